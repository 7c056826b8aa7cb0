"""Every configuration key: its default, what it takes, what it refuses, and that secrets stay unprinted."""

from __future__ import annotations

import dataclasses
import re
from datetime import timedelta

import pytest
from cryptography.fernet import Fernet

from flask_idempotent import settings as module
from flask_idempotent.errors import ConfigurationError
from flask_idempotent.records import RateLimit
from flask_idempotent.settings import Settings, load_settings
from flask_idempotent.values import to_ms

KEY = "q83vEjRWeJCrze8SNFZ4kKvN7xI0VniQq83vEjRWeJA="

DEFAULTS = {
    "redis_url": "redis://localhost:6379/0",
    "key_prefix": "idempotent",
    "header": "Idempotency-Key",
    "replay_header": "Idempotent-Replayed",
    "ttl": timedelta(hours=48),
    "lease": timedelta(seconds=30),
    "max_processing": timedelta(minutes=15),
    "skew": timedelta(seconds=3),
    "heartbeat": True,
    "settle_after": None,
    "client_retry_window": None,
    "durable": False,
    "mismatch_status": 422,
    "foreign_key": "not_found",
    "on_expired": "new",
    "tombstone": timedelta(days=7),
    "on_store_error": "closed",
    "mode": "enforce",
    "anonymous": "allow",
    "min_key_bits": 128,
    "fernet_keys": None,
    "fingerprint_keys": None,
    "inline_body": 65536,
    "max_body": 1048576,
    "rate_limit": RateLimit(100, 60_000),
    "max_waiters": 4,
    "form_field": "idempotency_key",
    "form_ignore": ("csrf_token",),
    "providers": {},
    "reconcile_tries": 8,
    "docs_url": None,
    "bind_key": None,
    "queue": "idempotency",
    "sweep_cron": "*/5 * * * *",
    "reconcile_cron": "* * * * *",
}
#: Whose default is "none", and so may be said to be it.
NONE_ALLOWED = {"client_retry_window", "fernet_keys", "fingerprint_keys", "rate_limit", "docs_url", "bind_key"}


def load(**values: object) -> Settings:
    return load_settings({f"IDEMPOTENT_{name}": value for name, value in values.items()})


def refusal(**values: object) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load(**values)
    return str(caught.value)


def lines(**values: object) -> list[str]:
    return refusal(**values).splitlines()[1:]


def test_defaults_are_those_of_the_documented_table() -> None:
    settings = load()
    values = {item.name: getattr(settings, item.name) for item in dataclasses.fields(settings)}
    assert values.pop("stated") == frozenset()
    assert values == DEFAULTS


def test_the_settings_know_what_was_stated_even_where_it_is_the_default() -> None:
    settings = load(LEASE=1200, MAX_BODY=1048576)
    assert settings.stated == {"lease", "max_body"}
    assert load_settings({"SECRET_KEY": "x"}).stated == frozenset()


def test_keys_of_others_are_left_alone() -> None:
    assert load_settings({"SECRET_KEY": "x", "IDEMPOTENCY_TTL": 1, "TTL": 1}) == Settings()


def test_settings_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        load().ttl = timedelta(1)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("REDIS_URL", "redis://:pw@host:1/2", None),
        ("REDIS_URL", "rediss://host", None),
        ("REDIS_URL", "unix:///run/redis.sock", None),
        ("REDIS_URL", "redis+sentinel://a:1,b:2/service", None),
        ("REDIS_URL", "redis+cluster://a:1", None),
        ("REDIS_URL", "embedded://", None),
        ("KEY_PREFIX", "shop:eu", None),
        ("HEADER", "X-Request-Key", None),
        ("REPLAY_HEADER", "X-Replayed", None),
        ("TTL", 90_000, timedelta(hours=25)),
        ("TTL", timedelta(days=3), None),
        ("LEASE", 0.25, timedelta(milliseconds=250)),
        ("LEASE", 0.001, timedelta(milliseconds=1)),
        ("MAX_PROCESSING", 30, timedelta(seconds=30)),
        ("SKEW", 0, timedelta(0)),
        ("SKEW", 0.0, timedelta(0)),
        ("SKEW", timedelta(0), None),
        ("HEARTBEAT", False, None),
        ("CLIENT_RETRY_WINDOW", 3600, timedelta(hours=1)),
        ("MISMATCH_STATUS", 409, None),
        ("FOREIGN_KEY", "isolate", None),
        ("ON_EXPIRED", "reject", None),
        ("TOMBSTONE", 60, timedelta(minutes=1)),
        ("ON_STORE_ERROR", "open", None),
        ("MODE", "off", None),
        ("ANONYMOUS", "refuse", None),
        ("MIN_KEY_BITS", 0, None),
        ("INLINE_BODY", 0, None),
        ("MAX_BODY", 65536, None),
        ("RATE_LIMIT", "5/second", RateLimit(5, 1_000)),
        ("RATE_LIMIT", "5/minute", RateLimit(5, 60_000)),
        ("RATE_LIMIT", "5/hour", RateLimit(5, 3_600_000)),
        ("RATE_LIMIT", "5/day", RateLimit(5, 86_400_000)),
        ("MAX_WAITERS", 0, None),
        ("FORM_FIELD", "_key", None),
        ("FORM_IGNORE", ["a", "b"], ("a", "b")),
        ("FORM_IGNORE", [], ()),
        ("DOCS_URL", "https://example.com/errors", None),
        ("FERNET_KEYS", [KEY], (KEY.encode(),)),
        ("FERNET_KEYS", (KEY.encode(), KEY), (KEY.encode(), KEY.encode())),
        ("FINGERPRINT_KEYS", ["0123456789abcdef"], (b"0123456789abcdef",)),
        ("FINGERPRINT_KEYS", [b"0123456789abcdef"], (b"0123456789abcdef",)),
        ("FINGERPRINT_KEYS", ["s3cr3t", b"x"], (b"s3cr3t", b"x")),
        ("DURABLE", "transaction", None),
        ("DURABLE", "intent", None),
        ("BIND_KEY", "keys", None),
        # said, but the default
        ("DURABLE", False, None),
        ("SETTLE_AFTER", 33, timedelta(seconds=33)),
        ("SETTLE_AFTER", 60, timedelta(seconds=60)),
        ("SETTLE_AFTER", 0, timedelta(0)),
        ("QUEUE", "idempotency", None),
        ("PROVIDERS", {}, None),
        ("PROVIDERS", {"stripe": {"window": 3600}}, None),
        ("RECONCILE_TRIES", 8, None),
        ("RECONCILE_TRIES", 1, None),
        *((name.upper(), None, None) for name in sorted(NONE_ALLOWED)),
    ],
)
def test_taken(name: str, value: object, meant: object) -> None:
    got = getattr(load(**{name: value}), name.lower())
    want = value if meant is None else meant
    assert got == want
    assert type(got) is type(want)


def test_a_made_key_is_taken() -> None:
    assert load(FERNET_KEYS=[Fernet.generate_key()]).fernet_keys is not None


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("TTL", 0, "more than 0"),
        ("LEASE", 0, "more than 0"),
        ("LEASE", timedelta(0), "more than 0"),
        ("LEASE", 0.0004, "at least 1 ms"),
        ("SKEW", 0.0004, "0 or at least 1 ms"),
        ("MAX_PROCESSING", 0, "more than 0"),
        ("CLIENT_RETRY_WINDOW", 0, "more than 0"),
        ("TOMBSTONE", 0, "more than 0"),
        ("TTL", -1, "negative"),
        ("SKEW", -0.5, "negative"),
        ("LEASE", timedelta(seconds=-1), "negative"),
        ("TTL", True, "a duration, not True"),
        ("TTL", "48h", "a duration, not '48h'"),
        ("TTL", float("nan"), "a duration, not nan"),
        ("TTL", float("inf"), "a duration, not inf"),
        ("TTL", 1e300, "at most 10 years"),
        ("TTL", -1e300, "negative"),
        ("TTL", 172_800_000_000, "at most 10 years"),
        ("HEARTBEAT", 1, "one of True, False, not 1"),
        ("HEARTBEAT", "true", "one of True, False"),
        ("DURABLE", 0, "one of False, 'transaction', 'intent', not 0"),
        ("DURABLE", True, "not True"),
        ("DURABLE", "transactional", "Did you mean 'transaction'?"),
        ("MISMATCH_STATUS", 400, "one of 422, 409, not 400"),
        ("MISMATCH_STATUS", "422", "one of 422, 409, not '422'"),
        ("FOREIGN_KEY", "isolated", "Did you mean 'isolate'?"),
        ("ON_EXPIRED", "refuse", "one of 'new', 'reject'"),
        ("ON_STORE_ERROR", "opne", "Did you mean 'open'?"),
        ("MODE", "enforced", "Did you mean 'enforce'?"),
        ("MODE", ["off"], "not a list"),
        ("ANONYMOUS", False, "one of 'allow', 'refuse', not False"),
        ("MIN_KEY_BITS", -1, "from 0 to 1024, not -1"),
        ("MIN_KEY_BITS", 128.0, "whole number"),
        ("MIN_KEY_BITS", True, "whole number"),
        ("INLINE_BODY", -1, "whole number"),
        ("MAX_BODY", "1MB", "whole number"),
        ("MAX_BODY", 2**29, "whole number from 0 to 268435456"),
        ("MAX_WAITERS", -1, "whole number"),
        ("RECONCILE_TRIES", 0, "from 1"),
        ("RATE_LIMIT", "100", "'N/minute'"),
        ("RATE_LIMIT", "100/minutes", "'N/minute'"),
        ("RATE_LIMIT", "-1/minute", "'N/minute'"),
        ("RATE_LIMIT", "1.5/minute", "'N/minute'"),
        ("RATE_LIMIT", "١/minute", "'N/minute'"),
        ("RATE_LIMIT", "100/minute\n", "'N/minute'"),
        ("RATE_LIMIT", 100, "'N/minute'"),
        ("RATE_LIMIT", "0/minute", "None for no limit"),
        ("HEADER", "", "header name"),
        ("HEADER", "Idempotency Key", "header name"),
        ("HEADER", "Idempotency-Key:", "header name"),
        ("HEADER", "Schlüssel", "header name"),
        ("HEADER", b"Idempotency-Key", "header name"),
        ("REPLAY_HEADER", "a\r\nb", "header name"),
        ("KEY_PREFIX", "", "a word"),
        ("KEY_PREFIX", "{shop}", "a word"),
        ("KEY_PREFIX", "my shop", "a word"),
        ("KEY_PREFIX", "shop\x00", "a word"),
        ("KEY_PREFIX", 7, "a word"),
        ("FORM_FIELD", "", "not empty"),
        ("FORM_FIELD", "  ", "not empty"),
        ("FORM_IGNORE", "csrf_token", "Write ['csrf_token']"),
        ("FORM_IGNORE", [1], "list of form field names"),
        ("FORM_IGNORE", [""], "list of form field names"),
        ("DOCS_URL", "ftp://example.com", "http://"),
        ("DOCS_URL", "https://example.com/#x", "fragment"),
        ("DOCS_URL", 'https://example.com/>; rel="x', "http://"),
        ("PROVIDERS", ["stripe"], "dictionary"),
        ("SWEEP_CRON", "every minute", "five fields"),
        ("QUEUE", "", "not empty"),
        ("BIND_KEY", "", "not empty"),
        ("BIND_KEY", 7, "not empty"),
    ],
)
def test_refused(name: str, value: object, told: str) -> None:
    [line] = lines(**{name: value})
    assert line.startswith(f"IDEMPOTENT_{name} ")
    assert told in line


@pytest.mark.parametrize("name", sorted(DEFAULTS.keys() - NONE_ALLOWED))
def test_none_is_refused_where_it_is_not_the_default(name: str) -> None:
    assert lines(**{name.upper(): None}) == [
        f"IDEMPOTENT_{name.upper()} must not be None. Leave the key out for the default."
    ]


@pytest.mark.parametrize(
    "url",
    [
        "http://user:hunter2@host",
        "hunter2:pw@host:6379",
        "REDIS://user:hunter2@host",
        "redis:user:hunter2@host",
        "redis://user:hunter2@[host",
        "redis://user:hunter2@ho st",
        "unix://",
        "redis+sentinel://user:hunter2@host:26379",
        "redis+cluster://",
        "",
        6379,
    ],
)
def test_a_wrong_redis_url_is_refused_and_not_printed(url: object) -> None:
    [line] = lines(REDIS_URL=url)
    assert line.startswith("IDEMPOTENT_REDIS_URL must be redis://host:port/0, ")
    assert "hunter2" not in line


FERNET_FIX = "Make a key: python -c"


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ([], "empty list"),
        ((), "empty list"),
        ("", "single value"),
        (KEY, "Put it into a list, [key]"),
        (KEY.encode(), "Put it into a list, [key]"),
        ([""], "item 1 is none"),
        ([KEY, "changeme"], "item 2 is none"),
        ([KEY, None], "item 2 is none"),
        ([KEY[:-4]], "item 1 is none"),
        (["ü" * 44], "item 1 is none"),
        (["A" * 43 + "="], "item 1 is none"),
        ({"new": KEY}, "not a dict"),
        (7, "not a int"),
    ],
)
def test_wrong_fernet_keys_are_refused_and_not_printed(value: object, told: str) -> None:
    [line] = lines(FERNET_KEYS=value)
    assert line.startswith("IDEMPOTENT_FERNET_KEYS must ")
    assert told in line
    assert FERNET_FIX in line
    assert KEY[:12] not in line
    assert "changeme" not in line


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ([], "empty list"),
        ("s3cr3ts3cr3ts3cr3t", "Put it into a list"),
        (["s3cr3ts3cr3ts3cr3t", ""], "item 2 is none"),
        (["s3cr3ts3cr3ts3cr3t", " \n"], "item 2 is none"),
        ([b""], "item 1 is none"),
        ([1], "item 1 is none"),
        (["s3cr3t", None], "item 2 is none"),
    ],
)
def test_wrong_fingerprint_keys_are_refused_and_not_printed(value: object, told: str) -> None:
    [line] = lines(FINGERPRINT_KEYS=value)
    assert line.startswith("IDEMPOTENT_FINGERPRINT_KEYS must ")
    assert told in line
    assert "s3cr3t" not in line


@pytest.mark.parametrize(
    ("keys", "weak"),
    [
        (["s3cr3ts3cr3t123"], True),
        (["x" * 40], True),
        (["abc" * 20], True),
        (["0123456789abcdef", "s3cr3t"], True),
        (["0123456789abcdef"], False),
        ([b"0123456789abcdef", "fedcba9876543210"], False),
        (["äöüßéèñç"], False),  # measured in bytes
        (None, False),
    ],
)
def test_a_weak_fingerprint_key_is_taken_and_warned_of_and_not_printed(
    keys: list[str | bytes] | None, weak: bool
) -> None:
    warnings = load(FINGERPRINT_KEYS=keys).warnings()
    assert len(warnings) == int(weak)
    for warning in warnings:
        assert warning.startswith("IDEMPOTENT_FINGERPRINT_KEYS holds a key that could be guessed. Make one: python -c")
        assert not any(str(key) in warning for key in keys or ())


def test_secrets_are_not_in_the_repr() -> None:
    text = repr(load(REDIS_URL="redis://:hunter2@h", FERNET_KEYS=[KEY], FINGERPRINT_KEYS=["0123456789abcdef"]))
    assert "lease=" in text
    for secret in ("hunter2", KEY, "0123456789abcdef"):
        assert secret not in text


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("TTTL", " Did you mean 'IDEMPOTENT_TTL'?"),
        ("FERNET_KEY", " Did you mean 'IDEMPOTENT_FERNET_KEYS'?"),
        ("MAXPROCESSING", " Did you mean 'IDEMPOTENT_MAX_PROCESSING'?"),
        ("ZZZZ", ""),
    ],
)
def test_unknown_keys_are_refused_with_the_nearest_known_one(name: str, hint: str) -> None:
    assert lines(**{name: "hunter2"}) == [f"IDEMPOTENT_{name} is not a known key.{hint} Correct or remove it."]


def test_all_problems_are_told_at_once() -> None:
    told = lines(
        LEASE=0, TTL="x", WRONG=1, MODE="log", MAX_BODY=10, INLINE_BODY=11, HEADER="Same", REPLAY_HEADER="same"
    )
    names = sorted(line.split(" ")[0].split("=")[0] for line in told)
    assert names == [
        "IDEMPOTENT_LEASE",
        "IDEMPOTENT_MAX_BODY",
        "IDEMPOTENT_MODE",
        "IDEMPOTENT_REPLAY_HEADER",
        "IDEMPOTENT_TTL",
        "IDEMPOTENT_WRONG",
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MODE", "log"),
        ("QUEUE", "other"),
        ("SWEEP_CRON", "0 * * * *"),
        ("RECONCILE_CRON", "0 * * * *"),
    ],
)
def test_what_is_not_built_yet_is_refused_by_one_table(
    name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    [line] = lines(**{name: value})
    assert line.startswith(f"IDEMPOTENT_{name}=")
    assert "is not available in this version" in line
    monkeypatch.delitem(module.NOT_YET, name)
    assert getattr(load(**{name: value}), name.lower()) is not None


# Contradictions


@pytest.mark.parametrize(
    ("stated", "moved", "value"),
    [
        ({"LEASE": 1200}, "max_processing", timedelta(seconds=1200)),
        ({"LEASE": 900}, "max_processing", timedelta(seconds=900)),
        ({"LEASE": 1}, "max_processing", timedelta(seconds=900)),
        ({"MAX_PROCESSING": 20}, "lease", timedelta(seconds=20)),
        ({"MAX_PROCESSING": 30}, "lease", timedelta(seconds=30)),
        ({"MAX_PROCESSING": 7200}, "lease", timedelta(seconds=30)),
        ({"MAX_BODY": 1000}, "inline_body", 1000),
        ({"MAX_BODY": 0}, "inline_body", 0),
        ({"MAX_BODY": 65536}, "inline_body", 65536),
        ({"MAX_BODY": 2**22}, "inline_body", 65536),
        ({"INLINE_BODY": 2**21}, "max_body", 2**21),
        ({"INLINE_BODY": 0}, "max_body", 2**20),
    ],
)
def test_a_value_that_is_stated_moves_a_default_that_is_not(
    stated: dict[str, object], moved: str, value: object
) -> None:
    settings = load(**stated)
    assert getattr(settings, moved) == value
    [name] = stated
    assert settings.stated == {name.lower()}


def test_max_processing_is_at_least_the_lease() -> None:
    [line] = lines(LEASE=1200, MAX_PROCESSING=900)
    assert line.startswith("IDEMPOTENT_MAX_PROCESSING (900 s) is shorter than IDEMPOTENT_LEASE (1200 s).")
    value = re.search(r"Set IDEMPOTENT_MAX_PROCESSING to ([\d.]+)", line)
    assert value is not None
    assert load(LEASE=1200, MAX_PROCESSING=float(value[1])).max_processing == timedelta(seconds=1200)


@pytest.mark.parametrize("values", [{"TTL": 10}, {"TTL": 10, "LEASE": 60}, {"TTL": 10, "MAX_PROCESSING": 60}])
def test_a_lifetime_counts_from_completion_and_may_be_shorter_than_a_run(values: dict[str, object]) -> None:
    assert load(**values).ttl == timedelta(seconds=10)


def test_durable_routes_never_run_unprotected() -> None:
    [line] = lines(DURABLE="transaction", ON_STORE_ERROR="open")
    assert line.startswith("IDEMPOTENT_DURABLE='transaction' and IDEMPOTENT_ON_STORE_ERROR='open' exclude each other")
    assert "Leave one of them out" in line
    assert load(DURABLE="transaction", ON_STORE_ERROR="closed").durable == "transaction"
    assert load(DURABLE=False, ON_STORE_ERROR="open").on_store_error == "open"


@pytest.mark.parametrize("window", [172_800, 172_800.5, 400_000])
def test_the_lifetime_outlasts_the_stated_window_and_the_error_prints_a_value_that_does(window: float) -> None:
    [line] = lines(CLIENT_RETRY_WINDOW=window)
    assert line.startswith("IDEMPOTENT_TTL (172800 s) does not outlast IDEMPOTENT_CLIENT_RETRY_WINDOW")
    value = re.search(r"Set IDEMPOTENT_TTL to ([\d.]+) or more", line)
    assert value is not None
    assert load(CLIENT_RETRY_WINDOW=window, TTL=float(value[1])).ttl.total_seconds() > window
    assert load(CLIENT_RETRY_WINDOW=window, TTL=window + 0.001)


def test_max_body_is_at_least_inline_body() -> None:
    [line] = lines(MAX_BODY=1000, INLINE_BODY=1001)
    assert line.startswith("IDEMPOTENT_MAX_BODY (1000) is less than IDEMPOTENT_INLINE_BODY (1001).")
    assert "Set IDEMPOTENT_INLINE_BODY to 1000 or less" in line
    assert load(MAX_BODY=1000, INLINE_BODY=1000).inline_body == 1000
    assert load(MAX_BODY=0, INLINE_BODY=0).max_body == 0


def test_the_two_headers_differ_whatever_their_case() -> None:
    assert "same as IDEMPOTENT_HEADER" in refusal(REPLAY_HEADER="idempotency-KEY")


def test_a_bad_value_is_not_also_a_contradiction() -> None:
    assert len(lines(LEASE="x", MAX_PROCESSING=1)) == 1
    assert len(lines(TTL="x", CLIENT_RETRY_WINDOW=10**8)) == 1


# Warnings


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({}, []),
        ({"TTL": 86_401}, []),
        ({"TTL": 604_800}, []),
        ({"TTL": 604_801}, [("IDEMPOTENT_TTL is 604801 s, above 7 d", "Set IDEMPOTENT_TTL to 604800")]),
        ({"TTL": 86_400}, [("IDEMPOTENT_TTL is 24 h", "24 h is assumed (an assumption")]),
        ({"TTL": 86_400, "CLIENT_RETRY_WINDOW": 3600}, []),
        ({"TTL": 86_399}, [("IDEMPOTENT_TTL is 86399 s, under 24 h", "24 h is assumed (an assumption")]),
        (
            {"TTL": 7200, "CLIENT_RETRY_WINDOW": 3600},
            [("IDEMPOTENT_TTL is 7200 s, under 24 h", "Set IDEMPOTENT_TTL to 172800")],
        ),
        ({"SKEW": 2}, []),
        ({"SKEW": 5}, []),
        ({"SKEW": 1.9}, [("IDEMPOTENT_SKEW is 1.9 s", "Set IDEMPOTENT_SKEW to between 2 and 5")]),
        ({"SKEW": 0}, [("IDEMPOTENT_SKEW is 0 s", "less is for tests")]),
        ({"SKEW": 5.1}, [("IDEMPOTENT_SKEW is 5.1 s", "Set IDEMPOTENT_SKEW")]),
        ({"SKEW": 0, "TTL": 604_801}, [("IDEMPOTENT_TTL", "604800"), ("IDEMPOTENT_SKEW", "between")]),
    ],
)
def test_warnings_name_the_key_and_the_fix(values: dict[str, object], told: list[tuple[str, str]]) -> None:
    warnings = load(**values).warnings()
    assert len(warnings) == len(told)
    for warning, (start, part) in zip(warnings, told, strict=True):
        assert warning.startswith(start)
        assert part in warning


def test_the_assumption_is_not_told_where_the_window_is_stated() -> None:
    [warning] = load(TTL=7200, CLIENT_RETRY_WINDOW=3600).warnings()
    assert "assum" not in warning


@pytest.mark.parametrize(
    ("length", "ms"),
    [(timedelta(0), 0), (timedelta(microseconds=1), 1), (timedelta(seconds=1.5), 1500), (timedelta(days=2), 172800000)],
)
def test_only_zero_becomes_zero_milliseconds(length: timedelta, ms: int) -> None:
    assert to_ms(length) == ms
