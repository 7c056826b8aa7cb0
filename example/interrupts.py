"""Ctrl-C and other endings, told where the program waits and nowhere else: so none gets lost, and all is tidied up."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

__all__ = ["Interrupted", "Interrupts"]

T = TypeVar("T")


class Interrupted(Exception):
    """A signal arrived while there was something to wait for."""

    def __init__(self, signum: signal.Signals) -> None:
        super().__init__(signum.name)
        self.signum = signum


class Interrupts:
    """Catches the signals that end a program, for the main thread of one with many threads.

    The system may hand a signal to any of them, and the main thread, which has to act on it, sleeps on. So it sleeps on
    a socket here, to which Python writes the number of each signal; the work is done in a thread.
    """

    def __init__(self) -> None:
        self._news, self._teller = socket.socketpair()
        self._teller.setblocking(False)
        signal.set_wakeup_fd(self._teller.fileno())
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, lambda number, frame: None)

    def wait_for(self, work: Callable[[], T]) -> T:
        """Do some work and return its result.

        :raises Interrupted: a signal came first; the work is left behind.
        """
        future: Future[T] = Future()

        def do() -> None:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
            self._teller.send(b"\0")

        threading.Thread(target=do, daemon=True).start()
        number = self._news.recv(1)[0]
        if number:
            raise Interrupted(signal.Signals(number))
        return future.result()
