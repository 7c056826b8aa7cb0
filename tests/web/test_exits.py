"""Every way out of a view, under every way to run an app: what becomes of the claim, and what a retry gets."""

import threading

import pytest
from flask import Flask, Response, abort, after_this_request, copy_current_request_context, current_app, request
from werkzeug.exceptions import HTTPException

from flask_idempotent import idempotent

from . import kit
from .kit import keyed

CONFIGS = {
    "production": {},
    "debug": {"DEBUG": True},
    "testing": {"TESTING": True},
    "propagate": {"PROPAGATE_EXCEPTIONS": True},
    "debug, not propagating": {"DEBUG": True, "PROPAGATE_EXCEPTIONS": False},
}


class Odd(BaseException):
    """What a worker's time-out or a greenlet's end looks like: no ``Exception``."""


@pytest.fixture(params=CONFIGS)
def propagates(request) -> bool:
    config = CONFIGS[request.param]
    return config.get("PROPAGATE_EXCEPTIONS", bool(config))


@pytest.fixture
def app(request, make_app, propagates) -> Flask:
    return make_app(config=CONFIGS[request.node.callspec.params["propagates"]], **kit.SHORT)


def orders(app, effects, leave):
    """``POST /orders`` that leaves by ``leave`` the first time, and answers the second."""

    @app.post("/orders")
    @idempotent
    def view():
        if effects.add() == 1:
            return leave()
        return "second", 201

    headers = keyed()
    return lambda: app.test_client().post("/orders", json={"a": 1}, headers=headers)


def raising(error):
    def leave():
        raise error

    return leave


def send(post, error, *, propagates):
    """The first request: its answer, or ``None`` where the error reaches the server."""
    if propagates:
        with pytest.raises(type(error)):
            post()
        return None
    return post()


def assert_given_back(store, effects, post):
    """Free at once: the very next request runs, and its answer is kept."""
    assert kit.the_record(store)["state"] == b"released"
    second = post()
    assert second.get_data(as_text=True) == "second"
    kit.assert_kept(second)
    kit.assert_replay(second, post())
    assert effects.runs == 2
    kit.assert_all_end(store)


# Raised, and nobody makes an answer of it


@pytest.mark.parametrize("handler", ["no handler", "handler for 500"])
@pytest.mark.parametrize("error", [ValueError("secret"), KeyError("secret"), RuntimeError()], ids=repr)
def test_an_exception(app, store, effects, propagates, error, handler):
    """F04, F91"""
    if handler != "no handler":
        app.register_error_handler(500, lambda error: ("sorry", 500))
    post = orders(app, effects, raising(error))
    # Flask lets an exception through only where nobody handles it.
    answer = send(post, error, propagates=propagates)
    if answer is not None:
        assert answer.status_code == 500
        kit.assert_not_kept(answer)
    assert_given_back(store, effects, post)


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), Odd(), GeneratorExit()], ids=repr)
def test_an_exit(app, store, effects, error):
    """F04: no error handler and no after-request hook sees these."""
    post = orders(app, effects, raising(error))
    send(post, error, propagates=True)
    assert_given_back(store, effects, post)


def test_a_greenlet_that_is_killed(app, store, effects):
    """F04"""
    import gevent

    post = orders(app, effects, lambda: gevent.getcurrent().throw(gevent.GreenletExit))
    greenlet = gevent.spawn(post)
    greenlet.join(kit.WAIT_S)
    assert isinstance(greenlet.value, gevent.GreenletExit)
    assert_given_back(store, effects, post)


@pytest.mark.parametrize("status", [500, 503, 409, 429])
def test_an_abort_that_is_not_kept(app, store, effects, status):
    post = orders(app, effects, lambda: abort(status))
    assert post().status_code == status
    assert_given_back(store, effects, post)


def test_an_abort_with_an_exception_of_its_own(app, store, effects):
    def leave():
        raise HTTPException(response=Response("not now", 503))

    post = orders(app, effects, leave)
    assert post().get_data(as_text=True) == "not now"
    assert_given_back(store, effects, post)


def test_a_view_that_returns_nothing(app, store, effects, propagates):
    """Flask's own TypeError: the view came to its end, what it did is done, and there is no answer to keep."""
    post = orders(app, effects, lambda: None)
    send(post, TypeError(), propagates=propagates)
    assert kit.the_record(store)["state"] == b"succeeded"
    kit.assert_problem(post(), "response-unavailable", more={"original_status"})
    assert effects.runs == 1


# An answer that is kept


def assert_stored(store, effects, first, post):
    kit.assert_kept(first)
    kit.assert_replay(first, post())
    assert effects.runs == 1
    assert kit.the_record(store)["state"] in (b"succeeded", b"failed")
    kit.assert_all_end(store)


EXITS = {
    "text": lambda: "done",
    "abort 410": lambda: abort(410),
    "abort 404": lambda: abort(404),
    "abort a response": lambda: abort(Response("teapot", 418)),
    "redirect": lambda: ("", 303, {"Location": "/orders/1"}),
    "generator": lambda: Response(iter(["a", "b", "c"])),
    "call_on_close": lambda: closing(Response("done")),
}


def closing(response):
    response.call_on_close(lambda: current_app)
    return response


@pytest.mark.parametrize("leave", EXITS.values(), ids=EXITS)
def test_an_answer(app, store, effects, leave):
    """F04"""
    post = orders(app, effects, leave)
    assert_stored(store, effects, post(), post)


@pytest.mark.parametrize("registered", ["handler for the class", "handler for Exception"])
@pytest.mark.parametrize("status", [200, 402, 503])
def test_an_exception_that_a_handler_makes_an_answer_of(app, store, effects, status, registered):
    """F93"""
    what = ValueError if registered == "handler for the class" else Exception
    app.register_error_handler(what, lambda error: ({"error": "declined"}, status))
    post = orders(app, effects, raising(ValueError()))
    first = post()
    assert (first.status_code, first.get_json()) == (status, {"error": "declined"})
    if status == 503:
        assert_given_back(store, effects, post)
    else:
        assert_stored(store, effects, first, post)


# The view is through, and a later layer fails


@pytest.mark.parametrize(
    "place", ["after_request", "view's after_this_request", "teardown_request", "teardown_appcontext"]
)
def test_a_later_layer_that_fails_changes_nothing_that_is_kept(app, store, effects, propagates, place):
    """The client saw 500, and the order is made: the retry is told so. F04, F91"""
    broken = [True]

    def fail(*args):
        if broken:
            raise LookupError("somebody else's bug")
        return args[0]

    if place == "after_request":
        app.after_request(fail)
    elif place.startswith("teardown"):
        getattr(app, place)(fail)

    def leave():
        if place == "view's after_this_request":
            after_this_request(fail)
        return "made", 201

    post = orders(app, effects, leave)
    first = send(post, LookupError(), propagates=propagates or place.startswith("teardown"))
    assert first is None or first.status_code == 500
    assert kit.the_record(store)["state"] == b"succeeded"
    broken.clear()
    second = post()
    assert (second.status_code, second.get_data()) == (201, b"made")
    assert second.headers[kit.REPLAYED] == "true"
    assert effects.runs == 1


def test_a_broken_session_changes_nothing_that_is_kept(app, store, effects, propagates):
    class Broken(type(app.session_interface)):
        def save_session(self, *args):
            raise LookupError("somebody else's bug")

    app.secret_key = "secret"
    good, app.session_interface = app.session_interface, Broken()
    post = orders(app, effects, lambda: ("made", 201))
    send(post, LookupError(), propagates=propagates)
    app.session_interface = good
    assert post().headers[kit.REPLAYED] == "true"
    assert effects.runs == 1


@pytest.mark.parametrize("how", ["raises", "answers 500", "aborts 503"])
def test_a_decorator_above_that_breaks_the_answer(app, store, effects, propagates, how):
    """The work is done, its answer is lost: never a second run."""
    broken = [True]

    def breaks(view):
        def inner():
            value = view()
            if broken and how == "raises":
                raise LookupError
            if broken and how == "aborts 503":
                abort(503)
            return ("broken", 500) if broken else value

        inner.__wrapped__ = view
        return inner

    app.post("/orders", endpoint="orders")(breaks(idempotent(kit.answering(effects, ("made", 201)))))
    headers = keyed()

    def post():
        return app.test_client().post("/orders", headers=headers)

    first = send(post, LookupError(), propagates=propagates and how == "raises")
    assert first is None or first.status_code >= 500
    broken.clear()
    problem = kit.assert_problem(post(), "response-unavailable", more={"original_status"})
    assert problem["original_status"] == 201
    assert effects.runs == 1


def test_a_stream_that_breaks_off(app, store, effects, propagates):
    """F95: no half of a body is kept as the answer."""

    def chunks():
        yield "a"
        raise LookupError

    post = orders(app, effects, lambda: Response(chunks()))
    first = send(post, LookupError(), propagates=False)
    assert first.status_code == 500
    kit.assert_problem(post(), "response-unavailable", more={"original_status"})
    assert effects.runs == 1


# Contexts that live longer, or shorter


def test_a_preserved_context(app, store, effects):
    """``with client:`` keeps the request's context until the next request."""
    first_run = threading.Event()

    @app.post("/orders")
    @idempotent
    def view():
        effects.add()
        if not first_run.is_set():
            first_run.set()
            raise SystemExit
        return "done"

    headers = keyed()
    with app.test_client() as client:
        with pytest.raises(SystemExit):
            client.post("/orders", headers=headers)
        assert kit.the_record(store)["state"] == b"released"
        second = client.post("/orders", headers=headers)
        kit.assert_kept(second)
        assert request.path == "/orders"
        third = client.post("/orders", headers=headers)
    kit.assert_replay(second, third)
    assert effects.runs == 2


@pytest.mark.parametrize("leave", ["answers", "raises"])
def test_a_thread_with_a_copy_of_the_context(app, store, effects, propagates, leave):
    """The copy's end comes while the view still runs, and settles nothing."""
    states = []

    @app.post("/orders")
    @idempotent
    def view():
        run = effects.add()

        @copy_current_request_context
        def work():
            states.append((request.path, kit.the_record(store)["state"]))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        states.append(kit.the_record(store)["state"])
        if leave == "raises" and run == 1:
            raise ValueError
        return "done"

    headers = keyed()

    def post():
        return app.test_client().post("/orders", headers=headers)

    if leave == "raises":
        send(post, ValueError(), propagates=propagates)
        assert kit.the_record(store)["state"] == b"released"
    first = post()
    kit.assert_replay(first, post())
    assert states == [("/orders", b"in_progress"), b"in_progress"] * effects.runs
    assert effects.runs == (2 if leave == "raises" else 1)
