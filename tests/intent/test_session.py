"""The app's session, its snapshot and its connections are its own: the key's transactions never touch them."""

import contextlib
import threading
import time

import pytest
import sqlalchemy as sa
from flask import make_response, request
from sqlalchemy.exc import IntegrityError

from flask_idempotent import NothingHappened, current_idempotency
from tests.web import kit

from .kit import Till, assert_unknown, new_key

MANY = {"pool_size": 30, "max_overflow": 0, "pool_timeout": 10}


def identity(till: Till):
    """What a session is, and holds."""
    session = till.db.session
    return (
        id(session()),
        id(session().get_transaction()),
        [id(each) for each in session.new],
        [id(each) for each in session.identity_map.values()],
    )


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
def test_pending_objects_and_a_snapshot_stay(make_till, database_url, isolation):
    """F81, F85: a guard's session has read, and has an object that isn't flushed. Around the claim, the notes of the
    view, and a duplicate that is refused, it is the same session in the same transaction and snapshot."""
    if database_url.startswith("sqlite"):
        pytest.skip("there are no such snapshots beside a writer; see the test below")
    till = make_till(database_url, engine_options={**MANY, "isolation_level": isolation})
    till.take_charges()
    till.ask("INSERT INTO coupons (code, used) VALUES ('a', 0)")
    #: There a read at SERIALIZABLE keeps others from inserting.
    locks = isolation == "SERIALIZABLE" and "mysql" in database_url
    before = []

    @till.app.before_request
    def guard():
        if till.runs:
            return
        assert [coupon.code for coupon in till.db.session.query(till.Coupon)] == ["a"]
        till.order("pending")
        before.append(identity(till))

    def view(charge):
        current_idempotency.remember(a=1)
        assert identity(till) == before[0]
        if not locks:
            till.ask("INSERT INTO coupons (code, used) VALUES ('b', 0)")
        till.redis.flushdb()
        till.elsewhere(lambda: kit.assert_problem(till.pay(key), "in-progress"))
        with till.db.session.no_autoflush:
            # Somebody committed beside it, and the snapshot doesn't see it.
            assert [coupon.code for coupon in till.db.session.query(till.Coupon)] == ["a"]
        assert identity(till) == before[0]
        till.db.session.commit()
        return {"charge": charge["id"]}, 201

    till.ending = view
    key = new_key()
    till.assert_one_charge(till.pay(key))
    assert till.orders() == ["pending"]
    assert len(before) == 1


def test_pending_objects_stay_on_sqlite(quick: Till):
    """An object that isn't flushed holds no lock, and is there in the view."""
    till = quick
    before = []

    @till.app.before_request
    def guard():
        till.order("pending")
        before.append(identity(till))

    def view(charge):
        assert identity(till) == before[0]
        till.db.session.commit()
        return {"charge": charge["id"]}, 201

    till.ending = view
    till.assert_one_charge(till.pay(new_key()))
    assert till.orders() == ["pending"]


def test_what_the_view_never_committed_is_not_committed(till: Till):
    """The key's commits are on other connections."""

    def view(charge):
        till.order("flushed")
        if not till.url.startswith("sqlite"):  # there a flush would lock out the key's own commit
            till.db.session.flush()
            current_idempotency.remember(a=1)
        return {"charge": charge["id"]}, 201

    till.ending = view
    till.assert_one_charge(till.pay(new_key()))
    assert (till.orders(), till.states()) == ([], ["succeeded"])


def test_a_view_that_holds_sqlites_write_lock_is_not_lost(make_till, sqlite_url):
    """SQLite has one writer. A view that flushed and never committed keeps the key's row from being finished until its
    session ends, which is after the answer: the outcome is unknown, and is looked up."""
    till = make_till(sqlite_url, engine_options={"pool_size": 2, "connect_args": {"timeout": 0.1}})
    till.take_charges()

    def view(charge):
        till.order("flushed")
        till.db.session.flush()
        return {"charge": charge["id"]}, 201

    till.ending = view
    key = new_key()
    first = till.timed(key, 8)
    assert first.status_code == 409
    assert till.orders() == []
    till.pass_time(31)
    till.assert_one_charge(till.pay(key))
    assert till.runs == 1


def test_a_failed_insert_leaves_the_session_as_it_was(make_till, database_url):
    """F81: two claims meet in the database, since Redis was emptied; the loser is refused, and its worker's session
    works on."""
    till = make_till(database_url, engine_options=MANY)
    till.take_charges()
    pending = []

    @till.app.before_request
    def guard():
        till.order("of the guard")
        pending.append(identity(till))

    @till.app.teardown_request
    def work_goes_on(error):
        if len(pending) == 2:
            pending.append(identity(till))
            till.db.session.commit()

    key = new_key()
    with kit.Crowd() as crowd:
        gate = crowd.gate()
        till.before = gate.hold
        running = crowd.start(till.pay, key)
        gate.wait_inside()
        till.redis.flushdb()
        kit.assert_problem(till.pay(key), "in-progress")
        assert pending[1] == pending[2]
        assert till.orders() == ["of the guard"]
        gate.open()
        first = running.result(kit.WAIT_S)
    till.assert_one_charge(first)
    assert till.orders() == ["of the guard"]
    assert till.runs == 1


def test_a_views_own_integrity_error_is_its_own(till: Till):
    """The session that failed in the view is the view's to roll back; the key's row doesn't mind."""

    def view(charge):
        for _ in range(2):
            till.db.session.add(till.Coupon(code="a"))
            try:
                till.db.session.commit()
            except IntegrityError:
                till.db.session.rollback()
        return {"charge": charge["id"]}, 201

    till.ending = view
    till.assert_one_charge(till.pay(new_key()))
    assert len(till.ask("SELECT * FROM coupons")) == 1


def test_two_connections_are_enough_for_six_that_work_outside(make_till, database_url):
    """No connection is held while the provider takes its time: a pool of two serves six at once."""
    till = make_till(database_url, engine_options={"pool_size": 2, "max_overflow": 0, "pool_timeout": 3})
    till.take_charges()
    held, barrier = [], threading.Barrier(6)

    def outside():
        barrier.wait(kit.WAIT_S)
        held.append(till.checked_out())
        time.sleep(1)

    till.before = outside
    began = time.monotonic()
    with kit.Crowd(6) as crowd:
        answers = [each.result(kit.WAIT_S) for each in [crowd.start(till.pay, new_key()) for _ in range(6)]]
    assert [answer.status_code for answer in answers] == [201] * 6
    assert time.monotonic() - began < 5
    assert min(held) == 0  # all six are inside of the view, and nobody holds a connection
    assert till.checked_out() == 0
    assert len(till.provider.entries()) == 6


def test_a_view_has_the_one_connection_for_itself(make_till, database_url):
    """Even a pool of one is enough for one request, where its guards hold no connection."""
    till = make_till(database_url, engine_options={"pool_size": 1, "max_overflow": 0, "pool_timeout": 1})
    till.take_charges()

    def view(charge):
        assert till.checked_out() == 0
        till.order("a")
        till.db.session.commit()
        return {"charge": charge["id"]}, 201

    till.ending = view
    till.assert_one_charge(till.pay(new_key()))
    assert till.orders() == ["a"]


def test_different_keys_at_serializable(make_till, database_url):
    """F84: unrelated keys don't abort each other, and one key runs once; no serialization failure reaches a client."""
    till = make_till(database_url, engine_options={**MANY, "isolation_level": "SERIALIZABLE"})
    till.take_charges()
    same = new_key()
    keys = [new_key() for _ in range(20)] + [same] * 10
    with kit.Crowd(30) as crowd:
        gate = crowd.gate()
        winner = []

        def hold(gate=gate, winner=winner):
            if request.headers[kit.KEY] == same:
                winner.append(1)
                gate.hold()

        till.before = hold
        sent = [crowd.start(till.pay, key) for key in keys]
        answers = [each.result(kit.WAIT_S) for each in sent[:20]]
        gate.wait_inside()
        deadline = time.monotonic() + kit.WAIT_S
        while sum(each.done() for each in sent[20:]) < 9:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        gate.open()
        others = [each.result(kit.WAIT_S) for each in sent[20:]]
    assert [answer.status_code for answer in answers] == [201] * 20
    assert sorted(answer.status_code for answer in others) == [201] + [409] * 9
    assert len(winner) == 1
    assert len(till.provider.entries()) == 21


@contextlib.contextmanager
def locked(till: Till):
    """Somebody holds all keys' rows: a person at a console, a worker that was stopped in front of its COMMIT."""
    with till.outside.begin() as connection:
        connection.execute(sa.text("SELECT * FROM idempotency_keys FOR UPDATE"))
        yield


def declines(charge):
    raise NothingHappened(make_response(("nothing", 503)))


#: How it comes to that row, the seconds after which it may be taken, and what the retry that may take it is told.
LOCKED_ROWS = {
    "unknown": (lambda charge: ("bad gateway", 502), 6, True),
    "released": (declines, 0, False),
}


@pytest.mark.parametrize(("ending", "seconds", "replayed"), LOCKED_ROWS.values(), ids=LOCKED_ROWS)
def test_a_row_that_stays_locked(make_till, database_url, ending, seconds, replayed):
    """Nobody waits as long as the database would let them, which on PostgreSQL is for ever."""
    if database_url.startswith("sqlite"):
        pytest.skip("one writer: the other transaction would keep everything out")
    till = make_till(database_url)
    till.take_charges()
    key = new_key()
    till.charges, till.ending = replayed, ending
    till.pay(key)
    till.pass_time(seconds)
    till.charges, till.ending = True, lambda charge: ({"charge": charge["id"]}, 201)
    with locked(till):
        kit.assert_problem(till.timed(key, 3), "in-progress")
        assert (till.runs, len(till.lookups)) == (1, 0)
    answer = till.pay(key)
    till.assert_one_charge(answer)
    assert (kit.REPLAYED in answer.headers) is replayed


@pytest.mark.parametrize("lapsed", [False, True], ids=["in time", "lapsed"])
def test_a_row_that_stays_locked_while_its_work_runs(make_till, database_url, lapsed):
    """The duplicate is refused, and so is the one who did the work, with the truth: nobody can tell. The next one looks
    it up."""
    if database_url.startswith("sqlite"):
        pytest.skip("one writer: the other transaction would keep everything out")
    till = make_till(database_url)
    till.take_charges()
    key = new_key()
    with kit.Crowd() as crowd:
        gate = crowd.gate()
        till.before = gate.hold
        first = crowd.start(till.timed, key, 12)
        gate.wait_inside()
        till.before = lambda: None
        if lapsed:
            till.pass_time(40)
        till.redis.flushdb()
        with locked(till):
            kit.assert_problem(till.timed(key, 3), "in-progress")
            gate.open()
            assert_unknown(first.result(kit.WAIT_S))
    assert (till.runs, len(till.lookups)) == (1, 0)
    till.pass_time(40)
    till.assert_one_charge(till.until_settled(key))
    assert (till.runs, len(till.lookups)) == (1, 1)


def test_a_row_that_is_locked_for_a_moment(make_till, database_url):
    """F86: another transaction holds the row, and lets go: the claim waits within bounds and goes on."""
    if database_url.startswith("sqlite"):
        pytest.skip("one writer: the other transaction would keep everything out")
    till = make_till(database_url)
    till.take_charges()
    key = new_key()
    till.ending = lambda charge: ("bad gateway", 502)
    till.pay(key)
    till.pass_time(6)
    with kit.Crowd() as crowd:
        with till.outside.begin() as connection:
            connection.execute(sa.text("SELECT * FROM idempotency_keys FOR UPDATE"))
            waiting = crowd.start(till.pay, key)
            time.sleep(0.5)
        answer = waiting.result(kit.WAIT_S)
    till.assert_one_charge(answer)
    assert (till.runs, len(till.lookups)) == (1, 1)
