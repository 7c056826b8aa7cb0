"""The savepoints of the sessions that share a transaction. A connection has one stack of them, for all sessions.

A session that commits releases its savepoint. Its work is then inside of whatever savepoint is open beneath, be it
another session's, and goes when that one is rolled back, though it was committed. So a savepoint in which nothing was
written yet is set anew behind the work that is committed: its rollback has nothing to take back. Where something was
written, a rollback would lose what the other session committed; that is noted, and the transaction is not committed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from sqlalchemy import event

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection, Engine
    from sqlalchemy.orm import Session

__all__ = ["Savepoints", "listen"]

_READS = frozenset({"SELECT", "SET", "SHOW", "EXPLAIN", "DESCRIBE", "PRAGMA", "TABLE", "VALUES"})
_CHANGES = re.compile(r"\b(insert|update|delete|merge)\b", re.IGNORECASE)
_SAVEPOINT = ("SAVEPOINT ", "RELEASE SAVEPOINT ", "ROLLBACK TO SAVEPOINT ")
#: The connections whose savepoints are followed.
_FOLLOWED: WeakKeyDictionary[Connection, Savepoints] = WeakKeyDictionary()


@dataclass(eq=False)
class _Savepoint:
    name: str
    session: Session
    #: Work of its own session is in it, to be committed or taken back.
    dirty: bool = False
    #: Work that another session committed is in it.
    guests: bool = False
    #: Work of its own session is outside of it by now: a rollback leaves that where it is.
    stuck: bool = False

    @property
    def holds_work(self) -> bool:
        return self.dirty or self.guests or self.stuck


class Savepoints:
    """Those of one connection, outermost first.

    `acts` says which session is about to use the connection; the rest is read off the statements that it sends.
    """

    def __init__(self) -> None:
        self._open: list[_Savepoint] = []
        self._acting: Session | None = None
        #: These are our own statements.
        self._at_work = False
        #: Work was taken back that its session had committed, or left where its session took it back.
        self.lost = False

    def follow(self, connection: Connection) -> None:
        """Hear of this connection's savepoints from now on. Those of an earlier transaction are gone with it.

        :param connection: taken from an engine after `listen` was called for it.
        """
        self.leave()
        self.lost = False
        _FOLLOWED[connection] = self

    def leave(self) -> None:
        """The transaction is over: hold on to none of its sessions."""
        self._open.clear()
        self._acting = None

    def acts(self, session: Session) -> None:
        """A session is about to use the connection. Its savepoint is opened next, where it has none yet."""
        self._acting = session

    def left_open(self, session: Session) -> bool:
        """Whether a session has written what it neither committed nor took back."""
        return any(each.session is session and (each.dirty or each.stuck) for each in self._open)

    def innermost(self, session: Session) -> int:
        """The place of a session's last savepoint; -1 where it has none."""
        return max((at for at, each in enumerate(self._open) if each.session is session), default=-1)

    # -- what the connection tells ---------------------------------------------------------------------------------

    def heard(self, connection: Connection, statement: str) -> None:
        """A statement is about to be sent."""
        if self._at_work or self._acting is None:
            return
        if not statement.startswith(_SAVEPOINT):
            if not _reads(statement):
                self._wrote(self._acting)
            return
        name = statement.split()[-1]
        self._at_work = True
        try:
            if statement.startswith("SAVEPOINT"):
                self._open.append(_Savepoint(name, self._acting))
            elif statement.startswith("RELEASE"):
                self._released(connection, name)
            else:
                self._rolled_back(connection, name)
        finally:
            self._at_work = False

    def _wrote(self, session: Session) -> None:
        at = self.innermost(session)
        if at >= 0:
            self._open[at].dirty = True
            for above in self._open[at + 1 :]:
                above.guests = True

    def _released(self, connection: Connection, name: str) -> None:
        """A session commits this one, in a moment."""
        at = self._find(name)
        if at is None:
            return
        entry = self._open.pop(at)
        beneath, above = self._open[:at], self._open[at:]
        set_anew: list[_Savepoint] = []
        parent = next((each for each in reversed(beneath) if each.session is entry.session), None)
        if parent is not None:
            parent.dirty |= entry.dirty
            parent.guests |= entry.guests
            parent.stuck |= entry.stuck
            for between in beneath[beneath.index(parent) + 1 :]:
                between.guests |= entry.holds_work
        elif entry.holds_work:
            while beneath and not beneath[-1].holds_work:
                set_anew.insert(0, beneath.pop())
            for each in beneath:
                each.guests = True
        for each in above:
            each.stuck |= each.dirty
            each.dirty = each.guests = False
        if set_anew or above:
            _release(connection, set_anew[0].name if set_anew else name)
            # The last one is there for the RELEASE that comes.
            _set(connection, [*(each.name for each in (*set_anew, *above)), name])

    def _rolled_back(self, connection: Connection, name: str) -> None:
        """A session takes back what it did since this one, in a moment."""
        at = self._find(name)
        if at is None:
            return
        entry = self._open.pop(at)
        above = self._open[at:]
        others = any(each.holds_work for each in above if each.session is not entry.session)
        self.lost |= entry.guests or entry.stuck or others
        for each in above:
            each.dirty = each.guests = each.stuck = False
        if above:
            connection.exec_driver_sql(f"ROLLBACK TO SAVEPOINT {name}")
            _release(connection, name)
            _set(connection, [*(each.name for each in above), name])

    def _find(self, name: str) -> int | None:
        return next((at for at, each in enumerate(self._open) if each.name == name), None)


def _reads(statement: str) -> bool:
    """Whether it changes nothing that a rollback should take back, as far as its words tell."""
    words = statement.split(None, 1)
    first = words[0].upper() if words else ""
    if first == "WITH":
        return not _CHANGES.search(statement)
    return first in _READS


def _release(connection: Connection, name: str) -> None:
    connection.exec_driver_sql(f"RELEASE SAVEPOINT {name}")


def _set(connection: Connection, names: list[str]) -> None:
    for name in names:
        connection.exec_driver_sql(f"SAVEPOINT {name}")


def listen(engine: Engine) -> None:
    """Hear of an engine's savepoints. Once is enough; more often does no harm."""
    if not event.contains(engine, "before_cursor_execute", _heard):
        event.listen(engine, "before_cursor_execute", _heard)


def _heard(connection: Connection, cursor: object, statement: str, *_: object) -> None:
    # (The events for savepoints don't tell the name of a new one.)
    savepoints = _FOLLOWED.get(connection)
    if savepoints is not None:
        savepoints.heard(connection, statement)
