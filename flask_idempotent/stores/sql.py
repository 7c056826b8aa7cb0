"""Records in the app's own database, written in the very transaction in which the view works."""

from __future__ import annotations

import datetime
import logging
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from sqlalchemy import func, select
from sqlalchemy.engine import Connection, Engine, Row
from sqlalchemy.exc import DBAPIError, IntegrityError, SQLAlchemyError

from ..errors import ConfigurationError, StoreUnavailable
from ..records import (
    FINISHED,
    Claim,
    ClaimReply,
    Completed,
    Completion,
    CompletionReply,
    KeptResponse,
    Record,
    Scope,
    State,
    Verdict,
)
from .base import NotCommitted, Released
from .faults import Fault, fault_of
from .models import Tables
from .rows import (
    Held,
    Rows,
    away,
    claim_lock_number,
    claim_parameters,
    is_innodb,
    is_mysql,
    key_of,
    lock_nothing,
    lock_number,
    locks_of,
)
from .statements import Statements
from .transaction import OuterEnded, Transaction, WorkLost, shared

__all__ = ["SqlStore"]

log = logging.getLogger("flask_idempotent")

#: How often a claim is tried again after a deadlock, a serialization failure, or a row that vanished.
TRIES = 4
#: The longest name of a lock on MySQL.
LOCK_NAME = 64
#: Milliseconds that a claim waits for the only writer that SQLite has.
SQLITE_BUSY_MS = 300

#: Between looks at a row that somebody is at.
READ_BACK_PAUSES_S = (0.01, 0.02, 0.05, 0.1, 0.2)

UNKNOWN = "It is not known whether this was carried out. Send the same request again with the same key."

T = TypeVar("T")


class SqlStore:
    """The Store for ``durable="transaction"``: key, effect and answer are committed together, or not at all.

    The row is inserted right before the view runs and seen by nobody until the commit, so there is no lease, no
    heartbeat and nothing to take over: a process that dies takes its row along.

    :param engine: a callable, since Flask-SQLAlchemy's engines are known only within an app context.
    """

    def __init__(self, engine: Callable[[], Engine], tables: Tables) -> None:
        self._sql = Statements(tables)
        self._rows = Rows(engine, self._sql)
        #: Process and token of what runs here.
        self._running: set[tuple[int, str]] = set()

    # -- the protocol ----------------------------------------------------------------------------------------------

    def claim(self, claim: Claim) -> ClaimReply:
        """Insert the row in the claim's own transaction, which stays open. Waits for nobody: a duplicate behind a row
        that isn't committed yet is told ``IN_PROGRESS``."""
        transaction = shared(claim)
        if claim.scope.tenant is not None and len(claim.scope.tenant) > 255:
            raise ConfigurationError(
                "a tenant of a durable route has at most 255 characters: return a shorter identifier"
            )
        old: Row[Any] | None = None
        for attempt in range(TRIES):
            try:
                reply, old = self._try_claim(claim, transaction, old)
            except DBAPIError as error:
                transaction.rollback()
                fault = fault_of(error)
                if fault is Fault.LOCKED:
                    transaction.close()
                    return ClaimReply(Verdict.IN_PROGRESS, wait_ms=1000)
                if fault is Fault.AGAIN and attempt < TRIES - 1:
                    time.sleep(random.uniform(0.005, 0.02) * 2**attempt)
                    continue
                transaction.discard()
                raise away(error) from error
            except SQLAlchemyError as error:
                transaction.discard()
                raise away(error) from error
            except BaseException:
                # A row that can't be read, or a time-out of the worker.
                transaction.discard()
                raise
            if reply is not None:
                if reply.verdict is Verdict.CLAIMED:
                    self._running.add((os.getpid(), claim.token))
                else:
                    transaction.close()
                return reply
        transaction.close()
        return ClaimReply(Verdict.IN_PROGRESS, wait_ms=1000)

    def renew(self, claims: Sequence[Claim]) -> Sequence[bool]:
        """Nothing to prolong: the row is held by its transaction."""
        return [True] * len(claims)

    def complete(self, completion: Completion) -> CompletionReply:
        """Commit the key and its answer, with the view's work (or without, where ``undo`` says so).

        :raises NotCommitted: nothing was committed, or nobody can tell.
        """
        claim = completion.claim
        transaction = shared(claim)
        transaction.part()
        if completion.undo:
            lost = self._claim_anew(claim, transaction)
            if lost is not None:
                return lost
        self._ends(claim)
        values = self._final(transaction, completion)
        try:
            transaction.check()
            self._write(transaction.connection, claim, values, transaction.number)
            transaction.commit()
        except (OuterEnded, WorkLost, SQLAlchemyError) as error:
            transaction.discard()
            return self._read_back(claim, values, error)
        transaction.close()
        return CompletionReply(Completed.STORED, expires_at=values["v_expires_at"])

    def release(self, claim: Claim, *, reason: str, forget: bool = False) -> Released:
        """Take back the view's work and the row: nothing binds the key any more."""
        transaction = shared(claim)
        self._ends(claim)
        if not transaction.is_open:
            return Released.GONE
        transaction.part()
        transaction.rollback()
        try:
            left = self._left_behind(claim, transaction)
        except SQLAlchemyError as error:
            transaction.discard()
            raise away(error) from error
        transaction.close()
        if left:
            _tell_ended(claim)
            self._mark_unknown(claim)
            return Released.LOST
        return Released.RELEASED

    def read(self, scope: Scope) -> Record | None:
        return self._rows.read(scope)

    def judge(self, claim: Claim) -> ClaimReply | None:
        """What the committed row says to a claim, without claiming. ``None`` where it would be free."""

        def look(connection: Connection) -> ClaimReply | None:
            lock_nothing(connection)
            row = connection.execute(self._sql.row, key_of(claim.scope)).one_or_none()
            return None if row is None else self._verdict(connection, claim, row)

        return self._rows.fresh(look)

    def is_open(self, claim: Claim, token: str) -> bool:
        """Whether the key is held, now, by the open transaction of the claim with this token. ``False`` also where
        nobody can tell: on SQLite, of a claim of another process."""

        def look(connection: Connection) -> bool:
            if connection.dialect.name == "sqlite":
                return (os.getpid(), token) in self._running
            if connection.dialect.name == "postgresql":
                free = connection.execute(self._sql.try_claim_lock, {"claim_lock": claim_lock_number(token)})
                return not free.scalar_one()
            # The one read of what isn't committed: whose it is, is what is asked.
            connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL READ UNCOMMITTED")
            ours = connection.execute(self._sql.ours, {**key_of(claim.scope), "p_token": token})
            return ours.one_or_none() is not None

        return self._rows.fresh(look)

    # -- claim -----------------------------------------------------------------------------------------------------

    def _try_claim(
        self, claim: Claim, transaction: Transaction, old: Row[Any] | None
    ) -> tuple[ClaimReply | None, Row[Any] | None]:
        """One try: a reply, or the old row that a next try replaces (``None`` for a row that vanished meanwhile)."""
        connection = transaction.begin()
        try:
            inserted = self._insert(connection, claim, old)
        except IntegrityError:
            inserted = None
        if inserted is not None:
            transaction.claimed(fence=inserted.lock_version, at_ms=inserted.claimed_at, number=inserted.number)
            reply = ClaimReply(
                Verdict.CLAIMED,
                fence=inserted.lock_version,
                attempt=inserted.attempt,
                created_at=inserted.created_at,
            )
            return reply, None
        transaction.rollback()
        connection = transaction.begin()
        lock_nothing(connection)
        row = connection.execute(self._sql.row, key_of(claim.scope)).one_or_none()
        if row is None:
            transaction.rollback()
            held = ClaimReply(Verdict.IN_PROGRESS, wait_ms=1000) if connection.dialect.name == "postgresql" else None
            return held, None
        reply_or_free = self._verdict(connection, claim, row)
        transaction.rollback()
        return (reply_or_free, None) if reply_or_free is not None else (None, row)

    def _insert(self, connection: Connection, claim: Claim, old: Row[Any] | None) -> Row[Any] | None:
        """The key's row, after the old one that it replaces. ``None`` where somebody else holds the key."""
        if is_mysql(connection.dialect):
            return self._insert_in_turn(connection, claim, old)
        if connection.dialect.name == "sqlite":
            _begin_immediate(connection)
        return self._insert_now(connection, claim, old)

    def _insert_in_turn(self, connection: Connection, claim: Claim, old: Row[Any] | None) -> Row[Any] | None:
        """MySQL can't bound one INSERT's wait. So those who insert a key take turns, by a lock of the server's, and
        look first whether a row is there: in a transaction that locks no gap, in which other keys are new."""
        turn = f"idempotent:{claim.scope.digest}"[:LOCK_NAME]
        if connection.execute(select(func.get_lock(turn, 0))).scalar_one() != 1:
            return None
        try:
            if old is None:
                lock_nothing(connection)
                found = connection.execute(self._sql.row_alone, key_of(claim.scope)).one_or_none()
                connection.rollback()
                connection.begin()
                if found is not None:
                    return None
            return self._insert_now(connection, claim, old)
        finally:
            connection.execute(select(func.release_lock(turn)))

    def _insert_now(self, connection: Connection, claim: Claim, old: Row[Any] | None) -> Row[Any] | None:
        dialect = connection.dialect
        if old is not None:
            # A statement that takes the row away would wait for another that is at it.
            connection.execute(self._sql.row_alone, key_of(claim.scope))
            key = key_of(claim.scope)
            gone = connection.execute(
                self._sql.drop,
                {**key, "p_token": old.claim_token, "p_version": old.lock_version, "p_status": old.status},
            )
            if gone.rowcount != 1:
                return None
            connection.execute(self._sql.drop_answer, key)
        parameters = claim_parameters(claim, old)
        if dialect.name == "postgresql":
            parameters.update(locks_of(claim))
            return self._sql.direct("claim", connection).execute(connection, parameters).one_or_none()
        self._rows.insert(connection, parameters)
        return connection.execute(self._sql.claimed, key_of(claim.scope)).one()

    def _verdict(self, connection: Connection, claim: Claim, row: Row[Any]) -> ClaimReply | None:
        """What a committed row says; ``None`` where it may be replaced."""
        if self._rows.is_over(claim, row):
            return None
        reply = self._rows.screen(connection, claim, row)
        if reply is not None or row.status == State.RELEASED.value:
            return reply
        # A row in progress that can be seen was committed by the view itself, and then left: nobody knows what it did.
        return ClaimReply(Verdict.INDETERMINATE)

    def _claim_anew(self, claim: Claim, transaction: Transaction) -> CompletionReply | None:
        """Take the view's work back, and hold the key again for the answer alone. A reply where that can't be.

        :raises NotCommitted: the view had ended the transaction, or the database is away.
        """
        self._ends(claim)
        transaction.rollback()
        try:
            left = self._left_behind(claim, transaction)
        except SQLAlchemyError as error:
            transaction.discard()
            raise NotCommitted(absent=True) from error
        if left:
            transaction.close()
            _tell_ended(claim)
            self._mark_unknown(claim)
            raise NotCommitted(UNKNOWN)
        try:
            reply = self.claim(claim)
        except StoreUnavailable as error:
            raise NotCommitted(absent=True) from error
        if reply.verdict is Verdict.CLAIMED:
            return None
        return CompletionReply(Completed.LOST, record=reply.record, wait_ms=reply.wait_ms)

    def _ends(self, claim: Claim) -> None:
        """Before its transaction does: from here on nobody is refused for this claim's sake."""
        self._running.discard((os.getpid(), claim.token))

    def _left_behind(self, claim: Claim, transaction: Transaction) -> bool:
        """After a rollback: whether our row is there all the same, since the view ended the transaction itself."""
        connection = transaction.begin()
        found = connection.execute(self._sql.ours, {**key_of(claim.scope), "p_token": claim.token}).one_or_none()
        transaction.rollback()
        return found is not None

    # -- completion ------------------------------------------------------------------------------------------------

    def _final(self, transaction: Transaction, completion: Completion) -> dict[str, Any]:
        """All that is written at the end. The database's clock is read once, at the claim; from there on time is
        counted by the process' own monotonic clock."""
        claim, response = completion.claim, completion.response
        now = transaction.now_ms()
        expires_at = now + claim.ttl_ms
        return {
            "v_status": completion.state.value,
            "v_reason": completion.reason[:255],
            "v_response_code": response.status,
            "v_completed_at": now,
            "v_expires_at": expires_at,
            "v_expires_day": datetime.datetime.fromtimestamp(expires_at / 1000, datetime.timezone.utc).date(),
            "v_tombstone_until": expires_at + claim.tombstone_ms if claim.tombstone_ms else None,
            "response": response,
            "version": transaction.fence,
        }

    def _write(self, connection: Connection, claim: Claim, values: Mapping[str, Any], number: int | None) -> None:
        """Finish the row and add its answer, by compare-and-swap on token and state.

        :raises OuterEnded: the row is not there in this state.
        """
        response: KeptResponse = values["response"]
        parameters = {
            **key_of(claim.scope),
            "p_token": claim.token,
            **{name: value for name, value in values.items() if name.startswith("v_")},
            "r_lock_version": values["version"],
            "r_headers": response.headers,
            "r_body": response.body,
            "r_kind": response.kind,
            "r_cipher": response.cipher,
        }
        if number is not None:
            finish = self._sql.direct("finish", connection)
            written = finish.execute(connection, {**parameters, "p_number": number}).one_or_none()
            if written is None:
                raise OuterEnded()
            return
        if connection.execute(self._sql.finish, parameters).rowcount != 1:
            raise OuterEnded()
        connection.execute(self._sql.add_answer, parameters)

    def _read_back(self, claim: Claim, values: Mapping[str, Any], error: Exception) -> CompletionReply:
        """After an error at the end: what is there, by our token and on a fresh connection, decides. The view is never
        run again for it.

        :raises NotCommitted: nothing is there, or it can't be read or finished.
        """
        log.error("record %s: %s at the end; reading back", claim.scope.digest[:12], type(error).__name__)
        try:
            record = self._read_alone(claim.scope)
        except StoreUnavailable:
            raise NotCommitted(UNKNOWN) from error
        if record is not None and record.token == claim.token:
            if record.state in FINISHED:
                return CompletionReply(Completed.STORED, expires_at=record.expires_at, record=record)
            return self._settle_ended(claim, values)
        if isinstance(error, WorkLost):
            log.error("record %s: %s", claim.scope.digest[:12], _lost_work(claim))
        if isinstance(error, OuterEnded):
            _tell_ended(claim)
            raise NotCommitted(UNKNOWN) from error
        raise NotCommitted(absent=True) from error

    def _read_alone(self, scope: Scope) -> Record | None:
        """The row, once no transaction is at it: where our connection broke, the server may still be at the COMMIT.

        :raises StoreUnavailable: it can't be read, or somebody stays at it.
        """
        key = key_of(scope)

        def look(connection: Connection) -> Record | None:
            if connection.dialect.name == "postgresql":
                if not connection.execute(select(self._sql.try_lock), {"lock": lock_number(scope)}).scalar_one():
                    raise Held()
            elif is_innodb(connection.dialect):
                connection.execute(self._sql.row_alone, key)
            row = connection.execute(self._sql.row, key).one_or_none()
            return None if row is None else self._rows.record(connection, row)

        for pause_s in READ_BACK_PAUSES_S:
            try:
                return self._rows.settled(look)
            except Held:
                time.sleep(pause_s)
        raise StoreUnavailable()

    def _settle_ended(self, claim: Claim, values: Mapping[str, Any]) -> CompletionReply:
        """The view ended the transaction, so its work and the row are there: the answer is added. Where that fails the
        outcome is unknown."""
        _tell_ended(claim)
        try:
            self._rows.fresh(lambda connection: self._write(connection, claim, values, None))
        except (OuterEnded, StoreUnavailable) as error:
            self._mark_unknown(claim)
            raise NotCommitted(UNKNOWN) from error
        return CompletionReply(Completed.STORED, expires_at=values["v_expires_at"])

    def _mark_unknown(self, claim: Claim) -> None:
        """The view's work may be there, without an answer. A row that is left in progress says the same."""
        try:
            self._rows.fresh(
                lambda connection: connection.execute(
                    self._sql.mark_unknown, {**key_of(claim.scope), "p_token": claim.token}
                )
            )
        except StoreUnavailable:
            log.error("record %s could not be marked as unknown; its row stays in progress", claim.scope.digest[:12])


def _begin_immediate(connection: Connection) -> None:
    """Take SQLite's only write lock now, or fail soon. A transaction that reads first and writes later can fail however
    long it waits; one that begins like this can't."""
    if getattr(connection.connection.dbapi_connection, "in_transaction", False):
        return
    patience = connection.exec_driver_sql("PRAGMA busy_timeout").scalar_one()
    connection.exec_driver_sql(f"PRAGMA busy_timeout = {SQLITE_BUSY_MS}")
    try:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
    finally:
        connection.exec_driver_sql(f"PRAGMA busy_timeout = {int(patience)}")


def _lost_work(claim: Claim) -> ConfigurationError:
    return ConfigurationError(
        f"the view {claim.scope.endpoint!r} committed work in one session while another one held work that it then "
        "took back, or never committed: commit the outer session, or roll it back, before a nested app context or a "
        "second session begins to write. Nothing was kept"
    )


def _tell_ended(claim: Claim) -> None:
    problem = ConfigurationError(
        f"the view {claim.scope.endpoint!r} ended the transaction that it shares with its key, by a raw COMMIT, by DDL "
        "or by connection().commit(): use db.session.commit() in durable='transaction' views"
    )
    log.error("record %s: %s", claim.scope.digest[:12], problem)
