"""The Lua scripts, each one step."""

from .base import Protocol
from .vocabulary import IN_PROGRESS, LIVE, RELEASED, SUCCEEDED, UNREADABLE, Actor, Record, System


class RedisScripts(Protocol):
    """What `claim`, `complete` and `release` do to the one record in Redis."""

    def redis_claim(self, system: System, number: int, actor: Actor) -> tuple[System, str, str | None]:
        """``claim.lua``: the system after it, its verdict, and what is wrong with it."""
        record = system.redis
        if record is not None and record.answer == UNREADABLE and self.on("unreadable"):
            return system, "unavailable", None
        if record is None or record.answer == UNREADABLE:
            return self._write_claim(system, number, actor, None)
        if record.token == number and record.state == IN_PROGRESS and self.on("claim_twice"):
            return system, "claimed", None
        if record.token == number and record.state == RELEASED and self.on("dead_token"):
            return system, "over", None
        likeness = self.likeness(record, actor)
        if likeness is not None:
            taken = record.state == RELEASED or (record.state == IN_PROGRESS and self.has_lapsed(record))
            if self.on("fp_bound") or not taken:
                return system, likeness, None
        if record.state == SUCCEEDED:
            return system, "replay", None
        if record.state == IN_PROGRESS and not self.has_lapsed(record):
            return system, "in progress", None
        return self._write_claim(system, number, actor, record)

    def _write_claim(
        self, system: System, number: int, actor: Actor, old: Record | None
    ) -> tuple[System, str, str | None]:
        attempt = old.attempt + 1 if old is not None else 1
        new = Record(IN_PROGRESS, actor.principal, actor.body, number, attempt=attempt)
        violation = None
        if not self.durable:  # else the database grants, and numbers
            new = new._replace(fence=self.next_fence(system, old.fence if old is not None else 0))
            system, violation = self.grant(system, number, new, old)
        return self.write_redis(system, new), "claimed", violation

    def redis_complete(self, system: System, number: int, answer: str) -> tuple[System, bool]:
        """``complete.lua``: whether the answer is kept, now or before."""
        record = system.redis
        if record is not None and self.is_mine(record, number):
            kept = record._replace(state=SUCCEEDED, answer=answer, lease=LIVE, confirmed=True)
            return self.write_copy(system, kept), True
        ours = record is not None and record.token == number and record.state == SUCCEEDED
        return system, ours and self.on("complete_own")

    def write_copy(self, system: System, record: Record) -> System:
        """A copy of a row carries the row's own expiry: where that is past, there is none."""
        gone = record.answer in system.world.expired_answers and self.on("copy_until")
        return self.write_redis(system, None if gone else record)

    def redis_release(self, system: System, number: int) -> System:
        """``release.lua``. On durable routes it leaves nothing: the row alone binds the key."""
        record = system.redis
        if record is None or not self.is_mine(record, number):
            return system
        forget = self.durable and self.on("giveback_deletes")
        return self.write_redis(
            system, None if forget else record._replace(state=RELEASED, lease=LIVE, answer=None, confirmed=False)
        )
