"""Keys that the app derives, and keys that are bound to a session."""

import uuid

import pytest
from flask import abort, session

from flask_idempotent import idempotent

from . import kit
from .kit import keyed


def webhook(app, effects, key, **keywords):
    view = kit.answering(effects, ("taken", 202))
    app.add_url_rule("/webhook", "webhook", idempotent(key=key, **keywords)(view), methods=["POST"])
    return app.test_client()


def test_a_webhook_by_its_event(make_app, effects):
    client = webhook(make_app(), effects, lambda request: request.json["id"])
    first = client.post("/webhook", json={"id": "evt_1", "n": 1})
    kit.assert_kept(first)
    kit.assert_replay(first, client.post("/webhook", json={"id": "evt_1", "n": 1}))
    kit.assert_problem(client.post("/webhook", json={"id": "evt_1", "n": 2}), "mismatch")
    kit.assert_kept(client.post("/webhook", json={"id": "evt_2", "n": 1}))
    assert effects.runs == 2


def test_the_header_does_not_count_where_a_key_is_derived(make_app, effects):
    client = webhook(make_app(), effects, lambda request: request.json["id"])
    first = client.post("/webhook", json={"id": "evt_1"}, headers=keyed())
    kit.assert_replay(first, client.post("/webhook", json={"id": "evt_1"}, headers=keyed("a,b")))
    assert effects.runs == 1


@pytest.mark.parametrize("key", ["zahlung für Jürgen", "支付-1", "a b,c", "\U0001f4b8" * 255, 7, 0, uuid.uuid4(), "x"])
def test_a_derived_key_may_be_any_text(make_app, effects, key):
    client = webhook(make_app(), effects, lambda request: key)
    first = client.post("/webhook")
    kit.assert_kept(first)
    kit.assert_replay(first, client.post("/webhook"))
    assert effects.runs == 1


def test_numbers_and_their_texts_are_the_same_key(make_app, effects):
    values = iter([7, "7"])
    client = webhook(make_app(), effects, lambda request: next(values))
    kit.assert_replay(client.post("/webhook"), client.post("/webhook"))


@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize(("key", "code"), [(None, "missing-key"), ("", "invalid-key"), ("x" * 256, "invalid-key")])
def test_a_key_that_cannot_be_is_refused_never_unprotected(make_app, effects, store, key, code, required):
    """F42: also where a key isn't required, since the route says how it is derived."""
    client = webhook(make_app(), effects, lambda request: key, required=required)
    kit.assert_problem(client.post("/webhook"), code)
    assert effects.runs == 0
    assert kit.our_keys(store) == []


@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize(
    ("error", "status"), [(KeyError("id"), 500), (AttributeError(), 500), (RuntimeError("secret"), 500)]
)
def test_a_key_that_raises_is_not_run(make_app, effects, store, error, status, required, caplog):
    """F42: the error is logged, and the client doesn't see it."""

    def key(request):
        raise error

    answer = webhook(make_app(), effects, key, required=required).post("/webhook")
    assert answer.status_code == status
    assert "secret" not in answer.get_data(as_text=True)
    assert type(error).__name__ in caplog.text
    assert effects.runs == 0
    assert kit.our_keys(store) == []


@pytest.mark.parametrize("key", [True, 1.5, b"bytes", object(), ["a"]])
def test_a_key_of_another_type_is_an_error(make_app, effects, store, key):
    """F39"""
    assert webhook(make_app(), effects, lambda request: key).post("/webhook").status_code == 500
    assert effects.runs == 0
    assert kit.our_keys(store) == []


def test_a_key_that_aborts_answers_for_itself(make_app, effects, store):
    client = webhook(make_app(), effects, lambda request: abort(400, "no signature"))
    assert client.post("/webhook").status_code == 400
    assert client.post("/webhook").status_code == 400
    assert effects.runs == 0
    assert kit.our_keys(store) == []


def test_malformed_json_under_a_key_is_the_apps_own_400(make_app, effects):
    client = webhook(make_app(), effects, lambda request: request.json["id"])
    answer = client.post("/webhook", data="{", content_type="application/json")
    assert answer.status_code == 400
    assert effects.runs == 0


# bind=


@pytest.fixture
def bound(make_app, effects):
    app = make_app(config={"SECRET_KEY": "secret"})

    @app.post("/login/<name>")
    def login(name):
        session["id"] = name
        return ""

    kit.add_orders(app, effects, bind=lambda request: session.get("id"))
    return app


def signed_in(app, name):
    client = app.test_client()
    client.post(f"/login/{name}")
    return client


def test_a_bound_key_is_of_one_session(bound, effects):
    one, other = signed_in(bound, "one"), signed_in(bound, "other")
    headers = keyed()
    first = one.post("/orders", headers=headers)
    kit.assert_replay(first, one.post("/orders", headers=headers))
    kit.assert_problem(other.post("/orders", headers=headers), "not-found")
    kit.assert_replay(first, signed_in(bound, "one").post("/orders", headers=headers))
    assert effects.runs == 1


def test_without_a_session_there_is_nothing_to_bind_to(bound, effects, store):
    kit.assert_problem(bound.test_client().post("/orders", headers=keyed()), "principal-required")
    assert effects.runs == 0
    assert kit.our_keys(store) == []


def test_a_binding_of_another_type_is_an_error(make_app, effects, store):
    """F39"""
    client = kit.add_orders(make_app(), effects, bind=lambda request: request).test_client()
    assert client.post("/orders", headers=keyed()).status_code == 500
    assert effects.runs == 0
    assert kit.our_keys(store) == []


def test_binding_and_principal_both_count(make_app, effects):
    app = make_app(principal=kit.user_header)
    client = kit.add_orders(app, effects, bind=lambda request: request.headers["X-Device"]).test_client()
    key = kit.new_key()
    first = client.post("/orders", headers=keyed(key, X_User="ann", X_Device="1"))
    for user, device in (("ann", "2"), ("bob", "1"), ("bob", "2")):
        kit.assert_problem(client.post("/orders", headers=keyed(key, X_User=user, X_Device=device)), "not-found")
    kit.assert_replay(first, client.post("/orders", headers=keyed(key, X_User="ann", X_Device="1")))
    assert effects.runs == 1
