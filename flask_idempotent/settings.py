"""From ``app.config`` to frozen ``Settings``: every ``IDEMPOTENT_`` key checked, all problems told at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal
from urllib.parse import urlsplit

import marshmallow
from cryptography.fernet import Fernet

from .errors import ConfigurationError
from .records import RateLimit
from .values import Durable, Mode, OnStoreError, near, one_of, parse_duration, parse_rate, plain, seconds, show

__all__ = ["MAKE_FERNET_KEY", "PREFIX", "Settings", "load_settings", "outlives", "ttl_warnings"]

#: What this version can't do yet: the values that a key refuses, or ``None`` for all but the default.
NOT_YET: dict[str, tuple[object, ...] | None] = {
    "MODE": ("log",),
    "QUEUE": None,
    "SWEEP_CRON": None,
    "RECONCILE_CRON": None,
}

PREFIX = "IDEMPOTENT_"

#: The command that prints a key for ``IDEMPOTENT_FERNET_KEYS``.
MAKE_FERNET_KEY = 'python -c "from cryptography.fernet import Fernet; print(Fernet.generate_key().decode())"'
_MAKE_SECRET = 'python -c "import secrets; print(secrets.token_hex(32))"'

_RATE_LIMIT = RateLimit(100, 60_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The app's configuration, one field for each ``IDEMPOTENT_`` key. Built by :func:`load_settings`, which checks it.

    Sizes are bytes. ``settle_after`` is ``None`` for lease plus skew; ``client_retry_window`` is ``None`` where nobody
    stated one. Secrets are left out of ``repr()``. ``stated`` names the fields that the app stated: what a route states
    moves the others, and contradicts these.
    """

    redis_url: str = field(default="redis://localhost:6379/0", repr=False)
    key_prefix: str = "idempotent"
    header: str = "Idempotency-Key"
    replay_header: str = "Idempotent-Replayed"
    ttl: timedelta = timedelta(hours=48)
    lease: timedelta = timedelta(seconds=30)
    max_processing: timedelta = timedelta(minutes=15)
    skew: timedelta = timedelta(seconds=3)
    heartbeat: bool = True
    settle_after: timedelta | None = None
    client_retry_window: timedelta | None = None
    durable: Durable = False
    mismatch_status: int = 422
    foreign_key: Literal["not_found", "isolate"] = "not_found"
    on_expired: Literal["new", "reject"] = "new"
    tombstone: timedelta = timedelta(days=7)
    on_store_error: OnStoreError = "closed"
    mode: Mode = "enforce"
    anonymous: Literal["allow", "refuse"] = "allow"
    min_key_bits: int = 128
    fernet_keys: tuple[bytes, ...] | None = field(default=None, repr=False)
    fingerprint_keys: tuple[bytes, ...] | None = field(default=None, repr=False)
    inline_body: int = 64 * 1024
    max_body: int = 1024 * 1024
    rate_limit: RateLimit | None = _RATE_LIMIT
    max_waiters: int = 4
    form_field: str = "idempotency_key"
    form_ignore: tuple[str, ...] = ("csrf_token",)
    providers: Mapping[str, object] = field(default_factory=dict)
    reconcile_tries: int = 8
    docs_url: str | None = None
    bind_key: str | None = None
    queue: str = "idempotency"
    sweep_cron: str = "*/5 * * * *"
    reconcile_cron: str = "* * * * *"
    stated: frozenset[str] = field(default=frozenset(), repr=False, compare=False)

    def warnings(self) -> list[str]:
        """What works, but hardly as it was meant: one sentence each, with the key and the fix. For the log at start."""
        found = ttl_warnings(self.ttl, self.client_retry_window, PREFIX + "TTL")
        if not timedelta(seconds=2) <= self.skew <= timedelta(seconds=5):
            found.append(
                f"{PREFIX}SKEW is {seconds(self.skew)}: that suits no production. "
                f"Set {PREFIX}SKEW to between 2 and 5 seconds (3 is the default); less is for tests."
            )
        if any(len(key) < 16 or _placeholder(key) for key in self.fingerprint_keys or ()):
            found.append(f"{PREFIX}FINGERPRINT_KEYS holds a key that could be guessed. Make one: {_MAKE_SECRET}")
        return found


def load_settings(config: Mapping[str, object]) -> Settings:
    """Check every ``IDEMPOTENT_`` key of ``config`` (other keys are left alone) and return them as ``Settings``.

    Durations are seconds (``int`` or ``float``) or ``timedelta``.

    :raises ConfigurationError: with one line for each unknown key, wrong value and contradiction, and its fix.
    """
    given = {key: value for key, value in config.items() if isinstance(key, str) and key.startswith(PREFIX)}
    values: dict[str, object]
    messages: dict[str, list[str]] = {}
    try:
        values = _SCHEMA.load(given, unknown=marshmallow.RAISE)
    except marshmallow.ValidationError as error:
        values = dict(error.valid_data or ())
        messages = error.messages_dict
    problems = [f"{key} {text}" for key, texts in messages.items() if key in _KEYS for text in texts]
    for key in sorted(messages.keys() - _KEYS):
        hint = near(key.removeprefix(PREFIX), (known.removeprefix(PREFIX) for known in _KEYS), PREFIX)
        problems.append(f"{key} is not a known key.{hint} Correct or remove it.")
    settings = Settings(**_fit_defaults(values), stated=frozenset(values))
    if settings.settle_after == settings.lease + settings.skew:
        values.pop("settle_after", None)
    problems += _not_yet(values)
    problems += _contradictions(settings, {key.removeprefix(PREFIX).lower() for key in messages})
    if problems:
        raise ConfigurationError("\n".join(["the configuration of flask_idempotent can't be used:", *problems]))
    return settings


def _fit_defaults(stated: Mapping[str, Any]) -> dict[str, Any]:
    """What was stated, and what it moves: a default that would contradict a stated value gives way to it."""
    default, values = Settings(), dict(stated)
    for less, more in (("lease", "max_processing"), ("inline_body", "max_body")):
        if less not in stated and more in stated:
            values[less] = min(stated[more], getattr(default, less))
        elif less in stated and more not in stated:
            values[more] = max(stated[less], getattr(default, more))
    return values


def _not_yet(values: Mapping[str, object]) -> list[str]:
    default = Settings()
    problems = []
    for name, refused in NOT_YET.items():
        value = values.get(name.lower(), getattr(default, name.lower()))
        if value in refused if refused is not None else value != getattr(default, name.lower()):
            problems.append(f"{PREFIX}{name}={show(value)} is not available in this version. Leave the key out.")
    return problems


def _contradictions(settings: Settings, bad: set[str]) -> list[str]:
    """Pairs of keys that exclude each other, but for those with a ``bad`` value, which were told already."""
    problems = []
    if not bad & {"max_processing", "lease"} and settings.max_processing < settings.lease:
        problems.append(
            f"{PREFIX}MAX_PROCESSING ({seconds(settings.max_processing)}) is shorter than {PREFIX}LEASE "
            f"({seconds(settings.lease)}). Set {PREFIX}MAX_PROCESSING to {plain(settings.lease)} or more."
        )
    if not bad & {"ttl", "client_retry_window"}:
        problems += outlives(settings.ttl, settings.client_retry_window, PREFIX + "TTL")
    if not bad & {"max_body", "inline_body"} and settings.max_body < settings.inline_body:
        problems.append(
            f"{PREFIX}MAX_BODY ({settings.max_body}) is less than {PREFIX}INLINE_BODY ({settings.inline_body}). "
            f"Set {PREFIX}INLINE_BODY to {settings.max_body} or less, or raise {PREFIX}MAX_BODY."
        )
    if settings.durable and settings.on_store_error == "open":
        problems.append(
            f"{PREFIX}DURABLE={show(settings.durable)} and {PREFIX}ON_STORE_ERROR='open' exclude each other: durable "
            "routes never run unprotected. Leave one of them out, and state it on the routes that need it."
        )
    if not bad & {"header", "replay_header"} and settings.header.lower() == settings.replay_header.lower():
        problems.append(f"{PREFIX}REPLAY_HEADER is the same as {PREFIX}HEADER. Give one of them another name.")
    return problems


# Rules that routes share with the app


def outlives(ttl: timedelta, window: timedelta | None, name: str) -> list[str]:
    """The problem of a lifetime ``name`` that doesn't outlast the stated retry window, with the value that would do."""
    if window is None or ttl > window:
        return []
    return [
        f"{name} ({seconds(ttl)}) does not outlast {PREFIX}CLIENT_RETRY_WINDOW ({seconds(window)}): a late retry "
        f"would run again. Set {name} to {plain(window + timedelta(hours=1))} or more."
    ]


def ttl_warnings(ttl: timedelta, window: timedelta | None, name: str) -> list[str]:
    """Warnings about a lifetime called ``name``; ``window`` is the stated client retry window."""
    day, week = timedelta(hours=24), timedelta(days=7)
    assumption = (
        f" No {PREFIX}CLIENT_RETRY_WINDOW is stated: 24 h is assumed (an assumption, not a fact). "
        f"State the window, or set {name} to more than 86400."
    )
    if ttl < day:
        text = f"{name} is {seconds(ttl)}, under 24 h: a retry on the next day runs again. Set {name} to 172800 (48 h)."
        return [text + (assumption if window is None else "")]
    if ttl == day and window is None:
        return [f"{name} is 24 h and does not outlast the clients' retries.{assumption}"]
    if ttl > week:
        return [
            f"{name} is {seconds(ttl)}, above 7 d: keys and answers pile up for no retry that is known. "
            f"Set {name} to 604800 (7 d) or less."
        ]
    return []


# Values: each parser returns what is meant, or raises ValueError with "must be ..." and the fix

#: A Redis value holds 512 MiB, and encryption makes a body a third larger.
_LARGEST_BODY = 256 * 1024 * 1024


def _whole(least: int, most: int) -> Callable[[object], int]:
    def parse(value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ValueError(f"must be a whole number from {least} to {most}, not {show(value)}.")
        return int(value)

    return parse


def _like(pattern: str, kind: str) -> Callable[[object], str]:
    def parse(value: object) -> str:
        if not isinstance(value, str) or not value.isprintable() or not re.fullmatch(pattern, value):
            raise ValueError(f"must be {kind}, not {show(value)}.")
        return value

    return parse


#: A token of RFC 9110, 5.6.2.
_header = _like(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", "a header name, such as 'Idempotency-Key'")
_cron_line = _like(r"\S+( +\S+){4}", "a cron line of five fields, such as '*/5 * * * *'")
_text = _like(r".*\S.*", "a text that is not empty and has no control characters")


def _redis_url(value: object) -> str:
    refusal = ValueError(
        "must be redis://host:port/0, rediss://host:port/0, unix:///path, redis+sentinel://host:port,host/service, "
        "redis+cluster://host:port or embedded:// (it is not printed, since it may hold a password)."
    )
    if not isinstance(value, str) or re.search(r"\s", value) or not value.isprintable():
        raise refusal
    try:
        parts = urlsplit(value)
    except ValueError:  # its text would quote the URL
        raise refusal from None
    complete = {
        "redis": True,
        "rediss": True,
        "embedded": True,
        "unix": bool(parts.path),
        "redis+sentinel": bool(parts.netloc and parts.path.strip("/")),
        "redis+cluster": bool(parts.netloc),
    }
    if not complete.get(parts.scheme) or not value.startswith(parts.scheme + "://"):
        raise refusal
    return value


def _secrets(value: object, check: Callable[[bytes], bool], kind: str, fix: str) -> tuple[bytes, ...]:
    """A list of secrets as bytes. Nothing of a value is ever printed."""
    if isinstance(value, (str, bytes)):
        raise ValueError(f"must be a list, not a single value. Put it into a list, [key], newest first. {fix}")
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"must be a list of keys, newest first, not a {type(value).__name__}. {fix}")
    if not value:
        raise ValueError(f"must not be an empty list: that would not mean 'none'. Leave the key out for none. {fix}")
    keys = []
    for place, item in enumerate(value, start=1):
        raw = item.encode() if isinstance(item, str) else item
        if not isinstance(raw, bytes) or not check(raw):
            raise ValueError(f"must hold {kind}; item {place} is none (it is not printed). {fix}")
        keys.append(raw)
    return tuple(keys)


def _fernet_keys(value: object) -> tuple[bytes, ...]:
    return _secrets(value, _is_fernet_key, "Fernet keys", f"Make a key: {MAKE_FERNET_KEY}")


def _is_fernet_key(raw: bytes) -> bool:
    try:
        Fernet(raw)
    except ValueError:
        return False
    return not _placeholder(raw.rstrip(b"=\n"))


def _fingerprint_keys(value: object) -> tuple[bytes, ...]:
    return _secrets(value, _is_fingerprint_key, "secrets, none of them empty", f"Make a key: {_MAKE_SECRET}")


def _is_fingerprint_key(raw: bytes) -> bool:
    return bool(raw.strip())


def _placeholder(raw: bytes) -> bool:
    return len(set(raw)) < 4


def _form_ignore(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        raise ValueError(f"must be a list of form fields, not a single text. Write [{show(value)}].")
    if not isinstance(value, (list, tuple)) or not all(isinstance(name, str) and name for name in value):
        raise ValueError("must be a list of form field names, such as ['csrf_token']; [] for none.")
    return tuple(value)


def _providers(value: object) -> Mapping[str, object]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"must be a dictionary by provider name, not {show(value)}.")
    for name, stated in value.items():
        changes = stated if isinstance(stated, Mapping) else {"window": stated}
        if not changes or not changes.keys() <= {"window", "search_delay"}:
            raise ValueError(f"[{name!r}] must state window and search_delay. Write {{'window': 86400}}, say.")
        for member, length in changes.items():
            try:
                parse_duration(length, zero=member == "search_delay")
            except ValueError as error:
                raise ValueError(f"[{name!r}][{member!r}] {error}") from None
    return dict(value)


_PARSERS: Mapping[str, Callable[[object], object]] = {
    "redis_url": _redis_url,
    "key_prefix": _like(r"[^\s{}]+", "a word without spaces, braces and control characters, such as 'shop'"),
    "header": _header,
    "replay_header": _header,
    "ttl": parse_duration,
    "lease": parse_duration,
    "max_processing": parse_duration,
    "skew": lambda value: parse_duration(value, zero=True),
    "heartbeat": one_of(True, False),
    "settle_after": lambda value: parse_duration(value, zero=True),
    "client_retry_window": parse_duration,
    "durable": one_of(False, "transaction", "intent"),
    "mismatch_status": one_of(422, 409),
    "foreign_key": one_of("not_found", "isolate"),
    "on_expired": one_of("new", "reject"),
    "tombstone": parse_duration,
    "on_store_error": one_of("closed", "open"),
    "mode": one_of("enforce", "log", "off"),
    "anonymous": one_of("allow", "refuse"),
    "min_key_bits": _whole(0, 1024),
    "fernet_keys": _fernet_keys,
    "fingerprint_keys": _fingerprint_keys,
    "inline_body": _whole(0, _LARGEST_BODY),
    "max_body": _whole(0, _LARGEST_BODY),
    "rate_limit": parse_rate,
    "max_waiters": _whole(0, 10_000),
    "form_field": _text,
    "form_ignore": _form_ignore,
    "providers": _providers,
    "reconcile_tries": _whole(1, 1_000),
    "docs_url": _like(r"https?://[^\s<>\"#]+", "an http:// or https:// URL without a fragment"),
    "bind_key": _text,
    "queue": _text,
    "sweep_cron": _cron_line,
    "reconcile_cron": _cron_line,
}

#: Keys whose default is "none", and which may say so.
_NONE_ALLOWED = {"client_retry_window", "fernet_keys", "fingerprint_keys", "rate_limit", "docs_url", "bind_key"}


def _field(name: str, parse: Callable[[object], object]) -> marshmallow.fields.Function:
    def deserialize(value: object) -> object:
        try:
            return parse(value)
        except ValueError as error:
            raise marshmallow.ValidationError(str(error)) from None

    return marshmallow.fields.Function(
        deserialize=deserialize,
        data_key=PREFIX + name.upper(),
        allow_none=name in _NONE_ALLOWED,
        error_messages={"null": "must not be None. Leave the key out for the default."},
    )


_SCHEMA = marshmallow.Schema.from_dict({name: _field(name, parse) for name, parse in _PARSERS.items()})()
_KEYS = frozenset(PREFIX + name.upper() for name in _PARSERS)
