"""How keywords and settings become a policy, what contradicts, and what is kept by status."""

from __future__ import annotations

import functools
import hashlib
import json
import operator
import re
from collections.abc import Callable
from typing import Any

import pytest

from flask_idempotent import policy as module
from flask_idempotent.errors import ConfigurationError
from flask_idempotent.keywords import keywords_from
from flask_idempotent.notes import Notes
from flask_idempotent.policy import (
    Policy,
    bind_policy,
    derives_from_payload_alone,
    finished_state,
    policy_warnings,
)
from flask_idempotent.providers import Provider
from flask_idempotent.records import RateLimit, State
from flask_idempotent.settings import Settings, load_settings

FERNET_KEY = "q83vEjRWeJCrze8SNFZ4kKvN7xI0VniQq83vEjRWeJA="
WHERE = "view 'shop.create_order'"


def a_callable(request: object) -> str:
    return "x"


def load(**values: object) -> Settings:
    return load_settings({f"IDEMPOTENT_{name}": value for name, value in values.items()})


def bind(settings: Settings | None = None, **keywords: object) -> Policy:
    return bind_policy(keywords_from(**keywords), settings or Settings(), where=WHERE)


def contradictions(settings: Settings, **keywords: object) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        bind(settings, **keywords)
    return str(caught.value).splitlines()


# Resolution


def test_the_settings_decide_what_the_keywords_leave_open() -> None:
    settings = load(
        HEADER="X-Key",
        REPLAY_HEADER="X-Replayed",
        TTL=100_000,
        LEASE=7,
        MAX_PROCESSING=70,
        SKEW=0,
        HEARTBEAT=False,
        MISMATCH_STATUS=409,
        FOREIGN_KEY="isolate",
        ON_EXPIRED="reject",
        TOMBSTONE=60,
        ON_STORE_ERROR="open",
        MODE="off",
        ANONYMOUS="refuse",
        MIN_KEY_BITS=0,
        SETTLE_AFTER=9,
        INLINE_BODY=10,
        MAX_BODY=20,
        RATE_LIMIT="7/second",
        FORM_FIELD="_key",
        FORM_IGNORE=["a"],
    )
    assert bind(settings) == Policy(
        scope=None,
        required=True,
        methods=frozenset({"POST", "PATCH"}),
        mode="off",
        header="X-Key",
        replay_header="X-Replayed",
        key=None,
        min_key_bits=0,
        fields=None,
        form_field="_key",
        form_ignore=("a",),
        bind=None,
        isolate=True,
        anonymous="refuse",
        ttl_ms=100_000_000,
        lease_ms=7_000,
        skew_ms=0,
        max_processing_ms=70_000,
        tombstone_ms=60_000,
        heartbeat=False,
        outcome_callable=None,
        kept_statuses=None,
        durable=False,
        recovery=None,
        settle_after_ms=9_000,
        provider=None,
        saga=None,
        on_store_error="open",
        rate=RateLimit(7, 1_000),
        wait_ms=None,
        store="full",
        rebuild=None,
        pii=False,
        mismatch_status=409,
        inline_body=10,
        max_body=20,
        notes=Notes(),
    )


def test_the_keywords_decide_where_they_speak() -> None:
    notes = Notes(ttl_reason="the bank asks for it")
    policy = bind(
        load(MODE="off", ON_STORE_ERROR="open", RATE_LIMIT="7/second", FERNET_KEYS=[FERNET_KEY]),
        scope="charges.create",
        required=False,
        methods=["put"],
        mode="enforce",
        key=a_callable,
        fields=["amount"],
        ttl=90_000,
        lease=1.5,
        max_processing=60,
        recovery="retry",
        pii=True,
        outcome={200},
        on_store_error="closed",
        rate_limit="9/day",
        bind=a_callable,
        notes=notes,
    )
    assert policy.scope == "charges.create"
    assert policy.required is False
    assert policy.methods == {"PUT"}
    assert policy.mode == "enforce"
    assert policy.key is a_callable
    assert policy.fields == ("amount",)
    assert (policy.ttl_ms, policy.lease_ms, policy.max_processing_ms) == (90_000_000, 1_500, 60_000)
    assert policy.recovery == "retry"
    assert policy.pii is True
    assert policy.kept_statuses == frozenset({200})
    assert policy.outcome_callable is None
    assert policy.on_store_error == "closed"
    assert policy.rate == RateLimit(9, 86_400_000)
    assert policy.bind is a_callable
    assert policy.notes is notes


def test_no_rate_limit_can_be_said_by_the_route_and_by_the_app() -> None:
    assert bind(rate_limit=None).rate is None
    assert bind(load(RATE_LIMIT=None)).rate is None
    assert bind().rate == RateLimit(100, 60_000)


def test_expired_keys_leave_a_tombstone_only_where_they_are_refused() -> None:
    assert bind(load(TOMBSTONE=60)).tombstone_ms == 0
    assert bind(load(TOMBSTONE=60, ON_EXPIRED="reject")).tombstone_ms == 60_000


def test_derived_keys_are_exempt_from_the_strength_check() -> None:
    assert bind().min_key_bits == 128
    assert bind(key=a_callable).min_key_bits == 0


@pytest.mark.parametrize(
    ("keywords", "anonymous"),
    [({}, "allow"), ({"pii": True}, "refuse"), ({"pii": True, "bind": a_callable}, "allow")],
)
def test_anonymous_callers_of_pii_routes_need_a_binding(keywords: dict[str, object], anonymous: str) -> None:
    assert bind(load(FERNET_KEYS=[FERNET_KEY]), **keywords).anonymous == anonymous


def test_a_binding_does_not_admit_anonymous_callers_where_the_app_refuses_them() -> None:
    assert bind(load(ANONYMOUS="refuse"), bind=a_callable).anonymous == "refuse"


# Contradictions between the two


def suggested(line: str, name: str) -> float:
    found = re.search(rf"(?:Set|or) {name}(?:=| to )([\d.]+)", line)
    assert found is not None, line
    return float(found[1].rstrip("."))


@pytest.mark.parametrize(
    ("settings", "keywords", "fixed"),
    [
        ({}, {"lease": 60, "max_processing": 50}, ["max_processing", "lease"]),
        ({"MAX_PROCESSING": 900}, {"lease": 900.5}, ["max_processing", "lease"]),
        ({"MAX_PROCESSING": 60, "LEASE": 20}, {"lease": 61}, ["max_processing", "lease"]),
        ({"LEASE": 30}, {"max_processing": 29}, ["max_processing", "lease"]),
        ({"CLIENT_RETRY_WINDOW": 86_400}, {"ttl": 86_400}, ["ttl"]),
        ({"CLIENT_RETRY_WINDOW": 86_400}, {"ttl": 80_000.5}, ["ttl"]),
    ],
)
def test_contradictions_name_the_place_and_a_value_that_does(
    settings: dict[str, object], keywords: dict[str, object], fixed: list[str]
) -> None:
    [line] = contradictions(load(**settings), **keywords)
    assert line.startswith(f"{WHERE}: ")
    for name in fixed:
        assert bind(load(**settings), **{**keywords, name: suggested(line, name)})


@pytest.mark.parametrize(
    ("settings", "keywords", "told"),
    [
        ({}, {"lease": 60, "max_processing": 50}, "lease (60 s) is longer than max_processing (50 s)."),
        ({"MAX_PROCESSING": 50}, {"lease": 60}, "lease (60 s) is longer than IDEMPOTENT_MAX_PROCESSING (50 s)."),
        ({"LEASE": 60}, {"max_processing": 50}, "IDEMPOTENT_LEASE (60 s) is longer than max_processing (50 s)."),
    ],
)
def test_a_contradiction_says_who_stated_each_value(
    settings: dict[str, object], keywords: dict[str, object], told: str
) -> None:
    assert contradictions(load(**settings), **keywords)[0].startswith(f"{WHERE}: {told}")


@pytest.mark.parametrize(
    ("settings", "keywords", "lease_ms", "max_processing_ms"),
    [
        ({}, {"lease": 900}, 900_000, 900_000),
        ({}, {"lease": 901}, 901_000, 901_000),
        ({"LEASE": 1200}, {"lease": 1201}, 1_201_000, 1_201_000),
        ({"LEASE": 1200}, {}, 1_200_000, 1_200_000),
        ({"MAX_PROCESSING": 60}, {"lease": 61, "max_processing": 62}, 61_000, 62_000),
        ({"MAX_PROCESSING": 60}, {"lease": 60}, 60_000, 60_000),
        ({}, {"max_processing": 29}, 29_000, 29_000),
        ({}, {"max_processing": 31}, 30_000, 31_000),
        ({"MAX_PROCESSING": 20}, {}, 20_000, 20_000),
        ({"MAX_PROCESSING": 20}, {"max_processing": 10}, 10_000, 10_000),
        ({"LEASE": 30}, {"lease": 10, "max_processing": 20}, 10_000, 20_000),
    ],
)
def test_what_is_stated_moves_what_nobody_stated(
    settings: dict[str, object], keywords: dict[str, object], lease_ms: int, max_processing_ms: int
) -> None:
    policy = bind(load(**settings), **keywords)
    assert (policy.lease_ms, policy.max_processing_ms) == (lease_ms, max_processing_ms)


@pytest.mark.parametrize(
    ("settings", "keywords", "ttl_ms"),
    [
        ({"CLIENT_RETRY_WINDOW": 86_400}, {"ttl": 86_400.001}, 86_400_001),
        ({}, {"ttl": 899}, 899_000),
        ({}, {"ttl": 1, "lease": 60, "max_processing": 60}, 1_000),
        ({"TTL": 10}, {}, 10_000),
        ({"TTL": 10, "LEASE": 60}, {}, 10_000),
    ],
)
def test_a_lifetime_counts_from_completion_and_may_be_shorter_than_a_run(
    settings: dict[str, object], keywords: dict[str, object], ttl_ms: int
) -> None:
    assert bind(load(**settings), **keywords).ttl_ms == ttl_ms


def test_pii_demands_encryption_and_says_how_to_make_a_key() -> None:
    [line] = contradictions(Settings(), pii=True)
    assert line.startswith(f"{WHERE}: pii=True needs IDEMPOTENT_FERNET_KEYS")
    assert "Fernet.generate_key()" in line
    assert bind(load(FERNET_KEYS=[FERNET_KEY]), pii=True).pii is True


def test_all_contradictions_are_told_at_once() -> None:
    settings = load(CLIENT_RETRY_WINDOW=3600, MAX_PROCESSING=900)
    told = contradictions(settings, pii=True, lease=901, ttl=3600, durable="transaction", required=False)
    names = [line.removeprefix(f"{WHERE}: ").split(" ")[0] for line in told]
    assert names == ["ttl", "lease", "required=False", "pii=True"]


# Durable routes


@pytest.mark.parametrize(
    ("settings", "keywords", "durable"),
    [
        ({}, {}, False),
        ({"DURABLE": "transaction"}, {}, "transaction"),
        ({"DURABLE": "transaction"}, {"durable": False}, False),
        ({"DURABLE": False}, {"durable": "transaction"}, "transaction"),
    ],
)
def test_the_route_decides_what_is_durable_and_else_the_app(
    settings: dict[str, object], keywords: dict[str, object], durable: object
) -> None:
    assert bind(load(**settings), **keywords).durable == durable


def payload_key(request: Any) -> str:
    return hashlib.sha256(request.get_data()).hexdigest()


CONTRADICT_DURABLE = [
    ({"on_store_error": "open"}, "on_store_error='open' excludes", {"on_store_error": "closed"}),
    ({"required": False}, "required=False excludes", {"required": True}),
    ({"store": "hash"}, "store='hash' excludes", {"store": "full"}),
    ({"key": payload_key}, "key= seems to be made from the payload alone", {"key": a_callable}),
]


@pytest.mark.parametrize("durable", ["transaction", "intent"])
@pytest.mark.parametrize(("keywords", "told", "fix"), CONTRADICT_DURABLE)
def test_a_durable_route_refuses_what_could_run_its_work_twice(
    durable: str, keywords: dict[str, object], told: str, fix: dict[str, object]
) -> None:
    [line] = contradictions(Settings(), durable=durable, **keywords)
    assert line.startswith(f"{WHERE}: {told}")
    assert f"durable={durable!r}" in line
    assert bind(Settings(), durable=durable, **fix).durable == durable
    assert bind(Settings(), durable=False, **keywords).durable is False


@pytest.mark.parametrize(("keywords", "told", "fix"), CONTRADICT_DURABLE)
def test_a_route_that_is_durable_by_the_setting_refuses_the_same(
    keywords: dict[str, object], told: str, fix: dict[str, object]
) -> None:
    settings = load(DURABLE="transaction")
    [line] = contradictions(settings, **keywords)
    assert line.startswith(f"{WHERE}: {told}")
    assert "IDEMPOTENT_DURABLE='transaction'" in line
    assert bind(settings, **fix).durable == "transaction"
    assert bind(settings, durable=False, **keywords).durable is False


def test_an_app_that_is_open_without_its_store_needs_a_word_on_durable_routes() -> None:
    settings = load(ON_STORE_ERROR="open")
    [line] = contradictions(settings, durable="transaction")
    assert line.startswith(f"{WHERE}: IDEMPOTENT_ON_STORE_ERROR='open' excludes durable='transaction'")
    assert "Set on_store_error='closed'" in line
    assert bind(settings, durable="transaction", on_store_error="closed").on_store_error == "closed"


@pytest.mark.parametrize("recovery", ["reconcile", "manual", "abandon"])
def test_a_transaction_leaves_nothing_to_recover(recovery: str) -> None:
    [line] = contradictions(Settings(), durable="transaction", recovery=recovery)
    assert line.startswith(f"{WHERE}: recovery={recovery!r} is not available with durable='transaction'")
    assert bind(durable="intent", recovery=recovery).recovery == recovery


@pytest.mark.parametrize("recovery", [None, "retry"])
def test_a_repeat_may_run_what_a_transaction_rolled_back(recovery: str | None) -> None:
    assert bind(durable="transaction", recovery=recovery).recovery == recovery


@pytest.mark.parametrize("settings", [{}, {"DURABLE": "intent"}])
def test_an_effect_outside_is_never_run_again_blind(settings: dict[str, object]) -> None:
    keywords = {} if settings else {"durable": "intent"}
    [line] = contradictions(load(**settings), recovery="retry", **keywords)
    assert line.startswith(f"{WHERE}: recovery='retry' excludes ")
    assert "Set recovery='reconcile' with a reconciler, 'manual' or 'abandon'" in line
    for recovery in (None, "reconcile", "manual", "abandon"):
        assert bind(load(**settings), recovery=recovery, **keywords).recovery == recovery


@pytest.mark.parametrize("recovery", ["reconcile", "manual", "abandon"])
def test_a_record_in_redis_alone_can_not_be_settled_later(recovery: str) -> None:
    [line] = contradictions(Settings(), recovery=recovery)
    assert line.startswith(f"{WHERE}: recovery={recovery!r} needs durable='intent'")
    [line] = contradictions(Settings(), reconcile=a_callable)
    assert line.startswith(f"{WHERE}: reconcile= needs durable='intent'")


@pytest.mark.parametrize("provider", ["stripe", Provider("acme", window=60, max_length=64)])
def test_a_providers_key_needs_a_durable_route(provider: object) -> None:
    [line] = contradictions(Settings(), provider=provider)
    assert line.startswith(f"{WHERE}: provider= needs a durable route")
    bound = bind(durable="intent", provider=provider).provider
    assert bound is not None
    assert bound.name == (provider if isinstance(provider, str) else "acme")


def test_a_key_outlives_what_its_provider_remembers() -> None:
    """Else an expired key, as if never seen, would get the provider's old result."""
    [line] = contradictions(Settings(), durable="intent", provider="adyen")
    assert line == (
        f"{WHERE}: ttl (172800 s) is shorter than what adyen remembers (2592000 s): an expired key would get its old "
        "result. Set ttl=2592000 or more."
    )
    assert bind(durable="intent", provider="adyen", ttl=2_592_000).ttl_ms == 2_592_000_000
    shorter = load(PROVIDERS={"adyen": {"window": 86_400}})
    assert bind(shorter, durable="intent", provider="adyen").provider == Provider("adyen", window=86_400, max_length=80)
    assert len(contradictions(load(PROVIDERS={"stripe": 172_801}), durable="intent", provider="stripe")) == 1


@pytest.mark.parametrize(
    ("settings", "keywords", "expected_ms"),
    [
        ({}, {}, 33_000),
        ({"LEASE": 5, "SKEW": 1}, {}, 6_000),
        ({}, {"lease": 60}, 63_000),
        ({"SETTLE_AFTER": 7}, {"lease": 60}, 7_000),
        ({"SETTLE_AFTER": 7}, {"settle_after": 8}, 8_000),
        ({}, {"provider": Provider("acme", window=60, max_length=64, search_delay=90)}, 123_000),
        ({"PROVIDERS": {"stripe": {"search_delay": 10}}}, {"provider": "stripe"}, 43_000),
    ],
)
def test_how_long_not_found_is_not_believed(
    settings: dict[str, object], keywords: dict[str, object], expected_ms: int
) -> None:
    assert bind(load(**settings), durable="intent", **keywords).settle_after_ms == expected_ms


def test_all_that_a_durable_route_refuses_is_told_at_once() -> None:
    told = contradictions(
        Settings(),
        durable="transaction",
        on_store_error="open",
        required=False,
        store="hash",
        recovery="manual",
        key=payload_key,
    )
    names = [line.removeprefix(f"{WHERE}: ").split("=")[0] for line in told]
    assert names == ["on_store_error", "required", "store", "recovery", "key"]


# What is kept

RELEASED = {401, 403, 408, 409, 423, 425, 429}


@pytest.mark.parametrize("status", range(100, 600))
def test_the_rule_by_status(status: int) -> None:
    policy = bind()
    if status < 200 or status >= 500 or status in RELEASED:
        assert not policy.keeps(status)
        assert policy.state_for(status) is State.RELEASED
    else:
        assert policy.keeps(status)
        assert policy.state_for(status) is (State.SUCCEEDED if status < 400 else State.FAILED)


@pytest.mark.parametrize("status", [0, 600, 999])
def test_no_status_outside_http_is_kept(status: int) -> None:
    assert bind().state_for(status) is State.RELEASED


@pytest.mark.parametrize(
    ("status", "state"),
    [
        (200, State.RELEASED),
        (201, State.SUCCEEDED),
        (302, State.SUCCEEDED),
        (404, State.RELEASED),
        (409, State.FAILED),
        (500, State.RELEASED),
        (503, State.FAILED),
    ],
)
def test_a_set_of_statuses_is_exact(status: int, state: State) -> None:
    policy = bind(outcome={201, 302, 409, 503})
    assert policy.state_for(status) is state
    assert policy.keeps(status) is (state is not State.RELEASED)


def test_a_callable_outcome_is_handed_on_and_leaves_the_rule_as_it_is() -> None:
    policy = bind(outcome=a_callable)
    assert policy.outcome_callable is a_callable
    assert policy.kept_statuses is None
    assert policy.state_for(200) is State.SUCCEEDED


@pytest.mark.parametrize(
    ("status", "state"), [(200, State.SUCCEEDED), (399, State.SUCCEEDED), (400, State.FAILED), (503, State.FAILED)]
)
def test_a_kept_error_is_failed_whatever_decided_so(status: int, state: State) -> None:
    assert finished_state(status) is state


# Warnings


def warnings(settings: Settings | None = None, **keywords: object) -> list[str]:
    settings = settings or Settings()
    return policy_warnings(bind(settings, **keywords), settings, where=WHERE)


@pytest.mark.parametrize(
    ("settings", "keywords", "told"),
    [
        ({}, {}, []),
        ({}, {"ttl": 86_401}, []),
        ({}, {"ttl": 604_800}, []),
        ({}, {"ttl": 604_801}, ["ttl is 604801 s, above 7 d"]),
        ({}, {"ttl": 3600}, ["ttl is 3600 s, under 24 h"]),
        ({}, {"ttl": 86_400}, ["ttl is 24 h"]),
        ({"CLIENT_RETRY_WINDOW": 60}, {"ttl": 86_400}, []),
        ({"TTL": 3600}, {}, []),  # the settings warn of that themselves, once
        ({"TTL": 3600}, {"ttl": 7200}, ["ttl is 7200 s, under 24 h"]),
        ({}, {"key": lambda request: request.get_data()}, ["key= seems to be made from the payload alone"]),
        ({}, {"key": a_callable}, []),
    ],
)
def test_warnings_of_a_route(settings: dict[str, object], keywords: dict[str, object], told: list[str]) -> None:
    found = warnings(load(**settings), **keywords)
    assert len(found) == len(told)
    for warning, start in zip(found, told, strict=True):
        assert warning.startswith(f"{WHERE}: {start}")


def test_the_assumed_window_is_labelled() -> None:
    assert "24 h is assumed (an assumption" in warnings(ttl=3600)[0]
    assert "assum" not in warnings(load(CLIENT_RETRY_WINDOW=60), ttl=3600)[0]


# Keys from the payload alone

ID = "id"
request: Any = None


def canonical(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def whole_json(request: Any) -> str:
    payload = request.get_json(silent=True)
    return canonical(payload)


def joined_values(request: Any) -> str:
    return "-".join(str(value) for value in request.json.values())


def in_a_nested_function(request: Any) -> str:
    def digest() -> str:
        return hashlib.sha256(request.data).hexdigest()

    return digest()


def from_the_global(_: Any) -> str:
    return hashlib.sha256(request.get_data()).hexdigest()


def with_a_secret(request: Any) -> str:
    app: Any = None
    return str(app.config["SECRET"] + canonical(request.json))


def an_event_id(request: Any) -> str:
    event = request.get_json()
    return f"event-{event['id']}"


def a_parsed_event(request: Any) -> str:
    return str(json.loads(request.get_data())["id"])


def an_attribute(request: Any) -> str:
    event: Any = object
    return str(event(request.json).id)


def with_the_path(request: Any) -> str:
    return f"{request.view_args}{canonical(request.json)}"


def wrapped(function: Callable[..., str]) -> Callable[..., str]:
    @functools.wraps(function)
    def outer(*args: Any) -> str:
        return function(*args)

    return outer


class Keys:
    def of_payload(self, request: Any) -> str:
        return canonical(request.json)

    def __call__(self, request: Any) -> str:
        return canonical(request.form)


class HeaderKeys:
    def __call__(self, request: Any) -> str:
        return str(request.headers["X-Event"])


@pytest.mark.parametrize(
    "key",
    [
        lambda r: r.get_data(),
        lambda r: hashlib.sha256(r.data).hexdigest()[:32],
        lambda r: hashlib.new("sha256", r.stream.read()).hexdigest(),
        lambda r: canonical(r.json),
        lambda r: canonical(r.form),
        lambda r: canonical(r.values),
        lambda r: "|".join(f"{name}={value}" for name, value in sorted(r.form.items())),
        whole_json,
        joined_values,
        in_a_nested_function,
        from_the_global,
        with_a_secret,
        wrapped(whole_json),
        functools.partial(whole_json),
        Keys().of_payload,
        Keys(),
    ],
)
def test_a_key_from_the_payload_alone_is_seen(key: Callable[..., str]) -> None:
    assert derives_from_payload_alone(key)


@pytest.mark.parametrize(
    "key",
    [
        lambda r: r.json["id"],
        lambda r: r.json[ID],
        lambda r: r.json.get("id"),
        lambda r: r.get_json()["data"]["object"]["id"],
        lambda r: r.form.get("order"),
        lambda r: r.form["order"],
        lambda r: operator.itemgetter("id")(r.json),
        lambda r: r.headers["X-Event-Id"],
        lambda r: r.headers.get("X-Event-Id") + canonical(r.json),
        lambda r: f"{r.path}{r.get_data()}",
        lambda r: f"{r.args['order']}{canonical(r.json)}",
        lambda r: r.remote_addr + canonical(r.form),
        lambda r: "constant",
        an_event_id,
        a_parsed_event,
        an_attribute,
        with_the_path,
        wrapped(an_event_id),
        functools.partial(an_event_id),
        HeaderKeys(),
        a_callable,
        str,
        len,
        operator.attrgetter("json"),
    ],
)
def test_a_key_from_anything_else_is_not_accused(key: Callable[..., str]) -> None:
    assert not derives_from_payload_alone(key)


def test_a_key_that_reads_another_part_of_the_request_is_not_accused() -> None:
    for name in sorted(module._OTHER):
        key = eval(f"lambda request: (request.get_data(), request.{name})")
        assert not derives_from_payload_alone(key), name
