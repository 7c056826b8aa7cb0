"""What a database's error means to a claim: somebody else is at it, try once more, or it is away."""

from __future__ import annotations

import enum

from sqlalchemy.exc import DBAPIError

__all__ = ["Fault", "fault_of"]


class Fault(enum.Enum):
    LOCKED = enum.auto()  #: another transaction holds what we asked for
    AGAIN = enum.auto()  #: a deadlock or a serialization failure: the same statements may go through now
    AWAY = enum.auto()  #: anything else


#: https://www.postgresql.org/docs/current/errcodes-appendix.html
_LOCKED_STATES = frozenset({"55P03"})
_AGAIN_STATES = frozenset({"40001", "40P01"})
#: https://mariadb.com/kb/en/mariadb-error-codes/ (lock wait time-out, NOWAIT; deadlock, record changed since last read)
_LOCKED_CODES = frozenset({1205, 3572})
_AGAIN_CODES = frozenset({1213, 1020})


def fault_of(error: DBAPIError) -> Fault:
    """What to do about an error of one of our own statements."""
    original = error.orig
    state = getattr(original, "sqlstate", None) or getattr(original, "pgcode", None)
    arguments = getattr(original, "args", ())
    code = arguments[0] if arguments and isinstance(arguments[0], int) else None
    if state in _LOCKED_STATES or code in _LOCKED_CODES or "database is locked" in str(original):
        return Fault.LOCKED
    if state in _AGAIN_STATES or code in _AGAIN_CODES:
        return Fault.AGAIN
    return Fault.AWAY
