"""The protocol of routes whose effect is outside: an unknown outcome is looked up, never sent again blind."""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone

from . import signals
from .call import Call
from .engine import Engine, Replay
from .errors import EncryptionError, IdempotencyError, Indeterminate, LeaseLost, StoreUnavailable
from .heartbeat import Heartbeat
from .policy import finished_state
from .providers.base import Provider
from .records import Claim, ClaimReply, Completion, Record, Settlement, Step, StoredResponse, Verdict
from .response.cipher import Cipher
from .stores.backing import lease
from .stores.base import NotCommitted, SettlingStore

__all__ = ["IntentEngine", "Orphan"]

#: What a client is told when the record can't be reached in the middle of the work.
INTERRUPTED = "The request was interrupted. Send the same request again with the same key to learn what became of it."

log = logging.getLogger("flask_idempotent")

#: Pauses in milliseconds between look-ups that found nothing out.
FIRST_PAUSE_MS = 1_000
LONGEST_PAUSE_MS = 60_000
#: Between those of an outcome that waits for a human.
HUMAN_PAUSE_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class Orphan:
    """An attempt that ended without an answer, as a reconciler sees it.

    ``started_at`` is when the first attempt began, by the database's clock, in UTC. ``context`` is what the view
    noted with ``remember()``.
    """

    scope: str
    attempt: int
    started_at: datetime
    context: dict[str, object]
    _key: Callable[[Provider | str | None, int, str | None], str]

    def provider_key(self, provider: Provider | str | None = None, step: int = 0, operation: str | None = None) -> str:
        """The key that the attempt sent, or would have sent: the same as ``current_idempotency.provider_key()``."""
        return self._key(provider, step, operation)


class IntentEngine(Engine):
    """The Engine of ``durable="intent"``.

    :param tries: look-ups in vain after which an outcome waits for a human.
    """

    def __init__(
        self,
        store: SettlingStore,
        cipher: Cipher,
        *,
        sender: object,
        heartbeat: Heartbeat | None,
        waiters: threading.Semaphore | None = None,
        tries: int = 8,
    ) -> None:
        super().__init__(store, cipher, sender=sender, heartbeat=heartbeat, waiters=waiters)
        self._settling = store
        self._tries = tries

    def suspend(self, call: Call, *, reason: str) -> None:
        """End a claim without an answer: nobody knows whether the effect happened."""
        claim = self._let_go(call)
        try:
            self._settling.suspend(claim, reason=reason)
        except StoreUnavailable:
            log.error("record %s: its outcome is unknown, and its lease lapses", claim.scope.digest[:12])
        call.settled = True

    def remember(self, call: Call, noted: dict[str, object]) -> None:
        """Commit what the work noted, before it goes on.

        :raises LeaseLost: the claim is not ours any more, or may not be.
        """
        claim = self.held(call)
        call.context = {**call.context, **noted}
        text = json.dumps(call.context, separators=(",", ":")).encode()
        try:
            kept = self._settling.note(claim, self._cipher.seal_text(claim.scope.digest, text))
        except StoreUnavailable:
            raise StoreUnavailable(INTERRUPTED) from None
        call.lost = call.lost or not kept
        self.held(call)

    def hand_out(self, call: Call, provider: Provider, key: str, name: str) -> str:
        """Note that a provider's key goes out, and see that it may.

        :raises LeaseLost: the claim is not ours any more, or may not be.
        :raises Indeterminate: the provider may have forgotten the first sending.
        """
        claim = self.held(call)
        try:
            since_ms = self._settling.first_use(claim, name)
        except StoreUnavailable:
            raise StoreUnavailable(INTERRUPTED) from None
        self.held(call)
        if since_ms > 0 and self._may_be_forgotten(call, provider, since_ms):
            self.suspend(
                call, reason=f"sending again is not safe: {provider.name} may have forgotten the first sending"
            )
            raise self.refuse(call, Indeterminate(), claim)
        return key

    def steps(self, call: Call) -> list[Step]:
        """The rows of the record's saga, with their results in clear.

        :raises EncryptionError: they can't be read.
        """
        claim = self.held(call)
        try:
            rows = self._settling.steps(claim.scope)
        except StoreUnavailable:
            raise StoreUnavailable(INTERRUPTED) from None
        digest = claim.scope.digest
        return [
            dataclasses.replace(row, result=self._cipher.open_text(digest, row.result) if row.result else b"")
            for row in rows
        ]

    def keep_steps(self, call: Call, *steps: Step, begun: bool = False) -> None:
        """Commit rows of the record's saga, all or none, before the work goes on.

        :param begun: something is about to be called for the first time.
        :raises LeaseLost: the claim is not ours any more, or may not be.
        """
        claim = self.held(call)
        digest = claim.scope.digest
        sealed = [
            dataclasses.replace(step, result=self._cipher.seal_text(digest, step.result) if step.result else b"")
            for step in steps
        ]
        try:
            kept = self._settling.keep_steps(claim, sealed, begun=begun)
        except StoreUnavailable:
            raise StoreUnavailable(INTERRUPTED) from None
        call.lost = call.lost or not kept
        self.held(call)

    def _may_be_forgotten(self, call: Call, provider: Provider, since_ms: int) -> bool:
        if provider.deduplicates:
            return since_ms > provider.window_ms
        # It remembers nothing. But on a route of its own no look-up leads to another attempt: the one before said that
        # nothing happened, or a human did.
        return call.policy.provider is None or call.policy.provider.name != provider.name

    def held(self, call: Call) -> Claim:
        """The claim, as long as nobody else can have it.

        :raises LeaseLost: it is not ours any more, or may not be.
        """
        claim = call.claim
        assert claim is not None
        if call.lost or call.settled or lease(claim).is_over:
            raise LeaseLost()
        return claim

    def _not_committed(self, error: NotCommitted) -> IdempotencyError:
        return Indeterminate()

    def _follow(self, call: Call, claim: Claim, reply: ClaimReply) -> Replay | None:
        if reply.verdict is not Verdict.SETTLE or reply.record is None:
            if reply.verdict is Verdict.CLAIMED and reply.attempt > 1:
                self._recall(call, claim)
            return super()._follow(call, claim, reply)
        orphan = reply.record
        signals.emit(
            signals.reclaimed,
            self._sender,
            scope=call.endpoint,
            digest=orphan.digest[:12],
            state=orphan.state.value,
            attempt=orphan.attempt,
            reason="lapsed",
        )
        with self._kept_alive(claim):
            settlement = self._look_up(call, claim, orphan)
        if settlement.kind == "completed":
            try:
                assert call.make_answer is not None
                response = call.make_answer(settlement)
            except Exception as error:
                log.exception("the reconciler of %s gave what is no answer; the outcome stays unknown", call.endpoint)
                settlement = Settlement(
                    "pending", reason=f"the reconciler gave what is no answer: {type(error).__name__}"
                )
            else:
                return self._settle_completed(call, claim, orphan, response, settlement.reason)
        if settlement.kind == "retry":
            doubt = self._doubt(call, claim, orphan)
            if doubt is None:
                return self._settle_retry(call, claim, orphan)
            settlement = doubt
        self._settle_later(call, claim, orphan, settlement)
        raise self.refuse(call, Indeterminate(), claim)

    @contextmanager
    def _kept_alive(self, claim: Claim) -> Iterator[None]:
        """A look-up that takes longer than a lease stays the only one."""
        if self._heartbeat is None:
            yield
            return
        beat = self._heartbeat.add(self.store, claim, on_lost=lambda: None)
        try:
            yield
        finally:
            self._heartbeat.remove(beat)

    def _look_up(self, call: Call, claim: Claim, orphan: Record) -> Settlement:
        if call.policy.recovery == "manual":
            return Settlement.manual("this route leaves what it doesn't know to a human")
        if call.settle is None and call.policy.saga is None:
            return Settlement.manual("this route has no reconciler")
        started_at = datetime.fromtimestamp(orphan.created_at / 1000, timezone.utc)
        try:
            context = self._context(claim, orphan)
        except EncryptionError:
            # Without it the reconciler might look for the wrong thing, and not find that.
            return Settlement("pending", reason="what the work noted can't be read: is a Fernet key missing?")
        if call.settle is None:
            # A saga knows by its own rows what was done; each of its steps says itself whether it may be sent again.
            return Settlement.retry()
        seen = Orphan(call.endpoint, orphan.attempt, started_at, context, call.derive_key)
        try:
            return call.settle(seen)
        except Exception as error:
            log.exception("the reconciler of %s failed; the outcome stays unknown", call.endpoint)
            return Settlement("pending", reason=f"the reconciler failed: {type(error).__name__}")

    def _doubt(self, call: Call, claim: Claim, orphan: Record) -> Settlement | None:
        """Why "it did not happen" is not believed; ``None`` where it is."""
        provider = call.policy.provider if call.policy.saga is None else None
        if provider is not None and not provider.deduplicates:
            return Settlement.manual(f"{provider.name} does not recognise a key: a human decides whether to send again")
        if orphan.read_at < orphan.unknown_since + claim.settle_after_ms:
            return Settlement("pending", reason="not found, but the look-up began too early to be believed")
        if provider is not None:
            since_ms = self._settling.since_first_use(claim)
            if since_ms is not None and since_ms > provider.window_ms:
                return Settlement.manual(f"not found, but {provider.name} may have forgotten the first sending")
        return None

    def _settle_completed(
        self, call: Call, claim: Claim, orphan: Record, response: StoredResponse, reason: str
    ) -> Replay | None:
        completion = Completion(
            claim,
            finished_state(response.status),
            self._cipher.seal(claim.scope.digest, response),
            reason or "settled by a look-up",
        )
        record = self._settling.settle_completed(claim, orphan, completion)
        if record is None:
            raise self.refuse(call, Indeterminate(), claim)
        return super()._follow(call, claim, ClaimReply(Verdict.REPLAY, record=record))

    def _settle_retry(self, call: Call, claim: Claim, orphan: Record) -> Replay | None:
        reply = self._settling.settle_retry(claim, orphan)
        if reply is None:
            raise self.refuse(call, Indeterminate(), claim)
        call.context = self._context(claim, orphan)
        return super()._follow(call, claim, reply)

    def _settle_later(self, call: Call, claim: Claim, orphan: Record, settlement: Settlement) -> None:
        tries = orphan.settle_tries + 1
        pause_ms = min(FIRST_PAUSE_MS * 2**orphan.settle_tries, LONGEST_PAUSE_MS)
        early_ms = orphan.unknown_since + claim.settle_after_ms - orphan.read_at
        reason = settlement.reason or "looked up, and not known yet"
        if settlement.kind == "manual" or tries >= self._tries:
            pause_ms = HUMAN_PAUSE_MS
            log.error("record %s of %s waits for a human: %s", orphan.digest[:12], claim.scope.endpoint, reason)
            reason = f"for a human: {reason}"
        elif early_ms > 0:
            # The pause counts with the skew on top, which every lapse has.
            pause_ms = max(early_ms - claim.skew_ms, 0)
        try:
            self._settling.settle_later(claim, orphan, pause_ms=pause_ms, reason=reason)
        except StoreUnavailable:
            log.warning("record %s: the look-up's result could not be noted", orphan.digest[:12])

    def _recall(self, call: Call, claim: Claim) -> None:
        """A later attempt knows what the earlier ones noted."""
        try:
            record = self._settling.read(claim.scope)
        except StoreUnavailable:
            return
        if record is not None:
            with suppress(EncryptionError):
                call.context = self._context(claim, record)

    def _context(self, claim: Claim, record: Record) -> dict[str, object]:
        """What the work noted.

        :raises EncryptionError: it can't be read.
        """
        if not record.context:
            return {}
        try:
            found: dict[str, object] = json.loads(self._cipher.open_text(claim.scope.digest, record.context))
        except (EncryptionError, ValueError) as error:
            log.error("record %s: what the work noted can't be read: %s", record.digest[:12], error)
            raise EncryptionError("what the work noted can't be read") from error
        return found
