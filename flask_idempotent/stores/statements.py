"""The statements of the SQL store, built once for its tables."""

from __future__ import annotations

from typing import Any, Literal

from sqlalchemy import bindparam, case, delete, func, insert, literal, null, select, tuple_, update
from sqlalchemy.dialects.postgresql import insert as postgresql_insert
from sqlalchemy.engine import Connection, Dialect
from sqlalchemy.sql.elements import ColumnElement

from ..records import State
from .direct import Direct
from .models import Tables, now_ms

__all__ = ["FIRST_USE", "Statements"]

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

#: What the names of steps begin with that note when a provider's key was first handed out.
FIRST_USE = "provider:"
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
        # Not a plain comparison: PostgreSQL would take the index of open keys for it and read all of them, and at
        # SERIALIZABLE every transaction that ends a key would be in every other's way.
        ours = (*this, token, func.coalesce(keys.c.status, "") == State.IN_PROGRESS.value)

        #: The key's row, and the database's clock.
        self.row = select(keys, now_ms().label("now")).where(*this)
        #: The same, held against others; fails at once where another transaction holds it.
        self.row_alone = self.row.with_for_update(nowait=True)
        #: PostgreSQL: takes the key's lock until the transaction ends, and tells whether it was free.
        self.try_lock = func.pg_try_advisory_xact_lock(bindparam("lock", type_=keys.c.lock_version.type))
        #: PostgreSQL: the same for a claim's lock, to see whether its transaction is open. Shared, so that those who
        #: ask don't meet each other.
        self.try_claim_lock = select(
            func.pg_try_advisory_xact_lock_shared(bindparam("claim_lock", type_=keys.c.lock_version.type))
        )
        #: Its answer, of the attempt ``p_version``; the day names the partition.
        self.answer = select(responses).where(
            *this_answer,
            responses.c.lock_version == bindparam("p_version"),
            responses.c.expires_day == bindparam("p_day"),
        )
        # What a claim learns of its own row. The number is that of the transaction, where the database has one. There a
        # lock tells others whose transaction it is: one who asks at this instant may hold it, and then nobody is told.
        learnt = (keys.c.lock_version, keys.c.attempt, keys.c.created_at, now_ms().label("claimed_at"))
        claim_lock = func.pg_try_advisory_xact_lock(bindparam("claim_lock", type_=keys.c.lock_version.type))
        self._learnt = (*learnt, func.txid_current().label("number"), claim_lock.label("named"))
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
        self._direct: dict[tuple[Any, ...], Direct] = {}
        self._lease_statements(this, token)

    def _lease_statements(self, this: tuple[ColumnElement[bool], ...], token: ColumnElement[bool]) -> None:
        """Those for rows that are committed and leased. Each is compare-and-swap: on the token and state of the claim
        that it belongs to, or on the number (``p_version``) of the row as it was read."""
        keys, responses = self._tables.keys, self._tables.responses
        seen = (*this, keys.c.lock_version == bindparam("p_version"))
        open_ = keys.c.status == State.IN_PROGRESS.value
        unknown = keys.c.status == State.INDETERMINATE.value
        lapsed = keys.c.locked_until + bindparam("skew_ms", type_=keys.c.locked_until.type) <= now_ms()
        lease = now_ms() + bindparam("lease_ms", type_=keys.c.locked_until.type)
        risen = case((keys.c.lock_version + 1 > now_ms(), keys.c.lock_version + 1), else_=now_ms())
        reason = bindparam("v_reason", type_=keys.c.reason.type)
        # (Each holder has a number of its own, unless the row was deleted and the clock turned back in between. The
        # token tells them apart there too, and what is sent twice counts once.)
        mine = keys.c.settle_token == bindparam("p_token")
        settling = {"settle_token": bindparam("p_token"), "lock_version": risen, "locked_until": lease}
        # (An assignment on MySQL sees the columns that were assigned before it: unknown_since comes first.)
        lapse = {"unknown_since": keys.c.locked_until, "status": State.INDETERMINATE.value, "reason": reason}
        running = {
            "status": State.IN_PROGRESS.value,
            "claim_token": bindparam("p_token"),
            "attempt": keys.c.attempt + 1,
            "lock_version": risen,
            "locked_until": lease,
            "recipe": bindparam("v_recipe", type_=keys.c.recipe.type),
            "request_hash": bindparam("v_request_hash", type_=keys.c.request_hash.type),
            "settle_token": "",
            "settle_tries": 0,
            "unknown_since": null(),
            "expires_at": null(),
            "reason": "",
        }

        #: A lapsed row becomes unknown, its outcome ours to settle; old token and attempt stay until the verdict.
        # (Whatever ends a claim takes its lease away, so a row of that number that lapsed is open anyhow.)
        self.take_lapsed = update(keys).where(*seen, open_, lapsed).ordered_values(*{**lapse, **settling}.items())
        #: The same for a row that is unknown already, where nobody is at it.
        self.take_unknown = update(keys).where(*seen, unknown, (keys.c.settle_token == "") | lapsed).values(settling)
        #: Another run of a released row; and of an orphan that turned out not to have happened.
        self.run_released = update(keys).where(*seen, keys.c.status == State.RELEASED.value).values(running)
        self.run_orphan = update(keys).where(*seen, unknown, mine).values(running)
        #: No verdict yet: others may look after ``lease_ms``.
        self.leave_unknown = (
            update(keys)
            .where(*seen, unknown, mine)
            .values(settle_token="", settle_tries=keys.c.settle_tries + 1, locked_until=lease, reason=reason)
        )
        final = {name: bindparam(f"v_{name}", type_=keys.c[name].type) for name in FINAL}
        ended = {**final, "settle_token": "", "locked_until": null()}
        #: The verdict that it happened.
        self.finish_orphan = update(keys).where(*seen, unknown, mine).values(ended)
        #: The end by the attempt itself, in time or late: no newer attempt has claimed.
        attempt = keys.c.attempt == bindparam("p_attempt", type_=keys.c.attempt.type)
        unfinished = (State.IN_PROGRESS.value, State.INDETERMINATE.value, State.RELEASED.value)
        self.finish_attempt = update(keys).where(*this, token, attempt, keys.c.status.in_(unfinished)).values(ended)
        answer = {
            name: bindparam(f"{kind}_{parameter}", type_=responses.c[name].type)
            for name, kind, parameter in ANSWER
            if name != "lock_version"
        }
        self.answer_row = insert(responses).from_select(
            [*answer, "lock_version"], select(*answer.values(), keys.c.lock_version).where(*this)
        )
        #: A claim that ends without an answer: unknown, or given back.
        self.suspend = (
            update(keys)
            .where(*this, token, attempt, open_)
            .values(status=State.INDETERMINATE.value, unknown_since=now_ms(), locked_until=null(), reason=reason)
        )
        self.release = (
            update(keys)
            .where(*this, token, attempt, keys.c.status.in_(unfinished[:2]))
            .values(
                status=State.RELEASED.value,
                locked_until=null(),
                unknown_since=null(),
                settle_token="",
                expires_at=now_ms() + bindparam("ttl_ms", type_=keys.c.expires_at.type),
                reason=reason,
            )
        )
        self.note = (
            update(keys).where(*this, token, open_).values(context=bindparam("v_context", type_=keys.c.context.type))
        )
        steps = self._tables.steps
        these = (
            steps.c.tenant_id == bindparam("p_tenant"),
            steps.c.endpoint == bindparam("p_endpoint"),
            steps.c.key_digest == bindparam("p_digest"),
        )
        #: How long ago a step began, in milliseconds; and the longest of all that hand out keys.
        self.since_step = select(now_ms() - steps.c.began_at).where(*these, steps.c.step == bindparam("s_step"))
        self.since_first_use = select(now_ms() - func.min(steps.c.began_at)).where(
            *these, steps.c.step.like(f"{FIRST_USE}%")
        )
        self.begin_step = insert(steps).values(
            tenant_id=bindparam("p_tenant"),
            endpoint=bindparam("p_endpoint"),
            key_digest=bindparam("p_digest"),
            step=bindparam("s_step"),
            item=0,
            status="begun",
            began_at=now_ms(),
        )
        self.drop_steps = delete(steps).where(*these)
        which = tuple_(keys.c.tenant_id, keys.c.endpoint, keys.c.key_digest).in_(bindparam("p_keys", expanding=True))
        tokens: Any = bindparam("p_tokens", expanding=True)
        # (A look-up holds its orphan's row by a token of its own.)
        held = (which, (keys.c.claim_token.in_(tokens) & open_) | (keys.c.settle_token.in_(tokens) & unknown))
        self.renew = (
            update(keys)
            .where(*held)
            .values(locked_until=case((keys.c.locked_until > lease, keys.c.locked_until), else_=lease))
        )
        self.held = select(case((open_, keys.c.claim_token), else_=keys.c.settle_token)).where(*held)
        #: The same, held against others, but for the rows that others hold.
        self.hold = self.held.with_for_update(skip_locked=True)

    def insert(self, dialect: Dialect) -> Any:
        """The INSERT of a key's row. On PostgreSQL it waits for nobody, and returns what the claim learns of its row:
        nothing where somebody else holds the key."""
        statement = self._inserts.get(dialect.name)
        if statement is None:
            statement = self._inserts[dialect.name] = self._build_insert(dialect)
        return statement

    def direct(self, name: Literal["claim", "finish"], connection: Connection) -> Direct:
        """The statements of every request, in the driver's own words: the INSERT of a key's row, which waits for
        nobody, and its end in one statement."""
        dialect = connection.dialect
        schemas = connection.get_execution_options().get("schema_translate_map")
        at = (name, dialect.name, tuple(schemas.items()) if schemas else ())
        known = self._direct.get(at)
        if known is None:
            if name == "finish":
                known = Direct(self.finish_at_once, dialect, schemas=schemas)
            else:
                no_wait = "SET STATEMENT innodb_lock_wait_timeout = 0 FOR "
                prefix = no_wait if getattr(dialect, "is_mariadb", False) else ""
                known = Direct(self.insert(dialect), dialect, prefix=prefix, schemas=schemas)
            self._direct[at] = known
        return known

    def _build_insert(self, dialect: Dialect) -> Any:
        keys = self._tables.keys
        values: dict[str, ColumnElement[Any]] = {
            column: bindparam(f"v_{column}", type_=keys.c[column].type) for column in CLAIM
        }
        least = bindparam("least_version", type_=keys.c.lock_version.type)
        first = bindparam("first_created", type_=keys.c.created_at.type)
        lease = bindparam("lease_ms", type_=keys.c.locked_until.type)
        values["status"] = literal(State.IN_PROGRESS.value, keys.c.status.type)
        values["lock_version"] = case((least > now_ms(), least), else_=now_ms())
        values["created_at"] = case((first > 0, first), else_=now_ms())
        values["locked_until"] = case((lease > 0, now_ms() + lease), else_=null())
        if dialect.name != "postgresql":
            return insert(keys).values(values)
        # Whoever holds the key holds this lock until the transaction ends.
        claim = postgresql_insert(keys).from_select(list(values), select(*values.values()).where(self.try_lock))
        return claim.on_conflict_do_nothing().returning(*self._learnt)
