"""Redis in front of a database: it answers what is sure, and the database decides the rest."""

from .redis_scripts import RedisScripts
from .vocabulary import (
    ASK_SQL,
    COMPLETE,
    COPY,
    DONE,
    FORGET_REDIS,
    GIVE_BACK,
    GUARD,
    IN_PROGRESS,
    INDETERMINATE,
    RELEASED,
    START,
    SUCCEEDED,
    UNASKED,
    UNREADABLE,
    VIEW,
    WRITE_BACK,
    Actor,
    Record,
    Step,
    Steps,
    System,
    finished,
)


class Durable(RedisScripts):
    """What `transaction` and `intent` share: a claim passes Redis first, and what SQL keeps is copied to Redis."""

    def request(self, system: System, number: int, actor: Actor) -> Steps:
        me = f"p{number}"
        if actor.at == START:
            yield from self._claim_in_front(system, number, actor, me)
        elif actor.at == GUARD:
            given_back = self.redis_release(system, number)
            yield Step(
                f"{me}: its guard refuses, it gives back",
                self.move(given_back, number, at=DONE, told=("refused",), seen=None),
                "LEFT-SOMETHING: a guard refused, yet the record changed" if given_back.redis != actor.seen else None,
            )
        elif actor.at == UNASKED:
            guess = Record(IN_PROGRESS, actor.principal, actor.body, number, fence=system.world.highest_fence + 1)
            granted, violation = self.grant(system, number, guess, system.row)
            ran = self.change_world(granted, highest_fence=system.world.highest_fence)
            yield Step(
                f"{me}: trusts Redis and runs without asking SQL",
                self.move(ran, number, at=VIEW, attempt=1),
                violation,
            )
        elif actor.at == GIVE_BACK:
            assert actor.told is not None
            given_back = self.redis_release(system, number) if actor.fronted else system
            answered, violation = self.answer(given_back, number, actor.told)
            yield Step(f"{me}: gives back in Redis, told {actor.told[0]}", answered, violation)
        elif actor.at == WRITE_BACK:
            yield self._write_back(system, number, actor, me)
        elif actor.at == COPY:
            assert actor.answer is not None
            copied, _ = self.redis_complete(system, number, actor.answer)
            if not self.on("sql_first") and actor.told is None:
                yield Step(f"{me}: keeps it in Redis, before SQL", self.move(copied, number, at=COMPLETE, told=("-",)))
            else:
                answered, violation = self.answer(copied, number, ("answered", actor.answer))
                yield Step(f"{me}: copies to Redis, and answers", answered, violation)

    # -- in front ----------------------------------------------------------------------------------------------------

    def _claim_in_front(self, system: System, number: int, actor: Actor, me: str) -> Steps:
        after, verdict, violation = self.redis_claim(system, number, actor)
        if self.allows(system, "guard"):
            if self.on("after_guards"):
                refused = self.move(self.after(system, "guard"), number, at=DONE, told=("refused",))
                yield Step(f"{me}: its guard refuses, before any claim", refused)
            elif verdict == "claimed":
                early = self.move(self.after(after, "guard"), number, at=GUARD, seen=system.redis)
                yield Step(f"{me}: claims before its guards ran", early, violation)
        if verdict == "claimed":
            then = ASK_SQL if self.on("sql_decides") else UNASKED
            yield Step(f"{me}: Redis: claimed", self.move(after, number, at=then, fronted=True))
        elif verdict == "replay":
            assert system.redis is not None
            answered, wrong = self.answer(after, number, ("answered", str(system.redis.answer)))
            yield Step(f"{me}: Redis: replay", answered, violation or self._replay_is_wrong(system) or wrong)
        elif verdict in ("foreign", "mismatch") and self._is_doubtful(system.redis):
            yield from self.doubt(system, number, actor, verdict, me)
        else:
            answered, wrong = self.answer(after, number, (verdict,))
            yield Step(f"{me}: Redis: {verdict}", answered, violation or wrong)
        if self.allows(system, "Redis away"):
            away = self.move(self.after(system, "Redis away"), number, at=ASK_SQL)
            yield Step(f"{me}: Redis is away, ask SQL", away)

    def _is_doubtful(self, record: Record | None) -> bool:
        """Whether a refusal by this record is Redis' own: nobody committed it."""
        return self.on("confirmed") and not (finished(record) and record is not None and record.confirmed)

    def doubt(self, system: System, number: int, actor: Actor, verdict: str, me: str) -> Steps:
        """Redis refuses by a record that isn't a copy of a committed one."""
        yield Step(f"{me}: Redis: {verdict}, but unconfirmed: ask SQL", self.move(system, number, at=ASK_SQL))

    def _replay_is_wrong(self, system: System) -> str | None:
        row, copy = system.row, system.redis
        forgetting = any(actor.at == FORGET_REDIS for actor in system.actors)
        if forgetting or copy is None:
            return None
        if row is None:
            return "REPLAY-WITHOUT-ROW: Redis replays what SQL no longer has"
        if row.state != SUCCEEDED or row.answer != copy.answer:
            return "WRONG-REPLAY: Redis replays what SQL does not hold"
        return None

    def _write_back(self, system: System, number: int, actor: Actor, me: str) -> Step:
        """A replay from SQL is copied to Redis, through one's own claim only."""
        mine = actor.fronted and self.is_mine(system.redis, number)
        careless = not self.on("cas_token") and not finished(system.redis)
        if mine or careless:
            copy = Record(SUCCEEDED, actor.principal, actor.body, number, answer=actor.answer, confirmed=True)
            system = self.write_copy(system, copy)
        answered, violation = self.answer(system, number, ("answered", str(actor.answer)))
        return Step(f"{me}: writes the replay back to Redis", answered, violation)

    def lose(self, system: System, number: int, told: tuple[str, ...], label: str, wrong: str | None = None) -> Step:
        """SQL says that the claim is lost."""
        if self.on("lost_gives_back"):
            return Step(label, self.move(system, number, at=GIVE_BACK, told=told), wrong)
        held = system.redis is not None and system.redis.token == number and system.redis.state == IN_PROGRESS
        answered, violation = self.answer(system, number, told)
        left = "LEFT-IN-FRONT: a claim that is lost stays open in Redis" if held else None
        return Step(label, answered, wrong or violation or left)

    # -- the row -----------------------------------------------------------------------------------------------------

    #: A released row ends as a finished one does.
    released_expires = True

    def is_over(self, row: Record) -> bool:
        """Whether the row's life is over, as if it was never there."""
        if not row.expired:
            return False
        if finished(row) or not self.on("expiry_final"):
            return True
        return row.state == RELEASED and (self.released_expires or not self.on("rel_no_expiry"))

    def row_says(self, row: Record, number: int, actor: Actor) -> str:
        """What a committed row says to a claim; ``take`` where it may be taken, replaced or settled."""
        if row.answer == UNREADABLE:
            return "unavailable" if self.on("unreadable") else "take"
        if row.token == number and row.state == IN_PROGRESS and self.on("claim_twice"):
            return "own claim"
        if row.reconciler == number and row.state == INDETERMINATE and self.on("claim_twice"):
            return "own look-up"
        if self.is_over(row):
            return "take"
        likeness = self.likeness(row, actor)
        if likeness is not None:
            free = row.state == RELEASED or (row.state == IN_PROGRESS and self.has_lapsed(row))
            if self.on("fp_bound") or not free:
                return likeness
        if row.state == SUCCEEDED:
            return "replay"
        if row.token == number and row.state == RELEASED and self.on("dead_token"):
            return "over"
        if row.state == INDETERMINATE:
            return "take" if self.may_settle(row) else "unknown"
        if row.state == IN_PROGRESS and not self.has_lapsed(row):
            return "in progress"
        return "take"

    def may_settle(self, row: Record) -> bool:
        """Whether a retry may look up what became of an unknown outcome."""
        return False

    def end(self, system: System) -> str | None:
        row, copy = system.row, system.redis
        if copy is None or row is None or row.expired or copy.state != RELEASED:
            return None
        same = (copy.principal, copy.body) == (row.principal, row.body)
        return None if same else "POISONED: Redis stays bound to another request"
