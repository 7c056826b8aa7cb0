"""The current protected call: what one request holds, from its opening to its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flask import has_request_context, request

from .errors import NotProtected
from .records import Claim, Settlement, StoredResponse

if TYPE_CHECKING:
    from werkzeug.wrappers import Response

    from .engine import Engine
    from .errors import IdempotencyError
    from .heartbeat import Beat
    from .policy import Policy
    from .providers.base import Provider
    from .request.fingerprint import Fingerprinter
    from .settling import Orphan

__all__ = ["ENVIRON_KEY", "Call", "current_call", "held_call"]

#: Never on ``g``: nested app contexts, and requests under one outer context, would share it.
ENVIRON_KEY = "flask_idempotent.call"


def _no_key(provider: object, step: int, operation: str | None) -> str:
    raise NotProtected("this call has no provider")


@dataclass(slots=True, eq=False)
class Call:
    """One protected call. It is changed by the wrapper, the engine and the completion, in this order."""

    #: What marked the view: identity only.
    mark: object
    policy: Policy
    endpoint: str
    engine: Engine
    fingerprinter: Fingerprinter
    counter: str = ""
    #: The key of the header, parsed; ``None`` where there is none.
    header_key: str | None = None

    #: The wrapper around the view was reached: guards have passed.
    entered: bool = False
    #: The view runs without a claim: no key where none is required, or no store where that is allowed.
    unprotected: bool = False
    #: The view returned (it did not raise).
    returned: bool = False
    #: The status of the view's own answer, returned or aborted with.
    own_status: int | None = None
    #: The view said that its effect did not happen.
    nothing_happened: bool = False
    #: The answer that takes the place of the view's, whatever is made of it above: a kept one, or a refusal.
    replay: Response | None = field(default=None, repr=False)
    #: Why the request was not let through.
    refusal: IdempotencyError | None = field(default=None, repr=False)
    #: What ``store="reference"`` keeps instead of the answer.
    reference: object = None
    #: The store said what became of the claim, or was asked in vain: nothing more is to be done.
    settled: bool = False

    claim: Claim | None = None
    fence: int = 0
    attempt: int = 0
    created_at: int = 0
    beat: Beat | None = field(default=None, repr=False)
    #: What the work noted, now or in an earlier attempt.
    context: dict[str, object] = field(default_factory=dict, repr=False)
    #: Asks the route's reconciler; makes an answer of what it found; derives a provider's key.
    settle: Callable[[Orphan], Settlement] | None = field(default=None, repr=False)
    make_answer: Callable[[Settlement], StoredResponse] | None = field(default=None, repr=False)
    derive_key: Callable[[Provider | str | None, int, str | None], str] = field(default=_no_key, repr=False)
    #: A renewal was refused: the claim is another's.
    lost: bool = False
    #: Why nothing that is answered now is kept: a saga was begun, and has not come to an end.
    unfinished: str = ""
    saga_ran: bool = False
    #: Why the saga was rolled back: an answer that says so is kept.
    rolled_back: str = ""


def current_call() -> Call | None:
    """The call of the current request, if it is protected and runs."""
    if not has_request_context():
        return None
    call: Call | None = request.environ.get(ENVIRON_KEY)
    return call


def held_call(what: str) -> Call:
    """The call of the current request, once its claim is held.

    :param what: what is asked of it, for the message.
    :raises NotProtected: there is none.
    """
    call = current_call()
    if call is None or call.claim is None or not call.entered:
        raise NotProtected(
            f"{what} is only there inside a protected view: mark the view with @idempotent, and send a key"
        )
    return call
