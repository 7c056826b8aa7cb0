"""``durable="transaction"``: key, effect and answer are committed together, or not at all."""

from .durable import Durable
from .vocabulary import (
    ASK_HOLDER,
    ASK_ROW,
    ASK_SQL,
    COMMIT,
    COMMIT_APART,
    COMMIT_BROKE,
    COPY,
    DONE,
    GIVE_BACK,
    IN_PROGRESS,
    SUCCEEDED,
    UNDO,
    VIEW,
    WRITE_BACK,
    Actor,
    Record,
    Step,
    Steps,
    System,
)


class Transaction(Durable):
    """The row is inserted in the view's own transaction, which is open while the view runs. Until the commit nobody
    sees it, and whoever would insert the same key is told that it is in progress."""

    def request(self, system: System, number: int, actor: Actor) -> Steps:
        yield from super().request(system, number, actor)
        me = f"p{number}"
        if actor.at == ASK_ROW:
            yield self._ask_row(system, number, actor, me)
        elif actor.at == ASK_HOLDER:
            yield self._ask_holder(system, number, actor, me)
        elif actor.at == ASK_SQL:
            yield from self._claim(system, number, actor, me)
        elif actor.at == VIEW:
            yield Step(f"{me}: the view runs", self.move(system, number, at=COMMIT, answer=f"E{number}"))
        elif actor.at == COMMIT:
            yield from self._commit(system, number, actor, me)
        elif actor.at == UNDO:
            yield self._claim_anew(system, number, actor, me)
        elif actor.at == COMMIT_APART:
            kept = system._replace(row=self._kept(system, number, actor))
            yield Step(f"{me}: COMMIT of the record", self.move(kept, number, at=COPY, told=("own",)))
        elif actor.at == COMMIT_BROKE:
            yield from self._read_back(system, number, actor, me)

    def doubt(self, system: System, number: int, actor: Actor, verdict: str, me: str) -> Steps:
        record = system.redis
        assert record is not None
        open_and_live = record.state == IN_PROGRESS and not self.has_lapsed(record)
        seen = (verdict, record.token, open_and_live)
        yield Step(
            f"{me}: Redis: {verdict}, of an open record: ask for the committed row",
            self.move(system, number, at=ASK_ROW, seen=seen),
        )

    def _ask_row(self, system: System, number: int, actor: Actor, me: str) -> Step:
        """A committed row decides. Without one the holder in Redis is asked for; and if its lease is over, a claim
        decides."""
        _, _, live = actor.seen
        says = None if system.row is None else self.row_says(system.row, number, actor)
        if says == "take":
            return Step(f"{me}: the row may be replaced", self.move(system, number, at=ASK_SQL, seen=None))
        if says is not None:
            told = ("answered", str(system.row.answer)) if says == "replay" and system.row is not None else (says,)
            answered, violation = self.answer(system, number, told)
            return Step(f"{me}: the committed row says {says}", answered, violation)
        if self.on("open_holder") and not live:
            return Step(f"{me}: no row, and a lapsed holder: claims", self.move(system, number, at=ASK_SQL, seen=None))
        return Step(f"{me}: no row is committed: asks for the holder", self.move(system, number, at=ASK_HOLDER))

    def _ask_holder(self, system: System, number: int, actor: Actor, me: str) -> Step:
        """The refusal stands if the open transaction is the one of the record in Redis; else the duplicate is told that
        the key is in progress."""
        verdict, token, _ = actor.seen
        holder = system.actors[token]
        is_open = holder.at == COMMIT or holder.commit_in_flight
        told = (verdict,) if is_open or not self.on("open_holder") else ("in progress",)
        answered, violation = self.answer(system, number, told)
        if told[0] == verdict:
            violation = violation or self.wrong_refusal(system, number, verdict)
        return Step(
            f"{me}: p{token}'s transaction is {'open' if is_open else 'not open'}: told {told[0]}", answered, violation
        )

    def _sql_says(self, system: System, number: int, actor: Actor) -> str:
        """What an INSERT of the row meets."""
        others = (other for n, other in enumerate(system.actors) if n != number)
        if self.on("insert_in_tx") and any(other.at == COMMIT or other.commit_in_flight for other in others):
            return "in progress"
        return "take" if system.row is None else self.row_says(system.row, number, actor)

    def _claim_anew(self, system: System, number: int, actor: Actor, me: str) -> Step:
        """The work was taken back, and its answer is kept: who came in between wins."""
        row, says = system.row, self._sql_says(system, number, actor)
        if says == "take":
            fence = self.next_fence(system, row.fence if row is not None else 0)
            new = Record(IN_PROGRESS, actor.principal, actor.body, number, fence)
            granted, violation = self.grant(system, number, new, row)
            return Step(
                f"{me}: SQL: its row again, for the answer alone", self.move(granted, number, at=COMMIT), violation
            )
        told = ("answered", str(row.answer)) if row is not None and says == "replay" else ("denied",)
        return self.lose(system, number, told, f"{me}: SQL: {says}, another came in between")

    def _claim(self, system: System, number: int, actor: Actor, me: str) -> Steps:
        row, says = system.row, self._sql_says(system, number, actor)
        if says == "take":
            fence = self.next_fence(system, row.fence if row is not None else 0)
            new = Record(IN_PROGRESS, actor.principal, actor.body, number, fence)
            granted, violation = self.grant(system, number, new, row)
            if actor.attempt:
                violation = violation or "RAN-AGAIN: one request runs its view twice"
            opened = self.move(granted, number, at=COMMIT, attempt=1, answer=f"E{number}")
            yield Step(f"{me}: SQL: its row, in the view's own transaction", opened, violation)
        elif says == "replay":
            assert row is not None
            yield Step(
                f"{me}: SQL: replay", self.move(system, number, at=WRITE_BACK, answer=row.answer, attempt=row.attempt)
            )
        else:
            yield Step(f"{me}: SQL: {says}", self.move(system, number, at=GIVE_BACK, told=(says,)))
        if self.allows(system, "SQL away"):
            away = self.move(self.after(system, "SQL away"), number, at=GIVE_BACK, told=("503",))
            yield Step(f"{me}: SQL is away at the claim", away)

    def _kept(self, system: System, number: int, actor: Actor) -> Record:
        fence = system.world.highest_fence
        return Record(SUCCEEDED, actor.principal, actor.body, number, fence, answer=actor.answer)

    def _commit(self, system: System, number: int, actor: Actor, me: str) -> Steps:
        row, world = system.row, system.world
        excuse = "expired" if row is not None and row.expired else world.excuse
        works = actor.answer == f"E{number}"  # else the work was taken back
        done = self.change_world(system, effects=world.effects + works, excuse=excuse)
        violation = "SECOND-EFFECT: the work was done twice" if done.world.effects > 1 and not excuse else None
        if not (self.on("insert_in_tx") and self.on("sql_decides")):
            apart = self.change_world(system, effects=world.effects + 1)
            yield Step(f"{me}: COMMIT of the effect alone", self.move(apart, number, at=COMMIT_APART), violation)
        else:
            both = done._replace(row=self._kept(system, number, actor))
            yield Step(f"{me}: COMMIT", self.move(both, number, at=COPY, told=("own",)), violation)
            if self.allows(system, "lost reply"):
                lost = self.move(self.after(both, "lost reply"), number, at=COMMIT_BROKE)
                yield Step(f"{me}: COMMIT applied, its reply is lost", lost, violation)
            if self.allows(system, "slow commit"):
                sent = self.move(self.after(system, "slow commit"), number, at=COMMIT_BROKE, commit_in_flight=True)
                yield Step(f"{me}: COMMIT is sent, the connection breaks while the server is at it", sent)
            if self.allows(system, "commit fails"):
                failed = self.move(self.after(system, "commit fails"), number, at=COMMIT_BROKE)
                yield Step(f"{me}: COMMIT fails, nothing applied", failed)
        if works and self.allows(system, "undo"):
            undone = self.move(self.after(system, "undo"), number, at=UNDO, answer=f"U{number}")
            yield Step(f"{me}: the view raises, a handler's answer is kept: the work is rolled back", undone)
        if self.allows(system, "transient"):
            back = self.move(self.after(system, "transient"), number, at=GIVE_BACK, told=("503",))
            yield Step(f"{me}: the view fails for now, all rolled back", back)

    def late_commit(self, system: System, number: int, actor: Actor) -> Step:
        """The server ends what was sent on a connection that broke."""
        row, world = system.row, system.world
        excuse = "expired" if row is not None and row.expired else world.excuse
        done = self.change_world(system, effects=world.effects + (actor.answer == f"E{number}"), excuse=excuse)
        kept = self.move(done._replace(row=self._kept(system, number, actor)), number, commit_in_flight=False)
        told = actor.told is not None and actor.told[0] == "503"
        return Step(
            f"p{number}'s COMMIT is applied after all",
            kept,
            "FALSE-503: told that nothing was committed, yet it is" if told else None,
        )

    def _read_back(self, system: System, number: int, actor: Actor, me: str) -> Steps:
        row = system.row
        ours = row is not None and row.token == number and row.state == SUCCEEDED
        if actor.commit_in_flight and self.on("readback_waits"):
            unknown = self.move(system, number, at=DONE, told=("nobody knows",))
            yield Step(f"{me}: reads back: the server is still at it", unknown)
            return
        if ours and self.on("readback"):
            yield Step(f"{me}: reads back: committed", self.move(system, number, at=COPY, told=("own",)))
        elif not ours and not self.on("never_rerun"):
            yield Step(f"{me}: runs the view again", self.move(system, number, at=ASK_SQL))
        else:
            yield Step(
                f"{me}: reads back: not committed",
                self.move(system, number, at=GIVE_BACK, told=("503",)),
                "FALSE-503: told that nothing was committed, yet it is" if ours else None,
            )
        if self.allows(system, "SQL away"):
            unknown = self.move(self.after(system, "SQL away"), number, at=DONE, told=("nobody knows",))
            yield Step(f"{me}: cannot read back: no claim either way, Redis is left to lapse", unknown)
