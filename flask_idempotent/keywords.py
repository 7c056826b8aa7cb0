"""The decorator's keywords: checked one by one, as it is applied."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final, Literal, TypeAlias

from marshmallow import Schema

from .errors import ConfigurationError
from .notes import Notes
from .providers.base import BUILT_IN, Provider
from .records import RateLimit
from .values import Durable, Mode, OnStoreError, near, one_of, parse_duration, parse_rate, show

__all__ = ["UNSET", "Fields", "Keywords", "Outcome", "Unset", "keywords_from"]

#: What this version can't do yet: the values that a keyword refuses, or ``None`` for all but the default.
NOT_YET: dict[str, tuple[object, ...] | None] = {
    "mode": ("log",),
}


class Unset(enum.Enum):
    """The type of ``UNSET``: the setting decides. ``0``, ``False`` and ``None`` are values."""

    UNSET = "unset"

    def __repr__(self) -> str:
        return "UNSET"


UNSET: Final = Unset.UNSET

#: Names and JSON pointers, a schema, a callable of the request, the raw bytes, no body; ``None`` for the whole body.
Fields: TypeAlias = tuple[str, ...] | Schema | Callable[..., object] | Literal["raw", False] | None
#: Decides "store" or "release" for a response, or the statuses that are stored; ``None`` for the rule by status.
Outcome: TypeAlias = Callable[..., str] | frozenset[int] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Keywords:
    """What ``@idempotent`` was told, checked and in one form: lists as tuples, seconds as ``timedelta``.

    ``UNSET`` is where the setting of that name decides. The mark of a view holds these, and nothing of an app. ``key``,
    ``bind`` and a callable in ``fields`` are called with the request, a callable ``outcome`` with the response.

    :raises ConfigurationError: with a line for each keyword that is wrong, and its fix.
    """

    scope: str | None = None
    required: bool = True
    methods: frozenset[str] = frozenset({"POST", "PATCH"})
    mode: Mode | Unset = UNSET
    key: Callable[..., str] | None = None
    fields: Fields = None
    ttl: timedelta | Unset = UNSET
    lease: timedelta | Unset = UNSET
    max_processing: timedelta | Unset = UNSET
    settle_after: timedelta | Unset = UNSET
    durable: Durable | Unset = UNSET
    recovery: Literal["retry", "reconcile", "manual", "abandon"] | None = None
    reconcile: Callable[..., object] | None = None
    provider: str | Provider | None = None
    saga: object | None = None
    pii: bool = False
    store: Literal["full", "reference", "hash"] = "full"
    rebuild: Callable[..., object] | None = None
    outcome: Outcome = None
    on_in_progress: Literal["reject", "wait"] = "reject"
    wait_timeout: timedelta = timedelta(seconds=10)
    on_store_error: OnStoreError | Unset = UNSET
    rate_limit: RateLimit | Unset | None = UNSET
    bind: Callable[..., str] | None = None
    notes: Notes = field(default_factory=Notes)

    def __post_init__(self) -> None:
        problems = []
        for item in dataclasses.fields(self):
            value, default = getattr(self, item.name), _DEFAULTS[item.name]
            if value is default or (value is None and item.name in _NONE_IS_DEFAULT):
                object.__setattr__(self, item.name, default)
                continue
            try:
                parsed = _PARSERS[item.name](value)
            except ValueError as error:
                problems.append(f"{item.name}= {error}")
                continue
            object.__setattr__(self, item.name, parsed)
            refused = NOT_YET.get(item.name, ())
            if parsed in refused if refused is not None else parsed != default:
                problems.append(f"{item.name}={show(value)} is not available in this version. Leave the keyword out.")
        if problems:
            raise ConfigurationError("\n".join(f"@idempotent: {problem}" for problem in problems))


def keywords_from(**keywords: object) -> Keywords:
    """The keywords of one ``@idempotent(...)``, checked. Durations are seconds or ``timedelta``.

    :raises ConfigurationError: for unknown keywords (with the nearest known one) and wrong values, each with its fix.
    """
    unknown = keywords.keys() - _PARSERS.keys()
    if unknown:
        raise ConfigurationError(
            "\n".join(f"@idempotent: {name}= is not a known keyword.{near(name, _PARSERS)}" for name in sorted(unknown))
        )
    return Keywords(**keywords)  # type: ignore[arg-type]


# Values

#: Standard methods that change nothing, or that no view answers.
_NEVER = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "CONNECT"})


def _scope(value: object) -> str:
    if not isinstance(value, str) or not value.strip() or not value.isprintable() or len(value) > 255:
        raise ValueError(
            f"must be a stable name of 1 to 255 characters, not {show(value)}. Write 'charges.create', say."
        )
    return value


def _methods(value: object) -> frozenset[str]:
    if isinstance(value, str):
        raise ValueError(f"must be a set of methods, not a single text. Write methods={{{show(value)}}}.")
    names = list(value) if isinstance(value, Iterable) else []
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError("must be a set of at least one method. Write methods={'POST', 'PATCH'}, say.")
    methods = frozenset(name.upper() for name in names)
    odd = sorted(name for name in methods if not re.fullmatch(r"[A-Z][A-Z0-9_-]*", name))
    if odd:
        raise ValueError(f"must hold names of methods, {show(odd[0])} is none. Write methods={{'POST', 'PATCH'}}, say.")
    if methods & _NEVER:
        raise ValueError(
            f"can't protect {', '.join(sorted(methods & _NEVER))}: it must not change anything. Leave it out."
        )
    return methods


def _callable(value: object) -> Callable[..., object]:
    if not callable(value):
        raise ValueError(f"must be a callable, not {show(value)}.")
    if inspect.iscoroutinefunction(value) or inspect.iscoroutinefunction(type(value).__call__):
        raise ValueError("must not be a coroutine function: its result is needed at once. Write it with a plain def.")
    return value


def _fields(value: object) -> Fields:
    if value is False or isinstance(value, Schema):
        return value
    if isinstance(value, str):
        if value == "raw":
            return "raw"
        raise ValueError(f"must be a list, not a single text. Write fields=[{show(value)}] (only 'raw' stands alone).")
    if isinstance(value, type) and issubclass(value, Schema):
        return _instance(value)
    if isinstance(value, Collection) and not isinstance(value, (bytes, Mapping)):
        return _names(value)
    if callable(value):
        return _callable(value)
    raise ValueError(
        f"must be names or JSON pointers, a marshmallow Schema, a callable, 'raw' or False, not {show(value)}. "
        "Leave it out for the whole body."
    )


def _instance(schema: type[Schema]) -> Schema:
    try:
        return schema()
    except Exception as error:
        raise ValueError(f"can't make a {schema.__name__}() ({error}). Give an instance of the schema.") from error


def _names(value: Collection[object]) -> tuple[str, ...]:
    if not value:
        raise ValueError(
            "must not be empty. Write fields=False for nothing of the body, or leave it out for all of it."
        )
    names = []
    for name in value:
        if not isinstance(name, str) or not name:
            raise ValueError(f"must hold names or JSON pointers as texts, not {show(name)}.")
        if name.startswith("/") and re.search(r"~(?![01])", name):
            raise ValueError(f"has a JSON pointer with a bare '~', {show(name)}. Write '~0' for '~' (RFC 6901).")
        names.append(name)
    if len(set(names)) < len(names):
        raise ValueError("names a field twice. Remove one.")
    return tuple(names if isinstance(value, Sequence) else sorted(names))


def _outcome(value: object) -> Outcome:
    if callable(value):
        return _callable(value)  # type: ignore[return-value]
    if not isinstance(value, Collection) or isinstance(value, (str, bytes, Mapping)) or not value:
        raise ValueError(
            f"must be a callable or a set of statuses to store, not {show(value)}. Write {{200, 201}}, say."
        )
    for status in value:
        if not isinstance(status, int) or isinstance(status, bool) or not 200 <= status <= 599:
            raise ValueError(f"must hold statuses from 200 to 599, not {show(status)}.")
    return frozenset(int(status) for status in value)


def _rate(value: object) -> RateLimit | None:
    if isinstance(value, RateLimit) and value.limit > 0 and value.window_ms > 0:
        return value
    return parse_rate(value)


def _notes(value: object) -> Notes:
    if not isinstance(value, Notes):
        raise ValueError(f"must be Notes, not {show(value)}. Write notes=Notes(executes='...').")
    return value


def _provider(value: object) -> object:
    if isinstance(value, Provider) or (isinstance(value, str) and value in BUILT_IN):
        return value
    raise ValueError(
        f"must be {', '.join(map(repr, BUILT_IN))} or a Provider, not {show(value)}. "
        "Write Provider('name', window=86400, max_length=64), say."
    )


def _saga(value: object) -> object:
    if isinstance(value, type) or not callable(getattr(value, "run", None)) or not hasattr(value, "resume"):
        raise ValueError(f"must be a Saga, not {show(value)}. Write checkout = Saga('checkout'), and saga=checkout.")
    return value


_PARSERS: Mapping[str, Callable[[object], object]] = {
    "scope": _scope,
    "required": one_of(True, False),
    "methods": _methods,
    "mode": one_of("enforce", "log", "off"),
    "key": _callable,
    "fields": _fields,
    "ttl": parse_duration,
    "lease": parse_duration,
    "max_processing": parse_duration,
    "settle_after": lambda value: parse_duration(value, zero=True),
    "durable": one_of(False, "transaction", "intent"),
    "recovery": one_of("retry", "reconcile", "manual", "abandon"),
    "reconcile": _callable,
    "provider": _provider,
    "saga": _saga,
    "pii": one_of(True, False),
    "store": one_of("full", "reference", "hash"),
    "rebuild": _callable,
    "outcome": _outcome,
    "on_in_progress": one_of("reject", "wait"),
    "wait_timeout": lambda value: parse_duration(value, zero=True),
    "on_store_error": one_of("closed", "open"),
    "rate_limit": _rate,
    "bind": _callable,
    "notes": _notes,
}
_DEFAULTS: Mapping[str, object] = {
    item.name: item.default if item.default is not dataclasses.MISSING else Notes()
    for item in dataclasses.fields(Keywords)
}
#: Keywords that may be said to be ``None``, which is as if they were left out.
_NONE_IS_DEFAULT = {name for name, default in _DEFAULTS.items() if default is None} | {"notes"}
