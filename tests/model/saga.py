"""A saga of two steps outside, the first of which can be undone. The database is asked directly, Redis left out."""

from .base import Protocol
from .vocabulary import (
    COMPENSATING,
    COMPLETE,
    DONE,
    EFFECT,
    FAILED,
    IN_PROGRESS,
    INDETERMINATE,
    JOB,
    LIVE,
    LOOK_UP,
    NOT_KEPT,
    RECORD_UNDO,
    REFUSED,
    RELEASED,
    START,
    SUCCEEDED,
    VERDICT,
    VIEW,
    Actor,
    Record,
    Step,
    Steps,
    System,
)

#: What the provider remembers: the keys of the steps and of the undo, and that it refused step two for good.
STEP_KEYS = ("", "step 1", "step 2")
UNDO_KEY, REFUSAL = "undo 1", "refusal"
BEGUN, UNDONE = 1, 2


class Saga(Protocol):
    """Steps are committed one by one. A step that is refused for good makes it `COMPENSATING`; the job undoes."""

    settles = True

    def request(self, system: System, number: int, actor: Actor) -> Steps:
        me = f"p{number}"
        if actor.at == START:
            yield self._claim(system, number, actor, me)
        elif actor.at == VIEW:
            yield self._next_step(system, number, actor, me)
        elif actor.at == EFFECT:
            yield from self._call(system, number, actor, me)
        elif actor.at == NOT_KEPT:
            yield self._record_step(system, number, actor, me)
        elif actor.at == REFUSED:
            row, ended = system.row, system
            if row is not None and self.is_mine(row, number):
                ended = system._replace(row=row._replace(state=COMPENSATING, lease=LIVE, reconciler=None))
            yield Step(f"{me}: leaves it to be compensated", self.move(ended, number, at=DONE, told=("409",)))
        elif actor.at == COMPLETE:
            row, violation = system.row, None
            told: tuple[str, ...] = ("denied",)
            if row is not None and self.is_mine(row, number):
                told = ("answered", "S")
                system = system._replace(row=row._replace(state=SUCCEEDED, answer="S", lease=LIVE))
                violation = (
                    "SUCCESS-AFTER-UNDO: a step was undone, and success is kept" if system.world.undone else None
                )
            answered, wrong = self.answer(system, number, told)
            yield Step(f"{me}: completes, told {told[0]}", answered, violation or wrong)

    def _claim(self, system: System, number: int, actor: Actor, me: str) -> Step:
        row = system.row
        free = row is None or row.state == RELEASED or (row.state == IN_PROGRESS and self.has_lapsed(row))
        if row is not None and row.state == COMPENSATING and not self.on("saga_hold"):
            free = True
        if not free:
            assert row is not None
            told = ("answered", str(row.answer)) if row.state == SUCCEEDED else (row.state,)
            answered, violation = self.answer(system, number, told)
            return Step(f"{me}: SQL: {row.state}", answered, violation)
        new = Record(
            IN_PROGRESS,
            actor.principal,
            actor.body,
            number,
            self.next_fence(system, row.fence if row is not None else 0),
            attempt=row.attempt + 1 if row is not None else 1,
            window_over=row.window_over if row is not None else False,
        )
        granted, violation = self.grant(system._replace(row=new), number, new, row)
        return Step(
            f"{me}: claims, attempt {new.attempt}", self.move(granted, number, at=VIEW, attempt=new.attempt), violation
        )

    def _next_step(self, system: System, number: int, actor: Actor, me: str) -> Step:
        one, two, _ = system.world.steps
        row = system.row
        if one and two:
            return Step(f"{me}: all steps are done", self.move(system, number, at=COMPLETE))
        step = 2 if one else 1
        deadline = actor.past_deadline and self.on("local_deadline")
        forgotten = actor.attempt > 1 and row is not None and row.window_over and self.on("window")
        if deadline or forgotten:
            ended = system
            if row is not None and self.is_mine(row, number):
                ended = system._replace(row=row._replace(state=INDETERMINATE))
            refused = self.move(ended, number, at=DONE, told=("unknown",))
            return Step(f"{me}: step {step} is not begun: lease or window is over", refused)
        return Step(f"{me}: step {step} begins", self.move(system, number, at=EFFECT, seen=step))

    def _call(self, system: System, number: int, actor: Actor, me: str) -> Steps:
        step, world = actor.seen, system.world
        if STEP_KEYS[step] in world.remembered:
            yield Step(f"{me}: step {step}: the provider remembers it", self.move(system, number, at=NOT_KEPT))
            return
        unit = 10 ** (step - 1)
        done = self.change_world(system, remembered=world.remembered | {STEP_KEYS[step]}, charges=world.charges + unit)
        violation = "SECOND-STEP: a step was done twice" if done.world.charges // unit % 10 > 1 else None
        if step == 1 or REFUSAL not in world.remembered:
            yield Step(
                f"{me}: step {step}: effect",
                self.move(done, number, at=NOT_KEPT),
                violation or self._after_the_undo(done),
            )
        refuses = REFUSAL in world.remembered or self.allows(system, "refusal")
        if step == 2 and refuses:
            said = system if REFUSAL in world.remembered else self.after(system, "refusal")
            remembered = world.remembered | ({REFUSAL} if self.deduplicates else frozenset())
            refused = self.move(self.change_world(said, remembered=remembered), number, at=REFUSED)
            yield Step(f"{me}: step 2: refused for good", refused)

    def _after_the_undo(self, system: System) -> str | None:
        if system.row is not None and system.row.state == FAILED:
            return "STEP-AFTER-ROLLBACK: an effect that nobody will undo"
        return "FORWARD-AFTER-UNDO: a step is done after the undo" if system.world.undone else None

    def _record_step(self, system: System, number: int, actor: Actor, me: str) -> Step:
        step, row = actor.seen, system.row
        one, two, undo = system.world.steps
        if row is None or not self.is_mine(row, number):
            return Step(f"{me}: notes step {step}: fenced out", self.move(system, number, at=DONE, told=("denied",)))
        if self.on("saga_commit"):
            system = self.change_world(system, steps=(1, two, undo) if step == 1 else (one, 1, undo))
            noted = self.move(system, number, at=COMPLETE if step == 2 else VIEW, seen=None)
        elif step == 1:  # noted in a transaction that is still open
            noted = self.move(system, number, at=EFFECT, seen=2)
        else:
            noted = self.move(system, number, at=COMPLETE, seen=None)
        return Step(f"{me}: notes step {step}", noted)

    # -- the job -----------------------------------------------------------------------------------------------------

    def job(self, system: System, number: int, actor: Actor) -> Steps:
        row = system.row
        one, two, undo = system.world.steps
        if actor.at == START and row is not None and row.state == COMPENSATING:
            if row.reconciler is None or self.has_lapsed(row):
                held = row._replace(reconciler=number, lease=LIVE, fence=self.next_fence(system, row.fence))
                taken = self.move(system._replace(row=held), number, at=LOOK_UP, past_deadline=False)
                yield Step("job: takes what is to be compensated", taken)
        elif actor.at == LOOK_UP:
            if undo == UNDONE or not one:
                yield Step("job: nothing is left to undo", self.move(system, number, at=VERDICT))
            elif undo == BEGUN and row is not None and row.window_over and self.on("window"):
                failed = system._replace(row=row._replace(state=INDETERMINATE, reconciler=None))
                yield Step("job: the undo was begun, its window is over: a human", self.move(failed, number, at=START))
            else:
                begun = self.change_world(system, steps=(one, two, BEGUN))
                yield Step("job: notes that it begins the undo", self.move(begun, number, at=EFFECT))
        elif actor.at == EFFECT:
            done = system
            if UNDO_KEY not in system.world.remembered or not self.on("comp_commit"):
                remembered = system.world.remembered | {UNDO_KEY}
                done = self.change_world(system, undone=system.world.undone + 1, remembered=remembered)
            violation = "SECOND-UNDO: a step was undone twice" if done.world.undone > 1 else None
            yield Step("job: undoes step 1", self.move(done, number, at=RECORD_UNDO), violation)
        elif actor.at == RECORD_UNDO:
            noted = self.change_world(system, steps=(one, two, UNDONE))
            yield Step("job: notes that it is undone", self.move(noted, number, at=VERDICT))
        elif actor.at == VERDICT:
            ended = system
            if row is not None and row.state == COMPENSATING and row.reconciler == number:
                state = FAILED if self.on("saga_failed") else RELEASED
                ended = system._replace(row=row._replace(state=state, reconciler=None))
            yield Step("job: the saga is rolled back", self.move(ended, number, at=START))

    def end(self, system: System) -> str | None:
        row = system.row
        if row is not None and any(actor.role == JOB for actor in system.actors):
            if row.state == COMPENSATING:
                return "STUCK: to be compensated for ever"
            if row.state == FAILED and system.world.charges % 10 != system.world.undone and not system.world.excuse:
                return "NOT-UNDONE: rolled back, yet an effect stands"
        return None
