"""Clients as a shop has them: they repeat a request until they have its answer, and don't wait politely."""

from __future__ import annotations

import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import httpx

from ..auth import PASSWORD

__all__ = ["Answer", "Clients", "Intent", "Tally", "at_once"]

#: Seconds until the clients of a situation give up for good.
PERSISTENCE = 25.0
#: Seconds between two tries. Shorter than what ``Retry-After`` asks for: these clients are worse than they should be.
PAUSE = 0.15
#: Each try waits longer than the one before by this factor, up to so many seconds.
GROWING_PATIENCE = 1.5
LONGEST_PATIENCE = 5.0


@dataclass(frozen=True, slots=True)
class Intent:
    """One thing that somebody wants to happen once. ``user`` and ``key`` go into the header where there are such."""

    path: str
    body: Mapping[str, object]
    reference: str
    user: str | None = None
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What makes two answers the same one: the status and the bytes."""

    status: int
    body: bytes


@dataclass(slots=True)
class Tally:
    """What the ``clients`` of one situation saw, of which ``served`` got a result.

    ``refusals`` counts the problems' codes, or the statuses where there was none; ``results`` has the successful
    answers to each intent, by reference.
    """

    sent: int = 0
    replayed: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    unanswered: int = 0
    clients: int = 0
    served: int = 0
    results: dict[str, list[Answer]] = field(default_factory=lambda: defaultdict(list))


class Clients:
    """Sends the intents of one situation to a shop, and keeps the tally.

    :param instances: a connection to each instance of the shop.
    :param on_client: called each time when a client is through.
    """

    def __init__(self, instances: Sequence[httpx.Client], on_client: Callable[[], None]) -> None:
        self.tally = Tally()
        self._instances = instances
        self._on_client = on_client
        self._lock = threading.Lock()
        self._deadline = time.monotonic() + PERSISTENCE

    def want(self, path: str, body: Mapping[str, object], *, user: str) -> Intent:
        """A new intent of a customer, under a fresh idempotency key."""
        reference = _new_reference(path)
        self.tally.results[reference] = []
        return Intent(path, {**body, "reference": reference}, reference, user, str(uuid.uuid4()))

    def event(self, path: str, kind: str) -> Intent:
        """A new event of the provider; its own id is the key."""
        reference = _new_reference("/evt")
        self.tally.results[reference] = []
        return Intent(path, {"id": reference, "type": kind}, reference)

    def send(
        self,
        intent: Intent,
        *,
        via: Sequence[int] = (0,),
        patience: float = LONGEST_PATIENCE,
        more: Mapping[str, object] | None = None,
    ) -> None:
        """One client: sends the request until it has a result, or is told that there will be none.

        :param via: the instance that each try reaches; the last one gets all further ones.
        :param patience: seconds to wait for an answer at the first try.
        :param more: members that go into the body of this client's requests.
        """
        served = False
        instances = iter([*via[:-1]])
        while True:
            response = self._try(self._instances[next(instances, via[-1])], intent, patience, more or {})
            if response is not None and response.is_success:
                served = True
                break
            final = response is not None and response.is_client_error and "Retry-After" not in response.headers
            if final or time.monotonic() > self._deadline:
                break
            patience = min(patience * GROWING_PATIENCE, LONGEST_PATIENCE)
            time.sleep(PAUSE)
        with self._lock:
            self.tally.clients += 1
            self.tally.served += served
        self._on_client()

    def _try(
        self, instance: httpx.Client, intent: Intent, patience: float, more: Mapping[str, object]
    ) -> httpx.Response | None:
        """One request; ``None`` where no answer came in time."""
        try:
            response = instance.post(
                intent.path,
                json={**intent.body, **more},
                headers={"Idempotency-Key": f'"{intent.key}"'} if intent.key else {},
                auth=httpx.BasicAuth(intent.user, PASSWORD) if intent.user else httpx.USE_CLIENT_DEFAULT,
                timeout=patience,
            )
        except httpx.TransportError:
            response = None
        with self._lock:
            tally = self.tally
            tally.sent += 1
            if response is None:
                tally.unanswered += 1
            elif response.is_success:
                tally.replayed += response.headers.get("Idempotent-Replayed") == "true"
                tally.results[intent.reference].append(Answer(response.status_code, response.content))
            else:
                tally.refusals[_reason(response)] += 1
        return response


def at_once(calls: Iterable[Callable[[], None]]) -> None:
    """Make all calls at the same moment, each in a thread of its own, and wait for them."""
    waiting = list(calls)
    barrier = threading.Barrier(len(waiting))
    errors: list[BaseException] = []

    def run(call: Callable[[], None]) -> None:
        barrier.wait()
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in waiting]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _new_reference(path: str) -> str:
    return f"{path.strip('/')}-{uuid.uuid4().hex[:12]}"


def _reason(response: httpx.Response) -> str:
    if response.headers.get("Content-Type") == "application/problem+json":
        return str(response.json()["code"])
    return str(response.status_code)
