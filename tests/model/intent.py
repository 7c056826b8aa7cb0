"""``durable="intent"``: the key is committed before an effect outside, and an unknown outcome is looked up."""

from typing import cast

from .durable import Durable
from .vocabulary import (
    ASK_SQL,
    COMPLETE,
    COPY,
    DONE,
    EFFECT,
    GIVE_BACK,
    IN_PROGRESS,
    INDETERMINATE,
    JOB,
    LAPSED,
    LIVE,
    LOOK_UP,
    NET,
    NOT_KEPT,
    NOTHING,
    RELEASED,
    RUNNING,
    START,
    SUCCEEDED,
    TAKE,
    UNREADABLE,
    VERDICT,
    VIEW,
    WRITE_BACK,
    Actor,
    Record,
    Step,
    Steps,
    System,
)

#: The provider's key for the one record.
KEY = "key"


class Intent(Durable):
    """Each step is a transaction of its own. The row's lease is the lease."""

    settles = True
    released_expires = False

    def request(self, system: System, number: int, actor: Actor) -> Steps:
        yield from super().request(system, number, actor)
        me = f"p{number}"
        if actor.at == ASK_SQL:
            yield from self._claim(system, number, actor, me)
        elif actor.at == TAKE:
            yield from self._take(system, number, actor, me)
        elif actor.at == LOOK_UP:
            yield from self._look_up(system, number, me)
        elif actor.at == VERDICT:
            yield from self._settle(system, number, actor, me)
        elif actor.at == VIEW:
            yield from self._view(system, number, actor, me)
        elif actor.at == EFFECT:
            yield from self._call_the_provider(system, number, me)
        elif actor.at == NOT_KEPT:
            yield self._not_kept(system, number, me)
        elif actor.at == NOTHING:
            row = system.row
            ended = system
            if row is not None and self.is_mine(row, number, (IN_PROGRESS, INDETERMINATE)):
                ended = system._replace(row=self.release_row(row))
            yield Step(f"{me}: nothing happened: released", self.move(ended, number, at=GIVE_BACK, told=("503",)))
        elif actor.at == COMPLETE:
            yield from self._complete(system, number, actor, me)
        elif actor.at == NET:
            row, ended = system.row, system
            if not self.on("kept") and row is not None and self.is_mine(row, number):
                ended = system._replace(row=self.release_row(row))
            # Nothing is told to Redis: its claim lapses, too.
            yield Step(
                f"{me}: gives up, told that the outcome is unknown",
                self.move(ended, number, at=DONE, told=("unknown",), seen=None),
                self.final_changed(row, ended.row),
            )

    # -- claim -------------------------------------------------------------------------------------------------------

    def may_settle(self, row: Record) -> bool:
        free = row.reconciler is None or self.has_lapsed(row) or not self.on("one_reconciler")
        return free and ("search lags" not in self.faults or row.settle_due)

    def _claim(self, system: System, number: int, actor: Actor, me: str) -> Steps:
        row = system.row
        if row is None:
            new = Record(IN_PROGRESS, actor.principal, actor.body, number, self.next_fence(system, 0))
            granted, violation = self.grant(system._replace(row=new), number, new, None)
            yield Step(f"{me}: SQL: inserts its row", self.move(granted, number, at=VIEW, attempt=1), violation)
            if self.allows(system, "lost reply"):
                yield Step(f"{me}: SQL: inserts, its reply is lost", self.after(granted, "lost reply"), violation)
        else:
            says = self.row_says(row, number, actor)
            if says in ("own claim", "own look-up"):
                then = VIEW if says == "own claim" else LOOK_UP
                yield Step(
                    f"{me}: SQL: recognises its {says}",
                    self.move(system, number, at=then, attempt=row.attempt),
                )
            elif says == "take":
                yield Step(f"{me}: SQL: reads a row that is {row.state}", self.move(system, number, at=TAKE, seen=row))
            elif says == "replay":
                replay = self.move(system, number, at=WRITE_BACK, answer=row.answer, attempt=row.attempt)
                yield Step(f"{me}: SQL: replay", replay)
            else:
                yield Step(f"{me}: SQL: {says}", self.move(system, number, at=GIVE_BACK, told=(says,)))
        if self.allows(system, "SQL away"):
            away = self.move(self.after(system, "SQL away"), number, at=GIVE_BACK, told=("503",))
            yield Step(f"{me}: SQL is away at the claim", away)

    def _fits(self, row: Record | None, seen: Record) -> bool:
        """The comparison of a takeover: is the row still as it was read, and lapsed?"""
        if row is None:
            return False
        return (
            ((row.token, row.fence) == (seen.token, seen.fence) or not self.on("take_version"))
            and (row.state == seen.state or not self.on("take_state"))
            and (row.state != IN_PROGRESS or self.has_lapsed(row) or not self.on("take_lease"))
            and (row.state != INDETERMINATE or self.may_settle(row))
        )

    def _take(self, system: System, number: int, actor: Actor, me: str) -> Steps:
        row, seen = system.row, cast("Record", actor.seen)
        if row is None or not self._fits(row, seen):
            yield Step(
                f"{me}: SQL: the row is another now, reads again", self.move(system, number, at=ASK_SQL, seen=None)
            )
            return
        over = seen.expired and not self.on("expiry_final")
        open_ = seen.state in (IN_PROGRESS, INDETERMINATE)
        if open_ and not over and self.on("inline") and self.on("take_keeps"):
            taken, violation = self._become_reconciler(system, number)
            yield Step(
                f"{me}: SQL: takes it over, to look it up", self.move(taken, number, at=LOOK_UP, seen=None), violation
            )
            if self.allows(system, "lost reply"):
                lost = self.move(self.after(taken, "lost reply"), number, at=ASK_SQL, seen=None)
                yield Step(f"{me}: SQL: takes it over, its reply is lost", lost, violation)
            return
        first = self.is_over(seen) or seen.answer == UNREADABLE
        new = Record(
            IN_PROGRESS,
            actor.principal,
            actor.body,
            number,
            self.next_fence(system, row.fence),
            attempt=1 if first else row.attempt + 1,
            answer=None if self.on("old_body") else row.answer,
            window_over=False if first else row.window_over,
        )
        taken, violation = self.grant(system._replace(row=new), number, new, row)
        if seen.expired and seen.state == SUCCEEDED:
            taken = self.change_world(taken, excuse="expired")
        then = LOOK_UP if open_ and self.on("inline") else VIEW
        yield Step(
            f"{me}: SQL: claims what was {seen.state}, attempt {new.attempt}",
            self.move(taken, number, at=then, attempt=new.attempt, seen=None),
            violation or self.final_changed(row, new),
        )

    def _become_reconciler(self, system: System, number: int) -> tuple[System, str | None]:
        """A lapsed or unknown row: the outcome is this one's to settle. Token and attempt stay until the verdict."""
        row = system.row
        assert row is not None
        new = row._replace(state=INDETERMINATE, reconciler=number, lease=LIVE, fence=self.next_fence(system, row.fence))
        taken = self.change_world(system._replace(row=new), highest_fence=max(new.fence, system.world.highest_fence))
        holder = system.actors[row.token]
        violation = self.final_changed(row, new)
        if row.state == IN_PROGRESS and row.lease == LIVE and holder.at in RUNNING and not holder.past_deadline:
            violation = "TOOK-LIVE-LEASE: a live lease was taken over"
        for other, actor in enumerate(system.actors):
            looks = actor.at in (LOOK_UP, VERDICT) and row.reconciler == other and not actor.past_deadline
            if other != number and looks and row.state == INDETERMINATE:
                violation = "TWO-RECONCILERS: two look it up at once"
        return taken, violation

    # -- settling ----------------------------------------------------------------------------------------------------

    def _look_up(self, system: System, number: int, me: str) -> Steps:
        found = system.world.charges > 0
        due = system.row.settle_due if system.row is not None else False
        seen = ("found" if found else "not found", due)
        yield Step(
            f"{me}: looks it up: {seen[0]}",
            self.move(system, number, at=VERDICT, seen=seen, answer="J1" if found else None),
        )
        if found and not due and self.allows(system, "search lags"):
            late = self.move(self.after(system, "search lags"), number, at=VERDICT, seen=("not found", False))
            yield Step(f"{me}: looks it up: not yet visible", late)

    def _may_run_again(self, row: Record, due_at_look_up: bool) -> bool:
        """Whether "it did not happen" is believed."""
        due = due_at_look_up if self.on("look_after") else row.settle_due
        late_enough = due or "search lags" not in self.faults or not self.on("settle_after")
        return late_enough and not (row.window_over and self.on("window"))

    def _settle(self, system: System, number: int, actor: Actor, me: str) -> Steps:
        row = system.row
        found, due = actor.seen
        if self.on("take_keeps"):
            held = row is not None and row.state == INDETERMINATE and row.reconciler == number
        else:
            held = self.is_mine(row, number)
        if row is None or not held:
            told = ("unknown",)
            yield Step(f"{me}: verdict: overtaken", self.move(system, number, at=GIVE_BACK, told=told, seen=None))
        elif found == "found":
            kept = row._replace(state=SUCCEEDED, answer=actor.answer, reconciler=None, expired=False)
            done = self.move(system._replace(row=kept), number, at=WRITE_BACK, seen=None)
            yield from self._verdict(system, done, number, f"{me}: verdict: it happened, completed")
        elif self._may_run_again(row, due):
            new = row._replace(
                state=IN_PROGRESS,
                token=number,
                reconciler=None,
                lease=LIVE,
                settle_due=False,
                attempt=row.attempt + self.on("take_keeps"),
                fence=self.next_fence(system, row.fence),
            )
            granted, violation = self.grant(system._replace(row=new), number, new, row)
            run = self.move(granted, number, at=VIEW, attempt=new.attempt, seen=None)
            label = f"{me}: verdict: it did not happen, runs attempt {new.attempt}"
            yield from self._verdict(system, run, number, label, violation)
        else:
            pending = system._replace(row=row._replace(state=INDETERMINATE, reconciler=None))
            told = ("unknown",) if self.on("take_keeps") else ("never ran",)
            yield Step(f"{me}: verdict: pending", self.move(pending, number, at=GIVE_BACK, told=told, seen=None))

    def _verdict(self, before: System, after: System, number: int, label: str, wrong: str | None = None) -> Steps:
        """A verdict is compare-and-swap: sent a second time it finds that the row has moved on."""
        yield Step(label, after, wrong)
        if self.allows(before, "lost reply"):
            told = ("unknown",)
            lost = self.move(self.after(after, "lost reply"), number, at=GIVE_BACK, told=told, seen=None, answer=None)
            yield Step(f"{label}; its reply is lost", lost, wrong)

    def job(self, system: System, number: int, actor: Actor) -> Steps:
        """The job settles what nobody asks for. It looks again only where something changed since."""
        row = system.row
        if actor.at == START and row is not None and self.on("job"):
            now = (row.fence, row.settle_due, row.window_over, system.world.charges)
            free = row.reconciler is None or self.has_lapsed(row) or not self.on("one_reconciler")
            lapsed = row.state == IN_PROGRESS and self.has_lapsed(row)
            if lapsed or (row.state == INDETERMINATE and free and actor.seen != now):
                taken, violation = self._become_reconciler(system, number)
                looking = self.move(taken, number, at=LOOK_UP, seen=None, past_deadline=False)
                yield Step(f"job: takes what is {row.state}", looking, violation)
        elif actor.at == LOOK_UP:
            yield from self._look_up(system, number, "job")
        elif actor.at == VERDICT:
            found, due = actor.seen
            if row is None or row.state != INDETERMINATE or row.reconciler != number:
                yield Step("job: verdict: overtaken", self.move(system, number, at=START, seen=None))
            elif found == "found":
                kept = row._replace(state=SUCCEEDED, answer=actor.answer, reconciler=None, expired=False)
                done = self.move(system._replace(row=kept), number, at=START, seen=None)
                yield Step("job: verdict: it happened, completed", done)
            elif self._may_run_again(row, due):
                freed = system._replace(row=self.release_row(row))
                yield Step("job: verdict: it did not happen, released", self.move(freed, number, at=START, seen=None))
            else:
                seen = (row.fence, due, row.window_over, system.world.charges)
                pending = system._replace(row=row._replace(reconciler=None))
                yield Step("job: verdict: pending", self.move(pending, number, at=START, seen=seen))

    # -- the view ----------------------------------------------------------------------------------------------------

    def _view(self, system: System, number: int, actor: Actor, me: str) -> Steps:
        row = system.row
        deadline = actor.past_deadline and self.on("local_deadline")
        forgotten = actor.attempt > 1 and row is not None and row.window_over and self.on("window")
        if deadline or forgotten:
            ended = system
            if row is not None and self.is_mine(row, number):
                ended = system._replace(row=row._replace(state=INDETERMINATE, lease=LIVE, settle_due=False))
            told = self.move(ended, number, at=GIVE_BACK, told=("unknown",))
            yield Step(f"{me}: provider_key() raises: {'the lease' if deadline else 'the window'} is over", told)
            return
        lost = row is None or row.token != number or row.state != IN_PROGRESS or row.lease == LAPSED
        yield Step(
            f"{me}: provider_key()",
            self.move(system, number, at=EFFECT),
            "KEY-AFTER-LAPSE: a key is handed out without a lease" if lost and not system.world.excuse else None,
        )
        if self.allows(system, "nothing"):
            yield Step(f"{me}: the view did nothing", self.move(self.after(system, "nothing"), number, at=NOTHING))

    def _call_the_provider(self, system: System, number: int, me: str) -> Steps:
        world, called = system.world, system
        if KEY not in world.remembered or not self.deduplicates:
            called = self.change_world(system, charges=world.charges + 1, remembered=frozenset((KEY,)))
        second = called.world.charges > max(1, world.charges) and not world.excuse
        violation = "SECOND-CHARGE: the provider was charged twice" if second else None
        answer = f"C{called.world.charges if self.deduplicates else 1}"
        then = COMPLETE if self.on("sql_first") else COPY
        yield Step(f"{me}: calls the provider", self.move(called, number, at=then, answer=answer), violation)
        if self.allows(system, "timeout"):
            unsure = self.move(self.after(called, "timeout"), number, at=NOT_KEPT, answer=answer)
            yield Step(f"{me}: the provider does it, the call times out, the view answers 502", unsure, violation)

    def _not_kept(self, system: System, number: int, me: str) -> Step:
        row, ended = system.row, system
        what = "indeterminate" if self.on("transient_ind") else "released"
        if row is not None and self.is_mine(row, number):
            unknown = row._replace(state=INDETERMINATE, lease=LIVE, settle_due=False)
            ended = system._replace(row=unknown if self.on("transient_ind") else self.release_row(row))
        return Step(
            f"{me}: an answer that is not kept: {what}", self.move(ended, number, at=GIVE_BACK, told=("unknown",))
        )

    # -- completion --------------------------------------------------------------------------------------------------

    def _complete(self, system: System, number: int, actor: Actor, me: str) -> Steps:
        row = system.row
        late = []
        if row is not None and row.attempt == actor.attempt:
            late = [INDETERMINATE] * self.on("late_ind") + [RELEASED] * self.on("late_rel")
        ours = row is not None and row.token == number and row.state == SUCCEEDED
        if row is not None and ours and row.answer == UNREADABLE:
            yield Step(
                f"{me}: SQL: was completed, and can't be read",
                self.move(system, number, at=GIVE_BACK, told=("unavailable",)),
            )
        elif row is not None and ours and self.on("complete_own"):
            answer = row.answer if self.on("stored_bytes") else actor.answer
            yield Step(
                f"{me}: SQL: was completed already", self.move(system, number, at=COPY, told=("own",), answer=answer)
            )
        elif row is not None and self.is_mine(row, number, (IN_PROGRESS, *late)):
            kept = row._replace(state=SUCCEEDED, answer=actor.answer, lease=LIVE, reconciler=None, expired=False)
            violation = self.final_changed(row, kept)
            if row.answer and row.state == IN_PROGRESS:
                violation = violation or "OLD-ANSWER: the completion meets the answer of an expired record"
            done = self.move(system._replace(row=kept), number, at=COPY, told=("own",))
            yield Step(f"{me}: SQL: completed, from {row.state}", done, violation)
            if self.allows(system, "lost reply"):
                lost = self.move(self.after(done, "lost reply"), number, told=None)
                again = self.move(lost, number, at=COMPLETE)
                yield Step(f"{me}: SQL: completed, its reply is lost; sent again", again, violation)
                yield Step(
                    f"{me}: SQL: completed, its reply is lost; gives up", self.move(lost, number, at=NET), violation
                )
        else:
            yield self._fenced_out(system, number, actor, me)
        if self.allows(system, "SQL away"):
            away = self.after(system, "SQL away")
            if self.on("outage"):
                yield Step(f"{me}: SQL stays away at the completion", self.move(away, number, at=NET))
            else:
                careless = self.move(away, number, at=COPY, told=("own",))
                yield Step(f"{me}: SQL stays away at the completion, answers all the same", careless)

    def _fenced_out(self, system: System, number: int, actor: Actor, me: str) -> Step:
        row, dropped = system.row, False
        told: tuple[str, ...] = ("denied",)
        if row is not None:
            known = row.attempt == actor.attempt or system.actors[row.token].told == ("never ran",)
            dropped = row.state in (INDETERMINATE, RELEASED) and not system.world.excuse and known
            if row.state == SUCCEEDED and row.token != number and self.likeness(row, actor) is None:
                told = ("answered", str(row.answer))
        wrong = "OUTCOME-DROPPED: a known outcome is thrown away" if dropped else None
        return self.lose(system, number, told, f"{me}: SQL: fenced out", wrong)

    def end(self, system: System) -> str | None:
        row = system.row
        if row is not None and any(actor.role == JOB for actor in system.actors):
            if row.state == IN_PROGRESS:
                return "STUCK: in progress for ever"
            if row.state == INDETERMINATE and not row.window_over:
                return "STUCK: unknown, though the provider could tell"
        if row is None and system.world.charges and not system.world.excuse:
            return "LOST-OUTCOME: charged, and there is no record"
        return super().end(system)
