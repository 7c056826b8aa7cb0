"""What a ``durable="intent"`` call may ask of the web: its reconciler, answers, and the provider's keys."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import cast

from flask import Flask
from flask.typing import ResponseReturnValue
from werkzeug.wrappers import Response

from ..call import Call
from ..errors import ConfigurationError, ResponseUnavailable
from ..providers.base import Provider, resolve
from ..records import Claim, Settlement, StoredResponse
from ..response.snapshot import snapshot
from ..settings import Settings
from ..settling import Orphan
from .problems import problem_response
from .views import Mark

__all__ = ["equip", "key_name", "provider_of"]

ABANDONED = "The first request was interrupted. Whether it was carried out is not known, and it is not tried again."


def equip(app: Flask, settings: Settings, call: Call, mark: Mark, claim: Claim) -> None:
    """Give a call what its engine needs to settle an orphan and to hand out keys."""
    call.settle = _settler(call, mark, settings)
    call.make_answer = lambda settlement: _answer(app, call, settlement)
    call.derive_key = lambda provider, step, operation: provider_of(call, settings, provider).key(
        _material(claim, operation), step
    )


def provider_of(call: Call, settings: Settings, provider: Provider | str | None) -> Provider:
    """The provider that a key is for.

    :raises ConfigurationError: neither the route nor the caller names one.
    """
    if provider is not None:
        return resolve(provider, settings.providers)
    if call.policy.provider is None:
        raise ConfigurationError(
            f"{call.endpoint} has no provider=: name it on the route, or as provider_key('stripe')"
        )
    return call.policy.provider


def key_name(key: str) -> str:
    """What a provider's key is noted under: not the key itself."""
    return hashlib.sha256(key.encode()).hexdigest()[:32]


def _material(claim: Claim, operation: str | None) -> str:
    """What a provider's key is made of: this record, or an operation that several records of a tenant share."""
    if operation is None:
        return f"record\0{claim.scope.digest}"
    tenant = claim.scope.tenant
    return f"operation\0{'-' if tenant is None else f'{len(tenant)}:{tenant}'}\0{operation}"


def _settler(call: Call, mark: Mark, settings: Settings) -> Callable[[Orphan], Settlement] | None:
    if call.policy.recovery == "abandon":
        return lambda orphan: _abandoned(settings)
    reconcile = mark.reconciler or mark.keywords.reconcile
    if reconcile is None:
        return None

    def settle(orphan: Orphan) -> Settlement:
        found = reconcile(orphan)
        if not isinstance(found, Settlement):
            raise TypeError("a reconciler returns Settlement.completed(...), .retry(), .pending() or .manual(reason)")
        return found

    return settle


def _abandoned(settings: Settings) -> Settlement:
    problem = ResponseUnavailable(ABANDONED)
    problem.title = "The first request was interrupted"
    answer = problem_response(problem, settings.docs_url)
    return Settlement("completed", answer, 409, reason="abandoned: its outcome was never looked up")


def _answer(app: Flask, call: Call, settlement: Settlement) -> StoredResponse:
    """The answer that a settlement stands for, as it is kept."""
    body = settlement.body
    if isinstance(body, Response):
        response = body
    elif body is None or isinstance(body, (bool, int, float)):
        # What a view can't return, and JSON can hold.
        response = app.response_class(json.dumps(body), mimetype="application/json")
    else:
        response = app.make_response(cast("ResponseReturnValue", body))
    if settlement.status != 200 or not isinstance(body, (tuple, Response)):
        response.status_code = settlement.status
    response.headers.extend(settlement.headers or {})
    return snapshot(response, bound=call.policy.max_body, replay_header=call.policy.replay_header)
