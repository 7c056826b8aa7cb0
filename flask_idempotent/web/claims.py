"""From a request that the guards let through to a claim: its key, who sends it, and what it asks for."""

from __future__ import annotations

import logging
import secrets
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from flask import Flask, request

from ..call import Call
from ..errors import IdempotencyError, MissingKey, PrincipalRequired
from ..policy import Policy
from ..records import Claim, RateLimit
from ..request import key as keys
from ..request import scope as scopes
from ..request.body import read_body

__all__ = ["Loader", "Loaders", "header_key", "make_claim"]

log = logging.getLogger("flask_idempotent")

Loader = Callable[[], object]

#: What werkzeug's own converters make of a part of a path.
PLAIN = (str, int, float, uuid.UUID)


@dataclass(slots=True)
class Loaders:
    """Who calls. Shared by the apps of one extension object, and read at each request: it may be told late."""

    principal: Loader | None = None
    tenant: Loader | None = None


def header_key(policy: Policy) -> str | None:
    """The key of the header, before anything else happens.

    :raises InvalidKey: it is malformed, or could be guessed.
    """
    key = keys.parse_header(request.headers.getlist(policy.header))
    if key is not None:
        keys.check_strength(key, policy.min_key_bits)
    return key


def make_claim(app: Flask, call: Call, loaders: Loaders, *, prefix: str) -> Claim | None:
    """Who asks for what; ``None`` where no key came and none is needed. Computed once a request.

    :raises IdempotencyError: the key is missing or malformed, or nobody is signed in where somebody must be.
    """
    policy = call.policy
    key = _key(call)
    if key is None:
        if policy.required:
            raise MissingKey()
        return None
    principal = scopes.identify(request, loader=loaders.principal, login_manager=hasattr(app, "login_manager"))
    tenant = scopes.text_of(loaders.tenant(), what="the tenant loader") if loaders.tenant else None
    binding = ""
    if policy.bind is not None:
        bound_to = scopes.text_of(policy.bind(request), what="the bind callable")
        if bound_to is None:
            raise PrincipalRequired("There is no session or token that this request could be bound to.")
        binding = scopes.binding_digest(prefix, tenant, bound_to)
    if principal is None and policy.anonymous == "refuse":
        raise PrincipalRequired()
    rate = policy.rate
    if rate is not None:
        bucket = scopes.bucket_digest(prefix, tenant, principal, request.remote_addr, counter=call.counter)
        rate = RateLimit(rate.limit, rate.window_ms, bucket)
    return Claim(
        scope=scopes.make_scope(
            prefix, tenant, call.endpoint, key, isolate_principal=principal if policy.isolate else None
        ),
        token=secrets.token_hex(16),
        fingerprints=call.fingerprinter.compute(
            request, endpoint_scope=call.endpoint, path_variables=_path_variables(app)
        ),
        principal=scopes.principal_digest(prefix, tenant, principal),
        binding=binding,
        lease_ms=policy.lease_ms,
        skew_ms=policy.skew_ms,
        max_processing_ms=policy.max_processing_ms,
        ttl_ms=policy.ttl_ms,
        tombstone_ms=policy.tombstone_ms,
        rate=rate,
    )


def _key(call: Call) -> str | None:
    """The callable's key; else the header's; else that of a form's hidden field."""
    policy = call.policy
    if policy.key is None:
        return call.header_key if call.header_key is not None else _form_key(policy)
    try:
        return keys.check_derived(policy.key(request))
    except IdempotencyError as error:
        log.warning("the key callable of %s gave no key: %s", call.endpoint, error.problem)
        raise
    except Exception as error:
        # The class only: a text can repeat what was sent.
        log.error("the key callable of %s failed: %s", call.endpoint, type(error).__name__)
        raise


def _form_key(policy: Policy) -> str | None:
    """The key of ``idempotent_key_field()``: a person's double-click sends it twice."""
    if request.mimetype not in ("application/x-www-form-urlencoded", "multipart/form-data"):
        return None
    form = read_body(request).form
    sent = form.flat().get(policy.form_field) if form is not None else None
    key = keys.parse_header(sent)
    if key is not None:
        keys.check_strength(key, policy.min_key_bits)
    return key


def _path_variables(app: Flask) -> Mapping[str, object]:
    """What the URL says, also where a hook took a part of it (a language, a tenant) out of the view's arguments, or put
    an object in its place."""
    found: dict[str, object] = request.view_args or {}
    rule = request.url_rule
    if rule is None or (rule.arguments == found.keys() and all(isinstance(value, PLAIN) for value in found.values())):
        return found
    adapter = app.create_url_adapter(request)
    return found if adapter is None else adapter.match()[1]
