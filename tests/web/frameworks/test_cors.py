"""Flask-CORS: every answer is for the origin of its own request; F105."""

import pytest
from flask import abort
from flask_cors import CORS, cross_origin

from flask_idempotent import Idempotent, idempotent
from tests.web import kit
from tests.web.kit import keyed

ONE, TWO, EVIL = "https://one.example", "https://two.example", "https://evil.example"
EXPOSED = [kit.REPLAYED, kit.EXPIRES, "Retry-After"]
OPTIONS = {"origins": [ONE, TWO], "supports_credentials": True, "always_send": False, "expose_headers": EXPOSED}


def build(redis_url, effects, how, when, answer, gate=None, **settings):
    """The neighbour for the whole app, or on the view; the extension before and after it."""
    app = kit.bare_app(redis_url, **settings)
    if when == "before":
        Idempotent(app)
    if how == "app":
        CORS(app, **OPTIONS)
    if when == "after":
        Idempotent(app)

    @idempotent
    def orders():
        effects.add()
        if gate is not None:
            gate.hold()
        return answer()

    app.route("/orders", methods=["POST"])(cross_origin(**OPTIONS)(orders) if how == "view" else orders)
    return app


ANSWERS = {"201": lambda: ("made", 201), "returned 404": lambda: ("no", 404), "aborted 410": lambda: abort(410)}

#: The neighbour's decorator sees no error of a view, with us or without.
CASES = [("app", name) for name in ANSWERS] + [("view", name) for name in ANSWERS if not name.startswith("aborted")]

both = pytest.mark.parametrize("how", ["app", "view"])
whens = pytest.mark.parametrize("when", ["before", "after"])


def assert_for(answer, origin):
    assert answer.headers.getlist("Access-Control-Allow-Origin") == ([] if origin in (None, EVIL) else [origin])
    if origin in (ONE, TWO):
        assert answer.headers.getlist("Access-Control-Allow-Credentials") == ["true"]
        exposed = answer.headers["Access-Control-Expose-Headers"]
        assert all(name in exposed for name in EXPOSED)
        assert "Origin" in answer.headers.getlist("Vary")


@pytest.mark.parametrize(("how", "answer"), CASES)
@whens
def test_each_client_gets_its_own_origin(redis_url, store, effects, how, when, answer):
    app = build(redis_url, effects, how, when, ANSWERS[answer])
    client, headers = app.test_client(), keyed()
    first = client.post("/orders", headers={**headers, "Origin": ONE})
    assert_for(first, ONE)
    kit.assert_kept(first)
    for origin in (TWO, ONE, None, EVIL):
        replay = client.post("/orders", headers={**headers, **({"Origin": origin} if origin else {})})
        assert (replay.status_code, replay.get_data()) == (first.status_code, first.get_data())
        assert replay.headers.getlist(kit.REPLAYED) == ["true"]
        assert_for(replay, origin)
    assert b"one.example" not in kit.everything(store)
    assert effects.runs == 1


@both
@whens
def test_our_own_answers(redis_url, effects, crowd, how, when):
    """400, 409, 422, 429 and 503 can be read by the page that sent the request."""
    gate = crowd.gate()
    app = build(redis_url, effects, how, when, lambda: ("made", 201), gate, RATE_LIMIT="1/minute")
    client, headers = app.test_client(), {**keyed(), "Origin": TWO}
    running = crowd.start(app.test_client().post, "/orders", headers=headers)
    gate.wait_inside()
    refused = {
        "in-progress": client.post("/orders", headers=headers),
        "mismatch": client.post("/orders", json={"a": 1}, headers=headers),
        "missing-key": client.post("/orders", headers={"Origin": TWO}),
        "rate-limited": client.post("/orders", headers={**keyed(), "Origin": TWO}),
    }
    if how == "app":  # the header is looked at ahead of the view
        refused["invalid-key"] = client.post("/orders", headers={**keyed("a,b"), "Origin": TWO})
    gate.open()
    assert running.result(kit.WAIT_S).status_code == 201
    for code, answer in refused.items():
        kit.assert_problem(answer, code)
        assert_for(answer, TWO)
    assert effects.runs == 1


@pytest.mark.parametrize("how", ["app", "view"])
def test_the_store_is_away(effects, how):
    app = build("redis://127.0.0.1:1", effects, how, "before", lambda: ("made", 201))
    answer = app.test_client().post("/orders", headers={**keyed(), "Origin": ONE})
    kit.assert_problem(answer, "store-unavailable")
    assert_for(answer, ONE)
    assert effects.runs == 0


@both
@whens
def test_preflight(redis_url, store, effects, how, when):
    app = build(redis_url, effects, how, when, lambda: ("made", 201))
    asked = {
        "Origin": ONE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": f"content-type, {kit.KEY}",
    }
    answer = app.test_client().options("/orders", headers=asked)
    assert answer.status_code == 200
    assert_for(answer, ONE)
    assert kit.KEY.lower() in answer.headers["Access-Control-Allow-Headers"].lower()
    for method in ("get", "head"):
        assert getattr(app.test_client(), method)("/orders").status_code == 405
    assert effects.runs == 0
    assert kit.our_keys(store) == []
