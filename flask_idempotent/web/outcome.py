"""What becomes of a claim when its answer is there: kept whole, kept without its body, or given back."""

from __future__ import annotations

import enum
import logging
from dataclasses import dataclass

from werkzeug.wrappers import Response

from ..call import Call
from ..policy import Policy

__all__ = ["Fate", "Outcome", "decide", "own_status", "without_answer"]

log = logging.getLogger("flask_idempotent")


class Fate(enum.Enum):
    KEEP = enum.auto()  #: the answer, whole
    MARK = enum.auto()  #: that it is done, with the view's own status; the answer the client got is not the view's
    RELEASE = enum.auto()


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
    if call.nothing_happened:
        return Outcome(Fate.RELEASE, status, "nothing happened")
    own = call.own_status
    own_kept = own is not None and call.policy.keeps(own)
    if own is not None and own_kept and status >= 500 > own:
        return without_answer(call, own, "a later layer broke the answer")
    if _keeps(call.policy, response):
        return Outcome(Fate.KEEP, status)
    if own is not None and own_kept and call.returned and own != status:
        return without_answer(call, own, "a later layer replaced the answer")
    return Outcome(Fate.RELEASE, status, f"status {status}")


def without_answer(call: Call, status: int, reason: str) -> Outcome:
    """The work is done, and its answer is not there to be kept."""
    return Outcome(Fate.RELEASE if call.policy.durable == "transaction" else Fate.MARK, status, reason)


def own_status(value: object) -> int:
    """The status that a view's return value asks for."""
    if isinstance(value, tuple) and value:
        for part in value[1:2]:
            if isinstance(part, int):
                return int(part)
            if isinstance(part, str) and part[:3].isdigit():
                return int(part[:3])
        value = value[0]
    return value.status_code if isinstance(value, Response) else 200


def _keeps(policy: Policy, response: Response) -> bool:
    if policy.outcome_callable is None:
        return policy.keeps(response.status_code)
    try:
        said = policy.outcome_callable(response)
    except Exception:
        log.exception("the outcome callable failed; the default table decides")
        return policy.keeps(response.status_code)
    if said not in ("store", "release"):
        log.error("the outcome callable said neither 'store' nor 'release'; the default table decides")
        return policy.keeps(response.status_code)
    return said == "store"
