"""The workers of a run: for each that dies a new one comes, with a fault of its own."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .history import History
from .worker import Nursery, Worker

__all__ = ["Crew", "Member"]

#: How often the crew is looked after.
LOOK_S = 0.02
#: A wait that takes so long.
STALL_S = 0.4
#: Characters of the log that are shown of a worker that died by itself.
LAST_WORDS = 3000


@dataclass(frozen=True)
class Member:
    """A worker in its place. ``name`` tells the place and how many were there before."""

    name: str
    worker: Worker
    fault: Mapping[str, Any] | None


class Crew:
    """So many workers, whatever happens to them.

    :param birth: gives the fault of a worker from its place and its generation.
    """

    def __init__(
        self, nursery: Nursery, history: History, size: int, birth: Callable[[int, int], dict[str, Any] | None]
    ) -> None:
        self.history = history
        self.is_calm = False
        self._nursery = nursery
        self._birth = birth
        #: Held by who puts another worker in a place.
        self._lock = threading.Lock()
        self._ended: set[str] = set()
        #: When those that stop in their views go on.
        self._wakes: dict[str, float] = {}
        self._generations = [0] * size
        self._members = [self._born(slot) for slot in range(size)]
        self._over = threading.Event()
        self._error: Exception | None = None
        self._looking = threading.Thread(target=self._look_after, daemon=True)
        self._looking.start()

    def pick(self, draw: random.Random) -> Member:
        """Any of them, as a load balancer picks one that it takes for alive."""
        return draw.choice(self._members)

    def member(self, slot: int) -> Member:
        return self._members[slot]

    def calm(self) -> None:
        """None has a fault any more, none is asleep."""
        self.is_calm = True
        for slot in range(len(self._members)):
            self.member(slot).worker.resume()
            with self._lock:
                if self._members[slot].fault is not None:
                    self._end(self._members[slot], "relief")
                    self._members[slot] = self._born(slot)

    def close(self) -> None:
        """All go home; what still runs there is for nobody.

        :raises Exception: what kept the dead from being replaced.
        """
        self._over.set()
        self._looking.join()
        for member in self._members:
            member.worker.kill()
        if self._error is not None:
            raise self._error

    def kill(self, slot: int) -> None:
        """SIGKILL, out of the blue."""
        with self._lock:
            self._end(self._members[slot], "kill")

    def _end(self, member: Member, why: str) -> None:
        if member.worker.alive():
            self.history.mark(why, worker=member.name)
            member.worker.kill()
            self._ended.add(member.name)
        self._note_fault(member)

    def _born(self, slot: int) -> Member:
        self._generations[slot] += 1
        generation = self._generations[slot]
        fault = None if self.is_calm else self._birth(slot, generation)
        return Member(f"w{slot}.{generation}", self._nursery.spawn(fault), fault)

    def _look_after(self) -> None:
        try:
            while not self._is_over():
                for slot in range(len(self._members)):
                    member = self.member(slot)
                    if not member.worker.alive():
                        self._replace(slot, member)
                    elif (member.fault or {}).get("action") == "stop":
                        self._wake(member)
        except Exception as error:
            self._error = error

    def _wake(self, member: Member) -> None:
        """Resume one that has stopped in its view, when its time is over."""
        assert member.fault is not None
        seconds = member.fault["seconds"]
        if member.name in self._wakes:
            if time.monotonic() >= self._wakes[member.name]:
                member.worker.resume()
        elif member.worker.met() is not None:
            self._wakes[member.name] = time.monotonic() + seconds
            self.history.mark("pause", worker=member.name, seconds=seconds)

    def _is_over(self) -> bool:
        """After a short wait, which tells whether the machine has time for anybody: leases lapse where it has none."""
        began = time.monotonic()
        over = self._over.wait(LOOK_S)
        took = time.monotonic() - began
        if took > STALL_S:
            self.history.mark("stall", at=time.time() - took, seconds=took)
        return over

    def _replace(self, slot: int, dead: Member) -> None:
        with self._lock:
            if self._members[slot] is not dead:
                return
            if dead.name not in self._ended and not self._note_fault(dead):
                last_words = self._nursery.log[-LAST_WORDS:]
                self.history.mark("died", worker=dead.name, detail=f"by itself: {dead.worker.ended()}\n{last_words}")
            self._members[slot] = self._born(slot)

    def _note_fault(self, member: Member) -> bool:
        """What the worker did besides, and whether it came as far as to its fault."""
        fault = member.fault or {}
        if "does" in fault:
            self.history.mark("habit", worker=member.name, detail=fault["does"])
        met = member.worker.met() if "layer" in fault else None
        if met is not None:
            action = fault.get("action", "kill")
            took = f" {fault['seconds']}" if action == "delay" else ""
            self.history.mark("fault", worker=member.name, detail=f"{met} {action}{took}")
        return met is not None
