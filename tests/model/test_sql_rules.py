"""Each rule of the durable stores is taken out once, and its scenario must go red: on a real database."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache

import pytest
import redis
import sqlalchemy as sa

from flask_idempotent.records import Verdict
from flask_idempotent.stores.models import Tables
from flask_idempotent.stores.transaction import shared
from tests import servers

from .bench import Bench, empty, open_engine
from .sql_rules import MYSQL, SWITCHES, Edit, edited, switch_off
from .sql_scenarios import SCENARIOS

CASES = [(name, database) for name, switch in SWITCHES.items() for database in switch.databases]
FAILURES = (AssertionError, pytest.fail.Exception)


@pytest.fixture
def database(request: pytest.FixtureRequest) -> tuple[str, str]:
    """A database's name and URL."""
    name: str = request.param
    return name, request.getfixturevalue(servers.DATABASES["mariadb" if name == MYSQL else name])


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture(scope="module")
def benches() -> Iterator[Callable[[str, str, redis.Redis], Bench]]:
    """Benches; the tables of a server are made once."""
    with ExitStack() as stack:

        @cache
        def opened(name: str, url: str) -> tuple[sa.Engine, Tables]:
            engine, tables = open_engine(url)
            if name == MYSQL:
                engine.dialect.is_mariadb = False
            stack.callback(engine.dispose)
            return engine, tables

        def make(name: str, url: str, client: redis.Redis) -> Bench:
            engine, tables = opened(name, url)
            empty(engine, tables)
            return Bench(engine, tables, client)

        yield make


@pytest.fixture
def bench_of(
    benches: Callable[[str, str, redis.Redis], Bench], database: tuple[str, str], client: redis.Redis
) -> Iterator[Callable[[], Bench]]:
    """Makes the test's bench, after what it changes."""
    with ExitStack() as stack:

        def make() -> Bench:
            bench = benches(*database, client)
            stack.callback(bench.close)
            return bench

        yield make


def test_every_switch_has_its_scenario() -> None:
    assert SCENARIOS.keys() == SWITCHES.keys()


@pytest.mark.parametrize(("rule", "database"), CASES, indirect=["database"])
def test_the_scenario_holds_with_the_rule(rule: str, bench_of: Callable[[], Bench]) -> None:
    SCENARIOS[rule](bench_of())


@pytest.mark.parametrize(("rule", "database"), CASES, indirect=["database"])
def test_the_scenario_fails_without_the_rule(
    rule: str, bench_of: Callable[[], Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    switch_off(monkeypatch, rule)
    # Any other exception would mean that the edit broke the store, not the rule.
    with pytest.raises((*FAILURES, *SWITCHES[rule].errors)):
        SCENARIOS[rule](bench_of())


def test_an_edit_that_finds_nothing_is_an_error() -> None:
    with pytest.raises(AssertionError, match="0 times in the script"):
        edited(Bench, "close", [Edit(Bench, "close", "not there", "")])


@pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)
def test_the_record_of_a_process_that_died_refuses_nobody(bench_of: Callable[[], Bench]) -> None:
    """It took its row along, its record in Redis stays for the rest of its lease. Whoever holds the row now, having
    come past Redis, is not refused by it."""
    bench = bench_of()
    dead = bench.shared("t1", "B")
    assert bench.verdict(bench.durable, dead) is Verdict.CLAIMED
    shared(dead).discard()
    assert bench.verdict(bench.transaction, bench.shared("t2")) is Verdict.CLAIMED
    assert bench.verdict(bench.durable, bench.shared("t3")) is Verdict.IN_PROGRESS
    assert bench.verdict(bench.durable, bench.shared("t4", "B")) is Verdict.IN_PROGRESS
