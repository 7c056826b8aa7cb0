"""Routes whose records are in Redis alone."""

from .redis_scripts import RedisScripts
from .vocabulary import (
    COMPLETE,
    DONE,
    GUARD,
    NET,
    NOT_KEPT,
    RELEASED,
    START,
    SUCCEEDED,
    VIEW,
    Actor,
    Step,
    Steps,
    System,
)


class RedisOnly(RedisScripts):
    durable = False

    def request(self, system: System, number: int, actor: Actor) -> Steps:
        me = f"p{number}"
        if actor.at == START:
            yield from self._claim(system, number, actor, me)
        elif actor.at == GUARD:
            given_back = system
            if system.redis is not None and self.is_mine(system.redis, number):
                given_back = self.write_redis(system, system.redis._replace(state=RELEASED))
            left = given_back.redis != actor.seen
            yield Step(
                f"{me}: its guard refuses, it gives back",
                self.move(given_back, number, at=DONE, told=("refused",), seen=None),
                "LEFT-SOMETHING: a guard refused, yet the record changed" if left else None,
            )
        elif actor.at == VIEW:
            ran = self.change_world(system, effects=system.world.effects + 1)
            second = ran.world.effects > 1 and not system.world.excuse
            yield Step(
                f"{me}: the view has its effect",
                self.move(ran, number, at=COMPLETE, answer=f"E{number}"),
                "SECOND-EFFECT: the work was done twice" if second else None,
            )
            if self.allows(system, "transient"):
                failed = self.after(system, "transient")
                yield Step(f"{me}: the view fails for now, without effect", self.move(failed, number, at=NOT_KEPT))
        elif actor.at == NOT_KEPT:
            released = self.redis_release(system, number)
            yield Step(f"{me}: release", self.move(released, number, at=DONE, told=("503",)))
            if self.allows(system, "lost reply"):
                yield Step(f"{me}: release applied, its reply is lost", self.after(released, "lost reply"))
        elif actor.at == COMPLETE:
            yield from self._complete(system, number, actor, me)
        elif actor.at == NET:
            ended = system if self.on("kept") else self.redis_release(system, number)
            what = "leaves it" if self.on("kept") else "releases"
            yield Step(f"{me}: the net {what}", self.move(ended, number, at=DONE, told=("unknown",)))

    def _claim(self, system: System, number: int, actor: Actor, me: str) -> Steps:
        after, verdict, violation = self.redis_claim(system, number, actor)
        if self.allows(system, "guard"):
            if self.on("after_guards"):
                refused = self.move(self.after(system, "guard"), number, at=DONE, told=("refused",))
                yield Step(f"{me}: its guard refuses, before any claim", refused)
            elif verdict == "claimed":
                early = self.move(self.after(after, "guard"), number, at=GUARD, seen=system.redis)
                yield Step(f"{me}: claims before its guards ran", early, violation)
        if verdict != "claimed":
            kept = system.redis.answer if system.redis is not None else None
            told = ("answered", str(kept)) if verdict == "replay" else (verdict,)
            answered, wrong = self.answer(after, number, told)
            yield Step(f"{me}: claim says {verdict}", answered, violation or wrong)
            return
        yield Step(f"{me}: claimed", self.move(after, number, at=VIEW), violation)
        if self.allows(system, "lost reply"):
            yield Step(f"{me}: claim applied, its reply is lost", self.after(after, "lost reply"), violation)
        if self.allows(system, "stray"):
            stray = self.move(self.after(after, "stray"), number, at=VIEW, stray_claim=True)
            yield Step(f"{me}: claimed; an earlier copy of the claim is still on its way", stray, violation)

    def _complete(self, system: System, number: int, actor: Actor, me: str) -> Steps:
        if self.allows(system, "full") and not self.on("allow_oom"):
            refused = self.move(self.after(system, "full"), number, at=DONE, told=("unknown",))
            yield Step(f"{me}: complete is refused, Redis is full", refused)
        assert actor.answer is not None
        after, kept = self.redis_complete(system, number, actor.answer)
        record = system.redis
        if kept or record is None:  # nothing is there: the view's own answer, not kept
            told: tuple[str, ...] = ("answered", actor.answer)
        elif record.state == SUCCEEDED and record.token != number:
            told = ("answered", str(record.answer))
        else:
            told = ("denied",)
        answered, wrong = self.answer(after, number, told)
        yield Step(f"{me}: complete, told {' '.join(told)}", answered, wrong)
        if self.allows(system, "lost reply"):
            again = self.after(after, "lost reply")
            yield Step(f"{me}: complete applied, its reply is lost; sent again", again)
            yield Step(f"{me}: complete applied, its reply is lost; gives up", self.move(again, number, at=NET))
        if self.allows(system, "Redis away"):
            # Documented: the claim lapses, and the work can run again.
            excuse = "away" if self.on("kept") else system.world.excuse
            away = self.change_world(self.after(system, "Redis away"), excuse=excuse)
            yield Step(f"{me}: complete fails, Redis is away", self.move(away, number, at=NET))
