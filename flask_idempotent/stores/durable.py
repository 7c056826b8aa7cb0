"""Redis in front of the database: it answers what is sure, and the database decides the rest."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence
from typing import Protocol

from ..errors import StoreUnavailable
from ..records import (
    FINISHED,
    BodyKind,
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
from .backing import backing
from .base import NotCommitted, Released, Store
from .intent import IntentStore
from .redis import RedisStore
from .sql import SqlStore

__all__ = ["DurableIntentStore", "DurableStore", "DurableTransactionStore"]

log = logging.getLogger("flask_idempotent")

#: A Redis copy whose body is in the database alone.
MIRRORED = "mirrored"


class Back(Store, Protocol):
    """A store in the database."""

    def judge(self, claim: Claim) -> ClaimReply | None:
        """What the committed row says to a claim, without claiming. ``None`` where a claim is to be made."""


class DurableStore:
    """The Store of durable routes.

    Redis answers alone what is confirmed (it was committed in the database first) and that somebody holds a live
    lease. "New", and a refusal by a record that the database hasn't agreed to, go to the database. Without Redis all of
    them do.

    A record whose answer Redis was away for says for the rest of its lease that work runs. So the database is asked
    about a lease that wasn't renewed when it was due, and about the answers that this process could not copy.

    :param inline_body: bytes; a larger body is kept in the database alone.
    """

    def __init__(self, front: RedisStore, back: Back, *, inline_body: int) -> None:
        self.front = front
        self.back: Back = back
        self._inline_body = inline_body
        #: What Redis doesn't know of yet: digests, and when (monotonic seconds) its own record of each lapses.
        self._uncopied: dict[str, float] = {}

    def claim(self, claim: Claim) -> ClaimReply:
        held = backing(claim)
        said, answer = self._ask(claim)
        if answer is not None:
            return answer
        held.fronted = said is not None and said.verdict is Verdict.CLAIMED
        try:
            reply = self.back.claim(claim)
        except Exception:
            self._give_back(claim)
            raise
        if reply.verdict is Verdict.CLAIMED:
            return reply
        if said is not None and said.counted:
            self._refund(claim)
        if reply.verdict is Verdict.SETTLE:
            return reply
        if reply.verdict is Verdict.REPLAY and reply.record is not None:
            self._write_back(claim, reply.record)
        else:
            self._give_back(claim)
        return reply

    def renew(self, claims: Sequence[Claim]) -> Sequence[bool]:
        """Prolong the leases, the database's first: that is the one that counts. One that Redis lost is no loss."""
        held = self.back.renew(claims)
        fronted = [claim for claim in claims if backing(claim).fronted]
        if fronted:
            try:
                self.front.renew(fronted)
            except StoreUnavailable:
                log.info("leases in Redis could not be prolonged; duplicates ask the database")
        return held

    def complete(self, completion: Completion) -> CompletionReply:
        try:
            reply = self.back.complete(completion)
        except NotCommitted as error:
            if error.absent:
                self._give_back(completion.claim)
            raise
        if reply.outcome is not Completed.STORED:
            # Its row is another's by now, and duplicates are to hear of that.
            self._give_back(completion.claim)
        else:
            record = reply.record
            if record is not None and record.response is not None:
                self._copy(completion.claim, record.state, record.response, record.reason, record.expires_at)
            else:
                state, response = completion.state, completion.response
                self._copy(completion.claim, state, response, completion.reason, reply.expires_at)
        return reply

    def release(self, claim: Claim, *, reason: str, forget: bool = False) -> Released:
        released = self.back.release(claim, reason=reason, forget=forget)
        self._give_back(claim)
        return released

    def read(self, scope: Scope) -> Record | None:
        return self.back.read(scope)

    def _ask(self, claim: Claim) -> tuple[ClaimReply | None, ClaimReply | None]:
        """What Redis says, and the answer where that is one; ``None`` where Redis is away."""
        try:
            said = self.front.claim(claim)
        except StoreUnavailable:
            return None, None
        return said, None if said.verdict is Verdict.CLAIMED else self._without_claim(claim, said)

    def _without_claim(self, claim: Claim, said: ClaimReply) -> ClaimReply | None:
        """The answer where Redis holds something already; ``None`` where the database is to be asked for a claim."""
        if said.verdict is Verdict.REPLAY and said.record is not None:
            if not said.record.confirmed:
                return self.back.judge(claim)
            if said.record.response is None or said.record.response.kind != MIRRORED:
                return said
            return self.back.judge(claim)
        if said.verdict in (Verdict.FOREIGN, Verdict.MISMATCH):
            return self._refused(claim, said)
        if said.verdict is Verdict.LIMITED:
            # A key that only Redis forgot is not a new one.
            return self.back.judge(claim) or said
        if said.verdict is Verdict.INDETERMINATE:
            return None
        if said.verdict is Verdict.IN_PROGRESS and self._is_doubtful(claim, said):
            return self._finished(claim, said.holder) or said
        return said

    def _is_doubtful(self, claim: Claim, said: ClaimReply) -> bool:
        """Whether what Redis takes for running may be over. A process that lives renews at a third of the lease."""
        return claim.scope.digest in self._uncopied or said.wait_ms < claim.lease_ms // 2 + claim.skew_ms

    def _finished(self, claim: Claim, holder: str) -> ClaimReply | None:
        """The answer of the database where the work is done. It also ends the record in Redis: whoever holds that would
        be told the same."""
        try:
            reply = self.back.judge(claim)
        except StoreUnavailable:
            return None
        if reply is None or reply.verdict is not Verdict.REPLAY or reply.record is None:
            return None
        record = reply.record
        if record.response is not None:
            theirs = dataclasses.replace(claim, token=holder)
            self._put(theirs, record.state, record.response, record.reason, record.expires_at)
        return reply

    def _refused(self, claim: Claim, said: ClaimReply) -> ClaimReply | None:
        """What becomes of a 404 or 422 that Redis gave: one by a record that was committed stands, the database decides
        any other."""
        return said if said.confirmed else None

    def _give_back(self, claim: Claim) -> None:
        """A claim in front that the database didn't agree to leaves nothing."""
        if not backing(claim).fronted:
            return
        try:
            self.front.release(claim, reason="", forget=True)
        except StoreUnavailable:
            log.info("a claim in Redis could not be given back; its lease lapses")

    def _refund(self, claim: Claim) -> None:
        """A key that only Redis took for a new one doesn't count as one."""
        try:
            self.front.refund(claim)
        except StoreUnavailable:
            log.info("the count of a known key could not be taken back")

    def _write_back(self, claim: Claim, record: Record) -> None:
        """Fill Redis again, through a claim of one's own only: so nothing that was forgotten comes back late."""
        if record.response is not None and record.state in (State.SUCCEEDED, State.FAILED):
            self._copy(claim, record.state, record.response, record.reason, record.expires_at)

    def _copy(self, claim: Claim, state: State, response: KeptResponse, reason: str, expires_at: int) -> None:
        if backing(claim).fronted:
            self._put(claim, state, response, reason, expires_at)

    def _put(self, claim: Claim, state: State, response: KeptResponse, reason: str, expires_at: int) -> None:
        if len(response.body) > self._inline_body and response.kind == BodyKind.FULL.value:
            response = dataclasses.replace(response, headers=b"[]", body=b"", kind=MIRRORED, cipher="")
        try:
            self.front.complete(
                Completion(claim, state, response, reason=reason, confirmed=True, expires_at=expires_at)
            )
            self._uncopied.pop(claim.scope.digest, None)
        except StoreUnavailable:
            log.info("the copy in Redis could not be written; the next repeat is answered from the database")
            self._remember_uncopied(claim)

    def _remember_uncopied(self, claim: Claim) -> None:
        now = time.monotonic()
        for digest, lapses in list(self._uncopied.items()):  # in the order in which they came
            if lapses > now:
                break
            self._uncopied.pop(digest, None)
        self._uncopied[claim.scope.digest] = now + (claim.lease_ms + claim.skew_ms) / 1000


class DurableTransactionStore(DurableStore):
    """The Store of routes whose effect is in the database, in the transaction of the key.

    A row that isn't committed is nothing that a claim could read, so while work runs its record in Redis refuses
    another caller or another body. It does so only where the database says that it is this record's claim whose
    transaction is open: after a flush or an outage of Redis it may be a stranger's record, and the rightful owner's
    work runs on.
    """

    back: SqlStore

    def __init__(self, front: RedisStore, back: SqlStore, *, inline_body: int) -> None:
        super().__init__(front, back, inline_body=inline_body)

    def release(self, claim: Claim, *, reason: str, forget: bool = False) -> Released:
        # Redis first: a process that dies here leaves nothing for a retry to wait for.
        self._give_back(claim)
        return self.back.release(claim, reason=reason, forget=forget)

    def _refused(self, claim: Claim, said: ClaimReply) -> ClaimReply | None:
        if said.confirmed:
            return said
        judged = self.back.judge(claim)
        if judged is not None or not said.wait_ms:
            return judged
        return said if self.back.is_open(claim, said.holder) else ClaimReply(Verdict.IN_PROGRESS, wait_ms=said.wait_ms)


class DurableIntentStore(DurableStore):
    """The Store of routes whose effect is outside: the same, and an unknown outcome is settled in the database."""

    back: IntentStore

    def __init__(self, front: RedisStore, back: IntentStore, *, inline_body: int) -> None:
        super().__init__(front, back, inline_body=inline_body)

    def _without_claim(self, claim: Claim, said: ClaimReply) -> ClaimReply | None:
        answer = super()._without_claim(claim, said)
        if said.verdict is Verdict.LIMITED and answer is said:
            # Redis keeps nothing of an outcome that is open, so its key is no new one, whatever Redis takes it for.
            record = self.back.read(claim.scope)
            if record is not None and record.state not in FINISHED:
                return None
        return answer

    def suspend(self, claim: Claim, *, reason: str) -> None:
        self.back.suspend(claim, reason=reason)
        self._give_back(claim)

    def note(self, claim: Claim, context: bytes) -> bool:
        return self.back.note(claim, context)

    def first_use(self, claim: Claim, name: str) -> int:
        return self.back.first_use(claim, name)

    def since_first_use(self, claim: Claim) -> int | None:
        return self.back.since_first_use(claim)

    def steps(self, scope: Scope) -> Sequence[Step]:
        return self.back.steps(scope)

    def keep_steps(self, claim: Claim, steps: Sequence[Step], *, begun: bool) -> bool:
        return self.back.keep_steps(claim, steps, begun=begun)

    def settle_completed(self, claim: Claim, orphan: Record, completion: Completion) -> Record | None:
        record = self.back.settle_completed(claim, orphan, completion)
        if record is None:
            self._give_back(claim)
        else:
            self._write_back(claim, record)
        return record

    def settle_retry(self, claim: Claim, orphan: Record) -> ClaimReply | None:
        reply = self.back.settle_retry(claim, orphan)
        if reply is None:
            self._give_back(claim)
        return reply

    def settle_later(self, claim: Claim, orphan: Record, *, pause_ms: int, reason: str) -> None:
        try:
            self.back.settle_later(claim, orphan, pause_ms=pause_ms, reason=reason)
        finally:
            self._give_back(claim)
