"""Who may settle a lapsed attempt, and what becomes of an attempt that comes back late."""

import contextlib
import json
import threading
import time
from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from flask_idempotent import NothingHappened, Settlement, current_idempotency
from flask_idempotent.call import current_call
from flask_idempotent.errors import LeaseLost
from flask_idempotent.records import Claim
from flask_idempotent.stores.backing import lease
from tests.harness import Proxy
from tests.web import kit

from .kit import LAPSING, Till, assert_unknown, die, new_key

MANY = {"pool_size": 10, "max_overflow": 10, "pool_timeout": 10}


@pytest.mark.parametrize("redis_is", ["there", "away"])
def test_one_of_many_takes_over(make_till, database_url, redis_is):
    """Eight threads at the lapse: one look-up, and never two at once; the others are told to wait."""
    config = {"IDEMPOTENT_REDIS_URL": "redis://127.0.0.1:1/0"} if redis_is == "away" else {}
    till = make_till(database_url, engine_options=MANY, config=config)
    till.take_charges()
    till.ending = lambda charge: die() or ("", 201)
    key = new_key()
    till.pay(key)
    till.pass_time(31)
    with kit.Crowd() as crowd:
        gate = crowd.gate()
        till.in_look_up = gate.hold
        contenders = [crowd.start(till.pay, key) for _ in range(8)]
        gate.wait_inside()
        deadline = time.monotonic() + kit.WAIT_S
        while sum(each.done() for each in contenders) < 7:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        gate.open()
        answers = [each.result(kit.WAIT_S) for each in contenders]
    assert sorted(answer.status_code for answer in answers) == [201] + [409] * 7
    for answer in answers:
        if answer.status_code == 201:
            till.assert_one_charge(answer)
        else:
            assert answer.get_json()["code"] in ("in-progress", "indeterminate")
            assert "Retry-After" in answer.headers
    assert (len(till.lookups), till.most_looking, till.runs) == (1, 1, 1)
    till.assert_one_charge(till.pay(key))


def test_never_two_look_ups_at_once_and_never_two_runs(make_till, database_url):
    """Eight threads that go on asking, through look-ups that find nothing, until one of them runs."""
    till = make_till(
        database_url,
        engine_options=MANY,
        config={"IDEMPOTENT_REDIS_URL": "redis://127.0.0.1:1/0"},
        **{**LAPSING, "HEARTBEAT": True, "LEASE": 5},
    )
    till.take_charges()
    till.before = lambda: die() if till.runs == 1 else time.sleep(0.3)
    till.charges = False
    till.ending = lambda charge: ({"charge": None}, 201 if till.runs > 1 else 500)
    key = new_key()
    till.pay(key)
    till.pass_time(5.1)
    till.in_look_up = lambda: time.sleep(0.05)
    with kit.Crowd() as crowd:
        answers = [each.result(kit.WAIT_S) for each in [crowd.start(till.until_settled, key) for _ in range(8)]]
    assert [answer.status_code for answer in answers] == [201] * 8
    assert [kit.REPLAYED in answer.headers for answer in answers].count(False) == 1
    assert till.most_looking == 1
    assert 1 <= len(till.lookups) <= 3
    assert till.attempts == [1, 2]


# Late completions


def held_up(till: Till, crowd: kit.Crowd):
    """An attempt that is held in its view after its charge, and whose lease has lapsed meanwhile."""
    gate = crowd.gate()

    def end(charge):
        gate.hold()
        return {"charge": charge["id"], "late": True}, 201

    till.ending = end
    key = new_key()
    late = crowd.start(till.pay, key)
    gate.wait_inside()
    till.pass_time(31)
    till.ending = lambda charge: ({"charge": charge["id"]}, 201)
    return key, gate, late


def test_a_late_completion_counts_from_indeterminate(make_till, database_url, crowd):
    """V7, F11: a look-up that found nothing yet made the outcome unknown. The attempt comes back, and counts."""
    till = make_till(database_url, engine_options=MANY)
    till.take_charges()
    till.provider.control(search_delay=3600)
    key, gate, late = held_up(till, crowd)
    assert_unknown(till.pay(key))
    assert (till.row().status, len(till.lookups)) == ("indeterminate", 1)
    gate.open()
    first = late.result(kit.WAIT_S)
    assert first.status_code == 201
    assert first.get_json()["late"] is True
    row = till.row()
    assert (row.status, row.attempt, row.settle_token) == ("succeeded", 1, "")
    kit.assert_replay(first, till.pay(key))
    till.redis.flushdb()
    kit.assert_replay(first, till.pay(key))
    assert (till.runs, len(till.provider.entries())) == (1, 1)


def test_a_late_completion_counts_while_it_is_looked_up(make_till, database_url, crowd):
    """The look-up's verdict comes after the attempt's own end: what is stored is told to both."""
    till = make_till(database_url, engine_options=MANY)
    till.take_charges()
    key, gate, late = held_up(till, crowd)
    looking = crowd.gate()
    till.in_look_up = looking.hold
    contender = crowd.start(till.pay, key)
    looking.wait_inside()
    gate.open()
    first = late.result(kit.WAIT_S)
    assert first.get_json()["late"] is True
    looking.open()
    # It settled nothing: the record was finished before.
    assert_unknown(contender.result(kit.WAIT_S))
    kit.assert_replay(first, till.pay(key))
    assert (till.runs, len(till.provider.entries()), till.row().attempt) == (1, 1, 1)


def test_a_late_completion_counts_from_released(make_till, database_url, crowd):
    """V7: somebody released the row, and no newer attempt has claimed it."""
    till = make_till(database_url, engine_options=MANY)
    till.take_charges()
    key, gate, late = held_up(till, crowd)
    till.ask("UPDATE idempotency_keys SET status = 'released', lock_version = lock_version + 1, locked_until = NULL")
    gate.open()
    first = late.result(kit.WAIT_S)
    assert first.get_json()["late"] is True
    kit.assert_kept(first)
    assert till.row().status == "succeeded"
    till.redis.flushdb()
    kit.assert_replay(first, till.pay(key))
    assert till.runs == 1


def test_a_completion_after_a_verdict_answers_what_is_stored(make_till, database_url, crowd):
    """F132: the look-up found the charge and answered for it: the attempt's own client gets the same bytes."""
    till = make_till(database_url, engine_options=MANY)
    till.take_charges()
    key, gate, late = held_up(till, crowd)
    settled = till.pay(key)
    till.assert_one_charge(settled)
    gate.open()
    first = late.result(kit.WAIT_S)
    assert (first.status_code, first.data) == (201, settled.data)
    assert "late" not in first.get_json()
    kit.assert_replay(settled, till.pay(key))
    till.redis.flushdb()
    kit.assert_replay(settled, till.pay(key))
    assert (till.runs, till.answers()) == (1, 1)


@pytest.mark.parametrize("winner", ["running", "finished"])
def test_a_newer_attempt_fences_the_older(make_till, database_url, crowd, winner):
    """F11, F12: the older one overwrites nothing, and gets the newer one's answer where there is one."""
    till = make_till(database_url, engine_options=MANY)
    till.take_charges()
    till.provider.control(search_delay=3600)
    key, gate, late = held_up(till, crowd)
    till.pass_time(6)
    running = crowd.gate()
    if winner == "running":
        till.before = running.hold
    second = crowd.start(till.pay, key)
    if winner == "running":
        running.wait_inside()
        gate.open()
        lost = late.result(kit.WAIT_S)
        kit.assert_problem(lost, "lease-lost")
        assert till.row().status == "in_progress"
        running.open()
        answer = second.result(kit.WAIT_S)
    else:
        answer = second.result(kit.WAIT_S)
        gate.open()
        lost = late.result(kit.WAIT_S)
        kit.assert_replay(answer, lost)
    till.assert_one_charge(answer)  # the same key went out twice, inside of the provider's window
    row = till.row()
    assert (row.status, row.attempt, till.answers(), till.attempts) == ("succeeded", 2, 1, [1, 2])
    assert len(set(till.keys)) == 1
    kit.assert_replay(answer, till.pay(key))


@pytest.mark.parametrize("end", ["502", "NothingHappened"])
def test_an_older_attempt_frees_nothing(make_till, database_url, crowd, end):
    """F12: however it ends, the newer one's row is not its own any more."""
    till = make_till(database_url, engine_options=MANY)
    till.take_charges()
    till.provider.control(search_delay=3600)
    gate = crowd.gate()

    def ends_badly(charge):
        gate.hold()
        if end == "502":
            return "bad gateway", 502
        raise NothingHappened(till.app.make_response(("nothing", 503)))

    till.ending = ends_badly
    key = new_key()
    late = crowd.start(till.pay, key)
    gate.wait_inside()
    till.pass_time(37)
    running = crowd.gate()
    till.before = running.hold
    till.ending = lambda charge: ({"charge": charge["id"]}, 201)
    second = crowd.start(till.pay, key)
    running.wait_inside()
    gate.open()
    late.result(kit.WAIT_S)
    row = till.row()
    assert (row.status, row.attempt) == ("in_progress", 2)
    running.open()
    till.assert_one_charge(second.result(kit.WAIT_S))


# The local deadline


def test_past_the_deadline_no_key_goes_out(make_till, database_url):
    """The lease was not renewed and may have lapsed: the view is told to stop, before its call."""
    till = make_till(database_url, **LAPSING)
    till.take_charges()
    seen = []

    def stop_in_time():
        if till.runs > 1:
            return
        time.sleep(0.45)
        for ask in (current_idempotency.provider_key, lambda: current_idempotency.remember(a=1)):
            with pytest.raises(LeaseLost) as caught:
                ask()
            seen.append(caught.value)

    till.before = stop_in_time
    key = new_key()
    lost = till.pay(key)
    kit.assert_problem(lost, "lease-lost")
    assert len(seen) == 2
    assert till.provider.entries() == []
    # The outcome is settled, not lost: nothing was sent, and the retry finds that out.
    answer = till.until_settled(key)
    till.assert_one_charge(answer)
    assert till.attempts == [1, 2]


@pytest.mark.parametrize("which", ["postgres_url", "mariadb_url"])
def test_redis_that_renews_does_not_hide_a_database_that_does_not(request, make_till, which):
    """The database's heartbeats get no answer while Redis would: past the deadline of the database no key goes out."""
    arguments = {"connect_args": {"read_timeout": 1, "connect_timeout": 1}} if which == "mariadb_url" else {}
    with Proxy(request.getfixturevalue(which)) as proxy:
        till = make_till(
            proxy.url,
            engine_options={**MANY, **arguments},
            LEASE=1,
            SKEW=0.2,
            SETTLE_AFTER=0.3,
        )
        till.take_charges()
        seen = []

        def hang(charge):
            if till.runs > 1:
                return {"charge": charge["id"]}, 201
            proxy.black_hole()
            time.sleep(1.2)
            # What Redis says of the lease helps nobody.
            till.front.renew([current_call().claim])
            try:
                current_idempotency.provider_key(step=1)
            except LeaseLost as error:
                seen.append(error)
            proxy.heal()
            raise seen[0]

        till.ending = hang
        key = new_key()
        lost = till.pay(key)
        kit.assert_problem(lost, "lease-lost")
        assert len(seen) == 1
        # The charge stands, and is found.
        answer = till.until_settled(key)
        till.assert_one_charge(answer)
        assert till.runs == 1


def test_a_heartbeat_keeps_a_long_view(make_till, database_url):
    """F14, for a lease in the database: duplicates are refused all the time, with Redis and without; one run."""
    till = make_till(database_url, engine_options=MANY, LEASE=0.5, SKEW=0.1, SETTLE_AFTER=0.1)
    till.take_charges()
    till.before = lambda: time.sleep(1.4)
    key = new_key()
    with kit.Crowd() as crowd:
        running = crowd.start(till.pay, key)
        while till.runs == 0:
            time.sleep(0.01)
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            kit.assert_problem(till.pay(key), "in-progress")
            till.redis.flushdb()
            time.sleep(0.05)
        first = running.result(kit.WAIT_S)
    till.assert_one_charge(first)
    kit.assert_replay(first, till.pay(key))
    assert (till.runs, till.lookups) == (1, [])


@contextlib.contextmanager
def running(till: Till, number: int) -> Iterator[list[Claim]]:
    """The claims of so many requests that are in their views; in the end each must be answered with 201."""
    claims: list[Claim] = []
    with kit.Crowd(number) as crowd:
        gate = crowd.gate()

        def hold():
            claims.append(current_call().claim)
            gate.hold()

        till.before = hold
        requests = [crowd.start(till.pay, new_key()) for _ in range(number)]
        for _ in requests:
            gate.wait_inside()
        yield claims
        gate.open()
        assert {each.result(kit.WAIT_S).status_code for each in requests} == {201}


def test_a_renewal_leaves_out_a_row_that_stays_locked(make_till, database_url):
    """A person at a console holds one of three rows: the two others are renewed, and of the third nobody says that its
    lease is longer, or lost."""
    if database_url.startswith("sqlite"):
        pytest.skip("one writer: the other transaction would keep everything out")
    till = make_till(database_url, engine_options=MANY, LEASE=30, HEARTBEAT=False)
    till.take_charges()

    def leases():
        return dict(till.ask("SELECT claim_token, locked_until FROM idempotency_keys"))

    with running(till, 3) as claims:
        till.ask("UPDATE idempotency_keys SET locked_until = locked_until - 5000")
        before = leases()
        ends = [lease(claim)._ends for claim in claims]
        with till.outside.begin() as connection:
            this = "tenant_id = '' AND endpoint = :endpoint AND key_digest = :digest"
            connection.execute(
                sa.text(f"SELECT * FROM idempotency_keys WHERE {this} FOR UPDATE"),
                {"endpoint": claims[0].scope.endpoint, "digest": claims[0].scope.digest},
            )
            began = time.monotonic()
            assert list(till.store.renew(claims)) == [True, True, True]
            assert time.monotonic() - began < 1
        after = leases()
        assert [after[claim.token] > before[claim.token] for claim in claims] == [False, True, True]
        assert [lease(claim)._ends > end for claim, end in zip(claims, ends, strict=True)] == [False, True, True]
        assert till.store.renew(claims) == [True] * 3


def test_one_statement_renews_them_all(make_till, database_url):
    """Twenty leases in one pass of the heartbeat: one UPDATE."""
    till = make_till(database_url, engine_options=MANY, LEASE=30)
    till.take_charges()
    with running(till, 20) as claims:
        assert len(claims) == 20
        before = till.ask("SELECT MIN(locked_until), MAX(locked_until) FROM idempotency_keys")[0]
        till.ask("UPDATE idempotency_keys SET locked_until = locked_until - 5000")
        with till.statements() as statements:
            assert till.store.renew(claims) == [True] * 20
        assert len([text for text in statements if text.startswith("UPDATE")]) == 1
        after = till.ask("SELECT MIN(locked_until), MAX(locked_until) FROM idempotency_keys")[0]
        assert after[0] >= before[0]
        # One that was taken over is told so, and the others stay.
        till.ask(
            "UPDATE idempotency_keys SET claim_token = 'another' WHERE key_digest = :digest",
            digest=claims[3].scope.digest,
        )
        assert list(till.store.renew(claims)) == [number != 3 for number in range(20)]
        till.ask(
            "UPDATE idempotency_keys SET claim_token = :token WHERE key_digest = :digest",
            digest=claims[3].scope.digest,
            token=claims[3].token,
        )


def test_beyond_max_processing_it_is_unknown(make_till, database_url):
    """5.4: nothing renews a view for ever."""
    till = make_till(database_url, engine_options=MANY, LEASE=0.4, SKEW=0.1, SETTLE_AFTER=0.1, MAX_PROCESSING=0.8)
    till.take_charges()
    key = new_key()
    with kit.Crowd() as crowd:
        gate = crowd.gate()

        def end(charge):
            gate.hold()
            return {"charge": charge["id"]}, 201

        till.ending = end
        running = crowd.start(till.pay, key)
        gate.wait_inside()
        answer = till.until_settled(key)  # it is looked up, and the charge is found
        till.assert_one_charge(answer)
        gate.open()
        assert running.result(kit.WAIT_S).data == answer.data
    assert (till.runs, len(till.lookups)) == (1, 1)


def test_what_was_noted_is_there_for_whoever_settles(till: Till):
    """``remember()`` is committed at once; the look-up and the next attempt have it."""
    noted = []

    def note():
        current_idempotency.remember(order=42)
        (context,) = till.ask("SELECT context FROM idempotency_keys")[0]
        noted.append(json.loads(bytes(context).removeprefix(b":")))
        current_idempotency.remember(attempt=current_idempotency.attempt)
        noted.append(current_idempotency.context)
        if till.runs == 1:
            die()

    till.before = note
    till.charges = False
    till.ending = lambda charge: ("", 201 if till.runs > 1 else 500)
    key = new_key()
    till.pay(key)
    till.pass_time(37)
    assert till.pay(key).status_code == 201
    assert [orphan.context for orphan in till.lookups] == [{"order": 42, "attempt": 1}]
    assert noted == [
        {"order": 42},
        {"order": 42, "attempt": 1},
        {"order": 42, "attempt": 1},
        {"order": 42, "attempt": 2},
    ]


def test_a_released_attempt_hands_its_notes_on(quick: Till):
    seen = []

    def note():
        seen.append(current_idempotency.context)
        current_idempotency.remember(tried=current_idempotency.attempt)
        if till.runs == 1:
            raise NothingHappened(till.app.make_response(("no", 503)))

    till = quick
    till.before = note
    key = new_key()
    till.pay(key)
    till.assert_one_charge(till.pay(key))
    assert seen == [{}, {"tried": 1}]


def test_a_lost_claim_learns_it_from_its_note(make_till, database_url, crowd):
    """Somebody took over before the local deadline: the row's token says so, and no key goes out."""
    till = make_till(database_url, engine_options=MANY)
    till.take_charges()
    gate = crowd.gate()
    errors = []

    def hold_first():
        if till.runs > 1:
            return
        gate.hold()
        with pytest.raises(LeaseLost) as caught:
            current_idempotency.remember(a=1)
        errors.append(caught.value)
        with pytest.raises(LeaseLost):
            current_idempotency.provider_key()
        raise caught.value

    till.before = hold_first
    key = new_key()
    late = crowd.start(till.pay, key)
    gate.wait_inside()
    till.pass_time(37)
    till.assert_one_charge(till.pay(key))
    gate.open()
    assert late.result(kit.WAIT_S).status_code in (201, 409)
    assert len(errors) == 1
    assert (len(till.provider.entries()), till.attempts) == (1, [1, 2])


@pytest.mark.parametrize("verdict", ["found", "not found", "pending"])
def test_settling_is_by_compare_and_swap(make_till, database_url, verdict):
    """A verdict on a row that moved on meanwhile is no verdict: the row's number is another one."""
    till = make_till(database_url)
    settle = till.settle
    till.settle = lambda orphan: (settle(orphan), Settlement.pending())[verdict == "pending" and len(till.lookups) == 1]
    till.take_charges()
    till.charges = verdict == "found"
    till.ending = lambda charge: die() or ("", 500)
    key = new_key()
    till.pay(key)
    till.pass_time(37)
    moved = threading.Event()

    def move():
        if not moved.is_set():
            moved.set()
            till.ask("UPDATE idempotency_keys SET lock_version = lock_version + 1")

    till.in_look_up = move
    assert_unknown(till.pay(key))
    row = till.row()
    assert (row.status, row.attempt, row.settle_tries, till.runs) == ("indeterminate", 1, 0, 1)
    till.charges = True
    till.ending = lambda charge: ({"charge": charge["id"]}, 201)
    till.pass_time(31)
    till.assert_one_charge(till.pay(key))
    assert till.runs == (1 if verdict == "found" else 2)


def test_a_verdict_that_was_made_without_redis(make_till, database_url, crowd):
    """Another host, which has lost Redis, settled it; the attempt's own claim in Redis is still there. What comes to
    stand there is what is stored in the database, and not what the attempt would have answered."""
    till = make_till(database_url, engine_options=MANY)
    till.take_charges()
    gate = crowd.gate()

    def end(charge):
        gate.hold()
        return {"charge": charge["id"], "late": True}, 201

    till.ending = end
    key = new_key()
    late = crowd.start(till.pay, key)
    gate.wait_inside()
    with till.outside.begin() as connection:
        till.age(connection, 31)
    other = make_till(database_url, name="other", config={"IDEMPOTENT_REDIS_URL": "redis://127.0.0.1:1/0"})
    other.take_charges()
    settled = other.pay(key)
    till.assert_one_charge(settled)
    gate.open()
    assert late.result(kit.WAIT_S).data == settled.data
    with till.statements() as statements:
        kit.assert_replay(settled, till.pay(key))
    assert statements == []
