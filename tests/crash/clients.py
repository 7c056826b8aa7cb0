"""Clients as they should be: they send the same request with the same key until they are told what became of it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from .crew import Crew
from .history import CHECK, History, Sent
from .plan import Batch, Timing, Trial
from .worker import CAUSE, PATHS, send

__all__ = ["Clients"]

#: A test's seconds are shorter than a client's: what it waits of the time that ``Retry-After`` says.
SHARE = 0.2
LONGEST_WAIT_S = 0.8
#: Seconds between two calls of who watches.
WATCH_S = 0.2


class Clients:
    """All clients of a batch, each in a thread from its begin to its last answer."""

    def __init__(self, pool: ThreadPoolExecutor, crew: Crew, history: History, batch: Batch, timing: Timing) -> None:
        self._pool = pool
        self._crew = crew
        self._history = history
        self._timing = timing
        self._began = time.monotonic()
        self._latest = self._began + timing.window + timing.calm
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._late: dict[int, Trial] = {}
        self._futures: list[Future[None]] = []
        for trial in batch.trials:
            if any(party.late for party in trial.parties):
                self._late[trial.number] = trial
            self._send_off(trial, late=False)
        self._trials = batch.trials

    def wait(self, watch: Callable[[], None]) -> None:
        """Until all have their answers, or have given up; ``watch`` is called meanwhile."""
        seen = 0
        while True:
            with self._lock:
                futures = list(self._futures)
            if len(futures) == seen:
                return
            while wait(futures, WATCH_S).not_done:
                watch()
            for future in futures:
                future.result()
            seen = len(futures)

    def check(self, watch: Callable[[], None]) -> None:
        """All is calm, and everybody asks once more: whoever gave up, too. A key that is stuck takes no time from the
        others."""
        self._latest = time.monotonic() + self._timing.calm
        for trial in self._trials:
            with self._lock:
                self._futures.append(self._pool.submit(self._check, trial))
        self.wait(watch)

    def stop(self) -> None:
        """Nobody sends another request."""
        self._over.set()

    def _send_off(self, trial: Trial, *, late: bool) -> None:
        for number, party in enumerate(trial.parties):
            if party.late is not late:
                continue
            for index, client in enumerate(party.clients):
                begins = time.monotonic() if late else self._began + trial.begins + client.waits
                with self._lock:
                    self._futures.append(self._pool.submit(self._persist, trial, number, index, client.tries, begins))

    def _check(self, trial: Trial) -> None:
        if trial.kind != "redis" or not self._history.is_forgotten(trial.number):
            for number, party in enumerate(trial.parties):
                if not party.late:
                    self._persist(trial, number, CHECK, None, self._began)
        self._tell(trial)

    def _tell(self, trial: Trial) -> None:
        """The owner was told the result: the late ones begin."""
        with self._lock:
            waiting = self._late.pop(trial.number, None)
        if waiting is not None:
            self._send_off(waiting, late=True)

    def _persist(self, trial: Trial, number: int, client: int, tries: int | None, begins: float) -> None:
        """One client, from its first request to its last."""
        draw = random.Random(f"{trial.key}/{number}/{client}")
        if self._over.wait(max(begins - time.monotonic(), 0)):
            return
        sent = 0
        while not self._over.is_set() and time.monotonic() < self._latest:
            answer = self._send(trial, number, client, draw)
            sent += 1
            if answer.told and number == 0:
                self._tell(trial)
            if answer.ends or sent == tries:
                return
            if answer.retry_after is not None:
                pause_s = min(answer.retry_after * SHARE, LONGEST_WAIT_S)
            else:
                pause_s = min(0.05 * 2**sent, LONGEST_WAIT_S)
            self._over.wait(pause_s * draw.uniform(0.5, 1.5))

    def _send(self, trial: Trial, number: int, client: int, draw: random.Random) -> Sent:
        party, member = trial.parties[number], self._crew.pick(draw)
        patience = self._timing.calm_patience if self._crew.is_calm else self._timing.patience
        at = time.time()
        try:
            answer = send(member.worker.address, PATHS[trial.kind], trial.key, party.body, party.user, patience)
        except OSError as error:
            sent = Sent(number, client, member.name, at, time.time(), error=f"{type(error).__name__}: {error}")
        else:
            headers = answer.headers
            code = ""
            if headers.get("Content-Type", "").startswith("application/problem+json"):
                code = answer.json()["code"]
            waits = headers.get("Retry-After")
            sent = Sent(
                number,
                client,
                member.name,
                at,
                time.time(),
                answer.status,
                answer.body,
                code,
                headers.get("Idempotent-Replayed") == "true",
                None if waits is None else float(waits),
                location=headers.get("Location", ""),
                cause=headers.get(CAUSE, ""),
            )
        self._history.sent(trial.number, sent)
        return sent
