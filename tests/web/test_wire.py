"""What goes over the wire: the first answer, its repeats, and every refusal with all of its headers and members."""

import pytest
from flask import Flask

from . import kit
from .kit import EXPIRES, KEY, REPLAYED, STATUS, keyed

DOCS = "https://example.com/idempotency"


@pytest.fixture
def orders(make_app, effects):
    return kit.add_orders(make_app(), effects).test_client()


def test_the_first_runs_and_the_repeat_is_told_the_same(orders, effects):
    headers = keyed()
    first = orders.post("/orders", json={"a": 1}, headers=headers)
    assert (first.status_code, first.get_json()) == (201, {"id": 1})
    assert 47 * 3600 < kit.assert_kept(first) <= 48 * 3600
    for _ in range(3):
        kit.assert_replay(first, orders.post("/orders", json={"a": 1}, headers=headers))
    assert effects.runs == 1


def test_another_key_is_another_run(orders, effects):
    bodies = [orders.post("/orders", json={"a": 1}, headers=keyed()).get_json() for _ in range(3)]
    assert bodies == [{"id": 1}, {"id": 2}, {"id": 3}]
    assert effects.runs == 3


@pytest.mark.parametrize("docs_url", [None, DOCS])
def test_mismatch(make_app, effects, docs_url):
    client = kit.add_orders(make_app(DOCS_URL=docs_url), effects).test_client()
    headers = keyed()
    first = client.post("/orders", json={"a": 1}, headers=headers)
    kit.assert_problem(client.post("/orders", json={"a": 2}, headers=headers), "mismatch", docs_url=docs_url)
    kit.assert_replay(first, client.post("/orders", json={"a": 1}, headers=headers))
    assert effects.runs == 1


def test_mismatch_status(make_app, effects):
    client = kit.add_orders(make_app(MISMATCH_STATUS=409), effects).test_client()
    headers = keyed()
    client.post("/orders", json={"a": 1}, headers=headers)
    kit.assert_problem(client.post("/orders", json={"a": 2}, headers=headers), "mismatch", status=409)
    assert effects.runs == 1


@pytest.mark.parametrize("docs_url", [None, DOCS])
def test_missing_key(make_app, effects, store, docs_url):
    client = kit.add_orders(make_app(DOCS_URL=docs_url), effects).test_client()
    kit.assert_problem(client.post("/orders", json={"a": 1}), "missing-key", docs_url=docs_url)
    assert effects.runs == 0
    assert kit.our_keys(store) == []


@pytest.mark.parametrize(
    "value",
    [
        "",
        '""',
        '"abc',
        "a,b",
        '"6c3f9c2e-1","7"',
        '"6c3f9c2e-83a1-4c52-b7a5-b6d9f0a4f5f3";q=1',
        "two words",
        "h\xe9llo-6c3f9c2e-83a1-4c52-b7a5",
        "x" * 256,
        "0123456789abcdef" * 16,
        "short",
        "00000000-0000-0000-0000-000000000000",
        "a" * 40,
    ],
)
def test_invalid_key(orders, effects, store, value):
    problem = kit.assert_problem(orders.post("/orders", json={"a": 1}, headers={KEY: value}), "invalid-key")
    assert not value or value not in problem["detail"]
    assert effects.runs == 0
    assert kit.our_keys(store) == []


def test_two_headers_are_no_key(orders, effects):
    headers = [(KEY, kit.new_key()), (KEY, kit.new_key())]
    kit.assert_problem(orders.post("/orders", headers=headers), "invalid-key")
    assert effects.runs == 0


def test_a_malformed_key_is_told_before_any_hook_runs(make_app, effects):
    """A client that spells its key wrong hears it whatever else is wrong with the request; the body is never read."""
    app = kit.add_orders(make_app(), effects)
    seen = []
    app.before_request(lambda: seen.append("hook"))
    kit.assert_problem(app.test_client().post("/orders", headers={KEY: "a,b"}), "invalid-key")
    assert seen == []


@pytest.mark.parametrize("docs_url", [None, DOCS])
def test_in_progress(make_app, effects, crowd, docs_url):
    gate = crowd.gate()
    app = kit.add_orders(make_app(DOCS_URL=docs_url), effects, gate=gate)
    headers = keyed()
    first = crowd.start(app.test_client().post, "/orders", json={"a": 1}, headers=headers)
    gate.wait_inside()
    for _ in range(3):
        refused = app.test_client().post("/orders", json={"a": 1}, headers=headers)
        kit.assert_problem(refused, "in-progress", docs_url=docs_url)
        assert refused.headers["Retry-After"] == "10"  # the lease is 30 s, and nobody waits longer than 10
    gate.open()
    kit.assert_kept(first.result())
    kit.assert_replay(first.result(), app.test_client().post("/orders", json={"a": 1}, headers=headers))
    assert effects.runs == 1


def test_retry_after_counts_lease_and_skew(make_app, effects, crowd):
    gate = crowd.gate()
    app = kit.add_orders(make_app(LEASE=4, SKEW=0.5), effects, gate=gate)
    headers = keyed()
    crowd.start(app.test_client().post, "/orders", headers=headers)
    gate.wait_inside()
    assert app.test_client().post("/orders", headers=headers).headers["Retry-After"] in ("4", "5")


def test_a_mismatch_comes_before_in_progress(make_app, effects, crowd):
    gate = crowd.gate()
    app = kit.add_orders(make_app(), effects, gate=gate)
    headers = keyed()
    crowd.start(app.test_client().post, "/orders", json={"a": 1}, headers=headers)
    gate.wait_inside()
    kit.assert_problem(app.test_client().post("/orders", json={"a": 2}, headers=headers), "mismatch")
    kit.assert_problem(app.test_client().post("/orders", json={"a": 1}, headers=headers), "in-progress")
    assert effects.runs == 1


def test_every_problem_has_its_own_instance_but_the_404(make_app, effects):
    client = kit.add_orders(make_app(principal=lambda: user), effects).test_client()
    user = "ann"
    headers = keyed()
    client.post("/orders", json={"a": 1}, headers=headers)
    mismatches = [client.post("/orders", json={"a": 2}, headers=headers).get_json() for _ in range(2)]
    assert mismatches[0].pop("instance") != mismatches[1].pop("instance")
    assert mismatches[0] == mismatches[1]
    user = "bob"
    foreign = [client.post("/orders", json={"a": n}, headers=headers) for n in (1, 2)]
    assert foreign[0].get_data() == foreign[1].get_data()


def test_the_404_is_the_same_to_the_byte_whatever_the_record_holds(make_app, crowd, effects, store):
    """Another principal's key: running, done, failed, given back, done without a body, expired behind a tombstone."""
    brief = {"TTL": 0.6, "LEASE": 0.3, "MAX_PROCESSING": 0.5, "SKEW": 0.2}
    app = make_app(ON_EXPIRED="reject", MAX_BODY=20, INLINE_BODY=20, principal=lambda: user, **brief)
    gate = crowd.gate()

    kit.add_orders(app, effects, "/running", gate=gate, ttl=60, max_processing=60)
    kit.add_orders(app, effects, "/expired")
    for name, answer in {
        "done": ("ok", 201),
        "failed": ("no", 402),
        "released": ("later", 503),
        "large": ("x" * 100, 200),
    }.items():
        kit_view = kit.answering(effects, answer)
        app.add_url_rule(f"/{name}", name, kit.idempotent(ttl=60)(kit_view), methods=["POST"])
    names = ("running", "done", "failed", "released", "large", "expired")
    headers = {name: keyed() for name in names}

    user = "ann"
    crowd.start(app.test_client().post, "/running", headers=headers["running"])
    gate.wait_inside()
    client = app.test_client()
    for name in names[1:]:
        client.post(f"/{name}", headers=headers[name])
    expired = kit.until(lambda: client.post("/expired", headers=headers["expired"]), differs_from=201)
    kit.assert_problem(expired, "expired-key")
    kit.assert_problem(
        client.post("/large", headers=headers["large"]), "response-unavailable", more={"original_status"}
    )
    states = {record["state"] for record in kit.records(store)}
    assert states == {b"in_progress", b"succeeded", b"failed", b"released"}

    user = "bob"
    answers = [client.post(f"/{name}", json={"n": n}, headers=headers[name]) for n, name in enumerate(names)]
    answers += [client.post(f"/{name}", headers=headers[name]) for name in names]
    for answer in answers:
        kit.assert_problem(answer, "not-found")
    assert len({answer.get_data() for answer in answers}) == 1
    assert len({tuple(answer.headers) for answer in answers}) == 1
    assert effects.runs == len(names)


def test_headers_can_be_renamed(make_app, effects):
    app = kit.add_orders(make_app(HEADER="X-Request-Key", REPLAY_HEADER="X-Replayed"), effects)
    client = app.test_client()
    kit.assert_problem(client.post("/orders", headers=keyed()), "missing-key")
    headers = {"X-Request-Key": kit.new_key()}
    first = client.post("/orders", headers=headers)
    second = client.post("/orders", headers=headers)
    assert (first.status_code, "X-Replayed" in first.headers) == (201, False)
    assert (second.get_data(), second.headers["X-Replayed"]) == (first.get_data(), "true")
    assert REPLAYED not in second.headers
    assert effects.runs == 1


def test_a_key_that_is_not_required(make_app, effects, store):
    client = kit.add_orders(make_app(), effects, required=False).test_client()
    for run in (1, 2):
        answer = client.post("/orders", json={"a": 1})
        assert answer.get_json() == {"id": run}
        assert answer.headers[STATUS] == "unprotected"
        assert REPLAYED not in answer.headers
        assert EXPIRES not in answer.headers
    assert kit.our_keys(store) == []
    headers = keyed()
    first = client.post("/orders", json={"a": 1}, headers=headers)
    kit.assert_kept(first)
    kit.assert_replay(first, client.post("/orders", json={"a": 1}, headers=headers))
    assert effects.runs == 3
    kit.assert_problem(client.post("/orders", headers={KEY: "a,b"}), "invalid-key")


def test_a_form_without_a_key_field_is_unprotected_only_where_allowed(make_app, effects):
    client = kit.add_orders(make_app(), effects).test_client()
    kit.assert_problem(client.post("/orders", data={"a": "1"}), "missing-key")


def test_off_is_off(make_app, effects, store):
    app: Flask = make_app(MODE="off")
    client = kit.add_orders(app, effects).test_client()
    headers = keyed()
    for run in (1, 2):
        answer = client.post("/orders", headers=headers)
        assert answer.get_json() == {"id": run}
        assert [name for name in (REPLAYED, EXPIRES) if name in answer.headers] == []
    assert kit.our_keys(store) == []


def test_retries_of_what_was_given_back_run_again(make_app, effects, store):
    app = make_app()
    answers = [("busy", 503), ("late", 429), ("done", 201)]
    app.add_url_rule("/jobs", "jobs", kit.idempotent(kit.answering(effects, *answers)), methods=["POST"])
    client, headers = app.test_client(), keyed()
    for body, status in answers:
        answer = client.post("/jobs", json={"a": 1}, headers=headers)
        assert (answer.get_data(as_text=True), answer.status_code) == (body, status)
        if status != 201:
            kit.assert_not_kept(answer)
            assert kit.the_record(store)["state"] == b"released"
            kit.assert_problem(client.post("/jobs", json={"a": 2}, headers=headers), "mismatch")
    kit.assert_replay(answer, client.post("/jobs", json={"a": 1}, headers=headers))
    assert effects.runs == 3


@pytest.mark.parametrize("status", [401, 403, 408, 409, 423, 425, 429, 500, 502, 503])
def test_statuses_that_may_pass_are_not_kept(make_app, effects, status):
    app = make_app()
    app.add_url_rule("/x", "x", kit.idempotent(kit.answering(effects, ("no", status), ("yes", 200))), methods=["POST"])
    client, headers = app.test_client(), keyed()
    assert client.post("/x", headers=headers).status_code == status
    assert client.post("/x", headers=headers).status_code == 200
    assert effects.runs == 2


@pytest.mark.parametrize("status", [400, 402, 404, 405, 406, 410, 412, 418, 422, 451])
def test_other_refusals_are_kept(make_app, effects, status, store):
    app = make_app()
    app.add_url_rule("/x", "x", kit.idempotent(kit.answering(effects, ("no", status))), methods=["POST"])
    client, headers = app.test_client(), keyed()
    first = client.post("/x", headers=headers)
    assert first.status_code == status
    kit.assert_kept(first)
    kit.assert_replay(first, client.post("/x", headers=headers))
    assert kit.the_record(store)["state"] == b"failed"
    assert effects.runs == 1
