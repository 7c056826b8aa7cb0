"""What becomes of a claim when its answer is there: kept whole, kept without its body, or given back."""

from __future__ import annotations

import enum
import logging
from dataclasses import dataclass

from werkzeug.exceptions import HTTPException
from werkzeug.wrappers import Response

from ..call import Call
from ..policy import Policy, finished_state
from ..records import State

__all__ = ["Fate", "Outcome", "decide", "end_state", "own_status", "unanswered", "without_answer"]

log = logging.getLogger("flask_idempotent")


class Fate(enum.Enum):
    KEEP = enum.auto()  #: the answer, whole
    MARK = enum.auto()  #: that it is done, with the view's own status; the answer the client got is not the view's
    RELEASE = enum.auto()
    SUSPEND = enum.auto()  #: nobody knows whether the effect outside happened


@dataclass(frozen=True, slots=True)
class Outcome:
    fate: Fate
    status: int
    reason: str = ""


def decide(call: Call, response: Response) -> Outcome:
    """The table "what becomes of it" for a view that ran, and the answer that stands after error handlers.

    Once the view has returned an answer that is kept, nothing releases the claim: what a later layer made of it can't
    take back what was done. Where the work shares a transaction with its key, it can be taken back, and is.
    """
    status = response.status_code
    if call.unfinished:
        return Outcome(Fate.SUSPEND, status, call.unfinished)
    if call.rolled_back and status < 500:
        return Outcome(Fate.KEEP, status, call.rolled_back)
    if call.nothing_happened:
        return Outcome(Fate.RELEASE, status, "nothing happened")
    own = call.own_status
    own_kept = own is not None and call.policy.keeps(own)
    if own is not None and own_kept and status >= 500 > own:
        return without_answer(call, own, "a later layer broke the answer")
    said = _said(call.policy, response)
    if said == "store":
        return Outcome(Fate.KEEP, status)
    if said == "release":
        return Outcome(Fate.RELEASE, status, "the outcome callable said so")
    if own is not None and own_kept and call.returned and own != status:
        return without_answer(call, own, "a later layer replaced the answer")
    return unanswered(call, status, f"status {status}")


def end_state(call: Call, status: int) -> State:
    """The state of a record that is kept. Where its saga was rolled back it failed, whatever the view made of it."""
    return State.FAILED if call.rolled_back else finished_state(status)


def without_answer(call: Call, status: int, reason: str) -> Outcome:
    """The work is done, and its answer is not there to be kept."""
    if call.policy.durable:
        return unanswered(call, status, reason)
    return Outcome(Fate.MARK, status, reason)


def unanswered(call: Call, status: int, reason: str) -> Outcome:
    """The work ended without an answer that is kept. Where its effect is outside, nobody knows what it did."""
    return Outcome(Fate.SUSPEND if call.policy.durable == "intent" else Fate.RELEASE, status, reason)


def own_status(value: object) -> int | None:
    """The status that a view's return value asks for; ``None`` for a WSGI callable, which has yet to say it."""
    if isinstance(value, tuple) and value:
        for part in value[1:2]:
            if isinstance(part, int):
                return int(part)
            if isinstance(part, str) and part[:3].isdigit():
                return int(part[:3])
        value = value[0]
    if isinstance(value, Response):
        return value.status_code
    if isinstance(value, HTTPException):
        return value.response.status_code if value.response is not None else value.code
    return None if callable(value) else 200


def _said(policy: Policy, response: Response) -> str:
    """``store``, ``release`` as the route's own callable has it, or ``not kept`` by status."""
    by_status = "store" if policy.keeps(response.status_code) else "not kept"
    if policy.outcome_callable is None:
        return by_status
    try:
        said = policy.outcome_callable(response)
    except Exception:
        log.exception("the outcome callable failed; the default table decides")
        return by_status
    if said not in ("store", "release"):
        log.error("the outcome callable said neither 'store' nor 'release'; the default table decides")
        return by_status
    return said
