"""Every way a request or a start can fail, with its status, code and what to do next."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from werkzeug.exceptions import HTTPException
from werkzeug.wrappers import Response

__all__ = [
    "PROBLEMS",
    "CompensationFailed",
    "ConfigurationError",
    "EncryptionError",
    "ExpiredKey",
    "IdempotencyError",
    "InProgress",
    "Indeterminate",
    "InvalidKey",
    "KeyNotFound",
    "LeaseLost",
    "Mismatch",
    "MissingKey",
    "NotProtected",
    "NothingHappened",
    "PrincipalRequired",
    "RateLimited",
    "ResponseUnavailable",
    "SagaFailed",
    "StoreUnavailable",
    "TransientStepError",
    "UnreadableRecord",
]


class ConfigurationError(Exception):
    """The set-up contradicts itself or could not protect a view. Raised at start; the text names the fix."""


class EncryptionError(Exception):
    """What is kept could not be encrypted or read: a key is missing, wrong, or the ciphertext was changed."""


class NotProtected(RuntimeError):
    """``current_idempotency`` was used outside a protected call."""


class IdempotencyError(HTTPException):
    """A refusal by this package, sent as ``application/problem+json``.

    :param detail: one sentence for the client; never a key, a fingerprint or a body.
    :param retry_after: seconds until a retry can succeed; only where ``retryable``.
    :param status: HTTP status, where it isn't the class's own.
    :param expires_at: end of the record's life, in milliseconds since the epoch, for ``Idempotency-Expires``.
    :param members: further members of the problem object.
    """

    #: The stable word a client can branch on (member ``code`` of the problem).
    problem: ClassVar[str] = ""
    title: str = ""
    #: HTTP status, on every concrete class. (None here: Flask files handlers by it, and one of ours is for all codes.)
    code: int = None  # type: ignore[assignment]
    #: Whether the very same request may succeed later. ``Retry-After`` is sent exactly when it is true.
    retryable: ClassVar[bool] = False
    default_retry_after: ClassVar[float] = 1

    def __init__(
        self,
        detail: str | None = None,
        *,
        retry_after: float | None = None,
        status: int | None = None,
        expires_at: int | None = None,
        **members: object,
    ) -> None:
        super().__init__(detail if detail is not None else type(self).description)
        self.retry_after: int | None = None
        if self.retryable:
            self.retry_after = max(1, math.ceil(self.default_retry_after if retry_after is None else retry_after))
        if status is not None:
            self.code = status
        self.expires_at = expires_at
        self.members = members

    @property
    def detail(self) -> str:
        """The sentence that the client reads."""
        return self.description or self.title

    @property
    def name(self) -> str:
        """The title, where werkzeug would print the status' name."""
        return self.title


class MissingKey(IdempotencyError):
    code = 400
    problem = "missing-key"
    title = "An idempotency key is required"
    description = "Send a new random key (a UUID, say) with this request, and the same key with every retry of it."


class InvalidKey(IdempotencyError):
    code = 400
    problem = "invalid-key"
    title = "The idempotency key is not acceptable"
    description = "Send one key of 1 to 255 printable ASCII characters, such as a UUID."


class PrincipalRequired(IdempotencyError):
    code = 401
    problem = "principal-required"
    title = "Sign in to send this request"
    description = "This operation is not available to anonymous callers."


class KeyNotFound(IdempotencyError):
    """Another principal's or session's key. The text must tell nothing of that."""

    code = 404
    problem = "not-found"
    title = "Not found"
    description = "Not found."


class InProgress(IdempotencyError):
    code = 409
    problem = "in-progress"
    title = "The first request with this key is still running"
    description = "Wait for the time in Retry-After, then send the same request again with the same key."
    retryable = True


class Indeterminate(IdempotencyError):
    code = 409
    problem = "indeterminate"
    title = "The outcome of the first request is not known yet"
    description = (
        "It has to be looked up first. Send the same request again with the same key after the time in Retry-After."
    )
    retryable = True
    default_retry_after = 10


class LeaseLost(IdempotencyError):
    code = 409
    problem = "lease-lost"
    title = "This request took too long and another one took its place"
    description = "Send the same request again with the same key to get the result of the other one."
    retryable = True


class ResponseUnavailable(IdempotencyError):
    """Done, but the answer was not kept or can't be read. Members ``original_status``, ``location``."""

    code = 409
    problem = "response-unavailable"
    title = "The request was carried out, but its answer is not available any more"
    description = "Do not send it again with another key: look the result up."


class SagaFailed(IdempotencyError):
    """A saga came to its end without success. ``__cause__`` is what its step raised, in the request that it failed in.

    :param step: the name of the step that failed; of the one whose compensation failed, where it is that.
    """

    ROLLED_BACK: ClassVar[Literal["ROLLED_BACK"]] = "ROLLED_BACK"
    COMPENSATION_FAILED: ClassVar[Literal["COMPENSATION_FAILED"]] = "COMPENSATION_FAILED"

    code = 409
    problem = "saga-rolled-back"
    title = "The request failed, and what was done of it has been undone"
    description = "It is not tried again under this key. Send it with a new key to try it anew."
    #: ``ROLLED_BACK``: all that was done is undone. ``COMPENSATION_FAILED``: something is left, and a human decides.
    status: Literal["ROLLED_BACK", "COMPENSATION_FAILED"] = ROLLED_BACK

    def __init__(self, step: str) -> None:
        super().__init__()
        self.step = step


class CompensationFailed(SagaFailed):
    """The same, with something left that could not be undone: nobody says that it failed, nor that it succeeded."""

    problem = "indeterminate"
    title = Indeterminate.title
    description = Indeterminate.description
    retryable = True
    default_retry_after = Indeterminate.default_retry_after
    status = SagaFailed.COMPENSATION_FAILED


class ExpiredKey(IdempotencyError):
    code = 410
    problem = "expired-key"
    title = "This idempotency key has expired"
    description = "Look up what became of the first request before you send it again with a new key."


class Mismatch(IdempotencyError):
    """The status is 422, or 409 where ``MISMATCH_STATUS`` says so (set on the instance)."""

    code = 422
    problem = "mismatch"
    title = "This idempotency key was used for another request"
    description = "A key stands for one request only. Send a changed request with a new key."


class RateLimited(IdempotencyError):
    code = 429
    problem = "rate-limited"
    title = "Too many new idempotency keys"
    description = "Retries of earlier requests are not counted. Send new ones after the time in Retry-After."
    retryable = True


class StoreUnavailable(IdempotencyError):
    code = 503
    problem = "store-unavailable"
    title = "The request can't be protected at the moment"
    description = (
        "Nothing was carried out. Send the same request again with the same key after the time in Retry-After."
    )
    retryable = True
    default_retry_after = 5


class UnreadableRecord(StoreUnavailable):
    """A record is there, and this version can't read it. Not an outage: it never opens a route that fails open."""


class TransientStepError(Exception):
    """Raised by a step of a saga, or by a compensation: not now, perhaps later.

    The saga stays there, and a retry of the request goes on with the very same call."""


class NothingHappened(HTTPException):
    """Raised inside a protected view: the effect certainly did not happen, so the key may be used again.

    :param response: what the client gets.
    """

    code = None

    def __init__(self, response: Response) -> None:
        if not isinstance(response, Response):
            raise TypeError("NothingHappened takes a response: raise NothingHappened(make_response({...}, 503)), say")
        super().__init__(response=response)


#: The concrete problems, each answered by its own error handler.
PROBLEMS: tuple[type[IdempotencyError], ...] = (
    MissingKey,
    InvalidKey,
    PrincipalRequired,
    KeyNotFound,
    InProgress,
    Indeterminate,
    LeaseLost,
    ResponseUnavailable,
    SagaFailed,
    CompensationFailed,
    ExpiredKey,
    Mismatch,
    RateLimited,
    StoreUnavailable,
)
