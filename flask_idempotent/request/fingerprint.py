"""What a request asks for, as a digest: the same for a retry, another one for another intent."""

from __future__ import annotations

import functools
import hashlib
import hmac
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from operator import itemgetter
from typing import Any, Literal, TypeAlias

from flask import Request
from marshmallow import Schema, ValidationError

from ..errors import ConfigurationError
from ..records import Fingerprint
from .body import Body, put_back_cached, read, read_body
from .canonical import dump, dump_value

__all__ = ["Fields", "Fingerprinter"]

#: What ``fields=`` takes: the whole body, names and JSON pointers, a Schema, a callable, ``"raw"``, or ``False``.
Fields: TypeAlias = (
    Literal[False, "raw"] | Sequence[str] | Set[str] | Schema | type[Schema] | Callable[[Request], object] | None
)

#: Version of the algorithm. Change it with anything that gives another value for the same request.
_VERSION = "1"
_DOMAIN = f"flask-idempotent/fingerprint/{_VERSION}\0".encode()

_BAD_ESCAPE = re.compile(r"~(?![01])")
_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")

_Part: TypeAlias = tuple[str, bytes]


class Fingerprinter:
    """Computes the fingerprints of one protected view. Made once, used for every request, safe to share by threads.

    A fingerprint is a SHA-256 over the method, the scope's name, the path variables, the query (by name; equal names
    keep their order) and the body. Headers don't count, nor does what stands in front of the path variables in the URL.

    - ``None``: the whole body. JSON in canonical form, forms by their parsed fields and the digests of their files (a
      new boundary is no new intent), anything else by its bytes.
    - names and JSON pointers (RFC 6901): top-level members or form fields. A name and the pointer ``/name`` are the
      same; a form field is the list of its values. Missing differs from null. Where the body is neither a JSON object
      nor a form, all of it counts.
    - a marshmallow ``Schema``: what its ``load`` makes of the JSON document, or of a form as a flat ``dict`` (the first
      value of each name; files count beside it). Where it is not valid, all of the body counts. It must load plain
      values, not models.
    - a callable: its result, anything that has canonical JSON. It must not use up ``request.stream``.
    - ``"raw"``: the bytes of the body, for signed bodies.
    - ``False``: neither body nor query; the body isn't even read.

    :param hmac_keys: newest first. With keys a value is an HMAC-SHA-256, so that a leaked store can't be searched for
        known bodies; there is one fingerprint for each key.
    :param form_field: the form field that may hold the key itself. It doesn't count.
    :param form_ignore: further form fields that don't count, such as a CSRF token.
    :raises ConfigurationError: ``fields`` is none of these.
    """

    __slots__ = ("_body", "_callable", "_ignored", "_keys", "_name", "_pointers", "_schema", "recipe_ids")

    #: One id for each fingerprint of :meth:`compute`, in the same order. Values of other recipes can't be compared.
    recipe_ids: tuple[str, ...]
    _callable: Callable[[Request], object]

    def __init__(
        self,
        fields: Fields = None,
        *,
        hmac_keys: Sequence[bytes] = (),
        form_field: str = "idempotency_key",
        form_ignore: Sequence[str] = ("csrf_token",),
    ) -> None:
        self._ignored = frozenset((form_field, *form_ignore))
        self._keys = tuple(hmac_keys)
        self._body, description = self._bind(fields)
        recipe = [_VERSION, description, sorted(self._ignored)]
        self.recipe_ids = tuple(_recipe_id([*recipe, _key_id(key)]) for key in self._keys) or (_recipe_id(recipe),)

    def compute(
        self, request: Request, *, endpoint_scope: str, path_variables: Mapping[str, object] | None = None
    ) -> tuple[Fingerprint, ...]:
        """The fingerprints of a request, under the newest key first. The body is left as it was found.

        :param endpoint_scope: the scope's name (``scope=`` of the decorator).
        :param path_variables: the matched variables, where hooks may have taken some out of ``request.view_args``.
        :raises ConfigurationError: what a callable or a Schema gave has no canonical form, or the body was consumed by
            something earlier.
        :raises RequestEntityTooLarge: by the app's own limits.
        """
        if path_variables is None:
            path_variables = request.view_args or {}
        kind, body = ("none", b"") if self._body is None else self._body(request)
        total = hashlib.sha256(_DOMAIN)
        for part in (
            request.method.encode(),
            endpoint_scope.encode("utf-8", "surrogatepass"),
            _path(request, path_variables),
            b"" if self._body is None else _query(request),
            kind.encode(),
            body,
        ):
            total.update(b"%d:" % len(part))
            total.update(part)
        if not self._keys:
            return (Fingerprint(self.recipe_ids[0], total.hexdigest()),)
        digest = total.digest()
        return tuple(
            Fingerprint(recipe, hmac.digest(key, digest, "sha256").hex())
            for recipe, key in zip(self.recipe_ids, self._keys, strict=True)
        )

    def _bind(self, fields: Fields) -> tuple[Callable[[Request], _Part] | None, object]:
        """How the body is read, and a description of that, the same in every process."""
        if fields is None:
            return self._whole, "whole"
        if fields is False:
            return None, "none"
        if isinstance(fields, str):
            if fields != "raw":
                raise ConfigurationError(
                    'fields= takes a list of names, or the word "raw". Put a single name in a list.'
                )
            return _raw, "raw"
        if isinstance(fields, type) and issubclass(fields, Schema):
            fields = fields()
        if isinstance(fields, Schema):
            self._schema = fields
            self._name = _name(fields)
            return self._loaded, ["schema", self._name, _describe_schema(fields)]
        if isinstance(fields, (Sequence, Set)):
            self._pointers = _pointers(fields)
            return self._selected, ["fields", [pointer for pointer, _ in self._pointers]]
        if callable(fields):
            self._callable = fields
            self._name = _name(fields)
            return self._called, ["callable", self._name]
        raise ConfigurationError(
            "fields= takes None, a list of names or JSON pointers, a marshmallow Schema, a callable(request), "
            f'"raw" or False, not {type(fields).__name__}.'
        )

    def _whole(self, request: Request) -> _Part:
        body = read_body(request, ignored=self._ignored)
        return body.kind, body.canonical()

    def _selected(self, request: Request) -> _Part:
        body = read_body(request, ignored=self._ignored)
        document: object = body.document if body.form is None else body.form.by_name()
        if not isinstance(document, dict):
            return body.kind, body.canonical()
        found = [[pointer, _resolve(document, tokens)] for pointer, tokens in self._pointers]
        return f"fields-{body.kind}", dump(found)

    def _loaded(self, request: Request) -> _Part:
        body = read_body(request, ignored=self._ignored)
        if body.kind == "raw":
            return body.kind, body.canonical()
        try:
            loaded: object = self._schema.load(_for_schema(body))
        except ValidationError:
            return self._whole(request)  # read again: hooks of the Schema may have changed the document
        files = body.form.files if body.form is not None else []
        return f"schema-{body.kind}", self._dump([loaded, files], "what {} loads")

    def _called(self, request: Request) -> _Part:
        result: object = self._callable(request)
        put_back_cached(request)
        return "callable", self._dump(result, "what {} returns")

    def _dump(self, value: object, what: str) -> bytes:
        try:
            return dump_value(value)
        except TypeError as error:
            raise ConfigurationError(
                f"fields=: {what.format(self._name)} holds {error}, which has no stable text. "
                "Give plain values (str, int, list, dict, dates) instead."
            ) from None


def _raw(request: Request) -> _Part:
    return "raw", read(request)


def _path(request: Request, variables: Mapping[str, object]) -> bytes:
    if not variables:
        return b""
    if all(type(value) in (str, int) for value in variables.values()):
        return dump(dict(variables))
    try:
        return dump_value(dict(variables))
    except TypeError:
        # A converter of the app made an object of it, whose text isn't stable. The path is.
        return dump([request.path, sorted(variables)])


def _query(request: Request) -> bytes:
    if not request.query_string:
        return b""
    try:
        pairs = sorted(request.args.items(multi=True), key=itemgetter(0))
    except UnicodeDecodeError:  # bytes that should have been percent-encoded
        return request.query_string
    return dump(pairs)


def _for_schema(body: Body) -> Any:
    """What a Schema is given. It says itself what it doesn't take, so the type is left open."""
    return body.document if body.form is None else body.form.flat()


def _pointers(fields: Iterable[object]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Names and pointers as sorted pointers with their tokens; the order in which they were given doesn't count."""
    pointers: dict[str, tuple[str, ...]] = {}
    for field in fields:
        if not isinstance(field, str) or not field:
            raise ConfigurationError("fields= takes names and JSON pointers: each a string, and none of them empty.")
        if not field.startswith("/"):
            field = "/" + field.replace("~", "~0").replace("/", "~1")
        elif _BAD_ESCAPE.search(field):
            raise ConfigurationError('fields= has a JSON pointer with a "~" that is neither ~0 nor ~1 (RFC 6901).')
        pointers[field] = tuple(token.replace("~1", "/").replace("~0", "~") for token in field[1:].split("/"))
    if not pointers:
        raise ConfigurationError("fields= is an empty list. State what makes another intent, or False for nothing.")
    return tuple(sorted(pointers.items()))


def _resolve(document: object, tokens: Sequence[str]) -> tuple[bool, object]:
    """Follow a pointer: ``(True, value)``, or ``(False, None)`` where it leads nowhere."""
    for token in tokens:
        if isinstance(document, dict):
            if token not in document:
                return False, None
            document = document[token]
        elif isinstance(document, list) and _INDEX.fullmatch(token) and int(token) < len(document):
            document = document[int(token)]
        else:
            return False, None
    return True, document


def _name(thing: object) -> str:
    """Module and qualified name, never an address."""
    while isinstance(thing, functools.partial):
        thing = thing.func
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{getattr(named, '__module__', '')}.{getattr(named, '__qualname__', '')}"


def _describe_schema(schema: Schema) -> list[object]:
    """What decides about the result of ``load``: a deploy that changes it makes another recipe."""
    partial = schema.partial
    return [
        sorted(schema.only) if schema.only is not None else None,
        sorted(schema.exclude),
        str(schema.unknown),
        partial if partial is None or isinstance(partial, bool) else sorted(partial),
        bool(schema.many),
        sorted([name, field.data_key or name, _name(type(field))] for name, field in schema.load_fields.items()),
    ]


def _key_id(key: bytes) -> str:
    """Tells HMAC keys apart without telling anything of them."""
    return hashlib.sha256(b"flask-idempotent/fingerprint-key/1\0" + key).hexdigest()


def _recipe_id(recipe: list[object]) -> str:
    return hashlib.sha256(_DOMAIN + dump(recipe)).hexdigest()[:16]
