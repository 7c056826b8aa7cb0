"""The provider's books: what it did, and which keys it remembers."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

__all__ = ["Entry", "KeyInUse", "KeyReused", "Ledger"]


class KeyReused(Exception):
    """The key was seen with other parameters."""


class KeyInUse(Exception):
    """The first request with this key is still being worked on, for so many seconds."""

    def __init__(self, age: float) -> None:
        super().__init__()
        self.age = age


@dataclass(frozen=True, slots=True)
class Entry:
    """Something that was done, once and for good. ``at`` is in seconds by the provider's clock, ``sent_at`` by the
    caller's, where it said so."""

    id: str
    operation: str
    key: str
    parameters: dict[str, object]
    at: float
    sent_at: float | None = None

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), **self.parameters}


@dataclass(slots=True)
class _Memory:
    operation: str
    parameters: dict[str, object]
    since: float
    entry: Entry | None = None


class Ledger:
    """Deduplicates by key inside of a window; its search shows an entry only after a while.

    :param window: seconds for which a key is remembered, from its first request on.
    :param search_delay: seconds until an entry is found by a search.
    :param clock: gives seconds; `advance` adds to it.
    """

    def __init__(
        self, *, window: float = 86_400.0, search_delay: float = 0.0, clock: Callable[[], float] = time.time
    ) -> None:
        self.window = window
        self.search_delay = search_delay
        self._clock = clock
        self._lock = threading.RLock()
        self.reset()

    def reset(self) -> None:
        """Empty books, and no memory."""
        with self._lock:
            self.entries: list[Entry] = []
            self._keys: dict[str, _Memory] = {}
            self._numbers = itertools.count(1)
            self._offset = 0.0

    def now(self) -> float:
        return self._clock() + self._offset

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        with self._lock:
            self._offset += seconds

    def forget(self) -> None:
        """Forget every key, as after the window."""
        with self._lock:
            self._keys.clear()

    def begin(self, operation: str, key: str, parameters: dict[str, object]) -> Entry | None:
        """A request arrives. An entry: it was done before, with this key; ``None``: go on with `apply`, or `drop`.

        :raises KeyReused: the key was for something else.
        :raises KeyInUse: the key's first request is not done yet.
        """
        if not key:
            return None
        with self._lock:
            known = self._keys.get(key)
            if known is not None and self.now() - known.since < self.window:
                if (known.operation, known.parameters) != (operation, parameters):
                    raise KeyReused
                if known.entry is None:
                    raise KeyInUse(self.now() - known.since)
                return known.entry
            self._keys[key] = _Memory(operation, parameters, self.now())
            return None

    def apply(self, operation: str, key: str, parameters: dict[str, object], sent_at: float | None = None) -> Entry:
        """Do it."""
        with self._lock:
            entry = Entry(f"{operation[:2]}_{next(self._numbers)}", operation, key, parameters, self.now(), sent_at)
            self.entries.append(entry)
            if key in self._keys:
                self._keys[key].entry = entry
            return entry

    def drop(self, key: str) -> None:
        """A request that was begun came to nothing; its key may be used again."""
        with self._lock:
            self._keys.pop(key, None)

    def act(self, operation: str, key: str, parameters: dict[str, object]) -> Entry:
        """A request from its begin to its end."""
        return self.begin(operation, key, parameters) or self.apply(operation, key, parameters)

    def search(self, operation: str, *, key: str | None = None, reference: str | None = None) -> list[Entry]:
        """What the search shows by now."""
        with self._lock:
            return [
                entry
                for entry in self.entries
                if entry.operation == operation
                and self.now() - entry.at >= self.search_delay
                and (key is None or entry.key == key)
                and (reference is None or entry.parameters.get("reference") == reference)
            ]
