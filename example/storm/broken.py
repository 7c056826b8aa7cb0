"""The shop with the claim taken out: its stores let everybody run. It shows that the table can fail."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence

from flask import Flask

from flask_idempotent.records import Claim, ClaimReply, Completed, Completion, CompletionReply, Record, Scope, Verdict
from flask_idempotent.stores.base import Released

from ..app import create_app as create_shop

__all__ = ["create_app"]


class NoClaim:
    """A store that says yes to every claim and remembers nothing."""

    def claim(self, claim: Claim) -> ClaimReply:
        now = _now_ms()
        return ClaimReply(Verdict.CLAIMED, fence=now, attempt=1, created_at=now)

    def renew(self, claims: Sequence[Claim]) -> Sequence[bool]:
        return [True] * len(claims)

    def complete(self, completion: Completion) -> CompletionReply:
        return CompletionReply(Completed.STORED, expires_at=_now_ms() + completion.claim.ttl_ms)

    def release(self, claim: Claim, *, reason: str, forget: bool = False) -> Released:
        return Released.RELEASED

    def suspend(self, claim: Claim, *, reason: str) -> None:
        pass

    def read(self, scope: Scope) -> Record | None:
        return None


def create_app(config: Mapping[str, object] | None = None) -> Flask:
    """The shop, unprotected. Without a record there is no key for the bank either, so each try makes one afresh."""
    app = create_shop(config)
    protection = app.extensions["idempotent"]
    for engine in protection.engines.values():
        engine.store = engine._settling = NoClaim()
        engine.hand_out = lambda *args: uuid.uuid4().hex
    return app


def _now_ms() -> int:
    return int(time.time() * 1000)
