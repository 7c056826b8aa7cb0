"""The crash matrix: a cell for each point at which a process can die, and what a retry makes of it.

Each cell kills a worker there (SIGKILL), looks at Redis, the database and the provider's ledger from outside, and sends
the same request to another worker until that is no longer refused. Then it says what was done, and what is kept.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
import sqlalchemy as sa

from flask_idempotent.request.scope import make_scope
from flask_idempotent.settling import FIRST_PAUSE_MS
from flask_idempotent.stores.intent import IntentStore
from flask_idempotent.stores.redis import RedisStore
from flask_idempotent.stores.sql import SqlStore
from tests import servers
from tests.harness import Proxy, wait_until
from tests.provider import ProviderClient, provider_process

from .worker import ENDPOINTS, OPERATIONS, PATHS, SAGA_LEASES, Answer, Nursery, Worker, create_tables, send

__all__ = [
    "CELLS",
    "DATABASES",
    "Cell",
    "Hospital",
    "Outcome",
    "Result",
    "main",
    "missing",
    "plan",
    "repeated_too_often",
    "table",
]

#: Settings of all workers.
TIMES = {"LEASE": 0.8, "SKEW": 0.1, "SETTLE_AFTER": 0.2}
LEASE_S, SKEW_S, SETTLE_S = TIMES.values()
#: Answers longer than that are in the database alone.
INLINE = 1000
#: A pause after a look-up that found nothing out.
PAUSE_S = FIRST_PAUSE_MS / 1000
#: How much later than it should a retry may be let through, and by how much that grows where leases are made longer.
LATE_S, LATE_GROWS = 4.0, 1.5
#: Whatever takes longer will never come.
BOUND_S = 60.0
REPLAYED = "Idempotent-Replayed"
EXPIRES = "Idempotency-Expires"
#: The columns of the table. What a Redis-only route does is the same on all databases: it asks none.
DATABASES = ("postgresql", "mariadb", "sqlite")
WITHOUT = "redis"
#: Runs of a cell that is disturbed.
TRIES = 4
#: So many leases of the beginning are the longest that a busy machine is given.
LONGEST = 8
#: More repeated cells than this part of a database's, and this many at least, are not the machine's fault alone.
REPEATED, REPEATED_LEAST = 0.1, 5
#: Cells that run at once on each database.
LANES = {WITHOUT: 2, "postgresql": 4, "mariadb": 4, "sqlite": 4}


class Outcome:
    """What the matrix says of a retry."""

    RUNS = "runs"  #: its view runs
    SETTLED = "looked up"  #: the reconciler finds the effect, and its result is the answer
    REPLAY = "replay"  #: the dead one's answer is given
    BACK = "goes back"  #: the saga failed: what was done is undone, and the record has failed
    HUMAN = "for a human"  #: the view itself broke the transaction: 409 `indeterminate` until somebody decides


RUNS, SETTLED, REPLAY, BACK, HUMAN = Outcome.RUNS, Outcome.SETTLED, Outcome.REPLAY, Outcome.BACK, Outcome.HUMAN

OPEN, DONE, FAILED, FREE, UNKNOWN = "in_progress", "succeeded", "failed", "released", "indeterminate"
#: What stands in Redis, in the database, and how often the effect is there.
Left = tuple[str | None, str | None, int]

EARLY, LATE = {"layer": "view", "at": "effect", "when": "before"}, {"layer": "view", "at": "effect", "when": "after"}


@dataclass(frozen=True)
class Cell:
    """A point of death.

    :param kind: of the route: ``redis``, ``transaction``, ``intent``, ``saga``.
    :param layer: with ``at`` and ``when``: the store call, or the point in the view.
    :param left: what is there when the process is dead.
    :param outcome: of the retry.
    :param effects: how often the effect is there in the end.
    :param attempt: which one it was that finished.
    :param does: what the dying worker does besides, see `worker.Faults.does`.
    :param first: what comes before, in order: ``"done"`` (an earlier request was answered), ``"died early"``, ``"died
        late"`` (before, after its effect), ``"gave back"``, ``"flushed"``, ``"overtaken"`` (the worker is stopped until
        another has taken its place), ``"running"`` (the dying one came with another body while this one's view ran).
    :param action: ``"kill"``; ``"raise"``: the store fails once; ``"away"``: its server is gone for the worker.
    :param told: status and code of what the client of a worker that lives on gets.
    :param pad: makes the answer longer.
    :param n: which of these calls it is.
    """

    kind: str
    layer: str
    at: str
    when: str
    left: Left
    outcome: str
    effects: int = 1
    attempt: int = 1
    does: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    action: str = "kill"
    told: tuple[int, str] | None = None
    pad: int = 0
    n: int = 1

    @property
    def point(self) -> str:
        return f"{self.layer}.{self.at} {self.when}"

    @property
    def id(self) -> str:
        """Unique, and fit for a test's name."""
        more = [*([] if self.action == "kill" else [self.action]), *([] if self.n == 1 else [str(self.n)])]
        return "-".join([self.kind, f"{self.layer}.{self.at}", self.when, *more, *self.first, *self.does]).replace(
            " ", "_"
        )

    @property
    def databases(self) -> tuple[str, ...]:
        return (WITHOUT,) if self.kind == "redis" else DATABASES

    def held(self, lease_s: float, *, flushed: bool) -> float:
        """For how long after its claim the dead one's retry is refused at least; 0 if it isn't."""
        in_redis, in_sql, _ = self.left
        if self.kind in ("intent", "saga") and in_sql == OPEN:
            # "It did not happen" is believed a little later than "it did"; a saga goes on then, too.
            return lease_s + (max(SKEW_S, SETTLE_S) if self.outcome in (RUNS, BACK) else SKEW_S)
        if in_redis == OPEN and not flushed:
            # Where nobody renews it, the database is asked whether it is over.
            return lease_s / 2 if in_sql in (DONE, FAILED) else lease_s + SKEW_S
        return 0.0

    def lasts(self, lease_s: float) -> float:
        """For how long after the dead one's end its retry is refused at most."""
        looked_up = self.left[1] in (OPEN, UNKNOWN)
        return self.held(lease_s, flushed=False) + (SETTLE_S + PAUSE_S if looked_up else 0.0)


def around(
    kind: str, layer: str, at: str, before: Mapping[str, Any], after: Mapping[str, Any], **both: Any
) -> list[Cell]:
    """The two cells of a call that a process can die at."""
    return [
        Cell(kind, layer, at, "before", **{**both, **before}),
        Cell(kind, layer, at, "after", **{**both, **after}),
    ]


def _redis_only() -> Iterator[Cell]:
    kind = "redis"
    nothing = {"left": (None, None, 0), "outcome": RUNS}
    claimed = {"left": (OPEN, None, 0), "outcome": RUNS, "attempt": 2}
    #: The documented limit: nobody can know that it was done.
    worked = {"left": (OPEN, None, 1), "outcome": RUNS, "attempt": 2, "effects": 2}
    kept = {"left": (DONE, None, 1), "outcome": REPLAY}
    yield from around(kind, "redis", "claim", nothing, claimed)
    yield from around(kind, "redis", "renew", claimed, claimed, does=("waits",))
    yield from around(kind, "redis", "renew", worked, worked, does=("waits after",))
    yield from around(kind, "view", "effect", claimed, worked)
    yield from around(kind, "redis", "complete", worked, kept)
    yield Cell(kind, "view", "answer", "before", **kept)  # type: ignore[arg-type]
    freed = {**claimed, "left": (FREE, None, 0)}
    yield from around(kind, "redis", "release", claimed, freed, does=("gives back",))
    yield from around(kind, "redis", "release", worked, {**worked, "left": (FREE, None, 1)}, does=("fails",))
    yield from around(
        kind,
        "redis",
        "read",
        {**kept, "attempt": 2},
        {**kept, "attempt": 2},
        does=("stops", "gives back"),
        first=("overtaken",),
    )
    # The store is away.
    yield from around(
        kind, "redis", "claim", {"left": (None, None, 0)}, {"left": (OPEN, None, 0), "attempt": 2},
        outcome=RUNS, action="raise", told=(503, "store-unavailable"),
    )  # fmt: skip
    yield from around(kind, "redis", "complete", worked, kept, action="raise", told=(201, ""))
    yield Cell(kind, "view", "effect", "after", **worked, action="away", told=(201, ""))  # type: ignore[arg-type]


def _transaction() -> Iterator[Cell]:
    kind = "transaction"
    nothing = {"left": (None, None, 0), "outcome": RUNS}
    #: Whatever it did goes with its transaction.
    claimed = {"left": (OPEN, None, 0), "outcome": RUNS}
    committed = {"left": (OPEN, DONE, 1), "outcome": REPLAY}
    copied = {"left": (DONE, DONE, 1), "outcome": REPLAY}
    yield from around(kind, "redis", "claim", nothing, claimed)
    yield from around(kind, "transaction", "claim", claimed, claimed)
    for layer in ("transaction", "redis"):
        yield from around(kind, layer, "renew", claimed, claimed, does=("waits",))
        yield from around(kind, layer, "renew", claimed, claimed, does=("waits after",))
    yield from around(kind, "view", "effect", claimed, claimed)
    yield from around(kind, "view", "local", claimed, claimed)
    yield from around(kind, "transaction", "complete", claimed, committed)
    yield from around(kind, "redis", "complete", committed, copied)
    yield Cell(kind, "view", "answer", "before", **copied)  # type: ignore[arg-type]
    for does in ("gives back", "fails"):
        # Redis first: what dies then leaves nothing.
        yield from around(kind, "redis", "release", claimed, nothing, does=(does,))
        yield from around(kind, "transaction", "release", nothing, nothing, does=(does,))
    yield from _of_replays(kind)
    yield from around(kind, "transaction", "is_open", copied, copied, first=("running",))
    # The view ended the transaction itself, and its process died before that could be told.
    yield Cell(kind, "transaction", "complete", "before", (OPEN, OPEN, 1), HUMAN, does=("commits",))
    yield from around(
        kind, "transaction", "read", {}, {}, left=(None, UNKNOWN, 1), outcome=HUMAN, does=("commits", "fails")
    )
    # A store is away.
    yield from around(
        kind, "transaction", "complete", claimed, committed, action="raise", told=(503, "store-unavailable")
    )
    yield Cell(kind, "view", "local", "after", **claimed, action="away", told=(503, "store-unavailable"))  # type: ignore[arg-type]
    yield Cell(kind, "redis", "claim", "after", **committed, action="raise", told=(201, ""))  # type: ignore[arg-type]
    yield from around(kind, "redis", "complete", committed, copied, action="raise", told=(201, ""))


def _intent() -> Iterator[Cell]:
    kind = "intent"
    nothing = {"left": (None, None, 0), "outcome": RUNS}
    fronted = {"left": (OPEN, None, 0), "outcome": RUNS}
    #: Committed: the reconciler decides.
    claimed = {"left": (OPEN, OPEN, 0), "outcome": RUNS, "attempt": 2}
    charged = {"left": (OPEN, OPEN, 1), "outcome": SETTLED}
    committed = {"left": (OPEN, DONE, 1), "outcome": REPLAY}
    copied = {"left": (DONE, DONE, 1), "outcome": REPLAY}
    yield from around(kind, "redis", "claim", nothing, fronted)
    yield from around(kind, "intent", "claim", fronted, claimed)
    yield from around(kind, "intent", "note", claimed, claimed)
    for layer in ("intent", "redis"):
        yield from around(kind, layer, "renew", claimed, claimed, does=("waits",))
        yield from around(kind, layer, "renew", charged, charged, does=("waits after",))
    yield from around(kind, "intent", "first_use", claimed, claimed)
    yield from around(kind, "view", "effect", claimed, charged)
    yield from around(kind, "view", "local", charged, charged)
    yield from around(kind, "intent", "complete", charged, committed)
    yield from around(kind, "redis", "complete", committed, copied)
    yield Cell(kind, "view", "answer", "before", **copied)  # type: ignore[arg-type]
    # Given back, and left open.
    freed = {"left": (OPEN, FREE, 0), "outcome": RUNS, "attempt": 2}
    yield from around(kind, "intent", "release", claimed, freed, does=("gives back",))
    yield from around(kind, "redis", "release", freed, {**freed, "left": (None, FREE, 0)}, does=("gives back",))
    for does, effects in (("fails early", 0), ("fails", 1)):
        usual = charged if effects else claimed
        unknown = {**usual, "left": (OPEN, UNKNOWN, effects)}
        yield from around(kind, "intent", "suspend", usual, unknown, does=(does,))
        yield from around(kind, "redis", "release", unknown, {**usual, "left": (None, UNKNOWN, effects)}, does=(does,))
    # The one that settles dies too.
    lost = {"left": (OPEN, UNKNOWN, 0), "outcome": RUNS, "attempt": 2, "first": ("died early",)}
    found = {"left": (OPEN, UNKNOWN, 1), "outcome": SETTLED, "first": ("died late",)}
    settled = {**found, "left": (OPEN, DONE, 1), "outcome": REPLAY}
    yield from around(kind, "view", "look_up", lost, lost)
    yield from around(kind, "view", "look_up", found, found)
    yield from around(kind, "intent", "since_first_use", lost, lost)
    yield from around(kind, "intent", "settle_retry", lost, {**lost, "left": (OPEN, OPEN, 0), "attempt": 3})
    yield from around(kind, "intent", "settle_completed", found, settled)
    yield from around(kind, "redis", "complete", settled, {**settled, "left": (DONE, DONE, 1)})
    # Its claim in front is given back, since the dead one's lease in the database still lasts.
    early = {**charged, "first": ("died late", "flushed")}
    yield from around(kind, "redis", "release", early, {**early, "left": (None, OPEN, 1)})
    yield from around(kind, "intent", "settle_later", found, found, does=("is unsure",))
    yield from around(kind, "redis", "release", found, {**found, "left": (None, UNKNOWN, 1)}, does=("is unsure",))
    # A later attempt, and one that comes too late.
    again = {**claimed, "attempt": 3}
    yield from around(kind, "intent", "read", again, again, first=("gave back",))
    late = {**copied, "attempt": 2}
    yield from around(kind, "intent", "read", late, late, does=("stops", "gives back"), first=("overtaken",))
    yield from _of_replays(kind)
    # A store is away.
    unsaid = (409, "indeterminate")
    yield Cell(
        kind,
        "intent",
        "claim",
        "after",
        (None, OPEN, 0),
        RUNS,
        attempt=2,
        action="raise",
        told=(503, "store-unavailable"),
    )
    yield from around(kind, "intent", "complete", charged, committed, action="raise", told=unsaid)
    yield Cell(kind, "view", "local", "after", **charged, action="away", told=unsaid)  # type: ignore[arg-type]
    yield Cell(kind, "redis", "claim", "after", **committed, action="raise", told=(201, ""))  # type: ignore[arg-type]
    yield from around(kind, "redis", "complete", committed, copied, action="raise", told=(201, ""))


def _of_replays(kind: str) -> Iterator[Cell]:
    """A durable answer is there, and the one that repeats it dies."""
    copied = {"left": (DONE, DONE, 1), "outcome": REPLAY}
    committed = {**copied, "left": (OPEN, DONE, 1)}
    yield from around(kind, kind, "judge", copied, copied, first=("done",), pad=2 * INLINE)
    yield from around(kind, "redis", "refund", committed, committed, first=("done", "flushed"))
    yield from around(kind, "redis", "complete", committed, copied, first=("done", "flushed"))


def _saga() -> Iterator[Cell]:
    """Two steps. Each is noted when it begins and when it is done, after the saga itself and before its end. Where the
    second is declined: that it failed, with the turn; then each undo like a step."""
    kind, resumes = "saga", {"outcome": RUNS, "effects": 2, "attempt": 2}

    def open_with(effects: int) -> dict[str, Any]:
        return {"left": (OPEN, OPEN, effects)}

    yield from around(kind, "intent", "steps", open_with(0), open_with(0), **resumes)
    for n, effects in enumerate((0, 0, 1, 1, 2, 2), 1):
        yield from around(kind, "intent", "keep_steps", open_with(effects), open_with(effects), **resumes, n=n)
    yield from around(kind, "view", "effect", open_with(1), open_with(2), **resumes)
    # It turns with the fifth of what is noted: before that a retry goes forward, and is not declined.
    back = {"outcome": BACK, "effects": 3, "attempt": 2, "does": ("declines",)}
    yield Cell(kind, "intent", "keep_steps", "before", (OPEN, OPEN, 1), **resumes, does=("declines",), n=5)  # type: ignore[arg-type]
    yield Cell(kind, "intent", "keep_steps", "after", (OPEN, OPEN, 1), **back, n=5)  # type: ignore[arg-type]
    for n, effects in enumerate((1, 2, 2, 3, 3), 6):
        yield from around(kind, "intent", "keep_steps", open_with(effects), open_with(effects), **back, n=n)
    yield from around(kind, "view", "undo", {**open_with(1), **back}, {**open_with(2), **back})
    # The answer of a saga that went back is kept like any other.
    yield from around(
        kind, "intent", "complete", {**open_with(3), **back},
        {**back, "left": (OPEN, FAILED, 3), "attempt": 1},
    )  # fmt: skip


SAGA_CELLS: list[Cell] = [*_saga()]

CELLS: list[Cell] = [*_redis_only(), *_transaction(), *_intent(), *SAGA_CELLS]

WHEN = ("before", "after")
#: Which store calls there are: every public method, on each kind of route that has the layer.
STORES: dict[str, type] = {"redis": RedisStore, "transaction": SqlStore, "intent": IntentStore}
#: Those that no request of that kind makes, and why.
NEVER = {
    ("intent", "intent", "steps"): "only a saga has steps",
    ("intent", "intent", "keep_steps"): "only a saga has steps",
    ("redis", "redis", "refund"): "only a durable route finds out that a new key is none",
    ("transaction", "redis", "read"): "durable routes read the database",
    ("intent", "redis", "read"): "durable routes read the database",
    **{(kind, "redis", "close"): "an app that goes closes its connections" for kind in STORES},
}


def points() -> set[tuple[str, str, str, str]]:
    """Kind, layer, method, before or after: where a process can die, by the stores' methods."""
    found = set()
    for kind in STORES:
        for layer in dict.fromkeys(("redis", kind)):
            store = STORES[layer]
            for at in dir(store):
                if not at.startswith("_") and callable(getattr(store, at)) and (kind, layer, at) not in NEVER:
                    found |= {(kind, layer, at, when) for when in WHEN}
    # A saga's route is an ``intent`` route, with two calls more.
    return found | {("saga", "intent", at, when) for at in ("steps", "keep_steps", "complete") for when in WHEN}


# -- running -------------------------------------------------------------------------------------------------------


@dataclass
class Result:
    """What a cell came to on one database: which processes were killed, and what the ledger said then and now."""

    cell: Cell
    database: str
    pids: list[int] = field(default_factory=list)
    ledger: list[str] = field(default_factory=list)
    met: set[str] = field(default_factory=set)
    #: Why it had to be run once more, each time.
    disturbed: list[str] = field(default_factory=list)
    seconds: float = 0.0
    error: BaseException | None = None

    def __str__(self) -> str:
        if self.error is not None:
            return "FAILED"
        pids = "+".join(map(str, self.pids))
        return f"{pids} ledger {'/'.join(dict.fromkeys(self.ledger))}"


class Lane:
    """What one cell at a time runs on: a healthy worker, and clients that look from outside."""

    def __init__(self, config: Mapping[str, Any], nursery: Nursery, database: str) -> None:
        self.config = dict(config)
        self.nursery = nursery
        self.database = database
        self.lease_s = LEASE_S
        self.healthy = self.spawn(None)
        self.redis = redis.Redis.from_url(config["redis_url"])
        self.outside = sa.create_engine(config["database_url"], pool_size=2)
        self.provider = ProviderClient(config["provider_url"])

    def spawn(self, fault: Mapping[str, Any] | None, **config: Any) -> Worker:
        return self.nursery.spawn(fault, **{**self.config, "LEASE": self.lease_s, **config})

    @property
    def late_s(self) -> float:
        return LATE_S * min(self.lease_s / LEASE_S, LATE_GROWS)

    def slow_down(self) -> None:
        """Longer leases from here on: the machine is too busy for these."""
        if self.lease_s >= LONGEST * LEASE_S:
            return
        self.lease_s *= 2
        before, self.healthy = self.healthy, self.spawn(None)
        before.stop()

    def close(self) -> None:
        self.healthy.stop()
        self.redis.close()
        self.outside.dispose()

    def ask(self, statement: str, **parameters: Any) -> list[Any]:
        with self.outside.connect() as connection:
            return list(connection.execute(sa.text(statement), parameters))


class Disturbed(Exception):
    """The run says nothing about its cell: it is run once more."""


class Late(Disturbed):
    """A retry was let through too late. Longer leases would be no help."""


class Case:
    """One run of a cell: one key, one body.

    :param flush: Redis forgets the record as soon as the process is dead.
    """

    def __init__(self, cell: Cell, lane: Lane, result: Result, *, flush: bool) -> None:
        self.cell, self.lane, self.result, self.flush = cell, lane, result, flush
        self.key = str(uuid.uuid4())
        self.name = f"{cell.kind}-{uuid.uuid4().hex[:12]}"
        self.body = {"name": self.name, "pad": cell.pad}
        self.digest = make_scope("idempotent", None, ENDPOINTS[cell.kind], self.key).digest
        self.record = f"idempotent:{{b{int(self.digest[-2:], 16):03d}}}:r:{self.digest}"
        self.earlier: Answer | None = None
        #: When the request was sent whose lease a retry waits for, and the first one that died.
        self.sent = self.first_sent = 0.0
        #: When the process was dead, or its client told.
        self.gone = 0.0
        self.workers: list[Worker] = []

    # -- what is there -------------------------------------------------------------------------------------------------

    def in_redis(self) -> str | None:
        state = self.lane.redis.hget(self.record, "state")
        return state.decode() if state else None

    def row(self) -> Any:
        rows = self.lane.ask("SELECT * FROM idempotency_keys WHERE key_digest = :digest", digest=self.digest)
        return rows[0] if rows else None

    def in_sql(self) -> str | None:
        row = self.row()
        return row.status if row is not None else None

    def entries(self) -> list[dict[str, Any]]:
        """The ledger's entries of this name, or the orders."""
        if self.cell.kind == "transaction":
            return [{"id": number} for (number,) in self.lane.ask("SELECT id FROM orders WHERE name = :n", n=self.name)]
        return [
            entry
            for operation in OPERATIONS[self.cell.kind]
            for entry in self.lane.provider.done_for(self.name, operation)
        ]

    def left(self) -> Left:
        return self.in_redis(), self.in_sql(), len(self.entries())

    def stored(self) -> bytes:
        """The body that is kept: the database's, or Redis' where there is none."""
        if self.cell.kind == "redis":
            return bytes(self.lane.redis.hget(self.record, "body") or b"")
        rows = self.lane.ask("SELECT body FROM idempotency_responses WHERE key_digest = :digest", digest=self.digest)
        assert len(rows) == 1, f"{len(rows)} answers"
        return bytes(rows[0].body)

    def names(self) -> list[str]:
        """The keys in Redis: the record, and the index of its bucket where there is one."""
        index = self.record.partition(":r:")[0] + ":inflight"
        return [name for name in (self.record, index) if self.lane.redis.exists(name)]

    # -- what is done --------------------------------------------------------------------------------------------------

    def post(self, worker: Worker, **changed: Any) -> Answer:
        options = {"key": self.key, "body": self.body, **changed}
        return send(worker.address, PATHS[self.cell.kind], **options)

    def forget(self) -> None:
        """A flush, as far as this record goes."""
        self.lane.redis.delete(self.record)
        self.lane.redis.zrem(self.record.partition(":r:")[0] + ":inflight", self.digest)

    def spawn(self, fault: Mapping[str, Any], **config: Any) -> Worker:
        if "stops" in fault.get("does", ()):
            # Stopped in the middle of a renewal, it would hold the row.
            config["HEARTBEAT"] = False
        self.workers.append(self.lane.spawn(fault, **config))
        return self.workers[-1]

    def die(self, worker: Worker, point: str) -> None:
        """A worker gets the request, again while it refuses it, and is killed there."""
        if "overtaken" in self.cell.first:
            self.overtake(worker)
        elif "running" in self.cell.first:
            self.ask_beside(worker)
        else:
            self.until_it_breaks(worker)
        assert worker.wait() == -9, f"ended with {worker.ended()}"
        assert worker.met() == point, worker.met()

    def until_it_breaks(self, worker: Worker, **changed: Any) -> None:
        ends = time.monotonic() + BOUND_S
        while True:
            self.sent = time.monotonic()
            try:
                answer = self.post(worker, **changed)
            except OSError:
                return
            if answer.status == 201 and "flushed" in self.cell.first:
                raise Disturbed("the dead one's lease was over before the next request came")
            self.assert_refused(answer)
            assert time.monotonic() < ends, f"it still lives, and said {answer}"
            time.sleep(0.03)

    def ask_beside(self, worker: Worker) -> None:
        """The request is stopped inside of its view while the worker is asked for another with its key."""
        runner = self.spawn({"does": "stops"}, LEASE=BOUND_S)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(self.post, runner)
            try:
                wait_until(runner.has_stopped, "the stop")
                self.until_it_breaks(worker, body={**self.body, "name": "another"})
            finally:
                runner.resume()
            self.earlier = running.result(BOUND_S)
        assert self.earlier.status == 201, self.earlier

    def overtake(self, worker: Worker) -> None:
        """It stops inside of its view, and goes on when another has finished the work."""
        with ThreadPoolExecutor(1) as pool:
            lost = pool.submit(self.until_it_breaks, worker)
            try:
                wait_until(worker.has_stopped, "the stop")
                self.gone = time.monotonic()
                held = self.lane.lease_s + SKEW_S
                self.earlier = self.retried(held, held + SETTLE_S + PAUSE_S)
            finally:
                worker.resume()
            lost.result(BOUND_S)

    def prepare(self) -> None:
        for what in self.cell.first:
            if what == "done":
                self.earlier = self.post(self.lane.healthy)
                assert self.earlier.status == 201, self.earlier
            elif what == "flushed":
                self.forget()
            elif what == "gave back":
                answer = self.post(self.spawn({"does": "gives back"}))
                assert (answer.status, answer.json()["code"]) == (503, "nothing happened"), answer
            elif what in ("died early", "died late"):
                fault = EARLY if what == "died early" else LATE
                self.die(self.spawn(fault), f"view.effect {fault['when']}")
                self.first_sent = self.sent
                if "flushed" not in self.cell.first:
                    # The next one shall get as far as to settle it at once.
                    time.sleep(self.lane.lease_s + SKEW_S + SETTLE_S)

    def fail(self) -> Answer:
        """The worker lives on, and tells its client what it knows."""
        cell = self.cell
        if cell.action == "raise":
            fault = {"layer": cell.layer, "at": cell.at, "when": cell.when, "action": "raise", "does": list(cell.does)}
            worker = self.spawn(fault)
            self.sent = time.monotonic()
            answer = self.post(worker)
        else:
            with self.outage() as (config, go_away):
                # Long enough to take the server away, and over before the first renewal.
                fault = {
                    "layer": cell.layer,
                    "at": cell.at,
                    "when": cell.when,
                    "action": "delay",
                    "seconds": self.lane.lease_s / 4,
                }
                worker = self.spawn(fault, **config)
                self.sent = time.monotonic()
                with ThreadPoolExecutor(1) as pool:
                    asked = pool.submit(self.post, worker)
                    worker.wait_met()
                    go_away()
                    if asked.done():
                        raise Disturbed("it was over before the server was away")
                    answer = asked.result(BOUND_S)
        self.refuse_lost(answer)
        assert worker.met() == cell.point, worker.met()
        self.result.pids.append(worker.pid)
        return answer

    @contextlib.contextmanager
    def outage(self) -> Iterator[tuple[dict[str, Any], Callable[[], object]]]:
        """What a worker is to be spawned with, and what takes the server away from it."""
        if self.cell.kind == "redis":
            proxy = Proxy(self.lane.config["redis_url"])
            proxy.start()
            yield {"redis_url": proxy.url}, proxy.stop
        elif self.lane.database == "sqlite":
            # Somebody who reads keeps the writer from its COMMIT; somebody who writes keeps it from beginning.
            statement = "SELECT * FROM orders" if self.cell.kind == "transaction" else "PRAGMA user_version = 1"
            impatient = {"connect_args": {"timeout": 0.2}}
            connection = self.lane.outside.connect()

            def lock() -> None:
                connection.exec_driver_sql("BEGIN" if self.cell.kind == "transaction" else "BEGIN IMMEDIATE")
                connection.exec_driver_sql(statement).close()

            with connection:
                yield {"engine_options": impatient}, lock
                connection.rollback()
        else:
            proxy = Proxy(self.lane.config["database_url"])
            proxy.start()
            yield {"database_url": proxy.url}, proxy.stop

    # -- what is said --------------------------------------------------------------------------------------------------

    def assert_refused(self, answer: Answer) -> None:
        """One of the documented refusals that a client is to send again after."""
        allowed = {"in-progress": 409, "indeterminate": 409, "store-unavailable": 503}
        if self.cell.kind == "redis":
            del allowed["indeterminate"]
        code = answer.json().get("code") if answer.headers.get_content_type() == "application/problem+json" else None
        self.refuse_lost(answer)
        assert allowed.get(code) == answer.status, answer  # type: ignore[arg-type]
        assert answer.json()["retryable"] is True, answer
        assert 1 <= int(answer.headers["Retry-After"]) <= 10, answer
        assert REPLAYED not in answer.headers, answer

    def refuse_lost(self, answer: Answer) -> None:
        if answer.status == 409 and answer.json()["code"] == "lease-lost":
            raise Disturbed("told that its lease is lost: too long from one call to the next, on a busy machine")

    def retried(self, held: float, lasts: float) -> Answer:
        """The same request on a healthy worker, until it is answered.

        :param held: it is asked at once, a moment before so many seconds are over, and then again and again.
        :param lasts: so many seconds after the other one's end it is to be let through.
        :raises Late: it was not.
        """
        ends, refused = self.gone + lasts + self.lane.late_s, 0
        while True:
            answer = self.post(self.lane.healthy)
            again = answer.status in (409, 503) and "Retry-After" in answer.headers
            if again:
                self.assert_refused(answer)
            if (now := time.monotonic()) > ends:
                what = f"still refused with {answer.json().get('code')}" if again else "let through"
                raise Late(f"{what} {now - self.gone:.1f} s after the other's end, and {lasts:.1f} s are right")
            if not again:
                return answer
            refused += 1
            early = self.sent + held - 0.1 - now
            time.sleep(early if refused == 1 and early > 0 else 0.06)

    def assert_replay(self, first: Answer) -> None:
        again = self.post(self.lane.healthy)
        assert (again.status, again.body) == (first.status, first.body), again
        assert again.headers[REPLAYED] == "true"
        assert again.headers[EXPIRES] == first.headers[EXPIRES]

    def assert_others_refused(self) -> None:
        for changed, status, code in (
            ({"body": {**self.body, "name": "another"}}, 422, "mismatch"),
            ({"user": "bob"}, 404, "not-found"),
        ):
            answer = self.post(self.lane.healthy, **changed)
            assert (answer.status, answer.json()["code"]) == (status, code), answer

    def run(self) -> None:
        """
        :raises Disturbed: it has to be done once more.
        """
        try:
            self.check()
        except AssertionError as error:
            if any(worker.has_lost() for worker in self.workers):
                raise Disturbed("a worker was too slow for its lease") from error
            raise
        finally:
            for worker in self.workers:
                worker.stop()

    def check(self) -> None:
        cell = self.cell
        if cell.action == "kill":
            fault = {"layer": cell.layer, "at": cell.at, "when": cell.when, "n": cell.n, "does": list(cell.does)}
            victim = self.spawn(fault)
            self.prepare()
            self.die(victim, cell.point)
            self.result.pids.append(victim.pid)
        else:
            told = self.fail()
            code = "" if told.status == 201 else told.json()["code"]
            assert (told.status, code) == cell.told, told
            self.earlier = told if told.status == 201 else None
        self.gone = time.monotonic()
        self.result.met.add(cell.point)
        left = self.left()
        self.result.ledger.append(f"{left[2]}→{cell.effects}")
        expected = cell.left
        if cell.action == "away" and cell.kind == "transaction" and self.lane.database == "sqlite":
            expected = (None, None, 0)  # it could see that nothing was committed, and gave the claim back
        if cell.at == "renew" and left[2] < expected[2]:
            raise Disturbed("a renewal came before the effect")
        assert left == expected, f"left {left}, not {expected}"
        kept = self.stored() if cell.outcome == REPLAY or cell.left[1] == FAILED else None
        if self.flush:
            self.forget()
        if cell.outcome == HUMAN:
            return self.assert_for_a_human()
        lease_s = self.lane.lease_s * (SAGA_LEASES if cell.kind == "saga" else 1)
        held, lasts = cell.held(lease_s, flushed=self.flush), cell.lasts(lease_s)
        if expected != cell.left:
            held = lasts = 0.0
        if "flushed" in cell.first and self.first_sent:
            self.sent = self.first_sent  # the lease in the database is that one's
        answer = self.retried(held, lasts)
        took = time.monotonic() - self.sent
        # Whatever a lease holds is not let through before.
        assert took >= held - 0.02, f"let through after {took:.2f} s"
        self.assert_settled(answer, kept)

    def assert_settled(self, answer: Answer, kept: bytes | None) -> None:
        cell = self.cell
        if cell.outcome == BACK:
            assert (answer.status, answer.json()["code"]) == (409, "saga-rolled-back"), answer
        else:
            assert answer.status == 201, answer
            looked_up = answer.json()["run"].startswith("looked up")
            assert looked_up == (cell.outcome == SETTLED) or cell.outcome == REPLAY, answer
        replayed = answer.headers.get(REPLAYED) == "true"
        assert replayed == (cell.outcome in (SETTLED, REPLAY) or kept is not None), answer
        if kept is not None:
            assert answer.body == kept, f"{answer.body!r} is not {kept!r}"
        if self.earlier is not None and cell.outcome == REPLAY:
            assert answer.body == self.earlier.body
        self.assert_replay(answer)
        self.assert_others_refused()
        entries = self.entries()
        assert len(entries) == cell.effects, f"{len(entries)} effects"
        self.assert_records(answer)
        if cell.kind != "redis":
            self.forget()
            self.assert_replay(answer)
            self.assert_replay(answer)
        assert len(self.entries()) == cell.effects
        if cell.kind == "intent":
            (entry,) = entries
            assert answer.json()["charge"] == entry["id"]
            payments = self.lane.ask("SELECT COUNT(*) FROM payments WHERE charge = :id", id=entry["id"])
            assert payments[0][0] == 1
        elif cell.kind == "redis":
            assert answer.json()["entry"] == entries[-1]["id"]
        elif cell.kind == "saga":
            back = cell.outcome == BACK
            operations = ["transfers", "refunds", "refunds"] if back else ["transfers", "charges"]
            assert [entry["operation"] for entry in entries] == operations
            undone = [entry["step"] for entry in entries if entry["operation"] == "refunds"]
            assert undone == (["pay", "reserve"] if back else []), f"undone in another order: {undone}"
            assert back or answer.json()["charge"] == entries[-1]["id"]

    def assert_records(self, answer: Answer) -> None:
        """Nothing is stuck, nothing stays for ever, and the numbers agree with what happened."""
        cell = self.cell
        state = FAILED if cell.outcome == BACK else DONE
        assert self.in_redis() == state
        # (An index may be gone by now: another cell took its last entry.)
        assert all(self.lane.redis.pttl(name) != -1 for name in self.names()), "a key without an end"
        if cell.kind == "redis":
            assert int(self.lane.redis.hget(self.record, "attempt") or 0) == cell.attempt
            assert self.stored() == answer.body
            return
        row = self.row()
        assert (row.status, row.attempt) == (state, cell.attempt), row
        assert self.stored() == answer.body
        assert row.expires_at > row.completed_at >= row.created_at

    def assert_for_a_human(self) -> None:
        """Said again and again, and nothing runs."""
        ends = time.monotonic() + self.lane.lease_s + SKEW_S + SETTLE_S
        while time.monotonic() < ends:
            answer = self.post(self.lane.healthy)
            self.assert_refused(answer)
            time.sleep(0.3)
        answer = self.post(self.lane.healthy)
        assert (answer.status, answer.json()["code"]) == (409, "indeterminate"), answer
        assert len(self.entries()) == self.cell.effects
        self.assert_others_refused()


def run(cell: Cell, lane: Lane) -> Result:
    """A cell on a lane: once as it is, and on durable routes once more with Redis flushed when the process is dead."""
    result = Result(cell, lane.database)
    began = time.monotonic()
    try:
        flushes = cell.kind != "redis" and cell.left[0] is not None and cell.action == "kill"
        for flush in (False, True) if flushes else (False,):
            for tries in reversed(range(TRIES)):
                case = Case(cell, lane, result, flush=flush)
                pids, ledger = list(result.pids), list(result.ledger)
                try:
                    case.run()
                    break
                except Disturbed as error:
                    result.pids, result.ledger = pids, ledger
                    result.disturbed.append(str(error))
                    if not tries:
                        raise
                    if not isinstance(error, Late):
                        lane.slow_down()
                except Exception as error:
                    raise AssertionError(f"{'with Redis flushed' if flush else 'as it is'}: {error}") from error
    except BaseException as error:
        result.error = error
    result.seconds = time.monotonic() - began
    return result


class Hospital:
    """The lanes of all databases, with threads that run cells on them.

    :param redis_url: of an empty server.
    :param url_of: gives a database's URL by its name, when its first cell comes; SQLite's is made here.
    """

    def __init__(self, redis_url: str, provider: ProviderClient, url_of: Callable[[str], str]) -> None:
        self._config = {
            "redis_url": redis_url,
            "provider_url": provider.url,
            "INLINE_BODY": INLINE,
            "RATE_LIMIT": "1000000/hour",
            **TIMES,
        }
        self._url_of = url_of
        self._stack = ExitStack()
        self._pools: dict[str, ThreadPoolExecutor] = {}
        self._lanes: list[Lane] = []
        self._here = threading.local()
        self._opening = threading.Lock()

    def __enter__(self) -> Hospital:
        self._directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="crash-")))
        self._nursery = self._stack.enter_context(
            Nursery({**self._config, "database_url": f"sqlite:///{self._directory / 'none.sqlite'}"})
        )
        return self

    def __exit__(self, *error: object) -> None:
        for pool in self._pools.values():
            pool.shutdown(cancel_futures=True)
        for lane in self._lanes:
            lane.close()
        self._stack.close()

    def start(self, cell: Cell, database: str) -> Future[Result]:
        """Run a cell as soon as there is a lane."""
        if database not in self._pools:
            self._pools[database] = ThreadPoolExecutor(LANES[database], thread_name_prefix=database)
        return self._pools[database].submit(self._run, cell, database)

    def _run(self, cell: Cell, database: str) -> Result:
        if not hasattr(self._here, "lane"):
            self._here.lane = self._open(database)
        return run(cell, self._here.lane)

    def _open(self, database: str) -> Lane:
        with self._opening:
            if database in ("sqlite", WITHOUT):
                # It lets one write at a time: every lane has a file of its own.
                url = f"sqlite:///{self._directory / f'{len(self._lanes)}.sqlite'}"
            else:
                url = self._url_of(database)
            config = {**self._config, "database_url": url}
            create_tables(config)
            lane = Lane(config, self._nursery, database)
            self._lanes.append(lane)
            return lane


# -- telling -------------------------------------------------------------------------------------------------------


def plan() -> list[tuple[Cell, str]]:
    """Every cell on every database that it is run on."""
    return [(cell, database) for cell in CELLS for database in cell.databases]


def missing(results: Iterable[Result]) -> list[str]:
    """The cells that were not run."""
    ran = {(result.cell, result.database) for result in results if result.met == {result.cell.point}}
    return [f"{cell.id} on {database}" for cell, database in plan() if (cell, database) not in ran]


def repeated_too_often(results: Iterable[Result]) -> list[str]:
    """What is to be said of databases with so many disturbed cells that this is a finding of its own.

    A lease that is lost or lapses late now and then does not show in a cell: it passes the next time.
    """
    by_database: dict[str, list[Result]] = {}
    for result in results:
        by_database.setdefault(result.database, []).append(result)
    told = []
    for database, ran in by_database.items():
        repeated = sum(bool(result.disturbed) for result in ran)
        if repeated >= REPEATED_LEAST and repeated > REPEATED * len(ran):
            told.append(
                f"on {database} {repeated} of {len(ran)} cells had to be repeated, and more than {REPEATED:.0%} are too"
                f" many: leases are lost or lapse late without a reason, or this machine is too busy for leases of"
                f" {LEASE_S} s"
            )
    return told


def disturbed(results: Iterable[Result]) -> list[str]:
    """How many tries were in vain, and of which cells."""
    repeated = [result for result in results if result.disturbed]
    tries = sum(len(result.disturbed) for result in repeated)
    lines = [f"{tries} tries were disturbed, of {len(repeated)} cells{':' if repeated else '.'}"]
    for result in repeated:
        reasons = "; ".join(dict.fromkeys(result.disturbed))
        lines.append(f"  {result.cell.id} on {result.database}, {len(result.disturbed)}: {reasons}")
    return lines


def table(results: Iterable[Result]) -> str:
    """Cells by databases: which processes were killed and where, what the ledger said then and in the end; below, what
    was disturbed."""
    results = list(results)
    by_cell: dict[Cell, dict[str, Result]] = {}
    for result in results:
        by_cell.setdefault(result.cell, {})[result.database] = result
    lines = []
    for kind in dict.fromkeys(cell.kind for cell in CELLS):
        columns = (WITHOUT,) if kind == "redis" else DATABASES
        lines.append(f"{'-- ' + kind + ' ':-<60}" + "".join(f" {name:<26}" for name in columns) + " a retry")
        for cell in CELLS:
            if cell.kind != kind or cell not in by_cell:
                continue
            action, number = [cell.action] * (cell.action != "kill"), [f"{cell.n}."] * (cell.n > 1)
            more = ", ".join([*action, *cell.first, *cell.does, *number])
            found = by_cell[cell]
            cells = "".join(f" {found[name]!s:<26}" if name in found else f" {'NOT RUN':<26}" for name in columns)
            lines.append(f"{cell.point + (f' ({more})' if more else ''):<60}{cells} {cell.outcome}")
    return "\n".join([*lines, *disturbed(results)])


def main() -> int:
    """Run it all and print the table; 1 where a cell failed, or was not run, or too many were repeated."""
    began = time.monotonic()
    logging.getLogger("flask_idempotent").setLevel(logging.ERROR)
    with ExitStack() as stack:
        urls = {
            "postgresql": stack.enter_context(
                servers.postgres(Path(stack.enter_context(tempfile.TemporaryDirectory())))
            ),
            "mariadb": stack.enter_context(servers.mariadb()),
        }
        provider = stack.enter_context(provider_process())
        hospital = stack.enter_context(
            Hospital(stack.enter_context(servers.embedded_redis()), provider, urls.__getitem__)
        )
        results = [future.result() for future in [hospital.start(cell, database) for cell, database in plan()]]
    print(table(results))
    for result in results:
        if result.error is not None:
            print(f"FAILED {result.cell.id} on {result.database}: {result.error}")
    absent, often = missing(results), repeated_too_often(results)
    for what in absent:
        print(f"NOT RUN {what}")
    for what in often:
        print(f"TOO OFTEN {what}")
    print(f"{len(CELLS)} cells, {len(results)} with databases, {time.monotonic() - began:.0f} s")
    return int(bool(absent or often) or any(result.error is not None for result in results))


if __name__ == "__main__":
    os.environ.setdefault("CI", "1")
    sys.exit(main())
