"""The ledger: e-mails and payments that really happened, and every request, in one file that all processes share.

It knows nothing of idempotency keys and is kept apart from their stores, so that it can prove what ran.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Effect", "Entry", "Ledger"]

_TABLES = (
    """
    CREATE TABLE IF NOT EXISTS effects (
        number INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, reference TEXT NOT NULL, detail TEXT NOT NULL
    )
    """,
    """
    CREATE TABLE IF NOT EXISTS requests (
        number INTEGER PRIMARY KEY, at REAL NOT NULL, scope TEXT NOT NULL, outcome TEXT NOT NULL, reason TEXT NOT NULL
    )
    """,
)


@dataclass(frozen=True, slots=True)
class Effect:
    """Something that happened. ``at`` is seconds since the epoch."""

    number: int
    at: float
    kind: str
    reference: str
    detail: str


@dataclass(frozen=True, slots=True)
class Entry:
    """What became of one request: ``outcome`` is ``ran``, ``replayed`` or ``refused`` (for ``reason``)."""

    number: int
    at: float
    scope: str
    outcome: str
    reason: str


class Ledger:
    """An append-only book in a SQLite file.

    :param path: the file; it is made where it is missing.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._open() as db:
            for table in _TABLES:
                db.execute(table)

    def append(self, kind: str, reference: str, detail: str) -> int:
        """Write down that an effect happened, and give it its number."""
        with self._open() as db:
            cursor = db.execute(
                "INSERT INTO effects (at, kind, reference, detail) VALUES (?, ?, ?, ?)",
                (time.time(), kind, reference, detail),
            )
            assert cursor.lastrowid is not None
            return cursor.lastrowid

    def note(self, scope: str, outcome: str, reason: str) -> None:
        """Write down what became of a request."""
        with self._open() as db:
            db.execute(
                "INSERT INTO requests (at, scope, outcome, reason) VALUES (?, ?, ?, ?)",
                (time.time(), scope, outcome, reason),
            )

    def runs(self) -> Counter[str]:
        """How often something happened for each reference."""
        with self._open() as db:
            return Counter(dict(db.execute("SELECT reference, count(*) FROM effects GROUP BY reference")))

    def effects(self) -> Counter[str]:
        """How many effects of each kind there are."""
        with self._open() as db:
            return Counter(dict(db.execute("SELECT kind, count(*) FROM effects GROUP BY kind")))

    def outcomes(self) -> Counter[tuple[str, str, str]]:
        """How many requests there were of each scope, outcome and reason."""
        with self._open() as db:
            rows = db.execute("SELECT scope, outcome, reason, count(*) FROM requests GROUP BY scope, outcome, reason")
            return Counter({(scope, outcome, reason): count for scope, outcome, reason, count in rows})

    def last_effects(self, count: int) -> list[Effect]:
        """The newest effects, newest first."""
        with self._open() as db:
            rows = db.execute(
                "SELECT number, at, kind, reference, detail FROM effects ORDER BY number DESC LIMIT ?", (count,)
            )
            return [Effect(*row) for row in rows]

    def last_requests(self, count: int) -> list[Entry]:
        """The newest requests, newest first."""
        with self._open() as db:
            rows = db.execute(
                "SELECT number, at, scope, outcome, reason FROM requests ORDER BY number DESC LIMIT ?", (count,)
            )
            return [Entry(*row) for row in rows]

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """A connection for one statement: SQLite serialises the writers, and a forked process shares nothing."""
        db = sqlite3.connect(self._path, timeout=10, isolation_level=None)
        try:
            db.execute("PRAGMA synchronous = OFF")  # it has to survive a killed process, not a power cut
            yield db
        finally:
            db.close()
