"""The statements of the SQL store, built once for its tables."""

from __future__ import annotations

from typing import Any

from sqlalchemy import bindparam, case, delete, func, insert, literal, null, select, update
from sqlalchemy.dialects.postgresql import insert as postgresql_insert
from sqlalchemy.engine import Dialect
from sqlalchemy.sql.elements import ColumnElement

from ..records import State
from .models import Tables, now_ms

__all__ = ["Statements"]

#: Columns of a key's row that its end writes.
FINAL = ("status", "reason", "response_code", "completed_at", "expires_at", "expires_day", "tombstone_until")
#: Columns of an answer's row, and the parameter of each.
ANSWER = (
    ("tenant_id", "p", "tenant"),
    ("endpoint", "p", "endpoint"),
    ("key_digest", "p", "digest"),
    ("expires_day", "v", "expires_day"),
    ("lock_version", "r", "lock_version"),
    ("headers", "r", "headers"),
    ("body", "r", "body"),
    ("kind", "r", "kind"),
    ("cipher", "r", "cipher"),
)

#: Columns of a key's row that its claim writes from parameters.
CLAIM = (
    "tenant_id",
    "endpoint",
    "key_digest",
    "principal",
    "binding",
    "recipe",
    "request_hash",
    "claim_token",
    "attempt",
)


class Statements:
    """Parameters: ``p_tenant``, ``p_endpoint``, ``p_digest`` name the key; ``p_token`` the claim; ``v_...`` are values
    of the key's row, ``r_...`` of its answer's."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        keys, responses = tables.keys, tables.responses
        this = (
            keys.c.tenant_id == bindparam("p_tenant"),
            keys.c.endpoint == bindparam("p_endpoint"),
            keys.c.key_digest == bindparam("p_digest"),
        )
        this_answer = (
            responses.c.tenant_id == bindparam("p_tenant"),
            responses.c.endpoint == bindparam("p_endpoint"),
            responses.c.key_digest == bindparam("p_digest"),
        )
        token = keys.c.claim_token == bindparam("p_token")
        ours = (*this, token, keys.c.status == State.IN_PROGRESS.value)

        #: The key's row, and the database's clock.
        self.row = select(keys, now_ms().label("now")).where(*this)
        #: The same, held against others; fails at once where another transaction holds it.
        self.row_alone = self.row.with_for_update(nowait=True)
        #: Its answer, of the attempt ``p_version``; the day names the partition.
        self.answer = select(responses).where(
            *this_answer,
            responses.c.lock_version == bindparam("p_version"),
            responses.c.expires_day == bindparam("p_day"),
        )
        # What a claim learns of its own row. The number is that of the transaction, where the database has one.
        learnt = (keys.c.lock_version, keys.c.attempt, keys.c.created_at, now_ms().label("claimed_at"))
        self._learnt = (*learnt, func.txid_current().label("number"))
        self.claimed = select(*learnt, null().label("number")).where(*this)
        #: Whether a row of this claim is there.
        self.ours = select(keys.c.status).where(*this, token)

        #: Takes away a row that a claim may replace, if it is still as it was read; and its answer.
        self.drop = delete(keys).where(
            *this, token, keys.c.lock_version == bindparam("p_version"), keys.c.status == bindparam("p_status")
        )
        self.drop_answer = delete(responses).where(*this_answer)

        final = {name: bindparam(f"v_{name}", type_=keys.c[name].type) for name in FINAL}
        answer = {
            name: bindparam(f"{kind}_{parameter}", type_=responses.c[name].type) for name, kind, parameter in ANSWER
        }
        #: The end of a claim, by compare-and-swap on token and state; and its answer.
        self.finish = update(keys).where(*ours).values(final)
        self.add_answer = insert(responses).values(answer)
        # Both in one statement, where a statement may hold two and the transaction has a number to compare.
        done = (
            update(keys)
            .where(*ours, func.txid_current() == bindparam("p_number", type_=keys.c.lock_version.type))
            .values(final)
            .returning(keys.c.status)
            .cte("done")
        )
        self.finish_at_once = (
            insert(responses)
            .from_select(list(answer), select(*answer.values()).select_from(done))
            .returning(responses.c.lock_version)
        )
        #: Nobody knows what a claim did.
        self.mark_unknown = (
            update(keys)
            .where(*ours)
            .values(
                status=State.INDETERMINATE.value,
                unknown_since=now_ms(),
                reason="the view ended the transaction that it shared with its key, and gave no answer that is kept",
            )
        )
        self._inserts: dict[str, Any] = {}

    def insert(self, dialect: Dialect) -> Any:
        """The INSERT of a key's row. On PostgreSQL it waits for nobody, and returns what the claim learns of its row:
        nothing where somebody else holds the key."""
        statement = self._inserts.get(dialect.name)
        if statement is None:
            statement = self._inserts[dialect.name] = self._build_insert(dialect)
        return statement

    def _build_insert(self, dialect: Dialect) -> Any:
        keys = self._tables.keys
        values: dict[str, ColumnElement[Any]] = {
            column: bindparam(f"v_{column}", type_=keys.c[column].type) for column in CLAIM
        }
        least = bindparam("least_version", type_=keys.c.lock_version.type)
        first = bindparam("first_created", type_=keys.c.created_at.type)
        values["status"] = literal(State.IN_PROGRESS.value, keys.c.status.type)
        values["lock_version"] = case((least > now_ms(), least), else_=now_ms())
        values["created_at"] = case((first > 0, first), else_=now_ms())
        if dialect.name != "postgresql":
            return insert(keys).values(values)
        # Whoever holds the key holds this lock until the transaction ends.
        free = func.pg_try_advisory_xact_lock(bindparam("lock", type_=keys.c.lock_version.type))
        claim = postgresql_insert(keys).from_select(list(values), select(*values.values()).where(free))
        return claim.on_conflict_do_nothing().returning(*self._learnt)
