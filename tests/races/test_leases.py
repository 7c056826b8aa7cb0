"""Leases that are renewed, and leases that run out: who may run, and whose result stands.

Short leases of half a second to a second, and a skew of 0.2 s, which no production would use. A duplicate waits for a
lease as a client does, by asking again.
"""

import random
import time

import pytest

from flask_idempotent import current_idempotency, idempotent, signals
from tests.harness import Proxy
from tests.web import kit
from tests.web.kit import keyed

LATE = {**kit.SHORT, "HEARTBEAT": False, "RATE_LIMIT": None}


def test_work_longer_than_its_lease(make_app, effects, crowd, store):
    """F14: renewed in the background; every duplicate is refused for five seconds, and then told the result."""
    app = make_app(LEASE=1, SKEW=0.2)
    gate = crowd.gate()
    kit.add_orders(app, effects, gate=gate)
    headers = keyed()
    first = crowd.start(app.test_client().post, "/orders", headers=headers)
    gate.wait_inside()
    deadlines = set()
    end = time.monotonic() + 5
    while time.monotonic() < end:
        kit.assert_problem_for(0.4, lambda: app.test_client().post("/orders", headers=headers), "in-progress")
        deadlines.add(kit.the_record(store)["locked_until"])
    assert len(deadlines) >= 5
    gate.open()
    kit.assert_replay(first.result(), app.test_client().post("/orders", headers=headers))
    assert effects.runs == 1
    kit.assert_all_end(store)


def test_renewals_end_with_max_processing(make_app, effects, crowd):
    """5.4: what hangs is not kept alive for ever."""
    gate = crowd.gate()
    app = kit.add_orders(make_app(LEASE=0.5, SKEW=0.2, MAX_PROCESSING=1), effects, gate=gate)
    headers = keyed()
    begin = time.monotonic()
    crowd.start(app.test_client().post, "/orders", headers=headers)
    gate.wait_inside()
    second = crowd.start(kit.until, lambda: app.test_client().post("/orders", headers=headers))
    gate.wait_inside()
    assert 0.9 < time.monotonic() - begin < kit.LAPSE_S
    assert effects.runs == 2
    gate.open()
    second.result()


@pytest.fixture
def late(make_app, effects, crowd):
    """A first request that overstays its lease, and a second one that took its place and waits at a gate of its own."""

    class Late:
        app = make_app(**LATE)
        gates = (crowd.gate(), crowd.gate())
        headers = keyed()

        def post(self):
            return self.app.test_client().post("/orders", json={"a": 1}, headers=self.headers)

    late = Late()

    @late.app.post("/orders")
    @idempotent
    def orders():
        run = effects.add(current_idempotency.fence)
        late.gates[run - 1].hold()
        return {"run": run, "attempt": current_idempotency.attempt}, 201

    late.first = crowd.start(late.post)
    late.gates[0].wait_inside()
    late.second = crowd.start(kit.until, late.post)
    late.gates[1].wait_inside()
    return late


def test_a_late_owner_gets_the_winners_answer(late, effects, store):
    """F12"""
    late.gates[1].open()
    winner = late.second.result()
    assert winner.get_json() == {"run": 2, "attempt": 2}
    kit.assert_kept(winner)
    held = kit.the_record(store)
    late.gates[0].open()
    kit.assert_replay(winner, late.first.result())
    assert kit.the_record(store) == held
    kit.assert_replay(winner, late.post())
    assert effects.runs == 2
    assert effects.lines[0] < effects.lines[1]


def test_a_late_owner_is_told_while_there_is_no_answer(late, effects, store):
    """F12"""
    held = kit.the_record(store)
    late.gates[0].open()
    kit.assert_problem(late.first.result(), "lease-lost")
    assert kit.the_record(store) == held
    kit.assert_problem(late.post(), "in-progress")
    late.gates[1].open()
    winner = late.second.result()
    assert winner.get_json() == {"run": 2, "attempt": 2}
    kit.assert_replay(winner, late.post())
    assert effects.runs == 2


@pytest.mark.parametrize("leave", [ValueError, SystemExit])
def test_a_late_owner_that_fails_frees_nothing(make_app, effects, crowd, store, leave):
    """F12: giving back is for the holder only."""
    app = make_app(config={"TESTING": True}, **LATE)
    gates = (crowd.gate(), crowd.gate())

    @app.post("/orders")
    @idempotent
    def orders():
        run = effects.add()
        gates[run - 1].hold()
        if run == 1:
            raise leave
        return {"run": run}

    headers = keyed()

    def post():
        return app.test_client().post("/orders", headers=headers)

    first = crowd.start(post)
    gates[0].wait_inside()
    second = crowd.start(kit.until, post)
    gates[1].wait_inside()
    held = kit.the_record(store)
    gates[0].open()
    with pytest.raises(leave):
        first.result()
    assert kit.the_record(store) == held
    gates[1].open()
    kit.assert_replay(second.result(), post())
    assert effects.runs == 2


def test_late_but_nobody_came(make_app, effects, crowd, store):
    """The lease has lapsed, and the key is still the first one's: its result is taken."""
    gate = crowd.gate()
    app = kit.add_orders(make_app(**LATE), effects, gate=gate)
    headers = keyed()
    first = crowd.start(app.test_client().post, "/orders", headers=headers)
    gate.wait_inside()
    deadline = int(kit.the_record(store)["locked_until"]) / 1000
    while (now := store.time())[0] + now[1] / 1e6 < deadline + 0.3:
        time.sleep(0.05)
    gate.open()
    kit.assert_kept(first.result())
    kit.assert_replay(first.result(), app.test_client().post("/orders", headers=headers))
    assert effects.runs == 1


def test_around_the_end_of_the_lease(make_app, store):
    """F11: 300 rounds in which a second request comes when the first one's lease ends, and the first one is done then
    too. However it falls out, there is one result, the first that was kept; nothing replaces it.

    A claim is one script, so nothing can stop between its reading and its writing; the rounds show that it is.
    """
    app = make_app(LEASE=0.03, SKEW=0.01, MAX_PROCESSING=60, HEARTBEAT=False, RATE_LIMIT=None)
    runs: dict[str, list[int]] = {}

    @app.post("/orders/<name>")
    @idempotent
    def orders(name):
        runs.setdefault(name, []).append(current_idempotency.attempt)
        time.sleep(random.uniform(0.030, 0.055))
        return {"result": kit.new_key()}, 201

    def post(name, headers, delay):
        time.sleep(delay)
        return app.test_client().post(f"/orders/{name}", headers=headers)

    seen = {"taken over": 0, "not": 0, "refused": 0, "lease-lost": 0, "replayed": 0}
    post("warm", keyed(), 0)
    with kit.Crowd(9) as crowd:

        def round_(number):
            name, headers = str(number), keyed()
            first = crowd.start(post, name, headers, 0)
            second = crowd.start(post, name, headers, random.uniform(0.030, 0.055))
            return name, headers, [first.result(), second.result()]

        with kit.Crowd(4) as rounds:
            results = [future.result() for future in [rounds.start(round_, number) for number in range(300)]]
    for name, headers, answers in results:
        last = post(name, headers, 0)
        assert last.headers[kit.REPLAYED] == "true"
        for answer in answers:
            if answer.status_code == 409:
                code = answer.get_json()["code"]
                assert code in ("in-progress", "lease-lost")
                seen["refused" if code == "in-progress" else code] += 1
            else:
                assert answer.status_code == 201
                assert answer.get_data() == last.get_data()
                seen["replayed"] += kit.REPLAYED in answer.headers
        assert runs[name] in ([1], [1, 2])
        seen["not" if runs[name] == [1] else "taken over"] += 1
    assert seen["taken over"], seen
    assert seen["not"], seen


def test_a_slow_store_leaves_no_gap(redis_url, effects):
    """F15: from the instant in which the client has its answer, nobody else runs, however slow the store's replies."""
    with Proxy(redis_url) as proxy:
        slow = kit.make_app(proxy.url, RATE_LIMIT=None)
        fast = kit.add_orders(kit.make_app(redis_url, RATE_LIMIT=None), effects)

        @slow.post("/orders")
        @idempotent
        def orders():
            proxy.delay(0.5)
            return {"id": effects.add()}, 201

        headers = keyed()
        before = time.monotonic()
        first = slow.test_client().post("/orders", headers=headers)
        assert time.monotonic() - before > 0.5
        for answer in kit.together(*[lambda: fast.test_client().post("/orders", headers=headers)] * 8):
            kit.assert_replay(first, answer)
        assert effects.runs == 1


def test_a_slow_store_while_the_client_waits(redis_url, effects, crowd):
    """F15: duplicates from before to after; each is refused or told the result."""
    with Proxy(redis_url) as proxy:
        slow, fast = (kit.make_app(url, RATE_LIMIT=None) for url in (proxy.url, redis_url))
        gate = crowd.gate()

        def in_view():
            proxy.delay(0.5)
            gate.hold()
            return {"id": effects.add()}, 201

        for app in (slow, fast):
            app.add_url_rule("/orders", "orders", idempotent(in_view), methods=["POST"])
        headers = keyed()
        running = crowd.start(slow.test_client().post, "/orders", headers=headers)
        gate.wait_inside()
        kit.assert_problem(fast.test_client().post("/orders", headers=headers), "in-progress")
        gate.open()
        second = kit.until(lambda: fast.test_client().post("/orders", headers=headers))
        kit.assert_replay(running.result(), second)
        assert effects.runs == 1


def test_a_record_that_vanishes_between_claim_and_reading(make_app, store):
    """F19: records of 50 ms, and a crowd that meets their end over and over: no run without a claim of its own."""
    app = make_app(TTL=0.05, LEASE=0.02, SKEW=0.01, MAX_PROCESSING=0.05, RATE_LIMIT=None)
    effects, claims, replays = kit.Effects(), [], []
    kit.add_orders(app, effects)
    counters = [
        (signals.claimed, lambda sender, **about: claims.append(about)),
        (signals.replayed, lambda sender, **about: replays.append(about)),
    ]
    for signal, count in counters:
        signal.connect(count, app)
    headers = keyed()

    def many():
        client = app.test_client()
        return [client.post("/orders", headers=headers) for _ in range(250)]

    answers = [answer for each in kit.together(*[many] * 4) for answer in each]
    fresh = [answer for answer in answers if answer.status_code == 201 and kit.REPLAYED not in answer.headers]
    replayed = [answer for answer in answers if kit.REPLAYED in answer.headers]
    assert len(fresh) + len(replayed) + sum(answer.status_code == 409 for answer in answers) == 1000
    assert effects.runs == len(claims) >= len(fresh)
    assert len(replayed) == len(replays)
    assert len(fresh) > 5
    assert replayed
    kit.wait_gone(store)
