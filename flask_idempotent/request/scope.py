"""Whose key it is: the scope that a record is filed under, and the digests of who sent it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from importlib import import_module
from typing import Any
from uuid import UUID

from werkzeug.wrappers import Request

from ..errors import ConfigurationError
from ..records import Scope

__all__ = [
    "binding_digest",
    "bucket_digest",
    "identify",
    "make_scope",
    "plain_text",
    "principal_digest",
    "text_of",
]

# What a digest stands for and the version of its layout come first, so that no two kinds can be equal.
_SCOPE = b"flask-idempotent/scope/1\0"
_PRINCIPAL = b"flask-idempotent/principal/1\0"
_BINDING = b"flask-idempotent/binding/1\0"
_BUCKET = b"flask-idempotent/bucket/1\0"
_CREDENTIAL = b"flask-idempotent/credential/1\0"


def plain_text(value: object) -> str | None:
    """The text of a ``str``, ``int`` or ``UUID``; ``None`` for anything else, ``bool`` included.

    Subclasses give the plain text of what they are, so that an enum member and its value are the same.
    """
    value_type = type(value)  # isinstance() would take a proxy for what it stands for
    if issubclass(value_type, str):
        return str.__str__(value)
    if issubclass(value_type, int) and value_type is not bool:
        return int.__repr__(value)
    if issubclass(value_type, UUID):
        return UUID.__str__(value)
    return None


def text_of(value: object, *, what: str) -> str | None:
    """Check what a loader gave and return its text: ``1`` and ``"1"`` are the same, ``None`` is none.

    :param what: the loader's name for the error, such as ``"tenant_loader"``.
    :raises ConfigurationError: anything but ``str``, ``int``, ``UUID`` or ``None`` (the text of a model instance holds
        a memory address), or an empty string, which can't be told from a value that is missing.
    """
    if value is None:
        return None
    text = plain_text(value)
    if text is None:
        raise ConfigurationError(
            f"{what} must return a str, an int, a UUID or None, not {type(value).__name__}. "
            "Return the stable identifier (the primary key, say) instead."
        )
    if not text:
        raise ConfigurationError(f"{what} returned an empty string. Return None where there is nobody.")
    return text


def make_scope(
    prefix: str, tenant: str | None, endpoint: str, key: str, *, isolate_principal: str | None = None
) -> Scope:
    """The identity of a record: 64 hexadecimal digits over key prefix, tenant, endpoint and key.

    :param endpoint: the stable name of the operation.
    :param isolate_principal: the principal's text where every principal has a space of its own; ``None`` where keys
        are shared by the tenant, and for anonymous callers.
    """
    return Scope(tenant, endpoint, _digest(_SCOPE, prefix, tenant, endpoint, key, isolate_principal))


def identify(request: Request, *, loader: Callable[[], object] | None, login_manager: bool) -> str | None:
    """The text of who sends this request, or ``None`` for an anonymous caller. Call it after the guards have run.

    The loader decides alone where there is one. Else the first of: Flask-Login's user, HTTP Basic's user name (the
    digest of the password where the name is empty), the digest of ``X-API-Key``, the digest of the bearer token. The
    last changes when the token is refreshed, and a retry then meets a stranger's key; such apps need a loader.
    The text of these has the source in front, so that a user ``7`` of one is not user ``7`` of another. Nothing here
    checks credentials: that is what the view's guards do.

    :param login_manager: whether the app has Flask-Login's ``login_manager``.
    :raises ConfigurationError: the loader or ``get_id()`` gave something without a stable text.
    """
    if loader is not None:
        return text_of(loader(), what="principal_loader")
    if login_manager:
        user = _login_user()
        if user is not None:
            return user
    authorization = request.authorization
    if authorization is not None and authorization.type == "basic":
        if authorization.username:
            return f"basic:{authorization.username}"
        if authorization.password:
            return f"basic-password:{_digest(_CREDENTIAL, authorization.password)}"
    api_key = request.headers.get("X-API-Key", "").strip()
    if api_key:
        return f"api-key:{_digest(_CREDENTIAL, api_key)}"
    # Not request.authorization.token: a token with "=" inside is read as parameters there.
    kind, _, token = request.headers.get("Authorization", "").strip().partition(" ")
    token = token.strip()
    if token and kind.lower() == "bearer":
        return f"bearer:{_digest(_CREDENTIAL, token)}"
    return None


def principal_digest(prefix: str, tenant: str | None, principal: str | None) -> str:
    """64 hexadecimal digits for a principal of this tenant; empty for an anonymous caller."""
    return "" if principal is None else _digest(_PRINCIPAL, prefix, tenant, principal)


def binding_digest(prefix: str, tenant: str | None, binding: str | None) -> str:
    """64 hexadecimal digits for the session or token that a key is bound to; empty for none."""
    return "" if binding is None else _digest(_BINDING, prefix, tenant, binding)


def bucket_digest(
    prefix: str, tenant: str | None, principal: str | None, remote_addr: str | None, *, counter: str = ""
) -> str:
    """64 hexadecimal digits for whoever the rate limit counts: the principal, else the remote address.

    Callers without either (a Unix socket, say) share one bucket.
    """
    if principal is not None:
        return _digest(_BUCKET, prefix, tenant, counter, "principal", principal)
    return _digest(_BUCKET, prefix, tenant, counter, "address", remote_addr or "unknown")


def _login_user() -> str | None:
    """Flask-Login's user as ``login:<id>``, ``None`` where nobody is logged in."""
    try:
        flask_login: Any = import_module("flask_login")
    except ImportError:
        return None  # a login_manager of another make
    user = flask_login.current_user
    if not getattr(user, "is_authenticated", False):
        return None
    identity = text_of(user.get_id(), what="get_id() of Flask-Login's user")
    if identity is None:
        raise ConfigurationError(
            "get_id() of Flask-Login's user returned None for somebody who is logged in. Return the user's identifier."
        )
    return f"login:{identity}"


def _digest(domain: bytes, *parts: str | None) -> str:
    """SHA-256 over length-prefixed parts: no two lists of parts give the same bytes, ``None`` is not ``""``."""
    pieces = [domain]
    for part in parts:
        if part is None:
            pieces.append(b"-")
        else:
            # Text from outside can hold lone surrogates, which plain UTF-8 refuses.
            raw = part.encode("utf-8", "surrogatepass")
            pieces.append(b"%d:" % len(raw))
            pieces.append(raw)
    return hashlib.sha256(b"".join(pieces)).hexdigest()
