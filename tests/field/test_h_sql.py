"""H. The mirror in SQL: a database's own races, which nobody sees as an error."""

import datetime
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from flask_idempotent.stores.sql import SqlStore
from tests.durable.fixtures import *  # noqa: F403
from tests.durable.kit import MANY, Shop
from tests.web import kit
from tests.web.kit import new_key, together


def forget_all_the_time(shop: Shop, stop: threading.Event) -> None:
    """Redis is emptied again and again, so that every duplicate reaches the database."""
    while not stop.wait(0.002):
        shop.redis.flushdb()


def right(answers: list[Any], *, body: Any) -> None:
    """One answer, told again, or a refusal with a time to come back."""
    for answer in answers:
        if answer.status_code == 201:
            assert answer.get_json() == body
        else:
            kit.assert_problem(answer, "in-progress")
    assert any(answer.status_code == 201 for answer in answers)


def test_losing_an_insert_leaves_the_apps_session_in_order(make_shop, database_url):
    """F81: both reach the INSERT; the loser is refused, or gets the answer. What its guard had pending is not lost, and
    the same worker's next 50 requests use the app's session as ever."""
    shop = make_shop(database_url, engine_options=MANY)

    @shop.app.before_request
    def guard() -> None:
        if shop.pending:
            shop.db.session.add(shop.Coupon(code=shop.pending.pop()))

    @shop.app.post("/plain")
    def plain() -> Any:
        shop.order("plain")
        shop.db.session.commit()
        return {"orders": shop.db.session.query(shop.Order).count()}, 200

    shop.pending = []
    shop.take_orders()
    key = new_key()
    with kit.Crowd() as crowd:
        gate = shop.gate = crowd.gate()
        running = crowd.start(shop.post, key)
        gate.wait_inside()
        shop.redis.flushdb()
        if not database_url.startswith("sqlite"):  # whose one writer is the view, so that a guard can't write now
            shop.pending.append("of the loser")
        kit.assert_problem(shop.post(key), "in-progress")  # behind the open row
        gate.open()
        first = running.result(kit.WAIT_S)
    shop.gate = None
    shop.redis.flushdb()
    shop.pending.append("of the replay")
    kit.assert_replay(first, shop.post(key))  # behind the committed one
    codes = [code for (code,) in shop.ask("SELECT code FROM coupons ORDER BY code")]
    assert codes == ["of the loser", "of the replay"][database_url.startswith("sqlite") :]
    for number in range(50):
        assert shop.post(path="/plain").get_json() == {"orders": number + 2}
    assert shop.runs == 1


def test_three_inserts_of_which_the_first_rolls_back(make_shop, database_url):
    """F83: no deadlock reaches a client, at most one of the others runs, and no view is run again by a retry inside."""
    shop = make_shop(database_url, engine_options=MANY)
    inside, leave = threading.Event(), threading.Event()
    started: list[int] = []

    @shop.view
    def view() -> Any:
        started.append(len(started) + 1)
        run = len(started)
        shop.order(f"{run}")
        shop.db.session.commit()
        if run == 1:
            inside.set()
            assert leave.wait(kit.WAIT_S)
            raise RuntimeError("rolled back")
        time.sleep(0.05)
        return {"run": run}, 201

    key = new_key()

    def duplicate() -> list[Any]:
        assert inside.wait(kit.WAIT_S)
        shop.redis.flushdb()
        answers = [shop.post(key)]
        leave.set()
        while answers[-1].status_code == 409:
            answers.append(shop.post(key))
        return answers

    first, *others = together(lambda: [shop.post(key)], duplicate, duplicate)
    assert [answer.status_code for answer in first] == [500]
    for answers in others:
        right(answers, body={"run": 2})
    assert started == [1, 2]
    shop.assert_done("2")


@pytest.mark.parametrize("code", [1213, 1020])
def test_a_deadlock_is_tried_again_inside(make_shop, mariadb_url, monkeypatch, code):
    """F83: and the view runs once."""
    shop = make_shop(mariadb_url)
    shop.ask("DELETE FROM idempotency_keys")
    shop.take_orders()
    insert, tries = SqlStore._insert, []

    def deadlock(*arguments: Any) -> Any:
        tries.append(None)
        if len(tries) < 3:
            driver = shop.engine.dialect.loaded_dbapi.OperationalError(code, "Deadlock found when trying to get lock")
            raise sa.exc.OperationalError("INSERT", {}, driver)
        return insert(*arguments)

    monkeypatch.setattr(SqlStore, "_insert", deadlock)
    assert shop.post().status_code == 201
    assert (len(tries), shop.runs) == (3, 1)


@pytest.mark.parametrize("database", ["postgres_url", "mariadb_url"])
def test_serializable(request, make_shop, database):
    """F84: 20 keys beside 10 duplicates of one whose winner holds its row. The 20 are all done, the duplicates are
    refused, and a commit that the level refused is a 503 that a client sends again."""
    url = request.getfixturevalue(database)
    shop = make_shop(url, engine_options={"pool_size": 8, "max_overflow": 8, "isolation_level": "SERIALIZABLE"})
    for table in ("orders", "idempotency_keys", "idempotency_responses"):
        shop.ask(f"DELETE FROM {table}")
    shop.take_orders()
    key = new_key()

    def different(number: int) -> Any:
        mine = new_key()
        for _ in range(40):
            answer = shop.post(mine, {"item": f"{number}"})
            if answer.status_code == 201:
                return answer
            kit.assert_problem(answer, "store-unavailable")
        raise AssertionError("never done")

    def same() -> Any:
        answer = shop.post(key, {"item": "same"})
        kit.assert_problem(answer, "in-progress")
        return answer

    with kit.Crowd() as crowd:
        gate = shop.gate = crowd.gate()
        winner = crowd.start(shop.post, key, {"item": "same"})
        gate.wait_inside()
        shop.gate = None
        shop.redis.flushdb()
        together(*[lambda number=number: different(number) for number in range(20)], *[same] * 10)
        gate.open()
        first = winner.result(kit.WAIT_S)
    if first.status_code == 503:
        first = shop.post(key, {"item": "same"})
    assert first.status_code == 201
    kit.assert_replay(first, shop.post(key, {"item": "same"}))
    assert shop.orders() == sorted([*(f"{number}" for number in range(20)), "same"])


@pytest.mark.parametrize("level", ["REPEATABLE READ", "READ COMMITTED"])
@pytest.mark.parametrize("database", ["postgres_url", "mariadb_url"])
def test_the_loser_finds_the_winner_outside_of_its_own_snapshot(request, make_shop, database, level):
    """F85: the app has read before; never "not found", never a run."""
    shop = make_shop(request.getfixturevalue(database), engine_options={**MANY, "isolation_level": level})
    for table in ("orders", "idempotency_keys", "idempotency_responses"):
        shop.ask(f"DELETE FROM {table}")
    key = new_key()
    winner: list[Any] = []

    @shop.app.before_request
    def guard() -> None:
        assert shop.db.session.query(shop.Order).count() == 0 or winner
        if not winner:
            winner.append(None)
            winner[0] = shop.elsewhere(lambda: shop.post(key))
            shop.redis.flushdb()

    shop.take_orders()
    loser = shop.post(key)
    kit.assert_replay(winner[0], loser)
    assert (shop.runs, shop.orders()) == (1, ["a"])


def test_an_insert_that_returns_nothing(make_shop, database_url):
    """F86: the row in the way isn't committed yet, so there is nothing to read: refused soon, and never a run."""
    shop = make_shop(database_url, engine_options=MANY)
    shop.take_orders()
    key = new_key()
    with kit.Crowd() as crowd:
        gate = shop.gate = crowd.gate()
        winner = crowd.start(shop.post, key)
        gate.wait_inside()
        end = time.monotonic() + 1
        times = []
        while time.monotonic() < end:
            shop.redis.flushdb()
            began = time.monotonic()
            kit.assert_problem(shop.post(key), "in-progress")
            times.append(time.monotonic() - began)
        assert min(times) < 0.5
        assert max(times) < 2
        gate.open()
        first = winner.result(kit.WAIT_S)
    shop.redis.flushdb()
    kit.assert_replay(first, shop.post(key))
    assert shop.runs == 1


def test_archiving_by_day_takes_expired_rows_only(make_shop, database_url):
    """F87: whatever is deleted by ``expires_day`` once that day is over was expired, so no second claim of a key is
    possible while its answer is promised; and there is one row for a key, on both sides of midnight."""
    shop = make_shop(database_url)
    shop.take_orders()
    post = shop.poster()
    first = post()
    shop.redis.flushdb()
    row = shop.row()

    def day(ms: int) -> datetime.date:
        return datetime.datetime.fromtimestamp(ms / 1000, datetime.timezone.utc).date()

    assert str(row.expires_day) == str(day(row.expires_at))

    # As archiving does on every day of the promised retention, the last millisecond of the last day included.
    for now in range(row.created_at, row.expires_at + 1, 3_600_000):
        shop.ask("DELETE FROM idempotency_keys WHERE expires_day < :today", today=str(day(now)))
        shop.ask("DELETE FROM idempotency_responses WHERE expires_day < :today", today=str(day(now)))
    kit.assert_replay(first, post())
    assert shop.runs == 1
    assert len(shop.ask("SELECT * FROM idempotency_keys")) == 1

    # The day after its end it may go.
    after = str(day(row.expires_at + 86_400_000))
    shop.ask("DELETE FROM idempotency_keys WHERE expires_day < :today", today=after)
    assert shop.ask("SELECT * FROM idempotency_keys") == []


@pytest.mark.parametrize("around", [-1, 1], ids=["before midnight", "after midnight"])
def test_a_key_has_one_row_over_midnight(make_shop, database_url, around):
    """F87: uniqueness is over all keys, whatever the day. A key whose life ends this side of midnight and a repeat of
    it that would end on the other meet in one row."""
    shop = make_shop(database_url)
    shop.take_orders()
    post = shop.poster()
    first = post()
    row = shop.row()
    other = datetime.date.fromisoformat(str(row.expires_day)) + datetime.timedelta(days=around)
    for table in ("idempotency_keys", "idempotency_responses"):
        shop.ask(f"UPDATE {table} SET expires_day = :day", day=str(other))
    shop.redis.flushdb()
    kit.assert_replay(first, post())
    assert (shop.runs, len(shop.ask("SELECT * FROM idempotency_keys")), shop.answers()) == (1, 1, 1)


def test_an_answer_that_was_archived_too_early_is_no_second_run(make_shop, database_url):
    """F87: the key's own row still says that it is done."""
    shop = make_shop(database_url)
    shop.take_orders()
    post = shop.poster()
    post()
    shop.redis.flushdb()
    shop.ask("DELETE FROM idempotency_responses")
    kit.assert_problem(post(), "response-unavailable", more={"original_status"})
    assert shop.runs == 1


def test_a_unique_violation_is_no_error(make_shop, database_url, caplog):
    """F88: duplicates at once, each in the database: refusals with a time to come back, or replays; no traceback."""
    shop = make_shop(database_url, engine_options={"pool_size": 16, "max_overflow": 4})
    shop.take_orders()
    stop = threading.Event()
    forgetting = threading.Thread(target=forget_all_the_time, args=(shop, stop))
    forgetting.start()
    try:
        for _ in range(3):
            key = new_key()
            before = shop.runs
            post: Callable[[], Any] = lambda key=key: shop.post(key)  # noqa: E731
            answers = together(*[post] * 16)
            assert shop.runs == before + 1
            right([*answers, *[post()]], body={"run": shop.runs})
    finally:
        stop.set()
        forgetting.join(kit.WAIT_S)
    assert shop.states() == ["succeeded"] * 3
    assert len(shop.orders()) == 3
    assert [record for record in caplog.records if record.exc_info or record.levelname == "ERROR"] == []
