"""Records in the app's database for effects outside of it: committed before the work, leased, settled after a crash."""

from __future__ import annotations

import datetime
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from sqlalchemy.engine import Connection, Engine, Row
from sqlalchemy.exc import DBAPIError, IntegrityError

from ..errors import ConfigurationError, StoreUnavailable
from ..records import (
    FINISHED,
    Claim,
    ClaimReply,
    Completed,
    Completion,
    CompletionReply,
    KeptResponse,
    Record,
    Scope,
    State,
    Step,
    Verdict,
)
from .backing import lease
from .base import NotCommitted, Released
from .faults import Fault, fault_of
from .models import Tables
from .rows import Held, Rows, claim_parameters, is_mysql, key_of, locks_of
from .statements import FIRST_USE, Statements
from .steps import StepRows

__all__ = ["IntentStore"]

log = logging.getLogger("flask_idempotent")

#: A claim reads and writes in turn; others may come between, so often.
ROUNDS = 5
#: A renewal asks so often for rows that others hold, with a pause between: most are held for a moment.
RENEWALS = 3
RENEWAL_PAUSE_S = 0.02
#: Pauses in seconds between tries to commit an outcome while the database is away. Bounded: a client waits.
PAUSES_S = (0.05, 0.2, 0.5)
#: No further try begins after so many seconds: each of them may take as long as the engine's own time-outs.
TRIES_END_S = 3.0

UNKNOWN = "The work was done, but this could not be recorded. Send the same request again with the same key."


class IntentStore:
    """The Store for ``durable="intent"``.

    Every step is a short transaction of its own, on a connection of its own, at READ COMMITTED: the app's session is
    never touched, and no connection is held while the view runs. The row's ``locked_until`` is the lease.
    """

    def __init__(self, engine: Callable[[], Engine], tables: Tables) -> None:
        self._sql = Statements(tables)
        self._rows = Rows(engine, self._sql)
        self._steps = StepRows(self._rows, tables)

    def claim(self, claim: Claim) -> ClaimReply:
        """Commit the key, before anything is done. ``SETTLE``: one before us lapsed, and we alone may settle it."""
        if claim.scope.tenant is not None and len(claim.scope.tenant) > 255:
            raise ConfigurationError(
                "a tenant of a durable route has at most 255 characters: return a shorter identifier"
            )
        old: Row[Any] | None = None
        for _ in range(ROUNDS):
            started = time.monotonic()
            try:
                reply = self._rows.settled(lambda connection, old=old: self._insert(connection, claim, old))  # type: ignore[misc]
                if reply is None:
                    reply, old = self._rows.settled(lambda connection: self._meet(connection, claim))
            except Held:
                break
            if reply is not None:
                if reply.verdict is Verdict.CLAIMED:
                    self._hold(claim, reply.attempt, started)
                return reply
        return ClaimReply(Verdict.IN_PROGRESS, wait_ms=1000)

    def renew(self, claims: Sequence[Claim]) -> Sequence[bool]:
        """Prolong the leases, all in one statement for each length of lease. One whose row another transaction holds is
        left as it is, until next time: the others don't wait for it."""
        held: set[str] = set()
        lengths: dict[int, list[Claim]] = {}
        for claim in claims:
            lengths.setdefault(claim.lease_ms, []).append(claim)
        for lease_ms, group in lengths.items():
            for _ in range(RENEWALS):
                started = time.monotonic()
                prolonged, ours = self._rows.settled(partial(self._prolong, group, lease_ms))
                for claim in group:
                    if claim.token in prolonged & ours:
                        lease(claim).holds_from(started, lease_ms)
                held |= ours
                group = [claim for claim in group if claim.token in ours - prolonged]
                if not group:
                    break
                time.sleep(RENEWAL_PAUSE_S)
        return [claim.token in held for claim in claims]

    def complete(self, completion: Completion) -> CompletionReply:
        """Commit the answer. A completion by the same attempt is taken late too, as long as no newer attempt claimed.

        :raises NotCommitted: the database stayed away; what became of the claim is unknown.
        """
        began = time.monotonic()
        for pause_s in (*PAUSES_S, None):
            try:
                return self._rows.alone(
                    completion.claim.scope, lambda connection, row: self._finish(connection, completion, row)
                )
            except StoreUnavailable as error:
                if pause_s is None or time.monotonic() - began > TRIES_END_S:
                    raise NotCommitted(UNKNOWN) from error
                time.sleep(pause_s)
        raise AssertionError("unreachable")

    def release(self, claim: Claim, *, reason: str, forget: bool = False) -> Released:
        """The effect certainly did not happen: the same request may run again."""
        parameters = {**self._ours(claim), "ttl_ms": claim.ttl_ms, "v_reason": reason[:255]}
        changed = self._rows.alone(
            claim.scope, lambda connection, _: connection.execute(self._sql.release, parameters).rowcount
        )
        if changed:
            return Released.RELEASED
        record = self.read(claim.scope)
        if record is None:
            return Released.GONE
        if record.token != claim.token:
            return Released.LOST
        return Released.FINISHED if record.state in FINISHED else Released.RELEASED

    def suspend(self, claim: Claim, *, reason: str) -> None:
        """Nobody knows whether the effect happened: it is looked up before anything is sent again."""
        parameters = {**self._ours(claim), "v_reason": reason[:255]}
        self._rows.alone(claim.scope, lambda connection, _: connection.execute(self._sql.suspend, parameters))

    def note(self, claim: Claim, context: bytes) -> bool:
        """Keep what the work noted, at once. ``False``: the claim is not ours any more."""
        parameters = {**key_of(claim.scope), "p_token": claim.token, "v_context": context}
        return bool(
            self._rows.alone(claim.scope, lambda connection, _: connection.execute(self._sql.note, parameters).rowcount)
        )

    def first_use(self, claim: Claim, name: str) -> int:
        """How long ago a provider's key was first handed out, in milliseconds. It is noted before it is handed out.

        :param name: names the key among those of this record, in at most 32 characters.
        """
        parameters = {**key_of(claim.scope), "s_step": FIRST_USE + name}

        def look(connection: Connection) -> int | None:
            since: int | None = connection.execute(self._sql.since_step, parameters).scalar_one_or_none()
            if since is not None:
                return since
            try:
                with connection.begin_nested():
                    connection.execute(self._sql.begin_step, parameters)
            except IntegrityError:
                return None  # somebody else noted it just now
            return 0

        return self._rows.settled(look) or 0

    def since_first_use(self, claim: Claim) -> int | None:
        """How long ago the first of all keys was handed out, in milliseconds; ``None`` where none ever was."""

        def look(connection: Connection) -> int | None:
            since: int | None = connection.execute(self._sql.since_first_use, key_of(claim.scope)).scalar_one()
            return since

        return self._rows.settled(look)

    def steps(self, scope: Scope) -> Sequence[Step]:
        return self._steps.read(scope)

    def keep_steps(self, claim: Claim, steps: Sequence[Step], *, begun: bool) -> bool:
        return self._steps.keep(claim, steps, begun=begun)

    def read(self, scope: Scope) -> Record | None:
        return self._rows.read(scope)

    def judge(self, claim: Claim) -> ClaimReply | None:
        """What the committed row says to a claim, without claiming. ``None`` where a claim is to be made."""

        def look(connection: Connection) -> ClaimReply | None:
            row = connection.execute(self._sql.row, key_of(claim.scope)).one_or_none()
            if row is None or self._rows.is_over(claim, row):
                return None
            return self._rows.screen(connection, claim, row)

        return self._rows.fresh(look)

    # -- settling --------------------------------------------------------------------------------------------------

    def settle_completed(self, claim: Claim, orphan: Record, completion: Completion) -> Record | None:
        """The verdict that it happened. ``None``: somebody else settled meanwhile."""

        def write(connection: Connection, row: Row[Any] | None) -> Record | None:
            if row is None:
                return None
            values = self._final(completion, row.now)
            parameters = {**self._seen(claim, orphan), **values}
            if connection.execute(self._sql.finish_orphan, parameters).rowcount != 1:
                return None
            self._answer(connection, claim, completion.response, values)
            return self._rows.record(connection, connection.execute(self._sql.row, key_of(claim.scope)).one())

        return self._rows.alone(claim.scope, write)

    def settle_retry(self, claim: Claim, orphan: Record) -> ClaimReply | None:
        """The verdict that it did not happen: the key is ours for the next attempt. ``None``: somebody else settled."""
        started = time.monotonic()
        parameters = {**self._seen(claim, orphan), **self._run(claim)}

        def write(connection: Connection, _: Row[Any] | None) -> ClaimReply | None:
            if connection.execute(self._sql.run_orphan, parameters).rowcount != 1:
                return None
            return self._claimed(connection, claim, reclaimed=True)

        reply = self._rows.alone(claim.scope, write)
        if reply is not None:
            self._hold(claim, reply.attempt, started)
        return reply

    def settle_later(self, claim: Claim, orphan: Record, *, pause_ms: int, reason: str) -> None:
        """No verdict yet: the next look-up is allowed after a pause."""
        parameters = {**self._seen(claim, orphan), "lease_ms": pause_ms, "v_reason": reason[:255]}
        self._rows.alone(claim.scope, lambda connection, _: connection.execute(self._sql.leave_unknown, parameters))

    # -- steps of a claim ------------------------------------------------------------------------------------------

    def _prolong(self, claims: Sequence[Claim], lease_ms: int, connection: Connection) -> tuple[set[str], set[str]]:
        """The tokens of those whose leases are longer now, and of all that are still theirs."""
        prolonged = set(connection.execute(self._sql.hold, _theirs(claims)).scalars())
        free = [claim for claim in claims if claim.token in prolonged]
        if free:
            connection.execute(self._sql.renew, {**_theirs(free), "lease_ms": lease_ms})
        return prolonged, set(connection.execute(self._sql.held, _theirs(claims)).scalars())

    def _insert(self, connection: Connection, claim: Claim, old: Row[Any] | None) -> ClaimReply | None:
        """A row of our own, in the place of an expired one; ``None`` where another row is in the way."""
        key = key_of(claim.scope)
        if old is not None:
            connection.execute(self._sql.row_alone, key)
            seen = {**key, "p_token": old.claim_token, "p_version": old.lock_version, "p_status": old.status}
            if connection.execute(self._sql.drop, seen).rowcount != 1:
                return None
            connection.execute(self._sql.drop_answer, key)
            connection.execute(self._sql.drop_steps, key)
        parameters = claim_parameters(claim, old, lease_ms=claim.lease_ms)
        if connection.dialect.name == "postgresql":
            statement = self._sql.insert(connection.dialect)
            if connection.execute(statement, {**parameters, **locks_of(claim)}).one_or_none() is None:
                return None
        else:
            try:
                with connection.begin_nested():
                    if is_mysql(connection.dialect):  # its INSERT would wait for a row that is held
                        if connection.execute(self._sql.row, key).one_or_none() is not None:
                            return None
                        connection.execute(self._sql.row_alone, key)
                    self._rows.insert(connection, parameters)
            except IntegrityError:
                return None
            except DBAPIError as error:
                if fault_of(error) is not Fault.LOCKED:
                    raise
                return None  # of a renewal, say: what the row says is read without a lock
        return self._claimed(connection, claim)

    def _meet(self, connection: Connection, claim: Claim) -> tuple[ClaimReply | None, Row[Any] | None]:
        """The row that is in the way, and what it lets us do: a reply, or an expired row to replace, or neither. It is
        read without a lock; whoever changes it then holds it first, which fails at once where somebody else does."""
        key = key_of(claim.scope)
        row = connection.execute(self._sql.row, key).one_or_none()
        if row is None:
            return None, None
        if self._rows.is_over(claim, row):
            return None, row
        reply = self._rows.screen(connection, claim, row)
        if reply is not None:
            return reply, None
        state = State(row.status)
        seen = {
            **key,
            "p_token": claim.token,
            "p_version": row.lock_version,
            "lease_ms": claim.lease_ms,
            "skew_ms": claim.skew_ms,
        }
        if state is State.IN_PROGRESS:
            if row.claim_token == claim.token:  # our own: the reply to the first sending was lost
                return self._claimed(connection, claim), None
            wait_ms = (row.locked_until or 0) + claim.skew_ms - row.now
            if wait_ms > 0:
                return ClaimReply(Verdict.IN_PROGRESS, wait_ms=wait_ms), None
            connection.execute(self._sql.row_alone, key)
            taken = connection.execute(self._sql.take_lapsed, {**seen, "v_reason": "the lease lapsed"}).rowcount
            return self._orphan(connection, claim, taken)
        if state is State.RELEASED:
            if row.claim_token == claim.token:
                return ClaimReply(Verdict.OVER), None
            connection.execute(self._sql.row_alone, key)
            ran = connection.execute(self._sql.run_released, {**seen, **self._run(claim)}).rowcount
            return (self._claimed(connection, claim) if ran == 1 else None), None
        if row.settle_token == claim.token:  # our own, as above
            return self._orphan(connection, claim, 1)
        early = (row.unknown_since or 0) + claim.settle_after_ms > row.now
        busy = row.locked_until is not None and row.locked_until + claim.skew_ms > row.now
        if early or busy:
            return ClaimReply(Verdict.INDETERMINATE), None
        connection.execute(self._sql.row_alone, key)
        taken = connection.execute(self._sql.take_unknown, seen).rowcount
        return self._orphan(connection, claim, taken)

    def _claimed(self, connection: Connection, claim: Claim, *, reclaimed: bool = False) -> ClaimReply:
        row = connection.execute(self._sql.claimed, key_of(claim.scope)).one()
        return ClaimReply(
            Verdict.CLAIMED,
            fence=row.lock_version,
            attempt=row.attempt,
            created_at=row.created_at,
            reclaimed=reclaimed,
        )

    def _orphan(self, connection: Connection, claim: Claim, taken: int) -> tuple[ClaimReply | None, None]:
        if taken != 1:
            return None, None
        row = connection.execute(self._sql.row, key_of(claim.scope)).one()
        return ClaimReply(Verdict.SETTLE, record=self._rows.record(connection, row)), None

    def _hold(self, claim: Claim, attempt: int, started: float) -> None:
        held = lease(claim)
        held.attempt = attempt
        held.holds_from(started, claim.lease_ms)

    # -- completion ------------------------------------------------------------------------------------------------

    def _finish(self, connection: Connection, completion: Completion, row: Row[Any] | None) -> CompletionReply:
        claim = completion.claim
        if row is None:
            return CompletionReply(Completed.LOST)
        values = self._final(completion, row.now)
        if connection.execute(self._sql.finish_attempt, {**self._ours(claim), **values}).rowcount == 1:
            self._answer(connection, claim, completion.response, values)
            return CompletionReply(Completed.STORED, expires_at=values["v_expires_at"])
        row = connection.execute(self._sql.row, key_of(claim.scope)).one()
        if row.claim_token == claim.token and State(row.status) in FINISHED:
            record = self._rows.record(connection, row)
            return CompletionReply(Completed.STORED, expires_at=record.expires_at, record=record)
        winner = self._rows.screen(connection, claim, row)
        if winner is not None and winner.verdict is Verdict.REPLAY:
            return CompletionReply(Completed.LOST, record=winner.record)
        return CompletionReply(Completed.LOST, wait_ms=max((row.locked_until or 0) - row.now, 0))

    def _final(self, completion: Completion, now: int) -> dict[str, Any]:
        claim = completion.claim
        expires_at = now + claim.ttl_ms
        return {
            "v_status": completion.state.value,
            "v_reason": completion.reason[:255],
            "v_response_code": completion.response.status,
            "v_completed_at": now,
            "v_expires_at": expires_at,
            "v_expires_day": datetime.datetime.fromtimestamp(expires_at / 1000, datetime.timezone.utc).date(),
            "v_tombstone_until": expires_at + claim.tombstone_ms if claim.tombstone_ms else None,
        }

    def _answer(self, connection: Connection, claim: Claim, response: KeptResponse, values: Mapping[str, Any]) -> None:
        connection.execute(
            self._sql.answer_row,
            {
                **key_of(claim.scope),
                "v_expires_day": values["v_expires_day"],
                "r_headers": response.headers,
                "r_body": response.body,
                "r_kind": response.kind,
                "r_cipher": response.cipher,
            },
        )

    def _ours(self, claim: Claim) -> dict[str, Any]:
        return {**key_of(claim.scope), "p_token": claim.token, "p_attempt": lease(claim).attempt}

    def _seen(self, claim: Claim, orphan: Record) -> dict[str, Any]:
        return {**key_of(claim.scope), "p_token": claim.token, "p_version": orphan.fence}

    def _run(self, claim: Claim) -> dict[str, Any]:
        fingerprint = claim.fingerprints[0]
        return {"lease_ms": claim.lease_ms, "v_recipe": fingerprint.recipe, "v_request_hash": fingerprint.value}


def _theirs(claims: Sequence[Claim]) -> dict[str, Any]:
    """The parameters that name many claims."""
    return {
        "p_keys": [tuple(key_of(claim.scope).values()) for claim in claims],
        "p_tokens": [claim.token for claim in claims],
    }
