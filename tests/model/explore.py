"""Breadth-first search: every state that can be reached, and the shortest way to the first that must not be."""

from collections import deque
from typing import NamedTuple

from .base import Protocol
from .environment import crash, environment
from .operations import operator, sweep
from .vocabulary import DONE, JOB, OPERATOR, OVER, SUCCEEDED, SWEEP, Step, Steps, System

#: More states than any run has.
LIMIT = 1_500_000


class Outcome(NamedTuple):
    """What a search found.

    :param violation: what is wrong, its name first; ``None`` where every state was visited and none is.
    :param trace: the labels of the shortest way there.
    """

    states: int
    violation: str | None = None
    trace: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The violation's name alone."""
        return (self.violation or "").split(":")[0]


def steps(protocol: Protocol, system: System) -> Steps:
    """Every next step: those of the actors, and those of the world."""
    for number, actor in enumerate(system.actors):
        if actor.at in OVER:
            continue
        if actor.role == JOB:
            own = protocol.job(system, number, actor)
        elif actor.role == SWEEP:
            own = sweep(protocol, system, number, actor)
        elif actor.role == OPERATOR:
            own = operator(protocol, system, number, actor)
        else:
            own = protocol.request(system, number, actor)
        for step in own:
            yield _checked(protocol, system, step, number)
        yield from crash(protocol, system, number, actor)
    yield from environment(protocol, system)


def _checked(protocol: Protocol, before: System, step: Step, number: int) -> Step:
    """The checks of every step of an actor."""
    if step.violation is not None:
        return step
    after = step.system
    violation = protocol.final_changed(before.row, after.row) or protocol.final_changed(before.redis, after.redis)
    actor = after.actors[number]
    told = actor.at == DONE and actor.told is not None and actor.told[0] == "answered"
    kept = after.row is not None and after.row.state == SUCCEEDED
    if protocol.durable and told and not kept and not after.world.excuse:
        violation = violation or "TOLD-BUT-NOT-KEPT: success was told, SQL does not hold it"
    return step if violation is None else step._replace(violation=violation)


def explore(protocol: Protocol, *, limit: int = LIMIT) -> Outcome:
    """Visit every state, or stop at the first violation.

    :raises RuntimeError: there are more states than the limit.
    """
    came_from: dict[System, tuple[System, str] | None] = {protocol.start: None}
    waiting = deque([protocol.start])
    while waiting:
        system = waiting.popleft()
        quiet = True
        for label, after, violation in steps(protocol, system):
            quiet = False
            if violation is not None:
                return Outcome(len(came_from), violation, (*_way(came_from, system), label))
            known = len(came_from)
            came_from.setdefault(after, (system, label))
            if len(came_from) > known:
                waiting.append(after)
        if quiet and (violation := protocol.end(system)) is not None:
            return Outcome(len(came_from), violation, _way(came_from, system))
        if len(came_from) > limit:
            raise RuntimeError(f"more than {limit} states: the bounds are too large")
    return Outcome(len(came_from))


def _way(came_from: dict[System, tuple[System, str] | None], system: System) -> tuple[str, ...]:
    labels = []
    while (origin := came_from[system]) is not None:
        system, label = origin
        labels.append(label)
    return tuple(reversed(labels))
