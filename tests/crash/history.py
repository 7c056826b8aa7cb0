"""What happened in a run: what clients sent and were told, and what was done to servers and workers meanwhile."""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["CHECK", "FORGETTING", "History", "Mark", "Sent"]

#: The number of the client that asks at the end, when all is calm.
CHECK = -1
#: Events that make Redis forget.
FORGETTING = frozenset({"flush", "restart redis"})
#: Answers that tell a client to stop.
FINAL_REFUSALS = (404, 422)


@dataclass(frozen=True)
class Sent:
    """A request, and its answer or what broke. Times are seconds since the epoch. ``cause``: what the view raised."""

    party: int
    client: int
    worker: str
    at: float
    until: float
    status: int = 0
    body: bytes = b""
    code: str = ""
    replayed: bool = False
    retry_after: float | None = None
    error: str = ""
    location: str = ""
    cause: str = ""

    @property
    def told(self) -> bool:
        """It was told a result."""
        return 200 <= self.status < 300 or self.undone

    @property
    def undone(self) -> bool:
        """It was told that its saga went back, which is a result like another."""
        return self.code == "saga-rolled-back"

    @property
    def refused(self) -> bool:
        """It was told that this key is not for this request."""
        return self.status in FINAL_REFUSALS

    @property
    def ends(self) -> bool:
        """A good client sends no further request."""
        return bool(self.status) and not (self.status >= 500 or self.retry_after is not None)

    def json(self) -> Any:
        return json.loads(self.body)

    def __str__(self) -> str:
        said = f"{self.status} {self.code or self.cause}".strip() if self.status else self.error
        if self.told:
            said += f" {self.body[:120].decode(errors='replace').strip()}" + (" (replayed)" if self.replayed else "")
        return said


@dataclass(frozen=True)
class Mark:
    """Something that was done to a worker, or to a server where ``worker`` is empty."""

    kind: str
    at: float
    until: float
    worker: str = ""
    detail: str = ""

    def meets(self, began: float, ended: float) -> bool:
        return self.at <= ended and began <= self.until

    def __str__(self) -> str:
        return " ".join(part for part in (self.kind, self.worker, self.detail) if part)


class History:
    """All of a batch; many threads write it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: defaultdict[int, list[Sent]] = defaultdict(list)
        self._marks: list[Mark] = []

    def sent(self, trial: int, sent: Sent) -> None:
        with self._lock:
            self._sent[trial].append(sent)

    def mark(
        self, kind: str, *, worker: str = "", detail: str = "", at: float | None = None, seconds: float = 0
    ) -> None:
        began = time.time() if at is None else at
        with self._lock:
            self._marks.append(Mark(kind, began, began + seconds, worker, detail))

    def of(self, trial: int) -> list[Sent]:
        with self._lock:
            return sorted(self._sent[trial], key=lambda sent: sent.at)

    def is_forgotten(self, trial: int) -> bool:
        """Whether Redis was emptied after the last result was told."""
        told = [each.until for each in self.of(trial) if each.told]
        return bool(told) and any(mark.kind in FORGETTING and mark.until >= max(told) for mark in self.marks)

    def __iter__(self) -> Iterator[Sent]:
        with self._lock:
            return iter([sent for each in self._sent.values() for sent in each])

    @property
    def marks(self) -> list[Mark]:
        with self._lock:
            return sorted(self._marks, key=lambda mark: mark.at)
