"""From the decorator's keywords to a frozen ``Policy``, checked against the settings when bound to an app."""

from __future__ import annotations

import dataclasses
import dis
import enum
import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import CodeType
from typing import Final, Literal, TypeAlias

from marshmallow import Schema

from .errors import ConfigurationError
from .notes import Notes
from .records import RateLimit, State
from .settings import (
    MAKE_FERNET_KEY,
    PREFIX,
    Mode,
    OnStoreError,
    Settings,
    near,
    outlives,
    parse_choice,
    parse_duration,
    parse_rate,
    plain,
    seconds,
    show,
    to_ms,
    ttl_warnings,
)

__all__ = [
    "UNSET",
    "Fields",
    "Keywords",
    "Outcome",
    "Policy",
    "Unset",
    "bind_policy",
    "derives_from_payload_alone",
    "finished_state",
    "keywords_from",
    "policy_warnings",
]

#: What this version can't do yet: the values that a keyword refuses, or ``None`` for all but the default.
NOT_YET: dict[str, tuple[object, ...] | None] = {
    "durable": ("transaction", "intent"),
    "recovery": ("reconcile", "manual", "abandon"),
    "reconcile": None,
    "provider": None,
    "saga": None,
    "settle_after": None,
    "store": None,
    "rebuild": None,
    "mode": ("log",),
    "on_in_progress": None,
    "wait_timeout": None,
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
    durable: Literal[False, "transaction", "intent"] | Unset = UNSET
    recovery: Literal["retry", "reconcile", "manual", "abandon"] | None = None
    reconcile: Callable[..., object] | None = None
    provider: object | None = None
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """All that a request needs to know about its route, resolved once. Built by :func:`bind_policy`.

    Times are milliseconds, sizes bytes. ``scope`` is ``None`` where the request's endpoint is the scope, ``rate``
    where new keys are not limited, ``fields`` where the whole body counts. ``tombstone_ms`` is 0 where an expired key
    is as if never seen, ``min_key_bits`` is 0 where keys are derived. ``anonymous`` is ``"refuse"`` also on ``pii``
    routes without a ``bind``.
    """

    scope: str | None
    required: bool
    methods: frozenset[str]
    mode: Mode
    header: str
    replay_header: str
    key: Callable[..., str] | None
    min_key_bits: int
    fields: Fields
    form_field: str
    form_ignore: tuple[str, ...]
    bind: Callable[..., str] | None
    isolate: bool
    anonymous: Literal["allow", "refuse"]
    ttl_ms: int
    lease_ms: int
    skew_ms: int
    max_processing_ms: int
    tombstone_ms: int
    heartbeat: bool
    #: ``callable(response) -> "store" | "release"``. The web layer calls it, and asks :meth:`keeps` only without it.
    outcome_callable: Callable[..., str] | None
    #: Exactly these statuses are kept; ``None`` for the default rule.
    kept_statuses: frozenset[int] | None
    recovery: Literal["retry", "reconcile", "manual", "abandon"] | None
    on_store_error: OnStoreError
    rate: RateLimit | None
    pii: bool
    mismatch_status: int
    inline_body: int
    max_body: int
    notes: Notes

    def keeps(self, status: int) -> bool:
        """Whether an answer of this status is kept and replayed; otherwise the key is free for another run.

        Without ``outcome=`` all of 2xx, 3xx and 4xx but for 401, 403, 408, 409, 423, 425 and 429, which may pass.
        """
        if self.kept_statuses is not None:
            return status in self.kept_statuses
        return 200 <= status < 500 and status not in _TRANSIENT

    def state_for(self, status: int) -> State:
        """The state that a record takes with an answer of this status."""
        return finished_state(status) if self.keeps(status) else State.RELEASED


def finished_state(status: int) -> State:
    """The state of a record whose answer is kept, whatever decided so: from 400 on it is ``FAILED``."""
    return State.FAILED if status >= 400 else State.SUCCEEDED


def bind_policy(keywords: Keywords, settings: Settings, *, where: str) -> Policy:
    """Resolve what ``keywords`` leave to ``settings``, and check the two together.

    :param where: what is protected, for the message: ``view 'shop.create_order'``.
    :raises ConfigurationError: with a line for each contradiction, which begins with ``where`` and names the fix.
    """
    ttl = settings.ttl if keywords.ttl is UNSET else keywords.ttl
    lease = settings.lease if keywords.lease is UNSET else keywords.lease
    longest = settings.max_processing if keywords.max_processing is UNSET else keywords.max_processing
    problems = outlives(ttl, settings.client_retry_window, "ttl")
    if lease > longest:
        problems.append(
            f"lease ({seconds(lease)}) is longer than max_processing ({seconds(longest)}). "
            f"Set max_processing={plain(lease)} or more, or shorten the lease."
        )
    least, why = max((lease + settings.skew, "lease plus skew"), (longest, "max_processing"))
    if ttl < least:
        problems.append(
            f"ttl ({seconds(ttl)}) is shorter than {why} ({seconds(least)}). Set ttl={plain(least)} or more."
        )
    if keywords.pii and not settings.fernet_keys:
        problems.append(f"pii=True needs {PREFIX}FERNET_KEYS, a list of keys. Make one: {MAKE_FERNET_KEY}")
    if problems:
        raise ConfigurationError("\n".join(f"{where}: {problem}" for problem in problems))
    outcome = keywords.outcome
    return Policy(
        scope=keywords.scope,
        required=keywords.required,
        methods=keywords.methods,
        mode=settings.mode if keywords.mode is UNSET else keywords.mode,
        header=settings.header,
        replay_header=settings.replay_header,
        key=keywords.key,
        min_key_bits=0 if keywords.key else settings.min_key_bits,
        fields=keywords.fields,
        form_field=settings.form_field,
        form_ignore=settings.form_ignore,
        bind=keywords.bind,
        isolate=settings.foreign_key == "isolate",
        anonymous="refuse" if keywords.pii and keywords.bind is None else settings.anonymous,
        ttl_ms=to_ms(ttl),
        lease_ms=to_ms(lease),
        skew_ms=to_ms(settings.skew),
        max_processing_ms=to_ms(longest),
        tombstone_ms=to_ms(settings.tombstone) if settings.on_expired == "reject" else 0,
        heartbeat=settings.heartbeat,
        outcome_callable=None if isinstance(outcome, frozenset) else outcome,
        kept_statuses=outcome if isinstance(outcome, frozenset) else None,
        recovery=keywords.recovery,
        on_store_error=settings.on_store_error if keywords.on_store_error is UNSET else keywords.on_store_error,
        rate=settings.rate_limit if keywords.rate_limit is UNSET else keywords.rate_limit,
        pii=keywords.pii,
        mismatch_status=settings.mismatch_status,
        inline_body=settings.inline_body,
        max_body=settings.max_body,
        notes=keywords.notes,
    )


def policy_warnings(policy: Policy, settings: Settings, *, where: str) -> list[str]:
    """What works on this route, but hardly as it was meant. A lifetime taken from the settings is warned of there."""
    found = []
    if policy.ttl_ms != to_ms(settings.ttl):
        found += ttl_warnings(timedelta(milliseconds=policy.ttl_ms), settings.client_retry_window, "ttl")
    if policy.key is not None and derives_from_payload_alone(policy.key):
        found.append(
            "key= seems to be made from the payload alone: a second, equal order would count as a repeat of the first. "
            "Take it from what the sender calls this one event or intent: an id in the payload, a header."
        )
    return [f"{where}: {text}" for text in found]


# Does a key come from the payload alone?

_WHOLE = {"get_data", "data", "stream", "input_stream"}
_PARSED = {"json", "get_json", "form", "values"}
# fmt: off
_OTHER = {
    "headers", "args", "view_args", "path", "full_path", "script_root", "url", "base_url", "root_url", "url_root",
    "url_rule", "query_string", "endpoint", "cookies", "authorization", "remote_addr", "remote_user", "access_route",
    "environ", "date", "referrer", "user_agent",
}
# fmt: on
_MEMBER_CALLS = {"get", "getlist", "pop", "itemgetter"}
_CONSTANT_LOADS = {"LOAD_CONST", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_NAME"}
_SILENT = {"CACHE", "PUSH_NULL", "PRECALL", "EXTENDED_ARG", "NOP", "RESUME"}


def derives_from_payload_alone(key: Callable[..., object]) -> bool:
    """Whether ``key`` seems to make keys from the whole payload and from nothing else of the request.

    A heuristic on the compiled code: it sees which attributes are read (``get_data``, ``json``, ``headers``, …) and
    whether a member is taken by a constant name (``request.json["id"]``, ``.get("id")``) or as an attribute ``id`` or
    ``…_id``, as for a webhook's event id. It doesn't follow calls into other functions, and says ``False`` where it
    can't see any code. Whole bytes count as the payload alone even beside a member, unless they are parsed (``loads``).
    """
    while isinstance(key, functools.partial):
        key = key.func
    target: object = inspect.unwrap(key)
    if inspect.ismethod(target):
        target = target.__func__
    elif not inspect.isfunction(target):
        target = type(target).__call__ if not isinstance(target, type) else None
    code = getattr(target, "__code__", None)
    if not isinstance(code, CodeType):
        return False
    attributes: set[str] = set()
    member = False
    for part in _nested(code):
        steps = [step for step in dis.get_instructions(part) if step.opname not in _SILENT]
        read = {str(step.argval) for step in steps if step.opname in ("LOAD_ATTR", "LOAD_METHOD")}
        attributes |= read
        member = member or any(name == "id" or name.endswith("_id") for name in read) or _takes_member(steps)
    if attributes & _OTHER:
        return False
    if attributes & _WHOLE:
        return not (member and "loads" in attributes | set(code.co_names))
    return bool(attributes & _PARSED) and not member


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _takes_member(steps: Sequence[dis.Instruction]) -> bool:
    """``x["name"]``, ``x[NAME]``, ``x.get("name")``; not ``app.config["NAME"]``."""
    for before, step, after in zip([None, *steps], steps, [*steps[1:], None], strict=False):
        if step.opname not in _CONSTANT_LOADS or (step.opname == "LOAD_CONST" and not isinstance(step.argval, str)):
            continue
        previous = before.argval if before is not None else None
        subscript = after is not None and (after.opname == "BINARY_SUBSCR" or after.argrepr == "[]")
        if (subscript and previous != "config") or (step.opname == "LOAD_CONST" and previous in _MEMBER_CALLS):
            return True
    return False


# Values: each parser returns what is meant, or raises ValueError with "must be ..." and the fix

_TRANSIENT = frozenset({401, 403, 408, 409, 423, 425, 429})
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


def _anything(value: object) -> object:
    return value


def _choice(*choices: object) -> Callable[[object], object]:
    return lambda value: parse_choice(value, choices)


_PARSERS: Mapping[str, Callable[[object], object]] = {
    "scope": _scope,
    "required": _choice(True, False),
    "methods": _methods,
    "mode": _choice("enforce", "log", "off"),
    "key": _callable,
    "fields": _fields,
    "ttl": parse_duration,
    "lease": parse_duration,
    "max_processing": parse_duration,
    "settle_after": lambda value: parse_duration(value, zero=True),
    "durable": _choice(False, "transaction", "intent"),
    "recovery": _choice("retry", "reconcile", "manual", "abandon"),
    "reconcile": _callable,
    "provider": _anything,
    "saga": _anything,
    "pii": _choice(True, False),
    "store": _choice("full", "reference", "hash"),
    "rebuild": _callable,
    "outcome": _outcome,
    "on_in_progress": _choice("reject", "wait"),
    "wait_timeout": lambda value: parse_duration(value, zero=True),
    "on_store_error": _choice("closed", "open"),
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
