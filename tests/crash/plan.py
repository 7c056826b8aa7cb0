"""What a run will do, drawn from its seed: the trials, the faults between them, and the faults that workers are born
with. The same seed gives the same plan; when each process gets to run is the machine's business."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .worker import RAIL_SETTLE_S

__all__ = [
    "FILE_EVENTS",
    "SQL_EVENTS",
    "WEIGHTS",
    "Batch",
    "Client",
    "Event",
    "Party",
    "Timing",
    "Trial",
    "draw_batch",
    "draw_fault",
]


@dataclass(frozen=True)
class Timing:
    """Seconds. ``window``: for how long a batch of trials is under fire. ``calm``: how long everything may take to
    settle when that is over. ``patience``, ``calm_patience``: how long a client waits for an answer, under fire and
    later."""

    lease: float = 0.8
    skew: float = 0.2
    settle_after: float = 0.3
    window: float = 15.0
    calm: float = 60.0
    patience: float = 4.0
    calm_patience: float = 15.0

    @property
    def lapse(self) -> float:
        """When the key of a process that stopped is free."""
        return self.lease + self.skew

    @property
    def long(self) -> float:
        """What no lease lasts that isn't renewed."""
        return self.lapse + 0.3


@dataclass(frozen=True)
class Client:
    """It begins so many seconds after the others, and gives up after so many requests, or never."""

    waits: float = 0.0
    tries: int | None = None


@dataclass(frozen=True)
class Party:
    """Some clients with one user and one body.

    :param name: what their effect is called.
    :param pad: bytes that make the answer longer.
    :param late: they begin when the owner was told the result.
    :param declined: the second step of its saga fails for good.
    """

    user: str
    name: str
    pad: int
    clients: tuple[Client, ...]
    late: bool = False
    declined: bool = False

    @property
    def body(self) -> dict[str, Any]:
        return {"name": self.name, "pad": self.pad, **({"declined": True} if self.declined else {})}


@dataclass(frozen=True)
class Trial:
    """One key. Its first party is the owner; where another begins together with it, whoever comes first is."""

    number: int
    kind: str
    key: str
    begins: float
    parties: tuple[Party, ...]


@dataclass(frozen=True)
class Event:
    """Something that is done to a server or a worker, ``at`` seconds after the batch began.

    :param match: which of the database's replies: those to a ``"commit"``, those to what keeps an ``"answer"``, or all.
    """

    at: float
    kind: str
    slot: int = 0
    seconds: float = 0.0
    times: int = 1
    when: str = "before"
    match: str = ""


@dataclass(frozen=True)
class Batch:
    number: int
    trials: tuple[Trial, ...]
    events: tuple[Event, ...]


#: How often each kind of event is drawn.
WEIGHTS: Mapping[str, int] = {
    "kill": 16,
    "pause": 6,
    "flush": 5,
    "restart redis": 3,
    "cut redis": 10,
    "break redis": 4,
    "silence redis": 3,
    "pause redis": 3,
    "delay redis": 3,
    "fill redis": 3,
    "cut sql": 16,
    "break sql": 4,
    "silence sql": 2,
    "pause sql": 2,
    "drop sql": 4,
    "lock sql": 6,
    "provider drops": 10,
    "provider waits": 6,
    "provider errs": 4,
}
#: Those that need a wire to the database.
SQL_EVENTS = frozenset({"cut sql", "break sql", "silence sql", "pause sql", "drop sql"})
#: Those that need a database in a file.
FILE_EVENTS = frozenset({"lock sql"})

#: Where a worker's own fault can lie, on each kind of route and on all: a layer, and a call of it.
POINTS: Mapping[str, Sequence[str]] = {
    "": ("redis.claim",) * 3
    + ("redis.complete",) * 3
    + ("redis.renew", "redis.release")
    + ("view.effect",) * 5
    + ("view.begin", "view.local", "view.answer") * 2,
    "redis": ("redis.claim", "redis.complete", "redis.renew", "redis.release", "view.effect"),
    "transaction": ("transaction.claim", "transaction.complete") * 3 + ("transaction.judge", "transaction.release"),
    "intent": (
        *("intent.claim", "intent.complete", "view.look_up") * 2,
        *("intent.note", "intent.first_use", "intent.suspend", "intent.renew", "view.sent"),
        *("intent.settle_completed", "intent.settle_retry"),
    ),
    "rail": ("view.begin", "view.sent") * 4
    + ("view.look_up", "intent.complete", "intent.suspend", "intent.settle_retry"),
    "saga": ("intent.keep_steps",) * 6 + ("view.undo",) * 4 + ("intent.steps", "intent.complete", "view.sent"),
}
#: Those of them that come soon and again, and the last time at which they are met.
OFTEN: Mapping[str, int] = {
    **dict.fromkeys(
        ("claim", "complete", "begin", "note", "first_use", "effect", "sent", "undo", "local", "answer"), 4
    ),
    "keep_steps": 10,
}
#: What a worker's view does besides, in every request, and how often. It waits for as long as a lease.
HABITS: Mapping[str, int] = {
    "": 40,
    "waits": 20,
    "waits after": 20,
    "renews": 5,
    "gives back": 5,
    "fails": 5,
    "is unsure": 5,
    "declines": 8,
}

#: How many clients an owner has.
CROWDS = (1, 1, 2, 2, 2, 2, 3, 3, 3, 4, 4, 12)


def draw_batch(
    seed: str,
    number: int,
    trials: range,
    *,
    kinds: Sequence[str],
    events: Sequence[str],
    timing: Timing,
    slots: int,
    pause_s: float,
) -> Batch:
    """The batch of this number.

    :param trials: the numbers of its trials.
    :param events: kinds of them.
    :param slots: how many workers there are.
    :param pause_s: the mean time between two events.
    """
    draw = random.Random(f"{seed}/batch {number}")
    return Batch(
        number,
        tuple(_trial(draw, number, draw.choice(kinds), timing) for number in trials),
        tuple(_events(draw, events, timing, slots, pause_s)),
    )


def draw_fault(seed: str, slot: int, generation: int, kinds: Sequence[str], timing: Timing) -> dict[str, Any] | None:
    """The fault that the worker of this number is born with; some have none."""
    draw = random.Random(f"{seed}/worker {slot}.{generation}")
    fault: dict[str, Any] = {}
    habit = draw.choices(tuple(HABITS), tuple(HABITS.values()))[0]
    if habit:
        fault["does"] = habit
    if draw.random() < 0.6:
        fault |= _point(draw, kinds, timing)
    return fault or None


def _point(draw: random.Random, kinds: Sequence[str], timing: Timing) -> dict[str, Any]:
    """One call at which a worker dies, fails or takes its time."""
    kind = draw.choice(("", *kinds))
    layer, _, at = draw.choice(POINTS[kind]).partition(".")
    when = draw.choice(("before", "after"))
    action = draw.choices(("kill", "raise", "delay"), (6, 2, 2))[0]
    if at == "answer":
        when = "before"
    if at == "sent":
        action = "kill"
    if at == "undo" and action == "raise":
        action = "kill"  # an undoing that fails is for a human
    if at == "begin":
        when, action = "after", "stop"
    if layer != "redis" and at == "complete" and action == "raise":
        action = "delay"  # a database tells of it in other words
    return {
        "layer": layer,
        "at": at,
        "when": when,
        "n": draw.randint(1, OFTEN[at]) if at in OFTEN else 1,
        "action": action,
        "seconds": draw.choice((timing.long, timing.long + RAIL_SETTLE_S) if action == "stop" else (0.2, timing.long)),
    }


def _trial(draw: random.Random, number: int, kind: str, timing: Timing) -> Trial:
    name, key = f"t{number}", str(uuid.UUID(int=draw.getrandbits(128), version=4))
    pad = draw.choice((0, 0, 0, 0, 0, 0, 0, 0, 500, 70_000))
    declined = kind == "saga" and draw.random() < 0.3
    parties = [Party("ann", name, pad, _clients(draw, draw.choice(CROWDS), timing), declined=declined)]
    fate = draw.random()
    if fate < 0.15:
        parties.append(Party("ann", f"{name}-other", 0, _clients(draw, draw.choice((1, 1, 2)), timing), late=True))
    elif fate < 0.3:
        clients = _clients(draw, draw.choice((1, 1, 2)), timing)
        parties.append(Party("bob", name, pad, clients, late=True, declined=declined))
    elif fate < 0.5:
        user = draw.choice(("ann", "bob"))
        parties.append(Party(user, f"{name}-rival", 0, _clients(draw, draw.choice((1, 2)), timing)))
    return Trial(number, kind, key, draw.uniform(0, timing.window * 0.9), tuple(parties))


def _clients(draw: random.Random, number: int, timing: Timing) -> tuple[Client, ...]:
    return tuple(
        Client(draw.choice((0.0, draw.uniform(0, timing.lapse))), draw.choice((None, None, None, draw.randint(1, 3))))
        for _ in range(number)
    )


def _events(draw: random.Random, kinds: Sequence[str], timing: Timing, slots: int, pause_s: float) -> Iterator[Event]:
    at = draw.uniform(0, pause_s)
    while kinds and at < timing.window:
        kind = draw.choices(kinds, [WEIGHTS[each] for each in kinds])[0]
        yield _event(draw, at, kind, timing, slots)
        at += draw.expovariate(1 / pause_s)


def _event(draw: random.Random, at: float, kind: str, timing: Timing, slots: int) -> Event:
    slot, seconds, times = draw.randrange(slots), 0.0, 1
    when, match = draw.choice(("before", "after")), ""
    if kind == "pause":
        seconds = timing.lapse + draw.choice((0.0, 0.0, RAIL_SETTLE_S)) + draw.uniform(0.2, 0.6)
    elif kind.startswith(("silence", "pause ", "fill", "lock")):
        seconds = draw.uniform(0.3, timing.lapse + 0.4)
    elif kind.startswith("delay"):
        seconds = draw.uniform(0.3, 1.0)
    elif kind.startswith("cut"):
        times, match = draw.choice((1, 1, 2, 3)), draw.choice(("", "commit", "answer"))
    elif kind == "provider waits":
        seconds, times = draw.choice((0.1, 0.4, timing.long)), draw.randint(1, 2)
    elif kind.startswith("provider"):
        times = draw.randint(1, 3)
    return Event(at, kind, slot, seconds, times, when, match)
