"""Carries out a batch's events: what is done to the servers, the wires and the workers while clients ask."""

from __future__ import annotations

import functools
import heapq
import itertools
import threading
import time
from collections.abc import Callable, Sequence

from .crew import Crew
from .history import History
from .plan import Event
from .site import Site

__all__ = ["Chaos"]

#: After so many seconds, call this.
Undo = tuple[float, Callable[[], None]]


class Chaos:
    """A thread that does what is planned, and undoes it when its time is over. Ended, it has undone everything."""

    def __init__(self, site: Site, crew: Crew, history: History, events: Sequence[Event]) -> None:
        self._site = site
        self._crew = crew
        self._history = history
        self._order = itertools.count()
        self._agenda: list[tuple[float, int, Callable[[], Undo | None]]] = []
        now = time.monotonic()
        for event in events:
            self._later(now + event.at, functools.partial(self._do, event))
        self._over = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """:raises Exception: what kept it from doing what was planned."""
        self._over.set()
        self._thread.join()
        self._site.heal()
        if self._error is not None:
            raise self._error

    def _later(self, at: float, act: Callable[[], Undo | None]) -> None:
        heapq.heappush(self._agenda, (at, next(self._order), act))

    def _run(self) -> None:
        try:
            while self._agenda:
                at, _, act = self._agenda[0]
                if self._over.wait(max(at - time.monotonic(), 0)):
                    return
                heapq.heappop(self._agenda)
                undo = act()
                if undo is not None:
                    seconds, call = undo
                    self._later(time.monotonic() + seconds, call)
        except Exception as error:
            self._error = error

    def _do(self, event: Event) -> Undo | None:
        what, _, server = event.kind.partition(" ")
        if what == "provider":
            self._spoil(event)
            return None
        if event.kind == "lock sql":
            self._history.mark("lock sql", seconds=event.seconds)
            return event.seconds, self._site.lock_file()
        if server in ("redis", "sql"):
            return self._disturb(event, what, server)
        if event.kind == "pause":
            return self._pause(event)
        if event.kind == "kill":
            self._crew.kill(event.slot)
        elif event.kind == "flush":
            began = time.time()
            self._site.redis.flushall()
            self._history.mark("flush", at=began, seconds=time.time() - began)
        return None

    def _pause(self, event: Event) -> Undo:
        member = self._crew.member(event.slot)
        member.worker.pause()
        self._history.mark("pause", worker=member.name, seconds=event.seconds)
        return event.seconds, member.worker.resume

    def _spoil(self, event: Event) -> None:
        """The provider has a bad day for its next callers."""
        action = {"drops": "drop", "waits": "wait", "errs": "answer"}[event.kind.partition(" ")[2]]
        fault = {"action": action, "when": event.when, "seconds": event.seconds, "times": event.times}
        self._site.provider.control(faults=[fault])
        self._history.mark(event.kind, seconds=event.seconds, detail=f"{event.when}, {event.times} times")

    def _disturb(self, event: Event, what: str, server: str) -> Undo | None:
        wire = self._site.redis_wire if server == "redis" else self._site.sql_wire
        assert wire is not None
        began = time.time()
        detail = ""
        undo: Undo | None = None
        if what == "cut":
            match = event.match if server == "sql" else ""
            wire.cut_reply(event.times, self._site.on_the_wire(match))
            detail = f"{event.times} replies {match}".strip()
        elif what == "break":
            wire.break_connections()
        elif what == "silence":
            wire.black_hole()
            undo = event.seconds, wire.fill_hole
        elif what == "pause":
            wire.hold()
            undo = event.seconds, wire.release
        elif what == "delay":
            wire.delay(0.05)
            undo = event.seconds, lambda: wire.delay(0)
        elif what == "fill":
            self._site.redis.config_set("maxmemory", 1)
            undo = event.seconds, self._site.make_room
        elif what == "drop":
            self._site.drop_connections()
        elif what == "restart":
            self._site.restart_redis()
        self._history.mark(event.kind, at=began, seconds=max(event.seconds, time.time() - began), detail=detail)
        return undo
