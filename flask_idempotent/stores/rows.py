"""Reading the key's row: what it is as a record, and what it says to a claim."""

from __future__ import annotations

import hashlib
import hmac
import logging
import random
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from sqlalchemy.engine import Connection, Dialect, Engine, Row
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from ..errors import StoreUnavailable, UnreadableRecord
from ..records import FINISHED, FORMAT, Claim, ClaimReply, Fingerprint, KeptResponse, Record, Scope, State, Verdict
from .faults import Fault, fault_of
from .statements import Statements

__all__ = [
    "Held",
    "Rows",
    "away",
    "claim_lock_number",
    "claim_parameters",
    "is_innodb",
    "is_mysql",
    "key_of",
    "lock_number",
    "locks_of",
]

log = logging.getLogger("flask_idempotent")

#: How often a short transaction is tried.
TRIES = 5
#: For so many seconds a lock that somebody else holds is asked for again.
PATIENCE_S = 1.0

T = TypeVar("T")


class Held(StoreUnavailable):
    """Another transaction stays at the key's row: that of a process that was stopped, or of a person at a console."""


class Rows:
    """Reads on connections of its own, and judges what it reads.

    :param engine: a callable, since Flask-SQLAlchemy's engines are known only within an app context.
    """

    def __init__(self, engine: Callable[[], Engine], statements: Statements) -> None:
        self._engine = engine
        self._sql = statements

    def fresh(self, work: Callable[[Connection], T]) -> T:
        """Some work in a short transaction on a connection of its own.

        :raises StoreUnavailable: the database is away, or refused.
        """
        try:
            with self._engine().begin() as connection:
                return work(connection)
        except SQLAlchemyError as error:
            raise away(error) from error

    def settled(self, work: Callable[[Connection], T]) -> T:
        """Like :meth:`fresh`, at READ COMMITTED, and tried again after a deadlock, a serialization failure or a lock
        that another statement held for a moment. The work must be safe to send twice.

        :raises Held: the lock is not given up.
        :raises StoreUnavailable: the database is away, or too busy.
        """
        began = time.monotonic()
        attempt = 0
        while True:
            try:
                with self._engine().connect() as connection:
                    by_statement = _is_set_by_statement(connection)
                    if connection.dialect.name != "sqlite" and not by_statement:
                        connection = connection.execution_options(isolation_level="READ COMMITTED")
                    with connection.begin():
                        if by_statement:
                            lock_nothing(connection)
                        return work(connection)
            except DBAPIError as error:
                # A connection that broke may have broken behind the statement: it is asked for once more, anew.
                broken = error.connection_invalidated and attempt == 0
                fault = fault_of(error)
                if fault is Fault.LOCKED:
                    if time.monotonic() - began > PATIENCE_S:
                        log.warning("a key's row stays locked by another transaction: %s", type(error.orig).__name__)
                        raise Held() from error
                elif attempt >= TRIES - 1 or (fault is Fault.AWAY and not broken):
                    raise away(error) from error
                time.sleep(random.uniform(0.005, 0.02) * 2 ** min(attempt, 3))
                attempt += 1
            except SQLAlchemyError as error:
                raise away(error) from error

    def alone(self, scope: Scope, work: Callable[[Connection, Row[Any] | None], T]) -> T:
        """Like :meth:`settled`, with the key's row, which nobody else changes meanwhile. A bare UPDATE would wait for
        whoever holds the row, as long as the database allows: on PostgreSQL for ever."""
        key = key_of(scope)
        return self.settled(
            lambda connection: work(connection, connection.execute(self._sql.row_alone, key).one_or_none())
        )

    def insert(self, connection: Connection, parameters: Mapping[str, Any]) -> None:
        """Add a key's row, on all but PostgreSQL. Behind another transaction's row this fails at once on MariaDB; on
        MySQL it waits."""
        dialect = connection.dialect
        if getattr(dialect, "is_mariadb", False):
            self._sql.direct("claim", connection).execute(connection, parameters)
        else:
            connection.execute(self._sql.insert(dialect), parameters)

    def read(self, scope: Scope) -> Record | None:
        """The record as it stands."""

        def look(connection: Connection) -> Record | None:
            lock_nothing(connection)
            row = connection.execute(self._sql.row, key_of(scope)).one_or_none()
            return None if row is None else self.record(connection, row)

        return self.fresh(look)

    def is_over(self, claim: Claim, row: Row[Any]) -> bool:
        """Whether the row's life is over, without a tombstone: as if it was never there.

        :raises UnreadableRecord: the row has a format that this version doesn't read.
        """
        _require_format(row)
        return _expired(row) and (row.tombstone_until or 0) <= row.now

    def screen(self, connection: Connection, claim: Claim, row: Row[Any]) -> ClaimReply | None:
        """What a row says that is not over: identity, fingerprint, state, in this order. ``None`` where the same
        request may go on by the row's open state."""
        if not (_equal(row.principal, claim.principal) and _equal(row.binding, claim.binding)):
            return ClaimReply(Verdict.FOREIGN, confirmed=True)
        if _expired(row):
            return ClaimReply(Verdict.EXPIRED)
        known = [fingerprint.value for fingerprint in claim.fingerprints if fingerprint.recipe == row.recipe]
        if known and not _equal(known[0], row.request_hash):
            return ClaimReply(Verdict.MISMATCH, confirmed=True)
        if State(row.status) in FINISHED:
            return ClaimReply(Verdict.REPLAY, comparable=bool(known), record=self.record(connection, row))
        return None

    def record(self, connection: Connection, row: Row[Any]) -> Record:
        """The row as a record, with its answer where it is finished.

        :raises UnreadableRecord: the row has a format that this version doesn't read.
        """
        _require_format(row)
        state = State(row.status)
        response = self._answer(connection, row) if state in FINISHED else None
        return Record(
            digest=row.key_digest,
            state=state,
            token=row.claim_token,
            fence=row.lock_version,
            attempt=row.attempt,
            created_at=row.created_at,
            locked_until=row.locked_until or 0,
            fingerprint=Fingerprint(row.recipe, row.request_hash),
            principal=row.principal,
            binding=row.binding,
            completed_at=row.completed_at or 0,
            expires_at=row.expires_at or 0,
            tombstone_until=row.tombstone_until or 0,
            response=response,
            context=bytes(row.context or b""),
            reason=row.reason,
            confirmed=True,
            unknown_since=row.unknown_since or 0,
            settle_tries=row.settle_tries,
            read_at=row.now,
        )

    def _answer(self, connection: Connection, row: Row[Any]) -> KeptResponse:
        kept = connection.execute(
            self._sql.answer,
            {
                "p_tenant": row.tenant_id,
                "p_endpoint": row.endpoint,
                "p_digest": row.key_digest,
                "p_version": row.lock_version,
                "p_day": row.expires_day,
            },
        ).one_or_none()
        if kept is None:
            # Its partition was dropped, or an operator deleted it: done, body not kept.
            return KeptResponse(row.response_code or 0, b"[]", b"", "none")
        return KeptResponse(row.response_code or 0, bytes(kept.headers), bytes(kept.body), kept.kind, kept.cipher)


def is_innodb(dialect: Dialect) -> bool:
    """MySQL or MariaDB."""
    return dialect.name in ("mysql", "mariadb")


def is_mysql(dialect: Dialect) -> bool:
    """MySQL itself, which has no ``SET STATEMENT``."""
    return is_innodb(dialect) and not getattr(dialect, "is_mariadb", False)


def _is_set_by_statement(connection: Connection) -> bool:
    """Whether the isolation is set by a statement of the transaction itself. As an option of the connection it is asked
    of MySQL twice, and an error there is not SQLAlchemy's: a connection that broke would not be recognised as one. (An
    engine that commits every statement has no transaction, but for that option.)"""
    if not is_innodb(connection.dialect):
        return False
    return getattr(connection.dialect, "_on_connect_isolation_level", None) != "AUTOCOMMIT"


def lock_nothing(connection: Connection) -> None:
    """For the transaction that begins: what it reads it doesn't lock. MySQL and MariaDB do at SERIALIZABLE, and wait
    for whoever holds the row."""
    if is_innodb(connection.dialect):
        connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")


def key_of(scope: Scope) -> dict[str, str]:
    """The parameters that name a key."""
    return {"p_tenant": scope.tenant or "", "p_endpoint": scope.endpoint, "p_digest": scope.digest}


def claim_parameters(claim: Claim, old: Row[Any] | None, *, lease_ms: int = 0) -> dict[str, Any]:
    """What a claim writes into its row.

    :param old: the row that it replaces: its number is outrun, and a released one's life goes on.
    :param lease_ms: 0 for a row that its transaction holds.
    """
    fingerprint = claim.fingerprints[0]
    former = old if old is not None and old.status == State.RELEASED.value else None
    return {
        "v_tenant_id": claim.scope.tenant or "",
        "v_endpoint": claim.scope.endpoint,
        "v_key_digest": claim.scope.digest,
        "v_principal": claim.principal,
        "v_binding": claim.binding,
        "v_recipe": fingerprint.recipe,
        "v_request_hash": fingerprint.value,
        "v_claim_token": claim.token,
        "v_attempt": former.attempt + 1 if former is not None else 1,
        "least_version": old.lock_version + 1 if old is not None else 0,
        "first_created": former.created_at if former is not None else 0,
        "lease_ms": lease_ms,
    }


def lock_number(scope: Scope) -> int:
    """The number of PostgreSQL's advisory lock on a key: whoever holds the key holds it, and nobody waits for it."""
    return int(scope.digest[:16], 16) - 2**63


def claim_lock_number(token: str) -> int:
    """The number of the advisory lock by which others see that a claim's transaction is open."""
    return int.from_bytes(hashlib.sha256(token.encode()).digest()[:8], "big", signed=True)


def locks_of(claim: Claim) -> dict[str, int]:
    """The advisory locks that a claim takes."""
    return {"lock": lock_number(claim.scope), "claim_lock": claim_lock_number(claim.token)}


def away(error: SQLAlchemyError) -> StoreUnavailable:
    """What a failed statement means to a request. Told to the log without what was sent."""
    original = getattr(error, "orig", None)
    log.error(
        "the database did not do what was asked: %s%s",
        type(original or error).__name__,
        " (are the tables there? see `flask idempotent ddl`)" if "idempotency_" in str(original) else "",
    )
    return StoreUnavailable()


def _require_format(row: Row[Any]) -> None:
    if str(row.format) != FORMAT:
        log.error("row %s has the stored format %s, this version reads %s", row.key_digest[:12], row.format, FORMAT)
        raise UnreadableRecord()


def _expired(row: Row[Any]) -> bool:
    """Expiry is for what is finished; an open or unknown outcome never expires into a second run."""
    return State(row.status) in FINISHED and row.expires_at is not None and row.expires_at <= row.now


def _equal(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode())
