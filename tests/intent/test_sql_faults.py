"""A database that is away, loses a reply or stands still, at claim, renewal and completion: charges are counted, every
answer ends in time, and nothing needs a hand afterwards.

The bound: while connections are refused, a completion is tried four times with pauses of 0.75 s together. A connection
that stands still is given up by the time-outs of the app's own engine: PyMySQL has them (``read_timeout``,
``connect_timeout``; here 1 s), and each of those tries may cost two, but none begins after 3 s. libpq has none for a
reply; there the answer comes when the connection breaks, which is up to the network (``tcp_user_timeout``,
``keepalives``) and here to the proxy.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from tests.durable.kit import empty_tables
from tests.harness import Proxy
from tests.web import kit

from .kit import Till, assert_unknown, commit_of, new_key

REFUSED_BOUND_S = 3.0
#: No try begins after three seconds; each is made on a connection that was open and on a new one; and some room.
STILL_BOUND_S = 8.0
#: For how long the proxy swallows everything, where the driver would wait for ever.
HOLE_S = 1.2

#: Leases that outlive the faults, and are renewed meanwhile.
LEASES = {"LEASE": 1.5, "SKEW": 0.1, "SETTLE_AFTER": 0.2}
SERVERS = {"postgresql": "postgres_url", "mariadb": "mariadb_url"}


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """The pool logs every connection that broke, with a traceback."""
    caplog.set_level(logging.CRITICAL)


@pytest.fixture(params=SERVERS)
def proxy(request: pytest.FixtureRequest) -> Iterator[Proxy]:
    """A server behind a proxy, once for each kind."""
    url = request.getfixturevalue(SERVERS[request.param])
    empty_tables(url)
    with Proxy(url) as proxy:
        yield proxy
        proxy.heal()


def timeouts(url: str) -> dict[str, Any]:
    arguments = {"connect_timeout": 1}
    if url.startswith("mysql"):
        arguments.update(read_timeout=1, write_timeout=1)
    return {"pool_size": 3, "max_overflow": 0, "pool_timeout": 2, "connect_args": arguments}


# Away: connections are refused


def test_away_at_the_claim(till: Till):
    """F130, V8: 503 before any work, as often as it is asked, and the key is free at once when it is back."""
    key = new_key()
    with till.sql_away():
        for _ in range(3):
            kit.assert_problem(till.timed(key, REFUSED_BOUND_S), "store-unavailable")
        assert till.records() == []
    assert (till.runs, till.provider.entries()) == (0, [])
    till.assert_one_charge(till.pay(key))


def test_away_for_a_note(till: Till):
    """The provider's key can't be noted, so it doesn't go out: 503, no charge. Nobody knows that: it is looked up."""
    with ExitStack() as stack:
        till.before = lambda: stack.enter_context(till.sql_away()) if till.runs == 1 else None
        key = new_key()
        kit.assert_problem(till.timed(key, REFUSED_BOUND_S), "store-unavailable")
    assert till.provider.entries() == []
    till.pass_time(37)
    till.assert_one_charge(till.pay(key))
    assert till.attempts == [1, 2]


def test_away_for_a_moment_at_completion(till: Till):
    """Bounded retries: it is back before they are over."""
    stack = ExitStack()

    def end(charge):
        stack.enter_context(till.sql_away())
        threading.Timer(0.3, stack.close).start()
        return {"charge": charge["id"]}, 201

    till.ending = end
    key = new_key()
    first = till.timed(key, REFUSED_BOUND_S)
    till.assert_one_charge(first)
    kit.assert_kept(first)
    kit.assert_replay(first, till.pay(key))
    assert till.lookups == []


@pytest.mark.parametrize("ending", [201, 502])
def test_away_at_completion(till: Till, ending):
    """The answer was not recorded: the client isn't told the view's 201, and nothing goes to Redis. The lease lapses,
    the look-up finds the charge."""
    with ExitStack() as stack:

        def end(charge):
            stack.enter_context(till.sql_away())
            return {"charge": charge["id"]}, ending

        till.ending = end
        key = new_key()
        first = till.timed(key, REFUSED_BOUND_S)
        if ending == 201:
            assert_unknown(first)
        else:
            assert first.status_code == 502
        assert [record["state"] for record in till.records()] == [b"in_progress"]
        kit.assert_problem(till.timed(key, REFUSED_BOUND_S), "in-progress")
        till.redis.flushdb()
        kit.assert_problem(till.timed(key, REFUSED_BOUND_S), "store-unavailable")
    kit.assert_problem(till.pay(key), "in-progress")
    till.pass_time(31)
    till.assert_one_charge(till.pay(key))
    assert (till.runs, len(till.lookups)) == (1, 1)


def test_away_for_the_heartbeats(make_till, database_url):
    """Renewals fail for a while, and the local deadline isn't reached: the view goes on, its end counts."""
    till = make_till(database_url, **LEASES)
    till.take_charges()

    def hold():
        with till.sql_away():
            time.sleep(0.8)

    till.before = hold
    key = new_key()
    first = till.timed(key, REFUSED_BOUND_S)
    till.assert_one_charge(first)
    kit.assert_replay(first, till.pay(key))
    assert till.runs == 1


# A reply that is lost


@pytest.mark.parametrize("what", ["begin", "insert", "commit"])
def test_a_lost_reply_at_the_claim(proxy, make_till, what):
    """V8: the claim recognises its own row, and runs; nobody has to look up what never began."""
    till = make_till(proxy.url, HEARTBEAT=False)
    till.take_charges()
    till.pay(new_key())
    till.provider.reset()
    key = new_key()
    parts = {"begin": b"ISOLATION LEVEL READ COMMITTED", "insert": b"INSERT INTO idempotency_keys"}
    proxy.cut_reply(match=parts.get(what, commit_of(proxy.url)))
    first = till.timed(key, REFUSED_BOUND_S)
    assert proxy.cuts == 1
    till.assert_one_charge(first)
    kit.assert_replay(first, till.pay(key))
    assert (till.runs, till.lookups, till.attempts) == (2, [], [1, 1])


def test_connections_that_broke_while_nobody_used_them(proxy, make_till):
    """A restarted database, or its time-out for idle clients: noticed at the claim, and at the completion; and gone
    without a trace, since each is asked once more on a new connection."""
    till = make_till(proxy.url, HEARTBEAT=False)
    till.take_charges()
    till.pay(new_key())
    till.provider.reset()
    till.before = proxy.break_connections
    proxy.break_connections()
    key = new_key()
    first = till.timed(key, REFUSED_BOUND_S)
    till.assert_one_charge(first)
    kit.assert_replay(first, till.pay(key))
    assert (till.runs, till.lookups) == (2, [])


def test_a_lost_reply_of_a_renewal(proxy, make_till):
    till = make_till(proxy.url, **LEASES)
    till.take_charges()

    def hold():
        proxy.cut_reply(match=b"UPDATE idempotency_keys")
        time.sleep(1)

    till.before = hold
    key = new_key()
    first = till.timed(key, REFUSED_BOUND_S)
    assert proxy.cuts == 1
    till.assert_one_charge(first)
    assert till.lookups == []


def test_a_lost_reply_of_a_note(proxy, make_till):
    """The note of the provider's key is there, and is noted again: the key goes out, once."""
    till = make_till(proxy.url, HEARTBEAT=False)
    till.take_charges()
    till.before = lambda: proxy.cut_reply(match=b"INSERT INTO idempotency_steps")
    first = till.timed(new_key(), REFUSED_BOUND_S)
    assert proxy.cuts == 1
    till.assert_one_charge(first)


@pytest.mark.parametrize("verdict", ["found", "not found"])
def test_a_lost_reply_of_a_verdict(proxy, make_till, verdict):
    """Whether it was written is found out by asking again; it is never acted upon twice."""
    till = make_till(proxy.url, HEARTBEAT=False)
    till.take_charges()
    till.ending = lambda charge: ("bad gateway", 502)
    if verdict == "not found":
        till.charges = False
    key = new_key()
    till.pay(key)
    till.pass_time(6)
    till.charges = True
    till.ending = lambda charge: ({"charge": charge["id"]}, 201)
    till.in_look_up = lambda: proxy.cut_reply(match=b"UPDATE idempotency_keys")
    answer = till.timed(key, REFUSED_BOUND_S)
    assert proxy.cuts == 1
    till.in_look_up = lambda: None
    if answer.status_code == 409:
        till.pass_time(37)
        answer = till.pay(key)
    till.assert_one_charge(answer)
    kit.assert_replay(answer, till.pay(key))
    assert till.runs <= 2


# A connection that stands still


@contextmanager
def swallowed(proxy: Proxy, url: str) -> Iterator[None]:
    """The proxy accepts everything and delivers nothing: until the end of the block, or for a while where the driver
    has no time-out."""
    proxy.black_hole()
    timer = threading.Timer(HOLE_S, proxy.heal)
    if url.startswith("postgresql"):
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if proxy._black_hole:
            proxy.heal()


def still(till: Till, proxy: Proxy, stack: ExitStack) -> Callable[[], None]:
    return lambda: stack.enter_context(swallowed(proxy, till.url)) and None


def test_standing_still_at_the_claim(proxy, make_till):
    till = make_till(proxy.url, engine_options=timeouts(proxy.url), **LEASES)
    till.take_charges()
    till.pay(new_key())  # a connection is open
    till.provider.reset()
    key = new_key()
    with ExitStack() as stack:
        still(till, proxy, stack)()
        first = till.timed(key, STILL_BOUND_S)
    if first.status_code != 201:
        kit.assert_problem(first, "store-unavailable")
        assert till.provider.entries() == []
    answer = till.until_settled(key)
    till.assert_one_charge(answer)
    assert till.runs == 2


def test_standing_still_for_the_heartbeats(proxy, make_till):
    """Longer than a lease: no key goes out past the deadline; what was sent before is found."""
    till = make_till(proxy.url, engine_options=timeouts(proxy.url), LEASE=0.6, SKEW=0.1, SETTLE_AFTER=0.2)
    till.take_charges()

    def end(charge):
        if till.runs == 1:
            with ExitStack() as stack:
                still(till, proxy, stack)()
                time.sleep(HOLE_S + 0.2)
        return {"charge": charge["id"]}, 201

    till.ending = end
    key = new_key()
    first = till.timed(key, STILL_BOUND_S)
    till.assert_one_charge(first)  # late, and nobody took over: it counts
    kit.assert_replay(first, till.pay(key))
    assert till.runs == 1


def test_standing_still_at_completion(proxy, make_till):
    till = make_till(proxy.url, engine_options=timeouts(proxy.url), **LEASES)
    till.take_charges()
    with ExitStack() as stack:

        def end(charge):
            still(till, proxy, stack)()
            return {"charge": charge["id"]}, 201

        till.ending = end
        key = new_key()
        first = till.timed(key, STILL_BOUND_S)
    if first.status_code != 201:
        assert_unknown(first)
    answer = till.until_settled(key)
    till.assert_one_charge(answer)
    assert till.runs == 1
