"""The words that all layers share: scope, claim, record, and what a store answers."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = [
    "FINISHED",
    "FORMAT",
    "BodyKind",
    "Claim",
    "ClaimReply",
    "Completed",
    "Completion",
    "CompletionReply",
    "Fingerprint",
    "KeptResponse",
    "RateLimit",
    "Record",
    "Scope",
    "Settlement",
    "State",
    "Step",
    "StepStatus",
    "StoredResponse",
    "Verdict",
]

#: Version of the stored format. A record with another one is refused, never guessed at.
FORMAT = "1"


class State(str, enum.Enum):
    """Where a record stands."""

    IN_PROGRESS = "in_progress"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    RELEASED = "released"
    INDETERMINATE = "indeterminate"


#: States that answer a repeat with what is kept, and that nothing overwrites.
FINISHED = frozenset({State.SUCCEEDED, State.FAILED})


@dataclass(frozen=True, slots=True)
class Scope:
    """The identity of a record.

    ``digest`` is 64 hexadecimal digits over key prefix, tenant, endpoint and key (and principal, where keys are
    isolated). Stores see it, never the key.
    """

    tenant: str | None
    endpoint: str
    digest: str


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What the request asks for, under one recipe. Two recipes can't be compared."""

    recipe: str
    value: str


@dataclass(frozen=True, slots=True)
class RateLimit:
    """At most ``limit`` new keys in ``window_ms`` for one ``bucket`` (a digest of the principal or the address)."""

    limit: int
    window_ms: int
    bucket: str = ""


@dataclass(frozen=True, slots=True)
class Claim:
    """One request's bid to run: who asks, for what, and for how long it may hold the key.

    ``fingerprints`` holds one per fingerprint key, newest first; the first is stored. ``principal`` and ``binding``
    are digests, empty for none. All times are milliseconds.
    """

    scope: Scope
    token: str
    fingerprints: Sequence[Fingerprint]
    principal: str
    binding: str
    lease_ms: int
    skew_ms: int
    max_processing_ms: int
    ttl_ms: int
    tombstone_ms: int = 0
    rate: RateLimit | None = None
    settle_after_ms: int = 0
    #: What a claim of a durable route holds besides its record; the stores' own business.
    backing: object | None = None


class BodyKind(str, enum.Enum):
    """How much of an answer is kept."""

    FULL = "full"
    NONE = "none"  #: too large, or lost on the way to the client
    REFERENCE = "reference"  #: a reference, from which the answer is made again
    HASH = "hash"  #: a digest of the body


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """An answer in clear: ``body`` is ``None`` where it was not kept (``kind`` says why)."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes | None
    kind: BodyKind = BodyKind.FULL

    @property
    def location(self) -> str | None:
        """Where the result is to be found, if the answer said so."""
        return next((value for name, value in self.headers if name.lower() == "location"), None)


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """An answer as it lies in a store. With a ``cipher`` (the id of a key) ``body`` holds all of it, encrypted."""

    status: int
    headers: bytes
    body: bytes
    kind: str
    cipher: str = ""


@dataclass(frozen=True, slots=True)
class Record:
    """What a store holds for a scope. Times are milliseconds since the epoch by the store's own clock."""

    digest: str
    state: State
    token: str
    fence: int
    attempt: int
    created_at: int
    locked_until: int
    fingerprint: Fingerprint
    principal: str = ""
    binding: str = ""
    completed_at: int = 0
    expires_at: int = 0
    tombstone_until: int = 0
    response: KeptResponse | None = None
    context: bytes = b""
    reason: str = ""
    confirmed: bool = False
    #: When the outcome became unknown, and how often it was looked up in vain.
    unknown_since: int = 0
    settle_tries: int = 0
    #: The store's clock when this was read.
    read_at: int = 0


class Verdict(str, enum.Enum):
    """What a store says to a claim."""

    CLAIMED = "claimed"  #: run: the claim is ours (also when the same token asked before)
    OVER = "over"  #: this very token was given back before; don't run
    REPLAY = "replay"  #: finished: ``record`` holds the answer
    IN_PROGRESS = "in_progress"  #: somebody runs; ``wait_ms`` until the lease can lapse
    INDETERMINATE = "indeterminate"  #: the outcome is being looked up
    SETTLE = "settle"  #: the one before lapsed, and we alone may settle what became of it: ``record`` is the orphan
    FOREIGN = "foreign"  #: another principal's or binding's key
    MISMATCH = "mismatch"  #: the key stands for another request
    EXPIRED = "expired"  #: past its life, and refused by a tombstone
    LIMITED = "limited"  #: too many new keys; ``wait_ms`` until the window frees


@dataclass(frozen=True, slots=True)
class ClaimReply:
    """A store's answer to a claim. ``fence``, ``attempt`` and times only with ``CLAIMED``.

    With ``FOREIGN`` and ``MISMATCH``, of the record that refuses: ``confirmed``, whether it was committed, and
    ``holder``, the token of its claim.
    ``wait_ms``: until a lease can lapse, or until more is allowed.
    """

    verdict: Verdict
    fence: int = 0
    attempt: int = 0
    created_at: int = 0
    reclaimed: bool = False
    comparable: bool = True
    confirmed: bool = False
    holder: str = ""
    #: The key was counted as a new one.
    counted: bool = False
    wait_ms: int = 0
    record: Record | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of a claim: the state it takes and the answer that is kept.

    ``expires_at`` (ms) is that of the row which a copy is made of; 0 where the record's life begins with this.
    ``undo``: the answer is kept, what the view did in the shared transaction is not.
    """

    claim: Claim
    state: State
    response: KeptResponse
    reason: str = ""
    confirmed: bool = True
    expires_at: int = 0
    undo: bool = False


@dataclass(frozen=True, slots=True)
class Settlement:
    """What a look-up found out about an orphan. Made by its class methods."""

    kind: Literal["completed", "retry", "pending", "manual"]
    body: object = None
    status: int = 200
    headers: Mapping[str, str] | None = None
    reason: str = ""

    @classmethod
    def completed(cls, body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Settlement:
        """The effect is there: the answer to give, as a view returns it. A 4xx makes the record ``failed``."""
        if not 200 <= status <= 599:
            raise ValueError("Settlement.completed takes a status from 200 to 599")
        return cls("completed", body, status, headers)

    @classmethod
    def retry(cls) -> Settlement:
        """The effect is certainly not there: safe to run again. Believed from a look-up that started late enough."""
        return cls("retry")

    @classmethod
    def pending(cls) -> Settlement:
        """Nobody can tell yet: look again later."""
        return cls("pending")

    @classmethod
    def manual(cls, reason: str) -> Settlement:
        """A human must decide. The key answers ``indeterminate`` until then."""
        return cls("manual", reason=reason)


class StepStatus(str, enum.Enum):
    """Where a step of a saga stands; or the saga itself, in the row that heads its steps."""

    BEGUN = "begun"  #: it may have happened; the saga: goes forward
    DONE = "done"  #: it happened; the saga: all of it
    FAILED = "failed"  #: it was refused for good, and may have happened all the same
    UNDOING = "undoing"  #: its compensation may have happened; the saga: goes back, and never forward again
    UNDONE = "undone"  #: it was compensated, or certainly never happened; the saga: nothing of it is left
    UNDO_FAILED = "undo_failed"  #: its compensation was refused for good: a human decides


@dataclass(frozen=True, slots=True)
class Step:
    """A row of a saga. ``name`` has at most 64 characters, ``item`` counts from 0 where a step runs over several.

    ``attempt`` counts the calls that failed, and the one that is to come. ``result`` is what the step gave.
    ``age_ms`` is how long ago it was begun when it was read: the step, or where it is undone its compensation.
    """

    name: str
    item: int = 0
    status: StepStatus = StepStatus.BEGUN
    attempt: int = 1
    result: bytes = b""
    reason: str = ""
    age_ms: int = 0


class Completed(str, enum.Enum):
    """What a store says to a completion."""

    STORED = "stored"  #: kept; ``record`` is given when it was stored before, by us
    LOST = "lost"  #: another claim holds the key, or ours was given back; ``record`` is a finished winner's
    GONE = "gone"  #: nothing is there any more: the store lost the record


@dataclass(frozen=True, slots=True)
class CompletionReply:
    """A store's answer to a completion. ``expires_at`` (ms) only with ``STORED``."""

    outcome: Completed
    expires_at: int = 0
    record: Record | None = None
    wait_ms: int = 0
