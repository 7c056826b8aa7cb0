"""The Store protocol: what the engine asks of a place that holds records."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol

from ..errors import StoreUnavailable
from ..records import Claim, ClaimReply, Completion, CompletionReply, Record, Scope, Step

__all__ = ["NotCommitted", "Released", "SettlingStore", "Store"]


class NotCommitted(StoreUnavailable):
    """A completion that may not have taken the work with it: the view's answer must not reach the client.

    :param absent: it is known that nothing was committed.
    """

    def __init__(self, detail: str | None = None, *, absent: bool = False) -> None:
        super().__init__(detail)
        self.absent = absent


class Released(str, enum.Enum):
    """What a store says when a claim is given back."""

    RELEASED = "released"  #: the key may be used again (also when it was given back before)
    FINISHED = "finished"  #: it is finished, by this very claim, and stays so
    LOST = "lost"  #: the claim was not ours any more
    GONE = "gone"  #: nothing is there


class Store(Protocol):
    """Holds records. Every method is one atomic step, safe to send twice, and bounded in time.

    All raise :class:`~flask_idempotent.errors.StoreUnavailable` when the store can't be asked, or can't be understood:
    a record that can't be read is never taken for an absent one. Only the store's own clock counts.
    """

    def claim(self, claim: Claim) -> ClaimReply:
        """Ask to run. With ``CLAIMED`` the record is ours until lease and skew have passed."""

    def renew(self, claims: Sequence[Claim]) -> Sequence[bool]:
        """Prolong leases to a full lease from now. ``False`` where a claim is not ours any more."""

    def complete(self, completion: Completion) -> CompletionReply:
        """Keep an answer, by compare-and-swap on token and state."""

    def release(self, claim: Claim, *, reason: str, forget: bool = False) -> Released:
        """Give a claim back: bound to its request still, or with ``forget`` leaving nothing."""

    def read(self, scope: Scope) -> Record | None:
        """The record as it stands, for operators and tests."""


class SettlingStore(Store, Protocol):
    """A store of records whose effect is outside: an unknown outcome is settled before anything is sent again."""

    def suspend(self, claim: Claim, *, reason: str) -> None:
        """Nobody knows whether the effect happened."""

    def note(self, claim: Claim, context: bytes) -> bool:
        """Keep what the work noted, at once. ``False``: the claim is not ours any more."""

    def first_use(self, claim: Claim, name: str) -> int:
        """How long ago a provider's key was first handed out (ms), noted before it is handed out."""

    def since_first_use(self, claim: Claim) -> int | None:
        """How long ago the first of all keys was handed out (ms); ``None`` where none ever was."""

    def steps(self, scope: Scope) -> Sequence[Step]:
        """The rows of a record's saga."""

    def keep_steps(self, claim: Claim, steps: Sequence[Step], *, begun: bool) -> bool:
        """Commit rows of a saga as they are given, all or none. ``False``: the claim is not ours any more, and nothing
        was written.

        :param begun: something is about to be called for the first time: the age of the rows counts from now.
        """

    def settle_completed(self, claim: Claim, orphan: Record, completion: Completion) -> Record | None:
        """The verdict that it happened: what is stored now. ``None``: somebody else settled meanwhile."""

    def settle_retry(self, claim: Claim, orphan: Record) -> ClaimReply | None:
        """The verdict that it did not happen: ``CLAIMED``, for the next attempt. ``None``: somebody else settled."""

    def settle_later(self, claim: Claim, orphan: Record, *, pause_ms: int, reason: str) -> None:
        """No verdict yet: the next look-up is allowed after a pause."""
