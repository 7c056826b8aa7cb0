"""The decorator's keywords: their defaults, what each takes, and what each refuses."""

from __future__ import annotations

import dataclasses
import functools
from datetime import timedelta
from http import HTTPStatus

import marshmallow
import pytest

from flask_idempotent import keywords as module
from flask_idempotent.errors import ConfigurationError
from flask_idempotent.keywords import UNSET, Keywords, keywords_from
from flask_idempotent.notes import Notes
from flask_idempotent.providers import Provider
from flask_idempotent.records import RateLimit


def a_callable(request: object) -> str:
    return "x"


async def a_coroutine(request: object) -> str:
    return "x"


ACME = Provider("acme", window=60, max_length=64)


class AsyncCall:
    async def __call__(self, request: object) -> str:
        return "x"


class Order(marshmallow.Schema):
    amount = marshmallow.fields.Integer()


class Choosy(marshmallow.Schema):
    def __init__(self, currency: str) -> None:
        super().__init__()


ORDER = Order()


def refusal(**keywords: object) -> str:
    with pytest.raises(ConfigurationError) as caught:
        keywords_from(**keywords)
    return str(caught.value)


DEFAULTS = {
    "scope": None,
    "required": True,
    "methods": frozenset({"POST", "PATCH"}),
    "mode": UNSET,
    "key": None,
    "fields": None,
    "ttl": UNSET,
    "lease": UNSET,
    "max_processing": UNSET,
    "settle_after": UNSET,
    "durable": UNSET,
    "recovery": None,
    "reconcile": None,
    "provider": None,
    "saga": None,
    "pii": False,
    "store": "full",
    "rebuild": None,
    "outcome": None,
    "on_in_progress": "reject",
    "wait_timeout": timedelta(seconds=10),
    "on_store_error": UNSET,
    "rate_limit": UNSET,
    "bind": None,
    "notes": Notes(),
}
NONE_TAKEN = {name for name, default in DEFAULTS.items() if default is None} | {"notes", "rate_limit"}


def test_defaults_are_those_of_the_documented_table() -> None:
    keywords = keywords_from()
    assert {item.name: getattr(keywords, item.name) for item in dataclasses.fields(keywords)} == DEFAULTS


def test_keywords_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        keywords_from().scope = "x"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "value", "meant"),
    [
        ("scope", "charges.create", "charges.create"),
        ("scope", "s" * 255, "s" * 255),
        ("required", False, False),
        ("methods", ["post", "Put"], frozenset({"POST", "PUT"})),
        ("methods", {"DELETE"}, frozenset({"DELETE"})),
        ("methods", iter(["PATCH"]), frozenset({"PATCH"})),
        ("methods", ("MKCOL", "M-SEARCH"), frozenset({"MKCOL", "M-SEARCH"})),
        ("mode", "enforce", "enforce"),
        ("mode", "off", "off"),
        ("key", a_callable, a_callable),
        ("bind", a_callable, a_callable),
        ("fields", ["amount", "/customer/id"], ("amount", "/customer/id")),
        ("fields", ("b", "a"), ("b", "a")),
        ("fields", {"b", "a"}, ("a", "b")),
        ("fields", ["/a~0b~1c", "/"], ("/a~0b~1c", "/")),
        ("fields", "raw", "raw"),
        ("fields", False, False),
        ("fields", ORDER, ORDER),
        ("fields", a_callable, a_callable),
        ("ttl", 90_000, timedelta(hours=25)),
        ("lease", 0.5, timedelta(milliseconds=500)),
        ("max_processing", timedelta(hours=1), timedelta(hours=1)),
        ("durable", False, False),
        ("durable", "transaction", "transaction"),
        ("durable", "intent", "intent"),
        ("recovery", "retry", "retry"),
        ("recovery", "reconcile", "reconcile"),
        ("recovery", "manual", "manual"),
        ("recovery", "abandon", "abandon"),
        ("reconcile", a_callable, a_callable),
        ("provider", "stripe", "stripe"),
        ("provider", ACME, ACME),
        ("settle_after", 60, timedelta(seconds=60)),
        ("settle_after", 0, timedelta(0)),
        ("pii", True, True),
        ("store", "full", "full"),
        ("store", "reference", "reference"),
        ("store", "hash", "hash"),
        ("rebuild", a_callable, a_callable),
        ("outcome", {200, 201}, frozenset({200, 201})),
        ("outcome", [HTTPStatus.CREATED, 599], frozenset({201, 599})),
        ("outcome", range(200, 203), frozenset({200, 201, 202})),
        ("outcome", a_callable, a_callable),
        ("on_in_progress", "reject", "reject"),
        ("on_in_progress", "wait", "wait"),
        ("wait_timeout", 5, timedelta(seconds=5)),
        ("wait_timeout", 0, timedelta(0)),
        ("wait_timeout", 10, timedelta(seconds=10)),
        ("on_store_error", "open", "open"),
        ("rate_limit", "3/hour", RateLimit(3, 3_600_000)),
        ("rate_limit", RateLimit(3, 1), RateLimit(3, 1)),
        ("rate_limit", None, None),
        ("notes", Notes(executes="charges a card"), Notes(executes="charges a card")),
        *((name, None, DEFAULTS[name]) for name in sorted(NONE_TAKEN - {"rate_limit"})),
    ],
)
def test_taken(name: str, value: object, meant: object) -> None:
    got = getattr(keywords_from(**{name: value}), name)
    assert got == meant
    assert type(got) is type(meant)


def test_a_schema_class_becomes_an_instance() -> None:
    assert type(keywords_from(fields=Order).fields) is Order


def test_the_keywords_do_not_share_the_callers_list() -> None:
    names = ["amount"]
    keywords = keywords_from(fields=names)
    names.append("currency")
    assert keywords.fields == ("amount",)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("scope", "", "1 to 255 characters"),
        ("scope", " ", "1 to 255 characters"),
        ("scope", "s" * 256, "1 to 255 characters"),
        ("scope", "a\nb", "1 to 255 characters"),
        ("scope", 7, "not 7"),
        ("required", 1, "one of True, False, not 1"),
        ("required", None, "one of True, False, not None"),
        ("methods", "POST", "Write methods={'POST'}"),
        ("methods", [], "at least one method"),
        ("methods", None, "at least one method"),
        ("methods", [1], "at least one method"),
        ("methods", [""], "is none"),
        ("methods", ["PO ST"], "'PO ST' is none"),
        ("methods", ["POST", "get"], "can't protect GET"),
        ("methods", ["HEAD", "OPTIONS"], "can't protect HEAD, OPTIONS"),
        ("methods", ["TRACE"], "can't protect TRACE"),
        ("methods", ["CONNECT"], "can't protect CONNECT"),
        ("mode", "enforced", "Did you mean 'enforce'?"),
        ("mode", None, "not None"),
        ("key", "X-Event-Id", "must be a callable, not 'X-Event-Id'"),
        ("key", a_coroutine, "coroutine"),
        ("key", AsyncCall(), "coroutine"),
        ("key", functools.partial(a_coroutine), "coroutine"),
        ("bind", "session", "must be a callable"),
        ("bind", a_coroutine, "coroutine"),
        ("fields", "amount", "Write fields=['amount']"),
        ("fields", [], "fields=False"),
        ("fields", (), "fields=False"),
        ("fields", ["amount", 1], "as texts, not 1"),
        ("fields", [""], "as texts, not ''"),
        ("fields", ["/a~b"], "bare '~'"),
        ("fields", ["/a~2"], "bare '~'"),
        ("fields", ["a", "a"], "twice"),
        ("fields", True, "'raw' or False, not True"),
        ("fields", 0, "'raw' or False, not 0"),
        ("fields", b"raw", "a bytes"),
        ("fields", {"amount": 1}, "a dict"),
        ("fields", a_coroutine, "coroutine"),
        ("fields", Choosy, "Give an instance"),
        ("ttl", 0, "more than 0"),
        ("ttl", -1, "negative"),
        ("ttl", None, "a duration, not None"),
        ("ttl", True, "a duration, not True"),
        ("ttl", "1h", "a duration"),
        ("lease", 0, "more than 0"),
        ("lease", timedelta(0), "more than 0"),
        ("lease", 0.0001, "at least 1 ms"),
        ("max_processing", 0, "more than 0"),
        ("settle_after", -1, "negative"),
        ("durable", True, "one of False, 'transaction', 'intent', not True"),
        ("durable", 0, "not 0"),
        ("durable", None, "not None"),
        ("recovery", "retrying", "Did you mean 'retry'?"),
        ("reconcile", "settle", "must be a callable"),
        ("reconcile", a_coroutine, "must not be a coroutine function"),
        ("provider", "square", "must be 'stripe', 'adyen', 'paypal' or a Provider"),
        ("pii", "yes", "one of True, False"),
        ("store", "ful", "Did you mean 'full'?"),
        ("outcome", [], "set of statuses"),
        ("outcome", set(), "set of statuses"),
        ("outcome", "store", "set of statuses"),
        ("outcome", 200, "set of statuses"),
        ("outcome", {200: True}, "set of statuses"),
        ("outcome", [199], "from 200 to 599, not 199"),
        ("outcome", [600], "from 200 to 599, not 600"),
        ("outcome", ["200"], "from 200 to 599, not '200'"),
        ("outcome", [True], "from 200 to 599, not True"),
        ("outcome", a_coroutine, "coroutine"),
        ("on_in_progress", "waiting", "Did you mean 'wait'?"),
        ("on_store_error", "fail", "one of 'closed', 'open'"),
        ("on_store_error", None, "not None"),
        ("rate_limit", "lots", "'N/minute'"),
        ("rate_limit", 0, "None for no limit"),
        ("rate_limit", "0/day", "None for no limit"),
        ("rate_limit", RateLimit(0, 1000), "'N/minute'"),
        ("rate_limit", False, "None for no limit"),
        ("notes", "charges a card", "Notes(executes='...')"),
        ("notes", {"executes": "x"}, "Notes(executes='...')"),
    ],
)
def test_refused_as_the_decorator_is_applied(name: str, value: object, told: str) -> None:
    [line] = refusal(**{name: value}).splitlines()
    assert line.startswith(f"@idempotent: {name}= ")
    assert told in line


def test_the_constructor_checks_too() -> None:
    with pytest.raises(ConfigurationError, match="lease="):
        Keywords(lease=timedelta(0))


def test_all_problems_are_told_at_once() -> None:
    assert [line.split("=")[0] for line in refusal(scope="", lease=0, durable="sometimes").splitlines()] == [
        "@idempotent: scope",
        "@idempotent: lease",
        "@idempotent: durable",
    ]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("field", "fields"),
        ("leese", "lease"),
        ("time_to_live", None),
        ("tll", "ttl"),
        ("max_procesing", "max_processing"),
    ],
)
def test_unknown_keywords_are_refused_with_the_nearest_known_one(name: str, hint: str | None) -> None:
    end = f" Did you mean {hint!r}?" if hint else ""
    assert refusal(**{name: 1}) == f"@idempotent: {name}= is not a known keyword.{end}"


@pytest.mark.parametrize(("name", "value"), [("mode", "log")])
def test_what_is_not_built_yet_is_refused_by_one_table(
    name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    [line] = refusal(**{name: value}).splitlines()
    assert line.startswith(f"@idempotent: {name}=")
    assert "is not available in this version" in line
    monkeypatch.delitem(module.NOT_YET, name)
    assert getattr(keywords_from(**{name: value}), name) != DEFAULTS[name]
