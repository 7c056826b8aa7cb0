"""A database with the stores over it, and a claim of every kind, for scenarios of one rule each."""

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import redis
import sqlalchemy as sa

from flask_idempotent import Provider, Settlement
from flask_idempotent.records import (
    Claim,
    ClaimReply,
    Completion,
    CompletionReply,
    Fingerprint,
    KeptResponse,
    Record,
    Scope,
    State,
    Verdict,
)
from flask_idempotent.response.cipher import Cipher
from flask_idempotent.settling import IntentEngine
from flask_idempotent.stores.backing import Lease
from flask_idempotent.stores.durable import DurableIntentStore, DurableTransactionStore
from flask_idempotent.stores.intent import IntentStore
from flask_idempotent.stores.models import Tables, add_tables
from flask_idempotent.stores.redis import RedisStore
from flask_idempotent.stores.sql import SqlStore
from flask_idempotent.stores.transaction import Transaction, shared

CREATED = KeptResponse(201, b"[]", b"made", "full")
OTHER = KeptResponse(200, b"[]", b"another answer", "full")
SCOPE = Scope(None, "orders", hashlib.sha256(b"k").hexdigest())
BANK = Provider("bank", window=3600, max_length=64)

LEASE_MS, SKEW_MS, TTL_MS = 30_000, 5_000, 3_600_000
#: Of a full life; a database on a busy machine takes its time.
TOLERANCE_MS = 20_000
INLINE_BODY = 65_536
#: How long the databases wait for a lock.
LOCK_WAIT_S = 3
OPTIONS: dict[str, dict[str, str]] = {
    "postgresql": {"options": f"-c lock_timeout={LOCK_WAIT_S}s"},
    "mysql": {"init_command": f"SET SESSION innodb_lock_wait_timeout = {LOCK_WAIT_S}"},
}


def open_engine(url: str) -> tuple[sa.Engine, Tables]:
    """An engine, and the tables that were made there."""
    engine = sa.create_engine(url, connect_args=OPTIONS.get(sa.make_url(url).get_backend_name(), {}))
    if engine.dialect.name == "sqlite":
        # Nothing here is about power cuts.
        sa.event.listen(engine, "connect", lambda connection, _: connection.execute("PRAGMA synchronous = OFF"))
    tables = add_tables(sa.MetaData())
    tables.keys.metadata.create_all(engine)
    return engine, tables


def empty(engine: sa.Engine, tables: Tables) -> None:
    with engine.begin() as connection:
        for table in tables.keys.metadata.sorted_tables:
            connection.execute(table.delete())


class Bench:
    """The stores, made when the bench is: a rule is switched off before."""

    def __init__(self, engine: sa.Engine, tables: Tables, client: redis.Redis) -> None:
        self.engine, self.tables, self.client = engine, tables, client
        self.transaction = SqlStore(lambda: engine, tables)
        self.intent = IntentStore(lambda: engine, tables)
        self.front = RedisStore(client, prefix="bench")
        self.durable = DurableTransactionStore(self.front, self.transaction, inline_body=INLINE_BODY)
        self.durable_intent = DurableIntentStore(self.front, self.intent, inline_body=INLINE_BODY)
        self._open: list[Transaction] = []

    def close(self) -> None:
        for transaction in self._open:
            transaction.close()

    # -- claims ------------------------------------------------------------------------------------------------------

    def leased(self, token: str, body: str = "A", **changes: Any) -> Claim:
        """A claim of an ``intent`` route, by p1 for "A" unless said otherwise."""
        values: dict[str, Any] = {
            "scope": SCOPE,
            "token": token,
            "fingerprints": (Fingerprint("r1", body),),
            "principal": "p1",
            "binding": "",
            "lease_ms": LEASE_MS,
            "skew_ms": SKEW_MS,
            "max_processing_ms": 120_000,
            "ttl_ms": TTL_MS,
            "backing": Lease(),
        }
        return Claim(**{**values, **changes})

    def shared(self, token: str, body: str = "A", **changes: Any) -> Claim:
        """A claim of a ``transaction`` route, with its transaction."""
        self._open.append(Transaction(self.engine))
        return self.leased(token, body, backing=self._open[-1], **changes)

    def running(self, token: str = "t1", body: str = "A", **changes: Any) -> Claim:
        """An ``intent`` claim whose row is committed, and whose view runs."""
        claim = self.leased(token, body, **changes)
        assert self.intent.claim(claim).verdict is Verdict.CLAIMED
        return claim

    def lapsed(self, token: str = "t1", **changes: Any) -> Claim:
        """The same, which has lost its lease."""
        claim = self.running(token, **changes)
        self.change(locked_until=1)
        return claim

    def taken_over(self, token: str = "t2", **changes: Any) -> tuple[Claim, Record]:
        """A claim that is to settle what became of the row, and what it read."""
        claim = self.leased(token, **changes)
        reply = self.intent.claim(claim)
        assert reply.verdict is Verdict.SETTLE
        assert reply.record is not None
        return claim, reply.record

    def answered(self, store: Any, claim: Claim, response: KeptResponse = CREATED) -> CompletionReply:
        reply: CompletionReply = store.complete(Completion(claim, State.SUCCEEDED, response))
        return reply

    def done(self, token: str = "t1", **changes: Any) -> Claim:
        """A ``transaction`` claim that is committed."""
        claim = self.shared(token, **changes)
        assert self.transaction.claim(claim).verdict is Verdict.CLAIMED
        self.answered(self.transaction, claim)
        return claim

    def verdict(self, store: Any, claim: Claim) -> Verdict:
        reply: ClaimReply = store.claim(claim)
        return reply.verdict

    # -- rows --------------------------------------------------------------------------------------------------------

    def change(self, **values: Any) -> None:
        """Change the row, as another process or an operator does."""
        with self.engine.begin() as connection:
            assert connection.execute(sa.update(self.tables.keys).values(values)).rowcount == 1

    def row(self) -> Any:
        with self.engine.begin() as connection:
            return connection.execute(sa.select(self.tables.keys)).one()

    def count(self, table: "sa.Table | None" = None) -> int:
        with self.engine.begin() as connection:
            counted = sa.select(sa.func.count()).select_from(self.tables.keys if table is None else table)
            return int(connection.execute(counted).scalar_one())

    def forget(self) -> None:
        """The row, as an operator does."""
        with self.engine.begin() as connection:
            connection.execute(self.tables.responses.delete())
            connection.execute(self.tables.keys.delete())

    def work_in(self, claim: Claim) -> None:
        """Some work of the view, in the transaction that it shares with its key."""
        step = {"endpoint": "work", "key_digest": "w", "step": "work", "status": "done", "began_at": 1}
        self.connection(claim).execute(sa.insert(self.tables.steps).values(step))

    def connection(self, claim: Claim) -> sa.Connection:
        return shared(claim).connection

    @contextlib.contextmanager
    def before_update(self, act: Callable[[], Any]) -> Iterator[None]:
        """Act between what the next claim reads and what it then writes, or holds before it writes."""
        armed = [True]

        def acts(connection: object, cursor: object, statement: str, *_: object) -> None:
            if armed and (statement.startswith("UPDATE idempotency_keys") or "FOR UPDATE" in statement):
                armed.clear()
                act()

        sa.event.listen(self.engine, "before_cursor_execute", acts)
        try:
            yield
        finally:
            sa.event.remove(self.engine, "before_cursor_execute", acts)
        assert not armed, "nothing was updated"

    @contextlib.contextmanager
    def sql_away(self) -> Iterator[None]:
        """New connections are refused, and the old ones are closed."""

        def refuse(dialect: Any, *_: object) -> None:
            raise dialect.loaded_dbapi.OperationalError("the database is away")

        sa.event.listen(self.engine, "do_connect", refuse)
        self.engine.dispose()
        try:
            yield
        finally:
            sa.event.remove(self.engine, "do_connect", refuse)

    def fail_at_commit(self, claim: Claim) -> None:
        """The commit is applied, its reply is lost."""
        transaction = shared(claim)
        commit = transaction.commit

        def fails() -> None:
            commit()
            raise sa.exc.OperationalError("COMMIT", {}, Exception("the reply was lost"))

        transaction.commit = fails  # type: ignore[method-assign]

    def break_at_commit(self, claim: Claim) -> None:
        """The connection breaks for its client alone."""
        transaction = shared(claim)

        def breaks() -> None:
            transaction._connection = None
            raise sa.exc.OperationalError("COMMIT", {}, Exception("timed out"))

        transaction.commit = breaks  # type: ignore[method-assign]

    # -- settling ----------------------------------------------------------------------------------------------------

    def engine_of(self) -> IntentEngine:
        return IntentEngine(self.intent, Cipher(()), sender=self, heartbeat=None)

    def call(self, claim: Claim, settle: "Callable[[Any], Settlement] | None" = None) -> Any:
        """As much of a call as settling needs."""
        policy = SimpleNamespace(wait_ms=None, provider=BANK, recovery="reconcile", saga=None)
        return SimpleNamespace(
            claim=claim,
            settle=settle,
            policy=policy,
            endpoint="orders",
            attempt=0,
            fence=0,
            created_at=0,
            lost=False,
            settled=False,
            beat=None,
            context={},
            make_answer=None,
            derive_key=lambda *_: "key",
        )

    def in_front(self) -> Record | None:
        return self.front.read(SCOPE)
