"""Ready principal loaders for Flask-JWT-Extended and Flask-HTTPAuth.

Both read what the guard of this request has verified, never the header itself::

    idem.principal_loader(jwt_identity)
    idem.principal_loader(httpauth_user(auth))
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol
from uuid import UUID

from .errors import ConfigurationError
from .request.scope import plain_text

__all__ = ["HTTPAuthObject", "httpauth_user", "jwt_identity"]


class HTTPAuthObject(Protocol):
    """What Flask-HTTPAuth's ``HTTPBasicAuth``, ``HTTPDigestAuth``, ``HTTPTokenAuth`` and ``MultiAuth`` share."""

    #: A method; APIFlask's own versions of these classes make a property of it.
    @property
    def current_user(self) -> object: ...


def jwt_identity() -> str | int | UUID | None:
    """The identity in the token that Flask-JWT-Extended verified for this request. A loader as it stands.

    ``None`` (an anonymous caller) where no token was verified: the view has no ``@jwt_required()``, or it is optional
    and none came. The identity outlives a refreshed token, so a retry with the new one is still the same principal.

    :raises ConfigurationError: the identity is neither ``str``, ``int`` nor ``UUID``.
    """
    jwt_extended: Any = import_module("flask_jwt_extended")
    try:
        identity: object = jwt_extended.get_jwt_identity()
    except RuntimeError:  # no verified token: that is how Flask-JWT-Extended says it
        return None
    if identity is None:
        return None
    text = plain_text(identity)
    if text is None:
        raise ConfigurationError(
            f"The identity in the JWT is of type {type(identity).__name__}. "
            "Issue tokens whose identity is a str, or write a principal_loader that picks one out of it."
        )
    return text


def httpauth_user(auth: HTTPAuthObject) -> Callable[[], str | int | UUID | None]:
    """Make a loader for an object of Flask-HTTPAuth.

    What the verify callback returned is taken where it is a ``str``, ``int`` or ``UUID``. Where it is something else
    (a model instance, a dict) HTTP Basic and Digest give the user name that was verified. A token has no such name:
    let ``verify_token`` return an identifier (``True`` names nobody, so that all callers would be anonymous), or write
    a ``principal_loader`` like ``lambda: auth.current_user().id``.

    :param auth: an ``HTTPBasicAuth``, ``HTTPDigestAuth``, ``HTTPTokenAuth`` or ``MultiAuth``, APIFlask's too.
    :returns: a loader. It gives ``None`` where nobody was verified, and raises ``ConfigurationError`` where somebody
        was whose identifier it can't find.
    """

    def httpauth_user_loader() -> str | int | UUID | None:
        found = auth.current_user
        user: object = found() if inspect.ismethod(found) else found
        if user is None or user is False:  # no guard ran, or an optional one found nobody
            return None
        text = plain_text(user) or _verified_name(auth)
        if not text:
            raise ConfigurationError(
                f"Flask-HTTPAuth's current_user() is of type {type(user).__name__}, which is no identifier. "
                "Write a principal_loader that returns its primary key."
            )
        return text

    return httpauth_user_loader


def _verified_name(auth: HTTPAuthObject) -> str | None:
    """The user name that HTTP Basic or Digest verified. Elsewhere ``username()`` reads a header nobody checked."""
    flask_httpauth: Any = import_module("flask_httpauth")
    if isinstance(auth, (flask_httpauth.HTTPBasicAuth, flask_httpauth.HTTPDigestAuth)):
        name: object = auth.username()
        return plain_text(name)
    return None
