"""The rows of sagas: read by whoever resumes one, written only by whoever holds the key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import bindparam, insert, select, update
from sqlalchemy.engine import Connection, Row

from ..records import Claim, Scope, State, Step, StepStatus
from .models import Tables, now_ms
from .rows import Rows, key_of
from .statements import FIRST_USE

__all__ = ["StepRows"]

#: Columns that a step's row is written with.
WRITTEN = ("status", "attempt", "result", "reason")
OPEN = frozenset({StepStatus.BEGUN, StepStatus.UNDOING})


class StepRows:
    """The steps of ``durable="intent"`` records, each committed on its own."""

    def __init__(self, rows: Rows, tables: Tables) -> None:
        self._rows = rows
        keys, steps = tables.keys, tables.steps
        key = {"tenant_id": "p_tenant", "endpoint": "p_endpoint", "key_digest": "p_digest"}
        these = [steps.c[column] == bindparam(name) for column, name in key.items()]
        this = (*these, steps.c.step == bindparam("s_step"), steps.c.item == bindparam("s_item"))
        values: dict[str, Any] = {name: bindparam(f"v_{name}", type_=steps.c[name].type) for name in WRITTEN}
        self._all = select(steps, (now_ms() - steps.c.began_at).label("age_ms")).where(
            *these, steps.c.step.not_like(f"{FIRST_USE}%")
        )
        # An UPDATE that changes nothing holds the row until the transaction ends: nobody takes the key over meanwhile.
        self._fence = (
            update(keys)
            .where(
                *(keys.c[column] == bindparam(name) for column, name in key.items()),
                keys.c.claim_token == bindparam("p_token"),
                keys.c.status == State.IN_PROGRESS.value,
            )
            .values(status=keys.c.status)
        )
        self._write = {
            (begun, over): update(steps)
            .where(*this)
            .values({**values, **({"began_at": now_ms()} if begun else {}), "done_at": now_ms() if over else None})
            for begun in (False, True)
            for over in (False, True)
        }
        self._add = insert(steps).values(
            {
                **{column: bindparam(name) for column, name in key.items()},
                "step": bindparam("s_step"),
                "item": bindparam("s_item"),
                **values,
                "began_at": now_ms(),
            }
        )

    def read(self, scope: Scope) -> list[Step]:
        """All of a record's, in no order."""

        def look(connection: Connection) -> list[Step]:
            return [
                Step(
                    row.step,
                    row.item,
                    StepStatus(row.status),
                    row.attempt,
                    bytes(row.result or b""),
                    row.reason,
                    row.age_ms,
                )
                for row in connection.execute(self._all, key_of(scope))
            ]

        return self._rows.settled(look)

    def keep(self, claim: Claim, steps: Sequence[Step], *, begun: bool) -> bool:
        """Write rows as they are given. Safe to send twice: whoever holds the key is the only one who writes."""
        key = key_of(claim.scope)

        def write(connection: Connection, _: Row[Any] | None) -> bool:
            if connection.execute(self._fence, {**key, "p_token": claim.token}).rowcount != 1:
                return False
            for step in steps:
                parameters = {**key, "s_step": step.name, "s_item": step.item, **_values(step)}
                changed = self._write[begun, step.status not in OPEN]
                if connection.execute(changed, parameters).rowcount != 1:
                    connection.execute(self._add, parameters)
            return True

        return self._rows.alone(claim.scope, write)


def _values(step: Step) -> dict[str, Any]:
    return {
        "v_status": step.status.value,
        "v_attempt": step.attempt,
        "v_result": step.result,
        "v_reason": step.reason[:255],
    }
