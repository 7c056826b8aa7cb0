"""A circuit breaker: while a server is away, new requests are refused at once instead of each waiting its time out."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["Breaker"]


class Breaker:
    """Opens after a run of failures; lets one call through when the pause is over, and closes when that succeeds.

    It takes no lock: a race lets one more call through, or counts one failure less, and a fork can't leave it locked.

    :param threshold: failures in a row that open it.
    :param pause_s: seconds for which calls are refused.
    """

    def __init__(
        self, *, threshold: int = 5, pause_s: float = 1.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._threshold = threshold
        self._pause_s = pause_s
        self._clock = clock
        self._failures = 0
        self._closed_at = 0.0

    def allows(self) -> bool:
        """Whether a call may be made now."""
        if self._failures < self._threshold:
            return True
        now = self._clock()
        if now < self._closed_at:
            return False
        self._closed_at = now + self._pause_s
        return True

    def succeeded(self) -> None:
        self._failures = 0

    def failed(self) -> None:
        self._failures += 1
        if self._failures >= self._threshold:
            self._closed_at = self._clock() + self._pause_s
