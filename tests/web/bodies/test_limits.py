"""Limits are the app's: 413 comes from where it always came, and what was refused leaves nothing behind."""

import importlib.metadata

import pytest
from flask import abort, request

from flask_idempotent import idempotent

from .. import kit
from .samples import READERS, dumps, multipart

KIB = 1024
FLASK = tuple(int(part) for part in importlib.metadata.version("flask").split(".")[:2])
since_flask_31 = pytest.mark.skipif(FLASK < (3, 1), reason="Flask 3.0 has no such limit")


def body(kind, size):
    if kind == "JSON":
        return {"data": b'"' + b"x" * (size - 2) + b'"', "content_type": "application/json"}
    if kind == "form":
        return {"data": b"note=" + b"x" * (size - 5), "content_type": "application/x-www-form-urlencoded"}
    if kind == "binary":
        return {"data": b"x" * size, "content_type": "application/octet-stream"}
    part = ("note", "x" * size) if kind == "multipart field" else ("scan", b"x" * size, "a.tif", "image/tiff")
    data, content_type = multipart([part])
    return {"data": data, "content_type": content_type}


KINDS = ["JSON", "form", "binary", "multipart field", "multipart file"]


def serve(app, effects, reader="nothing", **keywords):
    def view():
        effects.add()
        return dumps(READERS[reader](request)), 201

    app.add_url_rule("/bare", "bare", view, methods=["POST"])
    app.add_url_rule("/x", "x", idempotent(**keywords)(view), methods=["POST"])
    return app.test_client()


@pytest.mark.parametrize("size", [101 * KIB, 1500 * KIB])
@pytest.mark.parametrize("kind", KINDS)
def test_max_content_length(make_app, effects, store, kind, size):
    """413 from the app, before anything is claimed; the key is as free as before."""
    client = serve(make_app(config={"MAX_CONTENT_LENGTH": 100 * KIB}), effects)
    headers = kit.keyed()
    refused = client.post("/x", headers=headers, **body(kind, size))
    assert refused.status_code == 413
    assert refused.content_type != "application/problem+json"
    kit.assert_not_kept(refused)
    assert effects.runs == 0
    assert kit.our_keys(store) == []
    first = client.post("/x", headers=headers, **body(kind, 50 * KIB))
    assert first.status_code == 201
    kit.assert_replay(first, client.post("/x", headers=headers, **body(kind, 50 * KIB)))
    assert effects.runs == 1


def test_a_handler_for_413(make_app, effects, store):
    app = make_app(config={"MAX_CONTENT_LENGTH": 10})
    app.register_error_handler(413, lambda error: ("less, please", 413))
    client = serve(app, effects)
    assert client.post("/x", headers=kit.keyed(), **body("JSON", 11)).get_data(as_text=True) == "less, please"
    assert kit.our_keys(store) == []


def test_a_body_that_is_not_read_has_no_limit(make_app, effects):
    """With ``fields=False`` nobody but the view reads, and so it is the view that meets the limit."""
    client = serve(make_app(config={"MAX_CONTENT_LENGTH": 10}), effects, fields=False)
    assert client.post("/x", headers=kit.keyed(), **body("JSON", 11)).status_code == 201
    assert effects.runs == 1


@since_flask_31
@pytest.mark.parametrize("reader", ["form", "get_data", "nothing"])
@pytest.mark.parametrize("kind", ["form", "multipart field", "multipart file"])
def test_the_limit_of_forms_is_met_by_those_who_parse_them(make_app, effects, kind, reader):
    """Up to 1 MiB our own parsing knows no limit: the view meets it where it would without us."""
    client = serve(make_app(config={"MAX_FORM_MEMORY_SIZE": 10 * KIB}), effects, reader)
    headers = kit.keyed()
    bare, first, second = (client.post(path, headers=headers, **body(kind, 20 * KIB)) for path in ("/bare", "/x", "/x"))
    assert (first.status_code, first.get_data()) == (bare.status_code, bare.get_data())
    assert first.status_code == (413 if reader == "form" and kind != "form" else 201)
    kit.assert_replay(first, second)


@since_flask_31
@pytest.mark.parametrize("limit", ["MAX_FORM_MEMORY_SIZE", "MAX_FORM_PARTS"])
def test_the_limit_of_large_forms_is_met_before_the_view(make_app, effects, store, limit):
    """A large upload is parsed as Flask parses it, with Flask's limits, and left as if it never came."""
    client = serve(make_app(config={limit: 10}), effects)
    data, content_type = multipart(
        [*[(f"note {n}", "x" * 20) for n in range(20)], ("scan", b"x" * 1500 * KIB, "a", "b/c")]
    )
    assert client.post("/x", headers=kit.keyed(), data=data, content_type=content_type).status_code == 413
    assert effects.runs == 0
    assert kit.our_keys(store) == []


@since_flask_31
def test_a_limit_that_the_view_sets(make_app, effects):
    app = make_app()

    @app.post("/x")
    @idempotent
    def view():
        effects.add()
        request.max_content_length = 10
        return request.get_data()

    client, headers = app.test_client(), kit.keyed()
    first = client.post("/x", headers=headers, **body("JSON", 11))
    assert first.status_code == 413
    kit.assert_replay(first, client.post("/x", headers=headers, **body("JSON", 11)))
    assert client.post("/x", headers=kit.keyed(), **body("JSON", 10)).status_code == 200
    assert effects.runs == 2


class Untouchable:
    """A body that nobody may read."""

    def __init__(self):
        self.reads = 0

    def read(self, *args):
        self.reads += 1
        raise AssertionError("the body was read")

    readline = readlines = __iter__ = read

    # For the test client, which looks for the length.

    def tell(self):
        return 0

    def seek(self, *args):
        pass

    def close(self):
        pass


@pytest.mark.parametrize("guard", ["hook", "decorator"])
@pytest.mark.parametrize("kind", ["json", "x-www-form-urlencoded", "multipart"])
def test_who_is_not_let_in_is_not_read(make_app, effects, store, guard, kind):
    """A stranger's upload costs nothing: no byte is read and nothing is stored before the guard has spoken."""
    app = make_app()

    def refuse():
        abort(401)

    def view():
        effects.add()
        return "made"

    if guard == "hook":
        app.before_request(refuse)
        app.add_url_rule("/x", "x", idempotent(view), methods=["POST"])
    else:
        inner = idempotent(view)

        def guarded():
            refuse()
            return inner()

        guarded.__wrapped__ = inner
        app.add_url_rule("/x", "x", guarded, methods=["POST"])
    stream = Untouchable()
    content_type = "multipart/form-data; boundary=frontier" if kind == "multipart" else f"application/{kind}"
    for headers in (kit.keyed(), {}):
        answer = app.test_client().post(
            "/x", headers=headers, input_stream=stream, content_type=content_type, content_length=10 * KIB * KIB
        )
        assert answer.status_code == 401
    assert stream.reads == effects.runs == 0
    assert kit.our_keys(store) == []


def test_a_bad_key_is_refused_unread(make_app, effects, store):
    client = serve(make_app(), effects)
    stream = Untouchable()
    for headers, code in (({kit.KEY: "guess"}, "invalid-key"), ({}, "missing-key")):
        answer = client.post("/x", headers=headers, input_stream=stream, content_length=KIB, content_type="image/png")
        kit.assert_problem(answer, code)
    assert stream.reads == effects.runs == 0
    assert kit.our_keys(store) == []
