"""What is not protected is left alone, and nothing sticks to an app."""

import pytest
from flask import Flask
from flask_cors import CORS

from flask_idempotent import idempotent

from . import kit
from .kit import EXPIRES, REPLAYED, STATUS, keyed

OURS = (REPLAYED, EXPIRES, STATUS)


@pytest.fixture
def mixed(make_app, effects) -> Flask:
    app = make_app(RATE_LIMIT=None)

    @app.route("/x", methods=["GET", "POST", "PUT", "DELETE"])
    @idempotent
    def view():
        return {"run": effects.add()}

    app.get("/plain")(lambda: "plain")
    return app


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE"])
@pytest.mark.parametrize("headers", [{}, keyed(), keyed("a,b")])
def test_other_methods(mixed, effects, store, method, headers):
    for run in (1, 2):
        answer = mixed.test_client().open("/x", method=method, headers=headers)
        assert answer.status_code == 200
        assert effects.runs == run
        assert [name for name in OURS if name in answer.headers] == []
    assert kit.our_keys(store) == []


def test_automatic_options(mixed, effects, store):
    answer = mixed.test_client().options("/x", headers=keyed())
    assert (answer.status_code, effects.runs) == (200, 0)
    assert kit.our_keys(store) == []


def test_options_of_the_view(make_app, effects, store):
    app = make_app()
    view = idempotent(kit.answering(effects, "allowed"))
    app.add_url_rule("/x", "x", view, methods=["POST", "OPTIONS"], provide_automatic_options=False)
    for _ in range(2):
        assert app.test_client().options("/x").get_data(as_text=True) == "allowed"
    assert effects.runs == 2
    assert kit.our_keys(store) == []


def test_preflight(make_app, effects, store):
    """F105: a preflight needs no key, and our own answers carry the neighbour's headers."""
    app = make_app()
    CORS(app, expose_headers=[REPLAYED, "Retry-After"])
    client = kit.add_orders(app, effects).test_client()
    origin = {"Origin": "https://shop.example"}
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": kit.KEY}
    preflight = client.options("/orders", headers={**origin, **asked})
    assert preflight.status_code == 200
    assert preflight.headers["Access-Control-Allow-Headers"].lower() == kit.KEY.lower()
    refused = client.post("/orders", headers=origin)
    kit.assert_problem(refused, "missing-key")
    assert refused.headers["Access-Control-Allow-Origin"] in ("*", "https://shop.example")
    assert kit.our_keys(store) == []


@pytest.mark.parametrize(("method", "path", "status"), [("POST", "/nowhere", 404), ("PATCH", "/x", 405)])
def test_no_route(mixed, effects, store, method, path, status):
    assert mixed.test_client().open(path, method=method, headers=keyed("a,b")).status_code == status
    assert effects.runs == 0
    assert kit.our_keys(store) == []


def test_methods_can_be_named(make_app, effects):
    app = make_app()
    view = idempotent(methods={"PUT"})(kit.answering(effects, "done"))
    app.add_url_rule("/x", "x", view, methods=["PUT", "POST"])
    client, headers = app.test_client(), keyed()
    kit.assert_replay(client.put("/x", headers=headers), client.put("/x", headers=headers))
    assert effects.runs == 1
    client.post("/x")
    assert effects.runs == 2


HOOKS = ("before_request_funcs", "after_request_funcs", "teardown_request_funcs", "url_value_preprocessors")


def hooks(app):
    """The sizes of an app's lists of functions."""
    sizes = {name: {key: len(functions) for key, functions in getattr(app, name).items()} for name in HOOKS}
    return sizes, len(app.teardown_appcontext_funcs)


def test_nothing_sticks(mixed):
    """F97: a marker is on the replay alone, and hook lists don't grow over 1,000 requests."""
    client = mixed.test_client()
    replayed = keyed()
    client.post("/x", headers=replayed)
    before = hooks(mixed)
    for _ in range(250):
        assert client.post("/x", headers=replayed).headers[REPLAYED] == "true"
        assert REPLAYED not in client.post("/x", headers=keyed()).headers
        for path in ("/x", "/plain"):
            assert [name for name in OURS if name in client.get(path).headers] == []
    assert hooks(mixed) == before
