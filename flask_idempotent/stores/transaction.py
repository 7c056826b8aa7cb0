"""One database transaction that a key and the work of a view share: both are committed, or neither."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from sqlalchemy.exc import DBAPIError, PendingRollbackError, SAWarning, SQLAlchemyError

from .backing import Backing
from .savepoints import Savepoints, listen

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection, Engine
    from sqlalchemy.orm import Session

    from ..records import Claim

__all__ = ["SCHEMAS", "OuterEnded", "Transaction", "WorkLost", "shared"]

log = logging.getLogger("flask_idempotent")

#: The option by which SQLAlchemy puts tables into other schemas.
SCHEMAS = "schema_translate_map"

#: Set right behind the key's row. It is gone when somebody ended the transaction around it.
_SAVEPOINT = "idempotency_key"


class OuterEnded(Exception):
    """The view ended the transaction that it was to share: by a raw COMMIT, by DDL, by ``connection().commit()``."""


class WorkLost(Exception):
    """Work that one session committed went with what another one took back, or stayed though it was taken back."""


class Transaction(Backing):
    """A connection of the app's engine in a transaction of ours. The app's sessions join it while the view runs.

    :param engine: the engine that the view writes to, and that holds the tables.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine
        #: The number of the key's row, and of its answer.
        self.fence = 0
        #: The database's own number of the transaction, where it has one: it tells whether somebody ended it.
        self.number: int | None = None
        self._claimed_at_ms = 0
        self._claimed_monotonic = 0.0
        self._connection: Connection | None = None
        #: What a session found wrong when it parted.
        self._fault: Exception | None = None
        self._joined: list[Session] = []
        self._savepoints = Savepoints()
        self._current: Callable[[], Session | None] | None = None
        #: The app, and what the request that claimed runs in: another thread's copy of it doesn't join.
        self.app: object = None
        self.context: object = None

    @property
    def connection(self) -> Connection:
        """The connection. It is there from :meth:`begin` to :meth:`close`."""
        if self._connection is None:
            raise RuntimeError("the transaction is not open")
        return self._connection

    @property
    def is_open(self) -> bool:
        return self._connection is not None

    def begin(self) -> Connection:
        """Take a connection and begin. After a rollback it begins anew on the same one, unless the view closed it."""
        if self._connection is None or self._connection.closed:
            listen(self.engine)
            self._connection = self.engine.connect()
        self._connection.begin()
        self._savepoints.follow(self._connection)
        return self._connection

    def claimed(self, *, fence: int, at_ms: int, number: int | None) -> None:
        """The key's row is written: its number, the database's clock then, and what the transaction is known by."""
        self.fence, self.number, self._fault = fence, number, None
        self._claimed_at_ms, self._claimed_monotonic = at_ms, time.monotonic()
        if number is None:
            self.connection.exec_driver_sql(f"SAVEPOINT {_SAVEPOINT}")

    def now_ms(self) -> int:
        """The database's clock now: as it was when the key's row was written, and counted on from there."""
        return self._claimed_at_ms + int((time.monotonic() - self._claimed_monotonic) * 1000)

    def join(self, session: Session) -> Connection:
        """The connection, for a session that works in this transaction from now on."""
        if session not in self._joined:
            self._joined.append(session)
        self._savepoints.acts(session)
        return self.connection

    def part(self) -> None:
        """End what the sessions left open: work that was flushed and never committed goes, as it would without us."""
        self._joined.sort(key=self._savepoints.innermost, reverse=True)
        for session in (*self._joined, *self._bystanders()):
            left = self._savepoints.left_open(session) or session.new or session.dirty or session.deleted
            if left and session.in_transaction():  # one that was closed had its work taken back already
                log.warning("a durable view left work that it never committed: nothing of that is kept")
            try:
                session.rollback()
            except (SQLAlchemyError, SAWarning) as error:
                session.invalidate()
                self._fault = self._what_went_wrong(error)
        self._end_nested()
        self._joined.clear()
        if self._savepoints.lost and self._fault is None:
            self._fault = WorkLost()
        self._restore_options()

    def _end_nested(self) -> None:
        """End what is left of nested transactions: of sessions that ended theirs in another order than they began them,
        after which the connection takes one that is over for its last."""
        while self._connection is not None and not self._connection.closed:
            nested = self._connection.get_nested_transaction()
            if nested is None:
                return
            try:
                nested.close()
            except (SQLAlchemyError, SAWarning) as error:
                self._fault = self._fault or self._what_went_wrong(error)
                return

    def _what_went_wrong(self, error: Exception) -> Exception:
        if _is_cut(error):
            return error
        if isinstance(error, PendingRollbackError) and len(self._joined) > 1:
            return self._fault or WorkLost()  # their savepoints don't fit into each other
        return OuterEnded()  # the savepoint is gone with a transaction that the view ended

    def _restore_options(self) -> None:
        """What a session set for the connection was meant for its own statements."""
        if self._connection is None or self._connection.closed:
            return
        own = self.engine.get_execution_options().get(SCHEMAS)
        if self._connection.get_execution_options().get(SCHEMAS) != own:
            self._connection.execution_options(**{SCHEMAS: own})

    def watch(self, sessions: Callable[[], Session | None]) -> None:
        """Tell how the app's current session is found, which may hold work that was never even flushed."""
        self._current = sessions

    def _bystanders(self) -> list[Session]:
        session = self._current() if self._current is not None else None
        return [session] if session is not None and session not in self._joined else []

    def check(self) -> None:
        """See that the transaction is still the one in which the key's row was written.

        Where the database numbers its transactions, the statement that finishes the row compares that number instead.

        :raises OuterEnded: the view ended it.
        :raises WorkLost: two sessions of the view got into each other's way.
        :raises SQLAlchemyError: the connection broke.
        """
        if self._fault is not None:
            raise self._fault
        if self.number is not None:
            return
        try:
            self.connection.exec_driver_sql(f"RELEASE SAVEPOINT {_SAVEPOINT}")
        except SQLAlchemyError as error:
            if _is_cut(error):
                raise
            raise OuterEnded() from error

    def commit(self) -> None:
        self.connection.commit()

    def rollback(self) -> None:
        """Take all back. The connection stays; one that can't even do that is thrown away."""
        if self._connection is None:
            return
        try:
            self._connection.rollback()
        except SQLAlchemyError:
            self.discard()

    def close(self) -> None:
        """Give the connection back to its pool, rolled back."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        self._savepoints.leave()
        try:
            connection.close()
        except SQLAlchemyError:
            log.warning("a connection could not be given back to its pool, and was thrown away")
            _throw_away(connection)

    def discard(self) -> None:
        """Throw the connection away: nobody knows in what state it is."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._savepoints.leave()
            _throw_away(connection)


def _is_cut(error: Exception) -> bool:
    return isinstance(error, DBAPIError) and error.connection_invalidated


def _throw_away(connection: Connection) -> None:
    try:
        connection.invalidate()
        connection.close()
    except SQLAlchemyError:
        log.warning("the view had closed the connection that it shares with its key")


def shared(claim: Claim) -> Transaction:
    """The transaction that a claim of a ``transaction`` route came with."""
    assert isinstance(claim.backing, Transaction)
    return claim.backing
