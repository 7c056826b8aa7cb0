"""What all modes of the protocol share: rules as switches, compare-and-swap, and the checks of every step."""

from collections.abc import Iterable, Mapping
from typing import Any

from .rules import RULES
from .vocabulary import (
    COMMIT,
    DISPUTED,
    DONE,
    IN_PROGRESS,
    LAPSED,
    LIVE,
    RELEASED,
    RUNNING,
    START,
    SUCCEEDED,
    UNREADABLE,
    Actor,
    Record,
    Steps,
    System,
    World,
    finished,
)


class Protocol:
    """One configuration of the model.

    :param budget: how often each kind of fault may strike.
    :param without: rules that are switched off.
    :param deduplicates: the provider recognises a key that it has seen.
    """

    #: Redis stands in front of a database.
    durable = True
    #: The effect is outside, and a job settles what is unknown.
    settles = False

    def __init__(
        self,
        actors: Iterable[Actor],
        budget: Mapping[str, int],
        *,
        without: Iterable[str] = (),
        deduplicates: bool = True,
    ) -> None:
        self.without = frozenset(without)
        unknown = self.without - RULES.keys()
        if unknown:
            raise ValueError(f"no such rule: {sorted(unknown)}")
        self.faults = {name: index for index, name in enumerate(sorted(budget))}
        self.deduplicates = deduplicates
        self.start = System(None, None, None, tuple(actors), World(), tuple(budget[name] for name in self.faults))

    def on(self, rule: str) -> bool:
        return rule not in self.without

    # -- what a mode gives -------------------------------------------------------------------------------------------

    def request(self, system: System, number: int, actor: Actor) -> Steps:
        """The next steps of a request."""
        raise NotImplementedError

    def job(self, system: System, number: int, actor: Actor) -> Steps:
        """The next steps of the job that settles, or compensates."""
        return iter(())

    # -- changes -----------------------------------------------------------------------------------------------------

    def allows(self, system: System, fault: str) -> bool:
        """Whether this fault may strike once more."""
        index = self.faults.get(fault)
        return index is not None and system.budget[index] > 0

    def after(self, system: System, fault: str) -> System:
        """The system after this fault was used once more."""
        index = self.faults[fault]
        budget = system.budget
        return system._replace(budget=(*budget[:index], budget[index] - 1, *budget[index + 1 :]))

    def move(self, system: System, number: int, **changes: Any) -> System:
        """Change one actor."""
        actors = system.actors
        changed = actors[number]._replace(**changes)
        return system._replace(actors=(*actors[:number], changed, *actors[number + 1 :]))

    def change_world(self, system: System, **changes: Any) -> System:
        return system._replace(world=system.world._replace(**changes))

    def write_redis(self, system: System, record: Record | None) -> System:
        return system._replace(redis=record, replica=system.redis)

    # -- the rules of every store ------------------------------------------------------------------------------------

    def has_lapsed(self, record: Record) -> bool:
        return record.lease >= (LAPSED if self.on("skew") else DISPUTED)

    def next_fence(self, system: System, old: int) -> int:
        """``max(old + 1, the server's milliseconds)``: over every number that was ever given."""
        return max(old, system.world.highest_fence) + 1 if self.on("version_rises") else old + 1

    def is_mine(self, record: Record | None, number: int, states: tuple[str, ...] = (IN_PROGRESS,)) -> bool:
        """The comparison of every compare-and-swap: token and state."""
        if record is None:
            return False
        token = record.token == number or not self.on("cas_token")
        return token and (record.state in states or not self.on("cas_state"))

    def likeness(self, record: Record, actor: Actor) -> str | None:
        """What a record says to who asks: ``foreign``, ``mismatch``, or nothing."""
        if not self.on("principal_first") and record.body != actor.body:
            return "mismatch"
        if record.principal != actor.principal:
            return "foreign"
        return "mismatch" if record.body != actor.body else None

    def release_row(self, row: Record, **changes: Any) -> Record:
        expired = False if self.on("release_ttl") else row.expired
        return row._replace(state=RELEASED, reconciler=None, lease=LIVE, expired=expired, **changes)

    def grant(self, system: System, number: int, new: Record, old: Record | None) -> tuple[System, str | None]:
        """A claim that lets an actor run was recorded: what must hold now?"""
        world, violation = system.world, None
        if new.fence <= world.highest_fence:
            violation = "FENCE: the number did not rise"
        same = old is None or (old.body, old.principal) == (new.body, new.principal)
        if old is not None and not same and not (old.expired and old.state == SUCCEEDED):
            violation = "OTHER-REQUEST-RAN: a key that is bound runs another request"
        if not world.excuse:
            for other, actor in enumerate(system.actors):
                if other != number and actor.at in RUNNING and not actor.past_deadline:
                    violation = f"TWO-LIVE: p{number} may run while p{other} holds a live lease"
        if new.fence > world.highest_fence:
            system = self.change_world(system, highest_fence=new.fence)
        return system, violation

    def answer(self, system: System, number: int, told: tuple[str, ...]) -> tuple[System, str | None]:
        """A client is told something: may it be?"""
        violation = None
        if told[0] == "answered" and not system.world.excuse:
            for other, actor in enumerate(system.actors):
                if actor.told and actor.told[0] == "answered" and actor.told[1] != told[1]:
                    violation = f"DISAGREE: p{number} and p{other} were told different results"
        record = system.row if self.durable else system.redis
        if record is not None and record.token == number:
            if told[0] == "denied" and record.state == SUCCEEDED:
                violation = "OWN-SUCCESS-DENIED: told that the lease was lost, yet its answer is kept"
            if told[0] == "in progress" and record.state == IN_PROGRESS:
                violation = "SELF-BLOCK: refused by its own claim"
        if system.actors[number].at == START:  # else it was checked when it was decided
            violation = violation or self.wrong_refusal(system, number, told[0])
        return self.move(system, number, at=DONE, told=told, seen=None, fronted=False), violation

    def wrong_refusal(self, system: System, number: int, told: str) -> str | None:
        """Whoever holds the row, committed or open, is never refused by what Redis says; a stranger learns nothing."""
        if told not in ("foreign", "mismatch"):
            return None
        actor = system.actors[number]
        row = system.row if self.durable else system.redis
        if row is not None and row.answer != UNREADABLE and not (row.expired and finished(row)):
            if (row.principal, row.body) == (actor.principal, actor.body):
                return f"WRONG-REFUSAL: the one who holds the row is told {told}"
            if told == "mismatch" and row.principal != actor.principal:
                return "TOLD-A-STRANGER: another principal learns that the key is in use"
        if self.durable:
            for other in system.actors:
                holds = other.at == COMMIT and (other.principal, other.body) == (actor.principal, actor.body)
                if holds and self.on("insert_in_tx"):
                    return f"WRONG-REFUSAL: the one who holds the open row is told {told}"
        return None

    def final_changed(self, before: Record | None, after: Record | None) -> str | None:
        """A finished record is overwritten by nothing."""
        if before is None or after is None or not finished(before) or before.expired:
            return None
        if (before.state, before.answer) == (after.state, after.answer) or UNREADABLE in (before.answer, after.answer):
            return None
        return "FINAL-CHANGED: a finished record is overwritten"

    def end(self, system: System) -> str | None:
        """Nothing can happen any more: is settled what must be?"""
        return None
