"""From the decorator's keywords to a frozen ``Policy``, checked against the settings when bound to an app."""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import CodeType
from typing import Literal

from .errors import ConfigurationError
from .keywords import UNSET, Fields, Keywords
from .notes import Notes
from .providers.base import Provider, resolve
from .records import RateLimit, State
from .settings import MAKE_FERNET_KEY, PREFIX, Settings, outlives, ttl_warnings
from .values import Durable, Mode, OnStoreError, plain, seconds, show, to_ms

__all__ = ["Policy", "bind_policy", "derives_from_payload_alone", "finished_state", "policy_warnings"]

#: Statuses that may pass: a later repeat can fare better.
_TRANSIENT = frozenset({401, 403, 408, 409, 423, 425, 429})


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
    durable: Durable
    recovery: Literal["retry", "reconcile", "manual", "abandon"] | None
    #: Milliseconds for which "it did not happen" is not believed, from the lapse on.
    settle_after_ms: int
    provider: Provider | None
    #: The Saga that the view runs. It is above this layer, so it is not named here.
    saga: object | None
    on_store_error: OnStoreError
    rate: RateLimit | None
    #: How long a duplicate waits for the first one's result; ``None`` where it is refused at once.
    wait_ms: int | None
    store: Literal["full", "reference", "hash"]
    rebuild: Callable[..., object] | None
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
    durable = settings.durable if keywords.durable is UNSET else keywords.durable
    on_store_error = settings.on_store_error if keywords.on_store_error is UNSET else keywords.on_store_error
    lease, longest, problems = _lease_and_longest(keywords, settings)
    problems = outlives(ttl, settings.client_retry_window, "ttl") + problems
    provider = None
    if keywords.provider is not None:
        provider = resolve(keywords.provider, settings.providers)
        if ttl < provider.window:
            problems.append(
                f"ttl ({seconds(ttl)}) is shorter than what {provider.name} remembers ({seconds(provider.window)}): an "
                f"expired key would get its old result. Set ttl={plain(provider.window)} or more."
            )
    if durable:
        problems += _durable_problems(keywords, durable, on_store_error)
    else:
        problems += _redis_only_problems(keywords)
    if keywords.pii and not settings.fernet_keys:
        problems.append(f"pii=True needs {PREFIX}FERNET_KEYS, a list of keys. Make one: {MAKE_FERNET_KEY}")
    if (keywords.store == "reference") != (keywords.rebuild is not None):
        problems.append(
            "store='reference' and rebuild= need each other: the one keeps a reference, the other makes the answer "
            "again from it. State both, or neither."
        )
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
        durable=durable,
        recovery=keywords.recovery,
        settle_after_ms=to_ms(_settle_after(keywords, settings, lease, provider)),
        provider=provider,
        saga=keywords.saga,
        on_store_error=on_store_error,
        rate=settings.rate_limit if keywords.rate_limit is UNSET else keywords.rate_limit,
        wait_ms=to_ms(keywords.wait_timeout) if keywords.on_in_progress == "wait" else None,
        store=keywords.store,
        rebuild=keywords.rebuild,
        pii=keywords.pii,
        mismatch_status=settings.mismatch_status,
        inline_body=settings.inline_body,
        max_body=settings.max_body,
        notes=keywords.notes,
    )


def _lease_and_longest(keywords: Keywords, settings: Settings) -> tuple[timedelta, timedelta, list[str]]:
    """Lease and longest processing. A value that nobody stated gives way; two that were stated can contradict."""
    lease = settings.lease if keywords.lease is UNSET else keywords.lease
    longest = settings.max_processing if keywords.max_processing is UNSET else keywords.max_processing
    if lease <= longest:
        return lease, longest, []
    if keywords.max_processing is UNSET and "max_processing" not in settings.stated:
        return lease, lease, []
    if keywords.lease is UNSET and "lease" not in settings.stated:
        return longest, longest, []
    lease_name = f"{PREFIX}LEASE" if keywords.lease is UNSET else "lease"
    longest_name = f"{PREFIX}MAX_PROCESSING" if keywords.max_processing is UNSET else "max_processing"
    problem = (
        f"{lease_name} ({seconds(lease)}) is longer than {longest_name} ({seconds(longest)}). "
        f"Set max_processing={plain(lease)} or more here, or lease={plain(longest)} or less."
    )
    return lease, longest, [problem]


def _durable_problems(keywords: Keywords, durable: Durable, on_store_error: OnStoreError) -> list[str]:
    """What a durable route can't be told besides: each of these would let its work run twice, or lose its answer."""
    name = "durable" if keywords.durable is not UNSET else f"{PREFIX}DURABLE"
    said = f"{name}={show(durable)}"
    problems = []
    if on_store_error == "open":
        other = "on_store_error" if keywords.on_store_error is not UNSET else f"{PREFIX}ON_STORE_ERROR"
        problems.append(
            f"{other}='open' excludes {said}: a durable route never runs unprotected. "
            "Set on_store_error='closed' here, or durable=False."
        )
    if not keywords.required:
        problems.append(
            f"required=False excludes {said}: a request without a key would run unprotected. "
            "Leave required out, or set durable=False."
        )
    if keywords.store == "hash":
        problems.append(
            f"store='hash' excludes {said}: a repeat could not get the first answer. "
            "Leave store out, or set durable=False."
        )
    if keywords.saga is not None:
        problems += _saga_problems(keywords, durable, said)
    elif durable == "intent" and keywords.recovery == "retry":
        problems.append(
            f"recovery='retry' excludes {said}: a crash may have left an effect outside, and running again blind could "
            "repeat it. Set recovery='reconcile' with a reconciler, 'manual' or 'abandon'."
        )
    if durable == "transaction" and keywords.recovery not in (None, "retry"):
        problems.append(
            f"recovery={show(keywords.recovery)} is not available with {said}: a crash leaves nothing there to look "
            "into. Set recovery='retry', or leave it out."
        )
    if keywords.key is not None and derives_from_payload_alone(keywords.key):
        problems.append(f"{_PAYLOAD_ALONE} {said} doesn't take such a key.")
    return problems


def _saga_problems(keywords: Keywords, durable: Durable, said: str) -> list[str]:
    """A saga goes on at the step that isn't done: there is nothing else to be decided about it."""
    if durable != "intent":
        return [
            f"saga= excludes {said}: its steps act outside, and each is committed on its own. Set durable='intent'."
        ]
    if keywords.reconcile is not None or keywords.recovery in ("reconcile", "manual", "abandon"):
        other = "reconcile=" if keywords.recovery is None else f"recovery={show(keywords.recovery)}"
        return [f"{other} excludes saga=, whose recovery is to resume. Leave it out, or set recovery='retry'."]
    return []


def _redis_only_problems(keywords: Keywords) -> list[str]:
    """What needs a record that outlives Redis."""
    problems = []
    if keywords.saga is not None:
        problems.append("saga= needs durable='intent': its steps must outlive Redis. Set durable='intent'.")
    if keywords.provider is not None:
        problems.append("provider= needs a durable route: its key must survive Redis. Set durable='intent'.")
    if keywords.reconcile is not None or keywords.recovery in ("reconcile", "manual", "abandon"):
        said = "reconcile=" if keywords.recovery is None else f"recovery={show(keywords.recovery)}"
        problems.append(
            f"{said} needs durable='intent': a record in Redis alone is gone before anybody could settle it. Set "
            "durable='intent', or recovery='retry'."
        )
    return problems


def _settle_after(keywords: Keywords, settings: Settings, lease: timedelta, provider: Provider | None) -> timedelta:
    """Lease plus skew unless it is set, and the time that the provider's search lags behind."""
    if keywords.settle_after is not UNSET:
        return keywords.settle_after
    if settings.settle_after is not None:
        return settings.settle_after
    return lease + settings.skew + (provider.search_delay if provider is not None else timedelta(0))


def policy_warnings(policy: Policy, settings: Settings, *, where: str) -> list[str]:
    """What works on this route, but hardly as it was meant. A lifetime taken from the settings is warned of there."""
    found = []
    if policy.ttl_ms != to_ms(settings.ttl):
        found += ttl_warnings(timedelta(milliseconds=policy.ttl_ms), settings.client_retry_window, "ttl")
    if policy.key is not None and derives_from_payload_alone(policy.key):
        found.append(_PAYLOAD_ALONE)
    return [f"{where}: {text}" for text in found]


# Does a key come from the payload alone?

_PAYLOAD_ALONE = (
    "key= seems to be made from the payload alone: a second, equal order would count as a repeat of the first. "
    "Take it from what the sender calls this one event or intent: an id in the payload, a header."
)

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
