"""`FaultyStore`: it fails at the call that it was told, once, and is the store that it stands in front of otherwise."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fakeredis
import pytest
from flask import Flask
from flask_sqlalchemy import SQLAlchemy

from flask_idempotent import Idempotent, idempotent
from flask_idempotent.errors import ConfigurationError, StoreUnavailable
from flask_idempotent.stores.base import NotCommitted
from flask_idempotent.stores.intent import IntentStore
from flask_idempotent.stores.sql import SqlStore
from flask_idempotent.testing import FaultyStore
from tests.web import kit

ROOT = Path(__file__).parents[2]


class Notes:
    """A store that notes what it is asked."""

    name = "notes"

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []

    def claim(self, *arguments: object, **keywords: object) -> str:
        """Ask to run."""
        self.asked.append(("claim", *arguments, *keywords.items()))
        return f"reply {len(self.asked)}"

    def complete(self) -> str:
        self.asked.append(("complete",))
        return "kept"

    def _hidden(self) -> None: ...


@pytest.fixture
def notes() -> Notes:
    return Notes()


# -- which call, and what it does ----------------------------------------------------------------------------------


def test_before_the_store_never_hears_of_it(notes):
    store = FaultyStore(notes, at="claim", action="raise")
    with pytest.raises(StoreUnavailable, match=r"before claim\(\)"):
        store.claim(1)
    assert notes.asked == []


def test_after_the_store_did_it(notes):
    store = FaultyStore(notes, at="claim", when="after", action="raise")
    with pytest.raises(StoreUnavailable, match=r"after claim\(\)"):
        store.claim(1)
    assert notes.asked == [("claim", 1)]


def test_it_fails_once(notes):
    store = FaultyStore(notes, at="claim", n=3, action="raise")
    assert [store.claim(), store.claim()] == ["reply 1", "reply 2"]
    with pytest.raises(StoreUnavailable):
        store.claim()
    assert [store.claim(), store.claim()] == ["reply 3", "reply 4"]
    assert store.calls == 5


def test_other_methods_are_the_stores_own(notes):
    store = FaultyStore(notes, at="claim", action="raise")
    assert store.complete() == "kept"
    assert store.calls == 0
    assert store.name == "notes"
    assert store.complete.__self__ is notes
    with pytest.raises(AttributeError, match="renew"):
        store.renew()


def test_arguments_replies_and_errors_pass(notes):
    store = FaultyStore(notes, at="claim", n=2)
    assert store.claim(1, two=2) == "reply 1"
    assert notes.asked == [("claim", 1, ("two", 2))]
    assert store.claim.__doc__ == "Ask to run."

    def broken() -> None:
        raise KeyError("its own")

    notes.complete = broken
    with pytest.raises(KeyError):
        FaultyStore(notes, when="after", action="raise").complete()


def test_an_error_of_the_store_comes_before_the_fault(notes):
    notes.claim = lambda: 1 / 0
    store = FaultyStore(notes, at="claim", when="after", action="raise")
    with pytest.raises(ZeroDivisionError):
        store.claim()
    assert store.calls == 1


@pytest.mark.parametrize("when", ["before", "after"])
def test_delay(notes, when):
    store = FaultyStore(notes, at="claim", when=when, action="delay", seconds=0.2)
    done: list[float] = []
    claim = notes.claim
    notes.claim = lambda: (done.append(time.monotonic()), claim())[1]
    began = time.monotonic()
    assert store.claim() == "reply 1"
    ended = time.monotonic()
    assert ended - began >= 0.2
    assert (done[0] - began >= 0.2) is (when == "before")
    began = time.monotonic()
    store.claim()
    assert time.monotonic() - began < 0.15


def test_a_delay_holds_nobody_else(notes):
    store = FaultyStore(notes, at="claim", action="delay", seconds=1.0)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(store.claim)
        while store.calls == 0:
            time.sleep(0.001)
        began = time.monotonic()
        store.claim()
        assert time.monotonic() - began < 0.8
        assert not slow.done()


def test_threads_count_together(notes):
    store = FaultyStore(notes, at="claim", n=50, action="raise")
    barrier, failed = threading.Barrier(10), []

    def work() -> None:
        barrier.wait(kit.WAIT_S)
        for _ in range(10):
            try:
                store.claim()
            except StoreUnavailable:
                failed.append(threading.get_ident())

    with ThreadPoolExecutor(10) as pool:
        for each in [pool.submit(work) for _ in range(10)]:
            each.result(kit.WAIT_S)
    assert store.calls == 100
    assert len(failed) == 1
    assert len(notes.asked) == 99


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"at": "forget"}, "Notes has no method 'forget'"),
        ({"at": "_hidden"}, "no method '_hidden'"),
        ({"at": "name"}, "no method 'name'"),
        ({"when": "during"}, "'during' is neither"),
        ({"action": "explode"}, "'explode' is none of these"),
        ({"n": 0}, "n counts from 1"),
        ({"seconds": -1}, "seconds from 0"),
    ],
)
def test_wrong_arguments(notes, wrong, words):
    with pytest.raises(ValueError, match=words):
        FaultyStore(notes, **wrong)


# -- killing -------------------------------------------------------------------------------------------------------

KILLED = """
from flask_idempotent.testing import FaultyStore

class Store:
    def claim(self):
        print("claimed", flush=True)

store = FaultyStore(Store(), at="claim", when={when!r}, n=2)
store.claim()
try:
    store.claim()
finally:
    print("not killed", flush=True)
"""


@pytest.mark.parametrize(("when", "claims"), [("before", 1), ("after", 2)])
def test_kill_is_sigkill(when, claims):
    """Nothing of the process runs behind it: no ``finally``, no ``atexit``."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED.format(when=when)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert done.stdout == "claimed\n" * claims


def test_kill_is_what_it_does_unless_told(notes, monkeypatch):
    sent = []
    monkeypatch.setattr(os, "kill", lambda *arguments: sent.append(arguments))
    FaultyStore(notes, at="complete").complete()
    assert sent == [(os.getpid(), signal.SIGKILL)]


# -- in an app -----------------------------------------------------------------------------------------------------


@pytest.fixture
def redis() -> fakeredis.FakeRedis:
    return fakeredis.FakeRedis(version=(7, 0))


@pytest.fixture
def app(tmp_path: Path, redis: fakeredis.FakeRedis) -> Flask:
    app = kit.bare_app("redis://127.0.0.1:1", SKEW=2)
    app.config["SQLALCHEMY_DATABASE_URI"] = f"sqlite:///{tmp_path / 'shop.sqlite'}"
    db = SQLAlchemy(app)
    idem = Idempotent(app, db=db, redis=redis)
    idem.principal_loader(lambda: "ann")
    for kind in ("redis", "transaction", "intent"):

        @app.post(f"/{kind}", endpoint=kind)
        @idempotent(durable=False if kind == "redis" else kind, **({"recovery": "manual"} if kind == "intent" else {}))
        def view() -> tuple[dict[str, str], int]:
            return {"done": "yes"}, 201

    with app.app_context():
        db.create_all()
    return app


@pytest.fixture
def post(app: Flask) -> Callable[..., int]:
    def post(kind: str, key: str | None = None) -> int:
        return app.test_client().post(f"/{kind}", json={}, headers=kit.keyed(key)).status_code

    return post


@pytest.mark.parametrize("kind", ["redis", "transaction", "intent"])
def test_redis_is_in_front_of_all_routes(app, post, kind):
    found = FaultyStore.within(app, "redis", at="complete", action="raise")
    assert post(kind) == 201
    assert found.calls == 1
    assert post("redis") == 201
    assert found.calls == 2


@pytest.mark.parametrize(("layer", "other"), [("transaction", "intent"), ("intent", "transaction")])
def test_a_database_layer_is_of_its_routes_alone(app, post, layer, other):
    found = FaultyStore.within(app, layer, at="claim", action="raise")
    assert post("redis") == 201
    assert post(other) == 201
    assert found.calls == 0
    assert post(layer) == 503
    assert found.calls == 1
    assert post(layer) == 201


def test_two_faults_in_one_app(app, post):
    redis = FaultyStore.within(app, "redis", at="claim", n=2, action="raise")
    database = FaultyStore.within(app, "transaction", at="claim", n=2, action="raise")
    assert [post("transaction"), post("transaction"), post("transaction")] == [201, 503, 201]
    assert (redis.calls, database.calls) == (3, 3)


def test_a_fault_in_front_of_a_fault(app, post):
    first = FaultyStore.within(app, "redis", at="claim", action="raise")
    second = FaultyStore.within(app, "redis", at="claim", n=2, action="raise")
    assert [post("redis"), post("redis"), post("redis")] == [503, 503, 201]
    assert (first.calls, second.calls) == (2, 3)


def test_an_answer_that_may_not_be_committed_is_not_given(app, post):
    """As a database does that breaks at its COMMIT."""
    FaultyStore.within(app, "transaction", at="complete", action="raise")
    FaultyStore.within(app, "intent", at="complete", action="raise")
    assert post("transaction") == 503
    assert post("intent") == 409
    for store in (SqlStore, IntentStore):
        faulty = FaultyStore(object.__new__(store), at="complete", action="raise")
        with pytest.raises(NotCommitted):
            faulty.complete(None)


def take_orders(app: Flask, layer: str) -> Callable[[], int]:
    """Have the route of that layer place orders; what is given counts them: the rows of a ``transaction`` route, what
    an ``intent`` route did outside."""
    db, outside = app.extensions["sqlalchemy"], []
    orders = db.Table("orders", db.Column("id", db.Integer, primary_key=True))

    def view() -> tuple[dict[str, str], int]:
        if layer == "transaction":
            db.session.execute(orders.insert())
            db.session.commit()
        else:
            outside.append("order")
        return {}, 201

    def count() -> int:
        with app.app_context(), db.engine.connect() as connection:
            return len(outside) + len(connection.execute(orders.select()).all())

    with app.app_context():
        db.create_all()
    manual = {"recovery": "manual"} if layer == "intent" else {}
    app.view_functions[layer] = idempotent(durable=layer, **manual)(view)
    return count


BREAKS, WAITS = {"at": "complete", "action": "raise"}, {"at": "judge", "n": 99, "action": "delay"}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("faults", [(WAITS, BREAKS), (BREAKS, WAITS)], ids=["breaks in front", "waits in front"])
@pytest.mark.parametrize(("layer", "told"), [("transaction", 503), ("intent", 409)])
def test_behind_another_fault_it_knows_its_store(app, redis, post, layer, told, faults, when):
    """Nobody is told that an order was placed where its answer is not kept."""
    count = take_orders(app, layer)
    for fault in faults:
        FaultyStore.within(app, layer, when=when, **fault)
    key = kit.new_key()
    assert post(layer, key) == told
    kept = when == "after"
    assert count() == (1 if kept or layer == "intent" else 0)
    redis.flushall()  # else it would say for a while that the first one runs
    assert post(layer, key) == (201 if kept or layer == "transaction" else 409)
    assert count() == 1


@pytest.mark.parametrize(("at", "when"), [("claim", "after"), ("complete", "before"), ("release", "before")])
def test_a_database_that_is_gone_holds_no_transaction(app, post, at, when):
    """SQLite has one writer: who left its transaction open would keep the next one out."""
    view = app.view_functions["transaction"]
    if at == "release":
        app.view_functions["transaction"] = idempotent(durable="transaction")(lambda: ({}, 503))
    FaultyStore.within(app, "transaction", at=at, when=when, action="raise")
    assert post("transaction") == 503
    app.view_functions["transaction"] = view
    assert post("transaction") == 201


def test_redis_gone_at_completion_keeps_the_answer_from_nobody(app, post):
    FaultyStore.within(app, "redis", at="complete", action="raise")
    key = kit.new_key()
    assert [post("redis", key), post("redis", key)] == [201, 409]


def test_within_what_is_not_there(app):
    with pytest.raises(ValueError, match="'sql' is none of these"):
        FaultyStore.within(app, "sql")
    with pytest.raises(ValueError, match="RedisStore has no method 'suspend'"):
        FaultyStore.within(app, "redis", at="suspend")
    with pytest.raises(ConfigurationError, match="no Idempotent extension"):
        FaultyStore.within(Flask("bare"), "redis")
    alone = kit.bare_app("redis://127.0.0.1:1", SKEW=2)
    Idempotent(alone)
    with pytest.raises(ConfigurationError, match="no durable routes"):
        FaultyStore.within(alone, "intent")


def test_a_wrong_fault_changes_nothing(app, post):
    for layer in ("redis", "transaction"):
        with pytest.raises(ValueError, match="no method"):
            FaultyStore.within(app, layer, at="nothing")
    assert [post("redis"), post("transaction")] == [201, 201]
