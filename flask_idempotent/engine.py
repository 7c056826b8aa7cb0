"""Claim, run, complete or release: the order of things, for any caller and any store."""

from __future__ import annotations

import hmac
import logging
import math
import threading
import time
from dataclasses import dataclass

from blinker import NamedSignal

from . import signals
from .call import Call
from .errors import (
    EncryptionError,
    ExpiredKey,
    IdempotencyError,
    Indeterminate,
    InProgress,
    KeyNotFound,
    LeaseLost,
    Mismatch,
    RateLimited,
    ResponseUnavailable,
    StoreUnavailable,
)
from .heartbeat import Heartbeat
from .records import (
    FINISHED,
    BodyKind,
    Claim,
    ClaimReply,
    Completed,
    Completion,
    Record,
    State,
    StoredResponse,
    Verdict,
)
from .response.cipher import Cipher
from .stores.base import NotCommitted, Released, Store

__all__ = ["Engine", "Replay", "Settled", "unavailable"]

log = logging.getLogger("flask_idempotent")

#: Seconds between two questions of a waiting duplicate.
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 0.5


@dataclass(frozen=True, slots=True)
class Replay:
    """A kept answer. ``expires_at`` is in milliseconds since the epoch."""

    response: StoredResponse
    expires_at: int


@dataclass(frozen=True, slots=True)
class Settled:
    """What became of a completion: the answer was kept until ``expires_at``, or ``replay`` takes its place, or neither.

    ``ours`` tells whether the replay is what this very call had stored.
    """

    expires_at: int | None = None
    replay: Replay | None = None
    ours: bool = True


class Engine:
    """The protocol of one app over one store. It knows no web framework.

    :param sender: sender of the signals, the app.
    :param heartbeat: what keeps claims alive; ``None`` where they are left to lapse.
    :param waiters: counts the requests that wait for another one's result.
    """

    def __init__(
        self,
        store: Store,
        cipher: Cipher,
        *,
        sender: object,
        heartbeat: Heartbeat | None,
        waiters: threading.Semaphore | None = None,
    ) -> None:
        self.store = store
        self._waiters = waiters or threading.Semaphore(4)
        self._cipher = cipher
        self._sender = sender
        self._heartbeat = heartbeat

    def claim(self, call: Call, claim: Claim) -> Replay | None:
        """Ask to run. ``None``: the claim is held, run now. A replay: the work is done, answer with it.

        :raises IdempotencyError: any refusal; nothing is held then.
        """
        reply = self.store.claim(claim)
        if reply.verdict is Verdict.IN_PROGRESS and call.policy.wait_ms is not None:
            reply = self._wait(claim, reply, call.policy.wait_ms)
        if not reply.comparable:
            log.info(
                "record %s was fingerprinted by another recipe: a repeat is let through uncompared", _prefix(claim)
            )
        return self._follow(call, claim, reply)

    def _follow(self, call: Call, claim: Claim, reply: ClaimReply) -> Replay | None:
        """Do what the store said."""
        if reply.verdict is Verdict.CLAIMED:
            self._hold(call, claim, reply)
            return None
        if reply.verdict is Verdict.REPLAY and reply.record is not None:
            replay = self._open(call, claim, reply.record)
            self._emit(signals.replayed, call, claim, state=reply.record.state.value, attempt=reply.record.attempt)
            return replay
        raise self.refuse(call, _refusal(call, reply), claim)

    def complete(
        self, call: Call, state: State, response: StoredResponse, *, reason: str = "", undo: bool = False
    ) -> Settled:
        """Keep an answer. Never releases: where the store can't be reached, the lease lapses.

        :param undo: what the view did in the transaction that it shares with its key is taken back.
        :raises LeaseLost: another request holds the key, and is not finished.
        :raises StoreUnavailable: the work was not committed, or nobody can tell.
        :raises ResponseUnavailable: another request's answer stands, and can't be given.
        """
        claim = self._let_go(call)
        completion = Completion(claim, state, self._cipher.seal(claim.scope.digest, response), reason, undo=undo)
        try:
            reply = self.store.complete(completion)
        except NotCommitted as error:
            call.settled = True
            raise self.refuse(call, self._not_committed(error), claim) from None
        except StoreUnavailable:
            call.settled = True
            log.error("record %s: the answer could not be kept; its lease lapses, and a retry will run", _prefix(claim))
            return Settled()
        call.settled = True
        if reply.outcome is Completed.STORED:
            self._emit(signals.completed, call, claim, state=state.value, reason=reason)
            if reply.record is None or reply.record.response == completion.response:
                return Settled(expires_at=reply.expires_at)
            return Settled(replay=self._open(call, claim, reply.record))
        if reply.outcome is Completed.GONE:
            log.error("record %s is gone: the store lost it, and a retry will run", _prefix(claim))
            return Settled()
        self._emit(signals.lease_lost, call, claim)
        log.warning("record %s: the lease was lost before the answer was there", _prefix(claim))
        if reply.record is not None:
            replay = self._open(call, claim, reply.record)
            self._emit(signals.replayed, call, claim, state=reply.record.state.value, attempt=reply.record.attempt)
            return Settled(replay=replay, ours=False)
        raise self.refuse(call, LeaseLost(retry_after=retry_after(reply.wait_ms + claim.skew_ms)), claim)

    def release(self, call: Call, *, reason: str) -> Replay | None:
        """Give the claim back, so that the same request may run again. A finished record stays.

        :returns: the winner's answer, where another request took the place of this one and is finished.
        """
        claim = self._let_go(call)
        try:
            released = self.store.release(claim, reason=reason)
        except StoreUnavailable:
            call.settled = True
            log.error("record %s: the claim could not be given back; its lease lapses", _prefix(claim))
            return None
        call.settled = True
        if released is Released.RELEASED:
            self._emit(signals.released, call, claim, state=State.RELEASED.value, reason=reason)
        elif released is Released.LOST:
            self._emit(signals.lease_lost, call, claim)
            return self._winner(call, claim)
        return None

    def renew(self, call: Call) -> None:
        """Prolong the lease to a full one from now.

        Where the store can't be asked, the old lease still counts, and the heartbeat goes on asking.

        :raises LeaseLost: the claim is not ours any more.
        """
        assert call.claim is not None
        try:
            call.lost = call.lost or not self.store.renew([call.claim])[0]
        except StoreUnavailable:
            log.warning("record %s: the lease could not be prolonged now", _prefix(call.claim))
        if call.lost:
            raise LeaseLost()

    def refuse(self, call: Call, error: IdempotencyError, claim: Claim | None = None) -> IdempotencyError:
        """Tell of a refusal, and give it back to be raised."""
        self._emit(signals.refused, call, claim, reason=error.problem)
        if isinstance(error, Mismatch):
            self._emit(signals.mismatched, call, claim, reason=error.problem)
        return error

    def _not_committed(self, error: NotCommitted) -> IdempotencyError:
        """What a client is told whose work could not be committed."""
        return error

    def _wait(self, claim: Claim, reply: ClaimReply, wait_ms: int) -> ClaimReply:
        """Ask again with growing pauses, until the first one is finished or the time is up. A claim that lapses is
        taken over as at any time. Where too many wait already, a further one is refused at once."""
        if not self._waiters.acquire(blocking=False):
            return reply
        try:
            ends, pause_s = time.monotonic() + wait_ms / 1000, FIRST_PAUSE_S
            while reply.verdict is Verdict.IN_PROGRESS and (rest_s := ends - time.monotonic()) > 0:
                time.sleep(min(pause_s, rest_s))
                pause_s = min(pause_s * 1.5, LONGEST_PAUSE_S)
                reply = self.store.claim(claim)
            return reply
        finally:
            self._waiters.release()

    def _hold(self, call: Call, claim: Claim, reply: ClaimReply) -> None:
        call.claim, call.fence, call.attempt, call.created_at = claim, reply.fence, reply.attempt, reply.created_at
        if self._heartbeat is not None:

            def lost() -> None:
                call.lost = True
                log.warning("record %s: the lease was lost while the work ran", _prefix(claim))

            call.beat = self._heartbeat.add(self.store, claim, on_lost=lost)
        self._emit(signals.claimed, call, claim, state=State.IN_PROGRESS.value)
        if reply.reclaimed:
            self._emit(signals.reclaimed, call, claim, state=State.IN_PROGRESS.value, reason="lapsed")

    def _winner(self, call: Call, claim: Claim) -> Replay | None:
        """What the same request was answered with, by the one that took this one's place."""
        try:
            record = self.store.read(claim.scope)
        except StoreUnavailable:
            return None
        if record is None or record.state not in FINISHED or record.token == claim.token:
            return None
        known = {fingerprint.recipe: fingerprint.value for fingerprint in claim.fingerprints}
        same = (
            hmac.compare_digest(record.principal, claim.principal)
            and hmac.compare_digest(record.binding, claim.binding)
            and hmac.compare_digest(
                known.get(record.fingerprint.recipe, record.fingerprint.value), record.fingerprint.value
            )
        )
        return self._open(call, claim, record) if same else None

    def _let_go(self, call: Call) -> Claim:
        """Ends the renewals: whatever the store says next, nothing is held open any longer than a lease."""
        assert call.claim is not None
        if call.beat is not None and self._heartbeat is not None:
            self._heartbeat.remove(call.beat)
            call.beat = None
        return call.claim

    def _open(self, call: Call, claim: Claim, record: Record) -> Replay:
        """The kept answer in clear.

        :raises ResponseUnavailable: it was not kept, or can't be read. Never a reason to run again.
        """
        assert record.response is not None
        try:
            response = self._cipher.open(record.digest, record.response)
        except EncryptionError as error:
            log.error("record %s can't be read: %s", _prefix(claim), error)
            raise self.refuse(call, ResponseUnavailable(expires_at=record.expires_at), claim) from None
        if response.kind in (BodyKind.NONE, BodyKind.HASH):
            raise self.refuse(call, unavailable(response, record.expires_at), claim)
        return Replay(response, record.expires_at)

    def _emit(
        self,
        signal: NamedSignal,
        call: Call,
        claim: Claim | None,
        *,
        state: str | None = None,
        attempt: int | None = None,
        reason: str = "",
    ) -> None:
        signals.emit(
            signal,
            self._sender,
            scope=call.endpoint,
            digest=_prefix(claim) if claim else "",
            state=state,
            attempt=call.attempt if attempt is None else attempt,
            reason=reason,
        )


def retry_after(wait_ms: float) -> int:
    """Seconds for ``Retry-After``: until the lease can lapse, at least 1, at most 10 (requirement: a duplicate that
    waits for a long lease still looks again soon, since most work ends long before)."""
    return max(1, min(10, math.ceil(wait_ms / 1000)))


def unavailable(response: StoredResponse, expires_at: int) -> ResponseUnavailable:
    """The refusal where an answer can't be given again: what is known of it."""
    error = ResponseUnavailable(expires_at=expires_at, original_status=response.status)
    if response.location is not None:
        error.members["location"] = response.location
    return error


def _refusal(call: Call, reply: ClaimReply) -> IdempotencyError:
    if reply.verdict is Verdict.FOREIGN:
        return KeyNotFound()
    if reply.verdict is Verdict.MISMATCH:
        return Mismatch(status=call.policy.mismatch_status)
    if reply.verdict is Verdict.INDETERMINATE:
        return Indeterminate()
    if reply.verdict is Verdict.EXPIRED:
        return ExpiredKey()
    if reply.verdict is Verdict.LIMITED:
        return RateLimited(retry_after=reply.wait_ms / 1000)
    if reply.verdict is Verdict.IN_PROGRESS:
        return InProgress(retry_after=retry_after(reply.wait_ms))
    # OVER: this very claim was given back before; its sender is gone. Whoever retries brings a new token.
    return InProgress()


def _prefix(claim: Claim) -> str:
    """Enough of the digest to find a record in the logs."""
    return claim.scope.digest[:12]
