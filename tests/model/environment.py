"""What goes wrong: time, processes, servers, the provider. Each fault strikes as often as the budget says."""

from .base import Protocol
from .redis_scripts import RedisScripts
from .transaction import Transaction
from .vocabulary import (
    COMPENSATING,
    COMPLETE,
    DEAD,
    DISPUTED,
    EFFECT,
    IN_PROGRESS,
    INDETERMINATE,
    JOB,
    LAPSED,
    LIVE,
    NET,
    OPERATOR,
    OVER,
    START,
    SUCCEEDED,
    SWEEP,
    UNREADABLE,
    Actor,
    Step,
    Steps,
    System,
    finished,
)


def environment(protocol: Protocol, system: System) -> Steps:
    """Every turn that the world may take now."""
    yield from _leases(protocol, system)
    yield from _clocks_and_damage(protocol, system)
    yield from _redis_forgets(protocol, system)
    yield from _lives_end(protocol, system)
    for number, actor in enumerate(system.actors):
        if actor.commit_in_flight and isinstance(protocol, Transaction):
            yield protocol.late_commit(system, number, actor)
        if actor.stray_claim and isinstance(protocol, RedisScripts):
            after, verdict, violation = protocol.redis_claim(system, number, actor)
            if after.redis != system.redis and actor.at in OVER:
                violation = "PHANTOM: an old copy of a claim takes the record, nobody holds it"
            arrived = protocol.move(after, number, stray_claim=False)
            yield Step(f"the old copy of p{number}'s claim arrives: {verdict}", arrived, violation)


def crash(protocol: Protocol, system: System, number: int, actor: Actor) -> Steps:
    """A process dies. Another job follows a dead one."""
    if actor.at == START or actor.role in (OPERATOR, SWEEP) or not protocol.allows(system, "crash"):
        return
    crashed = protocol.after(system, "crash")
    if not protocol.durable and actor.at in (COMPLETE, NET):
        crashed = protocol.change_world(crashed, excuse="crash")
    name, then = ("job", START) if actor.role == JOB else (f"p{number}", DEAD)
    answer = actor.answer if actor.commit_in_flight else None
    gone = protocol.move(crashed, number, at=then, seen=None, answer=answer, fronted=False)
    yield Step(f"{name} CRASHES ({actor.at})", gone)


def _is_alive(system: System, number: int) -> bool:
    actor = system.actors[number]
    return actor.at not in OVER and not (actor.role == JOB and actor.at == START)


def _leases(protocol: Protocol, system: System) -> Steps:
    redis, row = system.redis, system.row
    if row is not None and row.lease < LAPSED:
        holder = row.token if row.state == IN_PROGRESS else None
        if row.state in (INDETERMINATE, COMPENSATING):
            holder = row.reconciler
        if holder is not None:
            yield from _row_lease_ends(protocol, system, holder)
    if redis is not None and redis.state == IN_PROGRESS and redis.lease < LAPSED:
        lapsed = redis._replace(lease=LAPSED)
        if not _is_alive(system, redis.token):
            yield Step("the lease in Redis lapses, its holder is gone", system._replace(redis=lapsed))
        elif not protocol.settles and protocol.allows(system, "pause"):
            paused = protocol.move(
                protocol.after(system, "pause")._replace(redis=lapsed), redis.token, past_deadline=True
            )
            excused = paused if protocol.durable else protocol.change_world(paused, excuse="pause")
            yield Step(f"p{redis.token} PAUSES past its lease", excused)
        elif protocol.durable and protocol.allows(system, "heartbeat"):
            missed = protocol.after(system, "heartbeat")._replace(redis=lapsed)
            yield Step(f"p{redis.token}'s heartbeat fails in Redis", missed)
    if row is not None and row.lease and protocol.allows(system, "late renewal"):
        if row.state != IN_PROGRESS or not _is_alive(system, row.token):
            return
        renewed = protocol.after(system, "late renewal")._replace(row=row._replace(lease=LIVE))
        yield Step(f"p{row.token}'s heartbeat renews late", protocol.move(renewed, row.token, past_deadline=False))


def _row_lease_ends(protocol: Protocol, system: System, holder: int) -> Steps:
    redis, row = system.redis, system.row
    assert row is not None
    lapsed = row._replace(lease=LAPSED)
    if not _is_alive(system, holder):
        yield Step("the lease in SQL lapses, its holder is gone", system._replace(row=lapsed))
        return
    name = "the job" if system.actors[holder].role == JOB else f"p{holder}"
    if protocol.allows(system, "pause"):
        paused = protocol.move(protocol.after(system, "pause")._replace(row=lapsed), holder, past_deadline=True)
        if redis is not None and redis.state == IN_PROGRESS and redis.token == holder:
            paused = paused._replace(redis=redis._replace(lease=LAPSED))
        yield Step(f"{name} PAUSES past its lease", paused)
    if protocol.allows(system, "heartbeat"):
        missed = protocol.after(system, "heartbeat")._replace(row=lapsed)
        knows = protocol.on("sql_is_lease")
        yield Step(
            f"{name}'s heartbeat fails in SQL, and goes through in Redis",
            protocol.move(missed, holder, past_deadline=knows),
        )


def _clocks_and_damage(protocol: Protocol, system: System) -> Steps:
    redis, row = system.redis, system.row
    if protocol.allows(system, "skew"):
        ahead = protocol.after(system, "skew")
        if redis is not None and redis.state == IN_PROGRESS and redis.lease == LIVE:
            early = ahead._replace(redis=redis._replace(lease=DISPUTED))
            yield Step("the clock of Redis is ahead by less than the skew", early)
        if row is not None and row.state == IN_PROGRESS and row.lease == LIVE:
            early = ahead._replace(row=row._replace(lease=DISPUTED))
            yield Step("the clock of SQL is ahead by less than the skew", early)
    if protocol.allows(system, "damage"):
        damaged = protocol.after(system, "damage")
        if protocol.durable and row is not None and row.state == SUCCEEDED and row.answer != UNREADABLE:
            yield Step("the row becomes unreadable", damaged._replace(row=row._replace(answer=UNREADABLE), redis=None))
        if not protocol.durable and redis is not None and redis.state == SUCCEEDED and redis.answer != UNREADABLE:
            yield Step("the record becomes unreadable", damaged._replace(redis=redis._replace(answer=UNREADABLE)))


def _redis_forgets(protocol: Protocol, system: System) -> Steps:
    redis = system.redis
    if redis is not None and protocol.allows(system, "flush"):
        flushed = protocol.after(system, "flush")._replace(redis=None, replica=None)
        yield Step("Redis is FLUSHED", flushed if protocol.durable else protocol.change_world(flushed, excuse="flush"))
    if redis != system.replica and protocol.allows(system, "failover"):
        over = protocol.after(system, "failover")._replace(redis=system.replica)
        yield Step(
            "Redis FAILS OVER and loses its last write",
            over if protocol.durable else protocol.change_world(over, excuse="failover"),
        )
    if redis is None or not protocol.allows(system, "key expires"):
        return
    if redis.state != IN_PROGRESS or not protocol.on("open_ttl"):
        gone = protocol.after(system, "key expires")._replace(redis=None)
        documented = not protocol.durable and redis.state == SUCCEEDED
        yield Step("PEXPIRE takes the key away", protocol.change_world(gone, excuse="expired") if documented else gone)


def _lives_end(protocol: Protocol, system: System) -> Steps:
    row, world = system.row, system.world
    if row is None:
        return
    calling = any(actor.at == EFFECT for actor in system.actors)
    waits = protocol.settles and world.remembered  # the TTL is at least the provider's window
    if not (row.expired or calling or waits) and protocol.allows(system, "expiry"):
        yield Step("the TTL of the row is over", _expire(protocol, protocol.after(system, "expiry")))
    if not row.window_over and protocol.allows(system, "window"):
        closed = protocol.after(system, "window")._replace(row=row._replace(window_over=True))
        yield Step("the provider's window, less the margin, is over", closed)
    if row.window_over and world.remembered and not calling and protocol.allows(system, "provider forgets"):
        forgot = protocol.change_world(protocol.after(system, "provider forgets"), remembered=frozenset())
        yield Step("the provider forgets the keys", forgot)
    unknown = row.state == INDETERMINATE or (row.state == IN_PROGRESS and row.lease == LAPSED)
    if unknown and "search lags" in protocol.faults and not row.settle_due:
        yield Step("settle_after is over", system._replace(row=row._replace(settle_due=True)))


def _expire(protocol: Protocol, system: System) -> System:
    row, copy = system.row, system.redis
    assert row is not None
    over = protocol.change_world(
        system._replace(row=row._replace(expired=True)),
        expired_answers=system.world.expired_answers | {row.answer or "-"},
    )
    if copy is not None and finished(copy) and copy.confirmed and protocol.on("copy_ttl"):
        return over._replace(redis=None)
    return over
