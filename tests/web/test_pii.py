"""What is kept about a person: encrypted in Redis, readable while its key is there, never a reason to run again."""

import base64

import pytest
from cryptography.fernet import Fernet
from flask import request, session

from flask_idempotent import idempotent
from flask_idempotent.errors import ConfigurationError

from . import kit
from .kit import keyed

OLD, NEW = Fernet.generate_key().decode(), Fernet.generate_key().decode()
SECRETS = ("Grete Weiser", "grete@example.com", "DE89370400440532013000", "patient-4711", "/patients/4711")


def patients(make_app, effects, *keys, **settings):
    """An app that keeps what it is told about a person; the caller is ``X-User``."""
    app = make_app(FERNET_KEYS=list(keys) or None, principal=kit.user_header, **settings)

    @app.post("/patients")
    @idempotent(pii=True)
    def create():
        effects.add()
        body = {**request.get_json(), "id": "patient-4711"}
        return body, 201, {"Location": "/patients/4711", "X-Mail": "grete@example.com"}

    return app.test_client()


PERSON = {"name": "Grete Weiser", "mail": "grete@example.com", "iban": "DE89370400440532013000"}


def test_nothing_is_in_clear_in_redis(make_app, effects, store):
    client = patients(make_app, effects, NEW)
    headers = keyed(X_User="grete@example.com")
    first = client.post("/patients", json=PERSON, headers=headers)
    held = kit.everything(store)
    # (Digits alone, as of the status, stand in digests and times by chance: it is looked for where it would be.)
    for text in (*SECRETS, headers[kit.KEY], "application/json", "status\x00201"):
        assert text.encode() not in held
        assert base64.b64encode(text.encode()).rstrip(b"=") not in held
    kit.assert_replay(first, client.post("/patients", json=PERSON, headers=headers))
    assert effects.runs == 1


def test_the_scan_would_find_it(make_app, effects, store):
    """The test above can fail: without keys the same app's answer lies there in clear."""
    app = make_app()
    app.add_url_rule("/p", "p", idempotent(kit.answering(effects, PERSON)), methods=["POST"])
    app.test_client().post("/p", headers=keyed())
    assert b"Grete Weiser" in kit.everything(store)


def test_encryption_is_for_all_routes_where_there_are_keys(make_app, effects, store):
    app = make_app(FERNET_KEYS=[NEW])
    app.add_url_rule("/p", "p", idempotent(kit.answering(effects, PERSON)), methods=["POST"])
    client, headers = app.test_client(), keyed()
    first = client.post("/p", headers=headers)
    assert b"Grete Weiser" not in kit.everything(store)
    kit.assert_replay(first, client.post("/p", headers=headers))


def test_rotation(make_app, effects):
    headers = keyed(X_User="ann")
    first = patients(make_app, effects, OLD).post("/patients", json=PERSON, headers=headers)
    rotated = patients(make_app, effects, NEW, OLD)
    kit.assert_replay(first, rotated.post("/patients", json=PERSON, headers=headers))
    later = keyed(X_User="ann")
    fresh = rotated.post("/patients", json=PERSON, headers=later)
    only_new = patients(make_app, effects, NEW)
    kit.assert_replay(fresh, only_new.post("/patients", json=PERSON, headers=later))
    assert effects.runs == 2


def test_a_removed_key_is_no_second_run(make_app, effects):
    headers = keyed(X_User="ann")
    patients(make_app, effects, OLD).post("/patients", json=PERSON, headers=headers)
    without = patients(make_app, effects, NEW)
    for _ in range(2):
        answer = without.post("/patients", json=PERSON, headers=headers)
        kit.assert_problem(answer, "response-unavailable")
        assert "Location" not in answer.headers
    kit.assert_problem(without.post("/patients", json={}, headers=headers), "mismatch")
    kit.assert_problem(without.post("/patients", json=PERSON, headers={**headers, "X-User": "bob"}), "not-found")
    back = patients(make_app, effects, NEW, OLD).post("/patients", json=PERSON, headers=headers)
    assert (back.status_code, back.get_json()["name"]) == (201, "Grete Weiser")
    assert effects.runs == 1


@pytest.mark.parametrize("how", ["one bit", "cut", "empty", "another record's", "cipher"])
def test_a_tampered_token_is_no_second_run(make_app, effects, store, how, caplog):
    client = patients(make_app, effects, NEW)
    headers = keyed(X_User="ann")
    client.post("/patients", json=PERSON, headers=headers)
    key = kit.record_key(store)
    token = store.hget(key, "body")
    if how == "another record's":
        client.post("/patients", json=PERSON, headers=keyed(X_User="ann"))
        (other,) = set(store.scan_iter("*:r:*")) - {key}
        store.hset(key, "body", store.hget(other, "body"))
    elif how == "cipher":
        store.hset(key, "cipher", "00000000")
    else:
        middle = len(token) // 2
        bit = token[:middle] + bytes([token[middle] ^ 1]) + token[middle + 1 :]
        store.hset(key, "body", {"one bit": bit, "cut": token[:-20], "empty": b""}[how])
    runs = effects.runs
    answer = client.post("/patients", json=PERSON, headers=headers)
    kit.assert_problem(answer, "response-unavailable")
    for text in (*SECRETS, headers[kit.KEY]):
        assert text not in answer.get_data(as_text=True) + caplog.text
    assert effects.runs == runs


def test_an_anonymous_caller_is_refused(make_app, effects, store):
    client = patients(make_app, effects, NEW)
    kit.assert_problem(client.post("/patients", json=PERSON, headers=keyed()), "principal-required")
    assert effects.runs == 0
    assert kit.our_keys(store) == []


def test_an_anonymous_caller_with_a_session_is_served(make_app, effects):
    app = make_app(FERNET_KEYS=[NEW], config={"SECRET_KEY": "secret"})
    app.get("/")(lambda: session.update(id="one") or "")
    kit.add_orders(app, effects, pii=True, bind=lambda request: session.get("id"))
    client, headers = app.test_client(), keyed()
    kit.assert_problem(client.post("/orders", headers=headers), "principal-required")
    client.get("/")
    first = client.post("/orders", headers=headers)
    kit.assert_replay(first, client.post("/orders", headers=headers))
    assert effects.runs == 1


def test_pii_without_keys_does_not_start(make_app, effects):
    client = patients(make_app, effects)
    with pytest.raises(ConfigurationError, match=r"FERNET_KEYS.*generate_key"):
        client.post("/patients", json=PERSON, headers=keyed(X_User="ann"))


@pytest.mark.parametrize("keys", [[], ["not a key"], "x" * 44, [NEW, "short"]])
def test_bad_keys_do_not_start_and_are_not_printed(make_app, keys):
    with pytest.raises(ConfigurationError, match="FERNET_KEYS") as told:
        make_app(FERNET_KEYS=keys)
    assert NEW not in str(told.value)


def test_hmac_fingerprints_rotate(make_app, effects, store):
    """3.4: a rotated key still compares, and a fingerprint under an unknown one is not a 422."""
    old, new = "old-secret-0123456789", "new-secret-0123456789"
    headers = keyed()

    def client(*keys):
        return kit.add_orders(make_app(FINGERPRINT_KEYS=list(keys) or None), effects).test_client()

    first = client(old).post("/orders", json={"a": 1}, headers=headers)
    rotated = client(new, old)
    kit.assert_replay(first, rotated.post("/orders", json={"a": 1}, headers=headers))
    kit.assert_problem(rotated.post("/orders", json={"a": 2}, headers=headers), "mismatch")
    kit.assert_replay(first, client(new).post("/orders", json={"a": 1}, headers=headers))
    assert effects.runs == 1
