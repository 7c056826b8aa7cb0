"""The end of a record's life, keys of one's own, and limits: settings that change who may run."""

import pytest

from . import kit
from .kit import keyed

#: A record that a test can outlive.
BRIEF = {"TTL": 0.5, "LEASE": 0.2, "MAX_PROCESSING": 0.4, "SKEW": 0.1}


def expired(client, headers, *, answer=201):
    """Ask until the record is past its life."""
    return kit.until(lambda: client.post("/orders", json={"a": 1}, headers=headers), differs_from=answer)


def test_an_expired_key_is_as_if_never_seen(make_app, effects, store):
    app = kit.add_orders(make_app(**BRIEF, principal=kit.user_header), effects)
    client, headers = app.test_client(), keyed(X_User="ann")
    first = client.post("/orders", json={"a": 1}, headers=headers)
    assert kit.assert_kept(first) <= 1
    kit.assert_replay(first, client.post("/orders", json={"a": 1}, headers=headers))
    kit.wait_gone(store)
    # Neither the fingerprint nor the principal binds any more.
    again = client.post("/orders", json={"a": 2}, headers={**headers, "X-User": "bob"})
    assert again.get_json() == {"id": 2}
    kit.assert_kept(again)
    assert effects.runs == 2


def test_an_expired_key_can_be_refused(make_app, effects):
    app = kit.add_orders(make_app(**BRIEF, ON_EXPIRED="reject", TOMBSTONE=60, principal=kit.user_header), effects)
    client, headers = app.test_client(), keyed(X_User="ann")
    client.post("/orders", json={"a": 1}, headers=headers)
    kit.assert_problem(expired(client, headers), "expired-key")
    # Expiry comes before the fingerprint, and after the principal.
    kit.assert_problem(client.post("/orders", json={"a": 2}, headers=headers), "expired-key")
    kit.assert_problem(client.post("/orders", json={"a": 1}, headers={**headers, "X-User": "bob"}), "not-found")
    assert effects.runs == 1


def test_a_tombstone_ends(make_app, effects, store):
    app = kit.add_orders(make_app(**BRIEF, ON_EXPIRED="reject", TOMBSTONE=0.5), effects)
    client, headers = app.test_client(), keyed()
    client.post("/orders", json={"a": 1}, headers=headers)
    kit.assert_problem(expired(client, headers), "expired-key")
    kit.assert_kept(expired(client, headers, answer=410))
    assert effects.runs == 2


def test_a_running_record_does_not_expire(make_app, effects, crowd):
    """Longer than its lifetime, but renewed: a duplicate is refused all the time."""
    gate = crowd.gate()
    app = kit.add_orders(make_app(TTL=0.6, LEASE=0.4, MAX_PROCESSING=0.6, SKEW=0.2), effects, gate=gate)
    kit.add_orders(app, effects, "/slow", gate=gate, ttl=30, max_processing=30)
    headers = keyed()
    running = crowd.start(app.test_client().post, "/slow", headers=headers)
    gate.wait_inside()
    client = app.test_client()
    kit.assert_problem_for(1.5, lambda: client.post("/slow", headers=headers), "in-progress")
    gate.open()
    kit.assert_replay(running.result(), client.post("/slow", headers=headers))
    assert effects.runs == 1


@pytest.mark.parametrize("user", ["ann", None])
def test_isolated_keys(make_app, effects, user):
    app = kit.add_orders(make_app(FOREIGN_KEY="isolate", principal=kit.user_header), effects)
    client, key = app.test_client(), kit.new_key()
    as_user = keyed(key, X_User=user) if user else keyed(key)
    first = client.post("/orders", json={"a": 1}, headers=as_user)
    other = client.post("/orders", json={"a": 2}, headers=keyed(key, X_User="bob"))
    assert [first.get_json(), other.get_json()] == [{"id": 1}, {"id": 2}]
    kit.assert_replay(first, client.post("/orders", json={"a": 1}, headers=as_user))
    kit.assert_replay(other, client.post("/orders", json={"a": 2}, headers=keyed(key, X_User="bob")))
    kit.assert_problem(client.post("/orders", json={"a": 2}, headers=as_user), "mismatch")
    assert effects.runs == 2


def test_anonymous_callers_can_be_refused(make_app, effects, store):
    app = kit.add_orders(make_app(ANONYMOUS="refuse", principal=kit.user_header), effects)
    client = app.test_client()
    kit.assert_problem(client.post("/orders", headers=keyed()), "principal-required")
    kit.assert_problem(client.post("/orders"), "missing-key")
    assert effects.runs == 0
    assert kit.our_keys(store) == []
    kit.assert_kept(client.post("/orders", headers=keyed(X_User="ann")))


def test_anonymous_callers_are_served_by_default(make_app, effects):
    app = kit.add_orders(make_app(principal=kit.user_header), effects)
    client, headers = app.test_client(), keyed()
    first = client.post("/orders", headers=headers)
    kit.assert_replay(first, client.post("/orders", headers=headers))
    kit.assert_problem(client.post("/orders", headers={**headers, "X-User": "ann"}), "not-found")
    assert effects.runs == 1


# The limit of new keys


def test_new_keys_are_limited_by_principal(make_app, effects, store):
    app = kit.add_orders(make_app(RATE_LIMIT="2/minute", principal=kit.user_header), effects)
    client = app.test_client()
    kept = [keyed(X_User="ann") for _ in range(2)]
    first = [client.post("/orders", headers=headers) for headers in kept]
    limited = client.post("/orders", headers=keyed(X_User="ann"))
    kit.assert_problem(limited, "rate-limited")
    assert 1 <= int(limited.headers["Retry-After"]) <= 60
    assert effects.runs == 2
    assert len(kit.records(store)) == 2
    kit.assert_kept(client.post("/orders", headers=keyed(X_User="bob")))
    kit.assert_kept(client.post("/orders", headers=keyed()))  # anonymous: the address has a bucket of its own
    for answer, headers in zip(first, kept, strict=True):
        for _ in range(3):
            kit.assert_replay(answer, client.post("/orders", headers=headers))
    kit.assert_problem(client.post("/orders", json={"a": 1}, headers=kept[0]), "mismatch")
    kit.assert_all_end(store)


def test_anonymous_callers_are_limited_by_address(make_app, effects):
    client = kit.add_orders(make_app(RATE_LIMIT="1/minute"), effects).test_client()

    def post(address):
        return client.post("/orders", headers=keyed(), environ_base={"REMOTE_ADDR": address})

    kit.assert_kept(post("10.0.0.1"))
    kit.assert_problem(post("10.0.0.1"), "rate-limited")
    kit.assert_kept(post("10.0.0.2"))
    assert effects.runs == 2


def test_the_window_frees(make_app, effects):
    client = kit.add_orders(make_app(RATE_LIMIT="1/second"), effects).test_client()
    headers = keyed()
    client.post("/orders", headers=keyed())
    kit.assert_problem(client.post("/orders", headers=headers), "rate-limited")
    kit.assert_kept(kit.until(lambda: client.post("/orders", headers=headers), differs_from=429))
    assert effects.runs == 2


def test_a_limit_of_a_route(make_app, effects):
    app = kit.add_orders(make_app(RATE_LIMIT=None), effects, "/few", rate_limit="1/hour")
    client = kit.add_orders(app, effects, "/many").test_client()
    assert [client.post("/few", headers=keyed()).status_code for _ in range(3)] == [201, 429, 429]
    assert {client.post("/many", headers=keyed()).status_code for _ in range(150)} == {201}


def test_a_hundred_a_minute_by_default(make_app, effects):
    client = kit.add_orders(make_app(), effects).test_client()
    statuses = [client.post("/orders", headers=keyed()).status_code for _ in range(102)]
    assert statuses == [201] * 100 + [429] * 2
    assert effects.runs == 100


def test_a_retry_of_what_was_given_back_is_not_a_new_key(make_app, effects):
    app = make_app(RATE_LIMIT="1/minute")
    view = kit.answering(effects, ("busy", 503), ("busy", 503), ("done", 200))
    app.add_url_rule("/x", "x", kit.idempotent(view), methods=["POST"])
    client, headers = app.test_client(), keyed()
    assert [client.post("/x", headers=headers).status_code for _ in range(4)] == [503, 503, 200, 200]
    assert effects.runs == 3
