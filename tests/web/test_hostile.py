"""What a hostile or careless view may do to its own call."""

from flask import request
from werkzeug.exceptions import ServiceUnavailable

from flask_idempotent import idempotent
from flask_idempotent.heartbeat import heartbeat

from . import kit


def test_an_error_that_is_returned_gives_the_key_back_like_one_that_is_raised(make_app, effects):
    app = make_app()

    @app.post("/x")
    @idempotent
    def view():
        return ServiceUnavailable() if effects.add() == 1 else "done"

    headers = kit.keyed()
    assert app.test_client().post("/x", headers=headers).status_code == 503
    assert app.test_client().post("/x", headers=headers).get_data() == b"done"
    assert effects.runs == 2


def test_a_second_pass_on_the_same_environ_leaves_the_outer_call_alone(make_app, effects):
    app = make_app()

    @app.post("/sub")
    def sub():
        return "sub"

    @app.post("/x")
    @idempotent
    def view():
        effects.add()
        environ = request.environ
        path, environ["PATH_INFO"] = environ["PATH_INFO"], "/sub"
        try:
            inner = b"".join(app.wsgi_app(environ, lambda status, headers, exc_info=None: lambda data: None))
        finally:
            environ["PATH_INFO"] = path
        return inner

    headers = kit.keyed()
    before = len(heartbeat)
    first = app.test_client().post("/x", headers=headers)
    assert first.get_data() == b"sub"
    assert len(heartbeat) == before
    kit.assert_replay(first, app.test_client().post("/x", headers=headers))
    assert effects.runs == 1
