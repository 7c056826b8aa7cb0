"""What works on records besides requests: the sweep, and an operator."""

from .base import Protocol
from .vocabulary import (
    DELETE,
    DONE,
    FINISHED,
    FORGET_REDIS,
    FORGET_SQL,
    IN_PROGRESS,
    INDETERMINATE,
    LAPSED,
    RELEASED,
    START,
    SUCCEEDED,
    Actor,
    Step,
    Steps,
    System,
    finished,
)


def sweep(protocol: Protocol, system: System, number: int, actor: Actor) -> Steps:
    """Select what is over, delete it by key."""
    row, charged = system.row, system.world.charges > 0
    if actor.at == START and row is not None and row.expired:
        if row.state not in (*FINISHED, RELEASED) and protocol.on("expiry_final"):
            return
        if row.state == RELEASED and protocol.settles and protocol.on("recheck") and charged:
            kept = row._replace(state=SUCCEEDED, answer="J1", expired=False)
            yield Step("sweep: looks a released row up once more: it happened", system._replace(row=kept))
        else:
            yield Step(f"sweep: selects what is {row.state}", protocol.move(system, number, at=DELETE, seen=row))
    elif actor.at == DELETE:
        same = row is not None and row.expired and (row.state, row.fence) == (actor.seen.state, actor.seen.fence)
        if row is None or not (same or not protocol.on("sweep_recheck")):
            yield Step("sweep: the row is another now", protocol.move(system, number, at=DONE))
            return
        violation = None
        if not row.expired or row.state in (IN_PROGRESS, INDETERMINATE):
            violation = "SWEPT-LIVE: an open or fresh record is deleted"
        if row.state == RELEASED and charged and not system.world.excuse:
            violation = "SWEPT-CHARGE: charged here, forgotten here"
        excuse = "expired" if row.state == SUCCEEDED else system.world.excuse
        swept = protocol.change_world(system._replace(row=None), excuse=excuse)
        yield Step(f"sweep: deletes what is {row.state}", protocol.move(swept, number, at=DONE), violation)


def operator(protocol: Protocol, system: System, number: int, actor: Actor) -> Steps:
    """Releases what is unknown, or forgets the record."""
    row = system.row
    if actor.at == START and row is not None:
        if row.state == INDETERMINATE or (row.state == IN_PROGRESS and row.lease == LAPSED):
            freed = protocol.release_row(row, fence=protocol.next_fence(system, row.fence))
            copy = system.redis if finished(system.redis) else None
            released = protocol.change_world(
                system._replace(row=freed, redis=copy), highest_fence=max(freed.fence, system.world.highest_fence)
            )
            yield Step(f"operator: releases what is {row.state}", protocol.move(released, number, at=DONE))
        if protocol.on("forget_order"):
            forgotten = protocol.change_world(system._replace(row=None), excuse="forgotten")
            yield Step("operator: forgets it in SQL", protocol.move(forgotten, number, at=FORGET_REDIS))
        else:
            forgotten = protocol.change_world(protocol.write_redis(system, None), excuse="forgotten")
            yield Step("operator: forgets it in Redis", protocol.move(forgotten, number, at=FORGET_SQL))
    elif actor.at == FORGET_REDIS:
        forgotten = protocol.write_redis(system, None)
        yield Step("operator: forgets it in Redis", protocol.move(forgotten, number, at=DONE))
    elif actor.at == FORGET_SQL:
        yield Step("operator: forgets it in SQL", protocol.move(system._replace(row=None), number, at=DONE))
