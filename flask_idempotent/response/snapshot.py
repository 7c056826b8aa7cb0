"""From a response to what is kept of it, and back."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import logging
from collections.abc import Iterable, Iterator
from typing import Literal

from werkzeug.http import http_date
from werkzeug.wrappers import Response

from ..records import BodyKind, StoredResponse

__all__ = [
    "EXPIRES_HEADER",
    "STATUS_HEADER",
    "http_expires",
    "kept_headers",
    "reduce",
    "reference_of",
    "restore",
    "snapshot",
]

log = logging.getLogger("flask_idempotent")

EXPIRES_HEADER = "Idempotency-Expires"
STATUS_HEADER = "Idempotency-Status"

#: Headers of one connection (RFC 9110, section 7.6.1), one client (RFC 6265) or one moment: never those of a replay.
NOT_KEPT = frozenset(
    {
        # one connection
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authentication-info",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "content-length",  # computed afresh
        # one moment
        "date",
        "server",
        "age",
        # one client
        "set-cookie",
        "www-authenticate",
        "authentication-info",
        # trace ids
        "traceparent",
        "tracestate",
        "x-request-id",
        "request-id",
        "x-correlation-id",
        "x-trace-id",
        "x-amzn-trace-id",
        "x-amzn-requestid",
        "x-cloud-trace-context",
        # our own
        "idempotency-expires",
        "idempotency-status",
    }
)
NOT_KEPT_PREFIXES = ("access-control-", "x-b3-", "x-datadog-")


def snapshot(response: Response, *, bound: int, replay_header: str) -> StoredResponse:
    """What is kept of an answer. A stream is read up to the bound, and still reaches the client whole.

    :param response: the answer; its body may be replaced by an equal one.
    :param bound: bytes; a larger body is not kept.
    :param replay_header: name of the marker of replays, which is not kept.
    :raises Exception: whatever the view's own stream raises; nothing of it is kept then.
    """
    body = _bounded(response, bound)
    kind = BodyKind.NONE if body is None else BodyKind.FULL
    return StoredResponse(response.status_code, kept_headers(response.headers, replay_header), body, kind)


def kept_headers(headers: Iterable[tuple[str, str]], replay_header: str) -> tuple[tuple[str, str], ...]:
    """The headers that a replay repeats, in order, repeated ones too."""
    kept = []
    marker = replay_header.lower()
    for name, value in headers:
        lower = name.lower()
        if lower in NOT_KEPT or lower == marker or lower.startswith(NOT_KEPT_PREFIXES):
            continue
        if lower == "vary":
            value = ", ".join(part for part in map(str.strip, value.split(",")) if part and part.lower() != "origin")
            if not value:
                continue
        kept.append((name, value))
    return tuple(kept)


def restore(stored: StoredResponse, response_class: type[Response]) -> Response:
    """The kept answer as a response of the app's class. The length is computed by the server, as for any answer."""
    response = response_class(stored.body or b"", status=stored.status)
    response.headers.clear()
    for name, value in stored.headers:
        response.headers.add(name, value)
    return response


def reduce(stored: StoredResponse, how: Literal["reference", "hash"], reference: object) -> StoredResponse:
    """What ``store=`` leaves of an answer: a reference to make it again from, or a digest.

    :param reference: a JSON value; ``None`` for the answer's ``Location``.
    """
    if how == "hash":
        if stored.body is None:
            return stored
        digest = hashlib.sha256(stored.body).hexdigest()
        return dataclasses.replace(stored, body=digest.encode("ascii"), kind=BodyKind.HASH)
    if reference is None:
        reference = stored.location
    if reference is None:
        log.error("store='reference': the view gave no reference and no Location, so a repeat can't be answered")
        return dataclasses.replace(stored, body=None, kind=BodyKind.NONE)
    return dataclasses.replace(stored, body=json.dumps(reference).encode("ascii"), kind=BodyKind.REFERENCE)


def reference_of(stored: StoredResponse) -> object:
    """The reference that was kept instead of an answer."""
    return json.loads(stored.body or b"null")


def http_expires(expires_at_ms: int) -> str:
    """The value of ``Idempotency-Expires``."""
    return http_date(expires_at_ms / 1000)


def _bounded(response: Response, bound: int) -> bytes | None:
    """The whole body, or ``None`` when it is larger than the bound; the client's copy is complete either way."""
    if response.is_sequence:
        body = b"".join(response.iter_encoded())
        return body if len(body) <= bound else None
    response.direct_passthrough = False
    source = response.response
    chunks: Iterator[bytes] = iter(response.iter_encoded())
    read: list[bytes] = []
    length = 0
    for chunk in chunks:
        read.append(chunk)
        length += len(chunk)
        if length > bound:
            _replace_body(response, itertools.chain(read, chunks), source)
            return None
    _replace_body(response, read, source)
    response.headers.setdefault("Content-Length", str(length))
    return b"".join(read)


def _replace_body(response: Response, body: Iterable[bytes], source: object) -> None:
    """Until here the response closes the view's source itself, from here on it has to be told."""
    response.response = body
    close = getattr(source, "close", None)
    if close is not None:
        response.call_on_close(close)
