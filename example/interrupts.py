"""Ctrl-C and other endings, told where the program waits and nowhere else: so none gets lost, and all is tidied up."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Generic, TypeVar

__all__ = ["Interrupted", "Interrupts"]

T = TypeVar("T")


class Interrupted(Exception):
    """A signal arrived while there was something to wait for."""

    def __init__(self, signum: signal.Signals) -> None:
        super().__init__(signum.name)
        self.signum = signum


@dataclass(frozen=True, slots=True)
class _Done(Generic[T]):
    result: T


class Interrupts:
    """Catches the signals that end a program. An exception out of a signal's handler could come anywhere, also where
    Python drops it; here the work is done in a thread, and the main thread waits for it or for a signal.
    """

    def __init__(self) -> None:
        self._events: SimpleQueue[object] = SimpleQueue()  # the one queue that a handler may use
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, lambda number, frame: self._events.put(Interrupted(signal.Signals(number))))

    def wait_for(self, work: Callable[[], T]) -> T:
        """Do some work and return its result.

        :raises Interrupted: a signal came first; the work is left behind.
        """

        def do() -> None:
            try:
                self._events.put(_Done(work()))
            except BaseException as error:
                self._events.put(error)

        threading.Thread(target=do, daemon=True).start()
        event = self._events.get()
        if isinstance(event, BaseException):
            raise event
        assert isinstance(event, _Done)
        result: T = event.result
        return result
