"""Many at one row: duplicates never wait for a view, and what a database refuses under load is never a 500."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event

from flask_idempotent.stores.sql import SqlStore
from tests.web import kit
from tests.web.kit import new_key, together

from .kit import MANY, Shop, empty_tables


def assert_soon(times: list[float]) -> None:
    """Nobody waited for the view, which stands until the test lets it go; a machine under load may stall."""
    assert min(times) < 0.5
    assert max(times) < 2


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    began = time.monotonic()
    answer = call()
    return time.monotonic() - began, answer


@contextmanager
def a_held_view(shop: Shop, *, flush: bool = True) -> Iterator[Callable[[], Any]]:
    """One request stands in its view, its row open; Redis has forgotten it. Gives the request to send again."""
    key = new_key()
    with kit.Crowd() as crowd:
        gate = shop.gate = crowd.gate()
        running = crowd.start(shop.post, key)
        gate.wait_inside()
        if flush:
            shop.redis.flushdb()
        yield lambda: shop.post(key)
        shop.gate = None
        gate.open()
        first = running.result(kit.WAIT_S)
    assert first.get_json() == {"run": 1}
    kit.assert_replay(first, shop.post(key))


@pytest.fixture
def busy(make_shop, database_url) -> Shop:
    """A shop with a pool of the usual size."""
    shop = make_shop(database_url, engine_options=MANY)
    shop.take_orders()
    return shop


def test_a_duplicate_behind_an_open_row_is_told_soon(busy):
    with a_held_view(busy) as post:
        times = []
        for _ in range(5):
            took, answer = timed(post)
            times.append(took)
            kit.assert_problem(answer, "in-progress")
            assert busy.records() == []  # what it was told binds nothing in Redis
        assert_soon(times)
    assert busy.runs == 1
    assert busy.orders() == ["a"]


def test_many_duplicates_behind_an_open_row_slow_nobody_down(busy):
    """F86: 40 of them, and a request that has nothing to do with them, on one pool."""

    @busy.app.get("/unrelated")
    def unrelated() -> Any:
        return {"orders": busy.db.session.query(busy.Order).count()}

    def read() -> Any:
        time.sleep(0.05)
        return busy.app.test_client().get("/unrelated")

    with a_held_view(busy) as post:
        (took, other), *answers = together(*[lambda call=call: timed(call) for call in [read, *[post] * 40]])
        assert other.get_json() == {"orders": 0}
        # SQLite's duplicates wait a moment for the one writer there is, each with a connection.
        assert took < (2.5 if busy.url.startswith("sqlite") else 1.0)
        for took, answer in answers:
            kit.assert_problem(answer, "in-progress")
            assert took < 3
    assert busy.runs == 1


def test_a_duplicate_behind_an_expired_row_that_is_claimed_anew(busy):
    """The old row is still to be seen, and the one who replaces it holds it: nobody waits for that either."""
    key = new_key()
    assert busy.post(key).get_json() == {"run": 1}
    busy.ask("UPDATE idempotency_keys SET expires_at = created_at")
    busy.redis.flushdb()
    with kit.Crowd() as crowd:
        gate = busy.gate = crowd.gate()
        running = crowd.start(busy.post, key)
        gate.wait_inside()
        busy.redis.flushdb()
        times = []
        for _ in range(3):
            took, answer = timed(lambda: busy.post(key))
            times.append(took)
            kit.assert_problem(answer, "in-progress")
        assert_soon(times)
        gate.open()
        assert running.result(kit.WAIT_S).get_json() == {"run": 2}
    assert (busy.runs, busy.states(), busy.answers()) == (2, ["succeeded"], 1)


def test_two_claim_an_expired_row_at_once(busy, monkeypatch):
    """Both have read the old row before either replaces it: one runs, the other is told soon."""
    key = new_key()
    assert busy.post(key).get_json() == {"run": 1}
    busy.ask("UPDATE idempotency_keys SET expires_at = created_at")
    insert, late, answers = SqlStore._insert, threading.Event(), []

    def insert_late(store: SqlStore, connection: Any, claim: Any, old: Any) -> Any:
        if old is not None and not late.is_set():
            late.set()
            busy.redis.flushdb()
            answers.append(crowd.start(busy.post, key))
            gate.wait_inside()
        return insert(store, connection, claim, old)

    with kit.Crowd() as crowd:
        gate = busy.gate = crowd.gate()
        busy.redis.flushdb()
        monkeypatch.setattr(SqlStore, "_insert", insert_late)
        took, answer = timed(lambda: busy.post(key))
        kit.assert_problem(answer, "in-progress")
        assert took < 3
        gate.open()
        assert answers[0].result(kit.WAIT_S).get_json() == {"run": 2}
    assert (busy.runs, busy.orders(), busy.states(), busy.answers()) == (2, ["a", "a"], ["succeeded"], 1)


@pytest.mark.parametrize("level", ["SERIALIZABLE", "REPEATABLE READ"])
def test_a_refusal_behind_an_open_row_at_a_strict_level(make_shop, database_url, level):
    """A refusal by a claim that only Redis knows is looked into, which mustn't wait for the row either: MariaDB locks
    what it reads at SERIALIZABLE."""
    if database_url.startswith("sqlite") and level == "REPEATABLE READ":
        pytest.skip("SQLite has no such level")
    shop = make_shop(database_url, engine_options={**MANY, "isolation_level": level})
    shop.take_orders()
    key = new_key()
    with kit.Crowd() as crowd:
        gate = shop.gate = crowd.gate()
        running = crowd.start(shop.post, key)
        gate.wait_inside()
        for flush in (False, True):
            if flush:
                shop.redis.flushdb()
            took, answer = timed(lambda: shop.post(key, {"item": "another"}))
            kit.assert_problem(answer, "in-progress" if flush else "mismatch")
            assert took < 2
        gate.open()
        first = running.result(kit.WAIT_S)
    kit.assert_replay(first, shop.post(key))


def test_the_first_of_three_rolls_back(busy):
    """F83: at most one of the others runs; nobody sees a 500, and no view runs again by itself."""

    @busy.view(rule="/fails")
    def fails() -> Any:
        busy.runs += 1
        run = busy.runs
        busy.order(f"{run}")
        busy.db.session.commit()
        if run == 1:
            while not refused:
                time.sleep(0.005)
            return "busy", 503
        return {"run": run}, 201

    refused: list[Any] = []
    key = new_key()

    def post() -> Any:
        return busy.post(key, path="/fails")

    def insist() -> Any:
        while busy.runs == 0:
            time.sleep(0.005)
        busy.redis.flushdb()
        while (answer := post()).status_code == 409:
            kit.assert_problem(answer, "in-progress")
            refused.append(answer)
        return answer

    answers = together(post, insist, insist)
    assert answers[0].status_code == 503
    assert [answer.get_json() for answer in answers[1:]] == [{"run": 2}] * 2
    assert (busy.runs, busy.orders(), busy.states()) == (2, ["2"], ["succeeded"])


@pytest.mark.parametrize("level", ["SERIALIZABLE", "default"])
def test_different_keys_at_once(make_shop, database_url, level):
    """F84: 20 keys, sent again where the answer is a 503 (a commit that a strict level refused): all done once. And
    ten of one key, whose winner holds its row: one runs, the others are told so."""
    options = MANY if level == "default" else {**MANY, "isolation_level": level}
    shop = make_shop(database_url, engine_options=options)
    shop.take_orders()
    key = new_key()

    def one(number: int) -> Any:
        mine = new_key()
        for _ in range(60):
            answer = shop.post(mine, {"item": f"{number}"})
            if answer.status_code == 201:
                return answer
            # On SQLite the one writer there is can be at another key.
            kit.assert_problem(answer, "in-progress" if answer.status_code == 409 else "store-unavailable")
            time.sleep(0.05)
        raise AssertionError("never done")

    def same() -> Any:
        return shop.post(key, {"item": "same"})

    answers = together(*[lambda number=number: one(number) for number in range(20)], *[same] * 10)
    assert [answer.status_code for answer in answers[:20]] == [201] * 20
    for answer in answers[20:]:
        if answer.status_code != 201:
            kit.assert_problem(answer, "store-unavailable" if answer.status_code == 503 else "in-progress")
    first = same()
    while first.status_code != 201:
        first = same()
    kit.assert_replay(first if kit.REPLAYED not in first.headers else same(), same())
    assert sorted(shop.orders()) == sorted([*(f"{number}" for number in range(20)), "same"])
    assert shop.states() == ["succeeded"] * 21


#: An error that a claim meets on its way, and what the client gets where it stays: a refusal, never a 500.
CODES = {
    "postgresql": {"40001": "store-unavailable", "40P01": "store-unavailable", "55P03": "in-progress"},
    "mysql": {1213: "store-unavailable", 1020: "store-unavailable", 1205: "in-progress", 3572: "in-progress"},
    "sqlite": {"database is locked": "in-progress"},
}


def driver_error(dialect: Any, code: Any) -> Exception:
    error = dialect.loaded_dbapi.OperationalError(code, "an error of the database")
    if dialect.name == "postgresql":
        error.sqlstate = code
    return sa.exc.OperationalError("INSERT", {}, error)


@pytest.mark.parametrize("times", [1, 100], ids=["once", "always"])
def test_what_a_database_refuses_in_a_claim_is_no_500(busy, monkeypatch, times):
    """F83: deadlocks and serialization failures are tried again inside, a lock time-out is somebody at it. The view
    runs once at most, and the key is free afterwards."""
    dialect = busy.engine.dialect
    insert = SqlStore._insert
    for code, problem in CODES[dialect.name].items():
        left = [times]

        def insert_badly(*arguments: Any, left: list[int] = left, code: Any = code) -> Any:
            if left[0]:
                left[0] -= 1
                raise driver_error(dialect, code)
            return insert(*arguments)

        monkeypatch.setattr(SqlStore, "_insert", insert_badly)
        before, post = busy.runs, busy.poster()
        answer = post()
        if times == 1 and problem == "store-unavailable":
            assert answer.status_code == 201
            assert busy.runs == before + 1
            continue
        kit.assert_problem(answer, problem)
        assert busy.runs == before
        assert busy.checked_out() == 0
        left[0] = 0
        assert post().status_code == 201
        assert busy.runs == before + 1


@pytest.mark.parametrize("forgets", [False, True], ids=["", "Redis forgets"])
def test_a_snapshot_that_a_guard_opened(make_shop, database_url, forgets):
    """F85: REPEATABLE READ, and the guard has read before the winner committed. The loser finds the winner's row, also
    where it goes to the database for a claim."""
    options = {} if database_url.startswith("sqlite") else {"isolation_level": "REPEATABLE READ"}
    shop = make_shop(database_url, engine_options={**MANY, **options})
    winner: list[Any] = []
    key = new_key()

    @shop.app.before_request
    def guard() -> None:
        shop.db.session.query(shop.Order).count()
        if not winner:
            winner.append(None)
            winner[0] = shop.elsewhere(lambda: shop.post(key))
            if forgets:
                shop.redis.flushdb()

    shop.take_orders()
    second = shop.post(key)
    kit.assert_replay(winner[0], second)
    assert shop.runs == 1
    shop.assert_done("a")


def test_a_storm_of_duplicates_while_redis_is_emptied(busy):
    """100 duplicates from 8 threads, Redis emptied every 50 ms: one effect, and right answers only."""
    busy.in_view = lambda: time.sleep(0.15)
    key, stop = new_key(), threading.Event()

    def flush() -> None:
        while not stop.wait(0.05):
            busy.redis.flushdb()

    def share(count: int) -> list[Any]:
        return [busy.post(key) for _ in range(count)]

    with kit.Crowd(9) as crowd:
        flushing = crowd.start(flush)
        sent = [crowd.start(share, 12 + (number < 4)) for number in range(8)]
        answers = [answer for future in sent for answer in future.result(60)]
        stop.set()
        flushing.result(kit.WAIT_S)
    assert len(answers) == 100
    for answer in answers:
        if answer.status_code == 409:
            kit.assert_problem(answer, "in-progress")
        else:
            assert (answer.status_code, answer.get_json()) == (201, {"run": 1})
    assert busy.runs == 1
    assert busy.post(key).get_json() == {"run": 1}
    busy.assert_done("a")


def test_the_end_of_a_key_reads_no_other_key(make_shop, postgres_url):
    """F84: at SERIALIZABLE whoever reads all open keys is in the way of each of them. Their index is not for this."""
    empty_tables(postgres_url)
    shop = make_shop(postgres_url)
    shop.take_orders()
    sent = []

    def note(_: object, __: object, statement: str, parameters: object, *___: object) -> None:
        if "WITH done AS" in statement:
            sent.append((statement, parameters))

    event.listen(shop.engine, "before_cursor_execute", note)
    assert shop.post().status_code == 201
    ((statement, parameters),) = sent
    shop.ask(
        "INSERT INTO idempotency_keys (endpoint, key_digest, recipe, request_hash, status, lock_version, claim_token,"
        " created_at) SELECT 'orders', encode(sha256(i::text::bytea), 'hex'), 'r', 'h', 'succeeded', 1, 't', 1"
        " FROM generate_series(1, 20000) i"
    )
    shop.ask("ANALYZE idempotency_keys")
    with shop.outside.begin() as connection:
        plan = "\n".join(connection.exec_driver_sql(f"EXPLAIN {statement}", parameters).scalars())
    assert "idempotency_keys_pkey" in plan
    assert "idempotency_keys_open" not in plan
