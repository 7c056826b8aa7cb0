"""The package's own answers: ``application/problem+json`` (RFC 9457), one error handler per concrete class."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from typing import Any

from flask import Flask, current_app, request
from flask.typing import ResponseReturnValue
from werkzeug.wrappers import Response

from ..errors import PROBLEMS, IdempotencyError, KeyNotFound
from ..response.snapshot import EXPIRES_HEADER, http_expires

__all__ = ["install_handlers", "own_handler", "problem_response"]

_OURS = "_idempotent_problem_handler"

#: The 404 is the same to the last byte for every key of somebody else, so its instance is one and the same too.
_NOT_FOUND_INSTANCE = uuid.uuid5(uuid.NAMESPACE_URL, "urn:flask-idempotent:not-found")


def install_handlers(app: Flask, docs_url: str | None) -> None:
    """Answer each problem class, unless the app already does.

    A handler of a concrete class comes before handlers of ``HTTPException`` that other extensions register; a handler
    that the app has for one of our classes, or for ``IdempotencyError``, comes before ours, whenever it was registered.
    """

    def answer(error: IdempotencyError) -> ResponseReturnValue:
        handler = own_handler(current_app, error)
        if handler is None:
            return problem_response(error, docs_url)
        result: ResponseReturnValue = current_app.ensure_sync(handler)(error)
        return result

    setattr(answer, _OURS, True)
    for cls in PROBLEMS:
        if cls not in app.error_handler_spec[None][cls.code]:
            app.register_error_handler(cls, answer)


def own_handler(app: Flask, error: IdempotencyError) -> Callable[..., Any] | None:
    """The handler that the app has for one of our classes, nearest first; ``None`` where only ours would answer."""
    for blueprint in (*request.blueprints, None):
        for code in (type(error).code, None):
            handlers = app.error_handler_spec[blueprint][code]
            for cls in type(error).__mro__:
                handler = handlers.get(cls)
                if handler is not None and issubclass(cls, IdempotencyError) and not hasattr(handler, _OURS):
                    return handler
    return None


def problem_response(error: IdempotencyError, docs_url: str | None) -> Response:
    """The answer for a problem. ``Retry-After`` is there exactly when the problem is retryable."""
    instance = _NOT_FOUND_INSTANCE if isinstance(error, KeyNotFound) else uuid.uuid4()
    members: dict[str, object] = {
        "type": f"{docs_url}#{error.problem}" if docs_url else f"urn:flask-idempotent:{error.problem}",
        "title": error.title,
        "status": error.code,
        "detail": error.detail,
        "instance": instance.urn,
        "code": error.problem,
        "retryable": error.retryable,
        **error.members,
    }
    response = Response(json.dumps(members), status=error.code, content_type="application/problem+json")
    response.headers["Content-Language"] = "en"
    if docs_url:
        response.headers["Link"] = f'<{docs_url}>; rel="describedby"'
    if error.retry_after is not None:
        response.headers["Retry-After"] = str(error.retry_after)
    if error.expires_at is not None:
        response.headers[EXPIRES_HEADER] = http_expires(error.expires_at)
    return response
