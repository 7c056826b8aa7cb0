"""Renews the leases of running claims: one thread a store, all that is due in one pass."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from .errors import StoreUnavailable
from .records import Claim
from .stores.base import Store

__all__ = ["Beat", "Heartbeat", "heartbeat"]

log = logging.getLogger("flask_idempotent")

#: A renewal that failed is tried again after this many seconds, or a renewal's pause, whichever is less.
RETRY_S = 1.0
#: What is due within this share of its pause is renewed along with what is due now.
SLACK = 0.25
#: Seconds after which a thread without a claim ends.
IDLE_S = 10.0


@dataclass(slots=True, eq=False)
class Beat:
    """One claim that is kept alive: every ``pause_s`` seconds, until ``ends`` (monotonic seconds)."""

    store: Store
    claim: Claim
    pause_s: float
    ends: float
    on_lost: Callable[[], None]
    due: float = field(default=0.0)


class Heartbeat:
    """Keeps claims alive while their process lives.

    One thread for each store that has claims, so that a database that hangs can't keep the claims in Redis from being
    renewed. It is started with the first claim, so that a server that forks its workers afterwards has one in each; a
    child forgets its parent's claims. Where the process is busy in one greenlet, nothing renews: give such a route a
    lease that covers its work.
    """

    def __init__(self) -> None:
        self._reset()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._lanes: weakref.WeakKeyDictionary[Store, _Lane] = weakref.WeakKeyDictionary()
        self._adding = threading.Lock()

    def add(self, store: Store, claim: Claim, *, on_lost: Callable[[], None]) -> Beat:
        """Renew a claim at a third of its lease, for at most its ``max_processing_ms``.

        :param on_lost: called once, from the thread, when the store says that the claim is not ours any more.
        """
        now = time.monotonic()
        pause_s = claim.lease_ms / 3000
        beat = Beat(store, claim, pause_s, now + claim.max_processing_ms / 1000, on_lost, now + pause_s)
        with self._adding:
            lane = self._lanes.get(store)
            if lane is None:
                lane = self._lanes[store] = _Lane()
        lane.add(beat)
        return beat

    def remove(self, beat: Beat) -> None:
        """Stop renewing. A renewal under way is harmless: it compares token and state."""
        lane = self._lanes.get(beat.store)
        if lane is not None:
            lane.remove(beat)

    def __iter__(self) -> Iterator[Beat]:
        """The claims that are kept alive now."""
        for lane in list(self._lanes.values()):
            yield from list(lane.beats)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _Lane:
    """The claims of one store, and the thread that renews them: all that is due in one pass."""

    def __init__(self) -> None:
        self._wake = threading.Condition()
        self.beats: set[Beat] = set()
        self._thread: threading.Thread | None = None
        self._wakes_at = 0.0
        #: The last wait was for nothing: the thread ends, and the next claim starts another.
        self._idle = False

    def add(self, beat: Beat) -> None:
        with self._wake:
            self.beats.add(beat)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="idempotent-heartbeat", daemon=True)
                self._thread.start()
            elif beat.due < self._wakes_at:
                self._wake.notify()

    def remove(self, beat: Beat) -> None:
        with self._wake:
            self.beats.discard(beat)

    def _run(self) -> None:
        while True:
            with self._wake:
                due = self._due()
                if not due and not self.beats and self._idle:
                    self._thread = None
                    return
            if not due:
                continue
            self._renew(due)

    def _due(self) -> list[Beat]:
        """Waits until something is due; returns it, with what is nearly due."""
        now = time.monotonic()
        self.beats -= {beat for beat in self.beats if beat.ends <= now}
        first = min((beat.due for beat in self.beats), default=None)
        if first is None or first > now:
            self._wakes_at = float("inf") if first is None else first
            self._wake.wait(IDLE_S if first is None else first - now)
            self._wakes_at = 0.0
            self._idle = first is None and time.monotonic() - now >= IDLE_S
            return []
        return [beat for beat in self.beats if beat.due <= now + beat.pause_s * SLACK]

    def _renew(self, beats: list[Beat]) -> None:
        started = time.monotonic()
        try:
            renewed = beats[0].store.renew([beat.claim for beat in beats])
        except StoreUnavailable:
            for beat in beats:
                beat.due = time.monotonic() + min(beat.pause_s, RETRY_S)
            return
        except Exception:
            log.exception("the heartbeat failed; it goes on")
            for beat in beats:
                beat.due = time.monotonic() + min(beat.pause_s, RETRY_S)
            return
        for beat, ours in zip(beats, renewed, strict=True):
            beat.due = started + beat.pause_s
            if ours:
                continue
            with self._wake:
                held = beat in self.beats
                self.beats.discard(beat)
            if held:
                try:
                    beat.on_lost()
                except Exception:
                    log.exception("telling of a lost lease failed")


#: The process's own.
heartbeat = Heartbeat()
