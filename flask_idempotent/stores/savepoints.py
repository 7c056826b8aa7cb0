"""The savepoints of the sessions that share a transaction. A connection has one stack of them, for all sessions.

A session that commits releases its savepoint. Its work is then inside of whatever savepoint is open beneath, be it
another session's, and goes when that one is rolled back, though it was committed. So a savepoint in which nothing was
written yet is set anew behind the work that is committed: its rollback has nothing to take back. Where something was
written, a rollback would lose what the other session committed; that is noted, and the transaction is not committed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from sqlalchemy import event

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection, Engine
    from sqlalchemy.orm import Session, SessionTransaction

__all__ = ["Savepoints", "listen"]

_SAVEPOINT = ("SAVEPOINT ", "RELEASE SAVEPOINT ", "ROLLBACK TO SAVEPOINT ")
#: The connections whose savepoints are followed.
_FOLLOWED: WeakKeyDictionary[Connection, Savepoints] = WeakKeyDictionary()


@dataclass(eq=False)
class _Savepoint:
    name: str
    session: Session | None
    #: The session's nested transaction; ``None`` for the outer one.
    level: SessionTransaction | None
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
        self._writes = False
        #: These are our own statements.
        self._at_work = False
        #: Work was taken back that its session had committed, or left where its session took it back.
        self.lost = False

    def follow(self, connection: Connection) -> None:
        """Hear of this connection's savepoints from now on. Those of an earlier transaction are gone with it.

        :param connection: taken from an engine after `listen` was called for it.
        """
        self._open.clear()
        self._acting, self._writes, self.lost = None, False, False
        _FOLLOWED[connection] = self

    def acts(self, session: Session, *, writes: bool) -> None:
        """A session is about to use the connection. Its savepoint is opened next, where it has none yet."""
        self._acting, self._writes = session, writes
        if not writes:
            return
        level = session.get_nested_transaction()
        for at, each in reversed(list(enumerate(self._open))):
            if each.session is session and each.level is level:
                each.dirty, self._writes = True, False
                for above in self._open[at + 1 :]:
                    above.guests = True
                return

    def left_open(self, session: Session) -> bool:
        """Whether a session has written what it neither committed nor took back."""
        return any(each.session is session and (each.dirty or each.stuck) for each in self._open)

    def innermost(self, session: Session) -> int:
        """The place of a session's last savepoint; -1 where it has none."""
        return max((at for at, each in enumerate(self._open) if each.session is session), default=-1)

    # -- what the connection tells ---------------------------------------------------------------------------------

    def heard(self, connection: Connection, statement: str) -> None:
        """One of their statements is about to be sent."""
        if self._at_work or self._acting is None:
            return
        name = statement.split()[-1]
        self._at_work = True
        try:
            if statement.startswith("SAVEPOINT"):
                self._opened(name)
            elif statement.startswith("RELEASE"):
                self._released(connection, name)
            else:
                self._rolled_back(connection, name)
        finally:
            self._at_work = False

    def _opened(self, name: str) -> None:
        level, writes = self._next_level()
        self._open.append(_Savepoint(name, self._acting, level, dirty=writes))

    def _next_level(self) -> tuple[SessionTransaction | None, bool]:
        """Which transaction of the acting session this is for, and whether it is about to be written in. They are
        opened when they are used, outermost first."""
        assert self._acting is not None
        current = self._acting.get_nested_transaction()
        levels = [current]
        while levels[0] is not None:
            parent = levels[0].parent
            levels.insert(0, parent if parent is not None and parent.nested else None)
        known = [each.level for each in self._open if each.session is self._acting]
        level = next((each for each in levels if not any(each is one for one in known)), current)
        writes = self._writes and level is current
        if writes:
            self._writes = False
        return level, writes

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
    if not statement.startswith(_SAVEPOINT):
        return
    savepoints = _FOLLOWED.get(connection)
    if savepoints is not None:
        savepoints.heard(connection, statement)
