"""Reads a request's body, understands it, and leaves it for the view as if nobody had read it."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from operator import itemgetter
from typing import IO, Any, TypeVar

from flask import Request
from werkzeug.datastructures import FileStorage, MultiDict
from werkzeug.exceptions import ClientDisconnected, RequestEntityTooLarge
from werkzeug.formparser import FormDataParser

from ..errors import ConfigurationError
from .canonical import NotCanonical, dump, load

__all__ = ["SMALL_UPLOAD", "Body", "Form", "put_back_cached", "read", "read_body"]

#: Multipart bodies up to this many bytes are parsed from memory, so that the view can still read the stream.
SMALL_UPLOAD = 1024 * 1024
_CHUNK = 256 * 1024

_T = TypeVar("_T")

_URLENCODED = "application/x-www-form-urlencoded"
_MULTIPART = "multipart/form-data"


@dataclass(frozen=True, slots=True)
class Form:
    """A form's fields and files, sorted by name; equal names keep their order.

    A file is ``(name, filename, content type, SHA-256 in hexadecimal)``.
    """

    fields: list[tuple[str, str]]
    files: list[tuple[str, str | None, str | None, str]]

    def by_name(self) -> dict[str, list[object]]:
        """All values of each name: a string for a field, ``[filename, content type, SHA-256]`` for a file."""
        values: dict[str, list[object]] = {}
        for name, value in self.fields:
            values.setdefault(name, []).append(value)
        for name, *file in self.files:
            values.setdefault(name, []).append(file)
        return values

    def flat(self) -> dict[str, str]:
        """The first value of each field, without the files: what ``request.form.to_dict()`` gives."""
        values: dict[str, str] = {}
        for name, value in self.fields:
            values.setdefault(name, value)
        return values


@dataclass(frozen=True, slots=True)
class Body:
    """A body that was understood: ``document`` for JSON, ``form`` for forms, else the ``raw`` bytes."""

    kind: str
    raw: bytes = b""
    document: object = None
    form: Form | None = None

    def canonical(self) -> bytes:
        """The same bytes for the same intent; unambiguous together with ``kind``."""
        if self.kind == "json":
            return dump(self.document)
        if self.form is not None:
            return dump([self.form.fields, self.form.files])
        return self.raw


def read(request: Request) -> bytes:
    """All bytes of the body, which is then put back: ``request.stream``, ``form``, ``files``, ``get_data()`` and
    ``environ["wsgi.input"]`` give it once more, under the limits that hold when they are used.

    :raises RequestEntityTooLarge: by the app's own ``MAX_CONTENT_LENGTH``.
    :raises ClientDisconnected: the client left before the whole body was there; another 400.
    :raises ConfigurationError: something earlier in the request has consumed the stream. Without the body every
        request would look the same.
    """
    used = _stream_was_used(request)
    # Not cached: with a cached body request.data would hold forms too, and a limit that the view sets would be late.
    data = request.get_data(cache=False)
    if not data and (
        used or request.content_length or ("form" in request.__dict__ and (request.form or request.files))
    ):
        raise ConfigurationError(
            "The request body was consumed before @idempotent could read it. Let the hook or guard that reads "
            "request.stream use request.get_data() instead, or state fields=False or a callable for this view."
        )
    if len(data) < (request.content_length or 0):
        raise ClientDisconnected()  # not every server tells: a part would count as a request of its own
    if _goes_on(request, data):
        raise RequestEntityTooLarge()
    if data or "wsgi.input_terminated" in request.environ:  # else what the server's input holds is not ours to know
        _put_back(request, data)
    return data


def read_body(request: Request, *, ignored: Collection[str] = ()) -> Body:
    """Read the body and understand it by its content type.

    JSON (``application/json``, ``application/*+json``) that has a canonical form, urlencoded forms, multipart forms;
    all else, what is malformed, and what is empty is ``raw``. Nothing here refuses a body: that is the view's business.
    Multipart bodies larger than 1 MiB or of unknown length are parsed as ``request.form`` and ``request.files``, whose
    files are rewound; their ``request.stream`` is empty afterwards, as always in Flask.

    :param ignored: names of form fields that don't count.
    :raises RequestEntityTooLarge: by the app's own limits.
    :raises ClientDisconnected, ConfigurationError: see :func:`read`.
    """
    mimetype = request.mimetype
    if mimetype in (_URLENCODED, _MULTIPART):
        kind = "multipart" if mimetype == _MULTIPART else "form"
        # A guard that checks a CSRF token has parsed the form already, and then the bytes are gone.
        parsed = "form" in request.__dict__
        length = request.content_length
        if parsed or (kind == "multipart" and (length is None or length > SMALL_UPLOAD)):
            source = None if "stream" in request.__dict__ else _count(request)
            if request.form or request.files:
                return Body(kind, form=_form(request.form, request.files, ignored))
            # Where no parts were found (there was no boundary, say) the stream may be as it came.
            data = request.get_data(cache=False)
            if not data and source is not None and source.count < (length or 0):
                raise ClientDisconnected()
            if not data:
                return Body(kind, form=Form([], []))
            _put_back(request, data)
            return Body("raw", data)
        data = read(request)
        form = _parse(data, request, ignored) if data else None
        return Body("raw", data) if form is None else Body(kind, data, form=form)
    data = read(request)
    if data and request.is_json:
        try:
            return Body("json", data, document=load(data))
        except NotCanonical:
            pass
    return Body("raw", data)


def put_back_cached(request: Request) -> None:
    """Fill the stream again after a callable of the app, which may have called ``get_data()`` or ``get_json()``."""
    cached = request.__dict__.get("_cached_data")  # asking get_data() would read a stream that nobody has read yet
    if isinstance(cached, bytes) and cached:
        _put_back(request, cached)


class _Counted(io.RawIOBase):
    """The server's input, counted."""

    def __init__(self, source: IO[bytes]) -> None:
        self.count = 0
        self._source = source

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._source.read(len(buffer))
        buffer[: len(data)] = data
        self.count += len(data)
        return len(data)


def _count(request: Request) -> _Counted:
    """Count what is read from here on."""
    counted = _Counted(request.environ["wsgi.input"])
    request.environ["wsgi.input"] = counted
    request.__dict__.pop("stream", None)
    return counted


def _stream_was_used(request: Request) -> bool:
    """Whether somebody asked for the stream of a body without a length: read, it looks like an empty one."""
    return (
        request.content_length is None
        and {"HTTP_TRANSFER_ENCODING", "wsgi.input_terminated"} <= request.environ.keys()
        and "stream" in request.__dict__
        and not {"form", "_cached_data"} & request.__dict__.keys()
    )


def _goes_on(request: Request, data: bytes) -> bool:
    """Whether a body without a length was cut off at the app's limit: Werkzeug's stream ends there without an error."""
    if request.content_length is not None or not data or len(data) != request.max_content_length:
        return False
    return bool(request.environ["wsgi.input"].read(1))


def _put_back(request: Request, data: bytes) -> None:
    request.environ["wsgi.input"] = io.BytesIO(data)
    request.__dict__.pop("stream", None)


def _parse(data: bytes, request: Request, ignored: Collection[str]) -> Form | None:
    """Parse a form from memory, ``None`` if it is malformed. The app's limits are left to the view's own parsing."""
    parser = FormDataParser(stream_factory=_in_memory, silent=False)
    try:
        _, fields, files = parser.parse(io.BytesIO(data), request.mimetype, len(data), request.mimetype_params)
    except (ValueError, RequestEntityTooLarge):  # the latter is how Werkzeug 3.0 calls a form that isn't UTF-8
        return None
    return _form(fields, files, ignored)


def _in_memory(
    total_content_length: int | None = None,
    content_type: str | None = None,
    filename: str | None = None,
    content_length: int | None = None,
) -> IO[bytes]:
    return io.BytesIO()


def _form(fields: MultiDict[str, str], files: MultiDict[str, FileStorage], ignored: Collection[str]) -> Form:
    return Form(
        _sorted(item for item in fields.items(multi=True) if item[0] not in ignored),
        [(name, file.filename, file.content_type, _digest(file)) for name, file in _sorted(files.items(multi=True))],
    )


def _sorted(items: Iterable[tuple[str, _T]]) -> list[tuple[str, _T]]:
    return sorted(items, key=itemgetter(0))


def _digest(file: FileStorage) -> str:
    digest = hashlib.sha256()
    file.stream.seek(0)
    while chunk := file.stream.read(_CHUNK):
        digest.update(chunk)
    file.stream.seek(0)
    return digest.hexdigest()
