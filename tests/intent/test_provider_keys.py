"""The key that goes to a provider: the same in every attempt and process, and nobody else's. J of the field reports, as
far as it is about keys.
"""

import hashlib
import re
import threading
from typing import Any

import pytest
from flask import request

from flask_idempotent import Provider, Settlement, current_idempotency
from flask_idempotent.errors import ConfigurationError
from tests.harness import wait_until
from tests.provider import NoAnswer, Refused
from tests.web import kit

from .kit import BANK, Till, assert_unknown, die, new_key

SHAPES = {
    "stripe": r"[0-9a-f]{64}_\d+",
    "adyen": r"[0-9a-f]{64}_\d+",
    "paypal": r"[0-9a-f]{8}-[0-9a-f]{4}-5[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}",
    "bank": r"[0-9a-f]{60}_\d+",
}
LENGTHS = {"stripe": 255, "adyen": 80, "paypal": 38, "bank": 64}


def keys_of(till: Till, key: str, *, user: str = "ann", path: str = "/charges") -> "list[str]":
    till.asked.clear()
    assert till.pay(key, user=user, path=path).status_code == 201
    return list(till.asked)


@pytest.fixture
def make_asking(make_till, sqlite_url):
    """A till whose view only asks for keys: those of three steps."""

    def make(**options: Any) -> Till:
        provider = options.pop("remembers", "stripe")
        till = make_till(sqlite_url, TTL=30 * 86_400, **options)
        till.asked = []
        till.idem.tenant_loader(lambda: request.headers.get("X-Tenant"))

        def take() -> Any:
            till.runs += 1
            till.asked += [current_idempotency.provider_key(step=step) for step in range(3)]
            return "", 201

        till.take = take
        till.take_charges(provider=provider)
        till.take_charges("/other", provider=provider)
        return till

    return make


@pytest.mark.parametrize("remembers", SHAPES)
def test_its_shape(make_asking, remembers):
    """8.1: within what each provider takes, and nothing of the client's key in it."""
    till = make_asking(remembers=BANK if remembers == "bank" else remembers)
    key = new_key()
    found = keys_of(till, key)
    assert len(set(found)) == 3
    for each in found:
        assert re.fullmatch(SHAPES[remembers], each)
        assert len(each) <= LENGTHS[remembers]
        assert key not in each
        assert key.replace("-", "") not in each
        for digest in (hashlib.sha256(key.encode()), hashlib.sha256(key.replace("-", "").encode())):
            assert digest.hexdigest()[:16] not in each


def test_it_is_the_same_in_every_app_and_process(make_asking, make_till):
    """From the record alone: another app object of the same configuration asks for the same."""
    key = new_key()
    first = keys_of(make_asking(), key)
    other = make_asking(name="another process")
    other.forget_all()
    assert keys_of(other, key) == first


def test_it_differs_by_all_that_makes_a_record(make_asking):
    """Tenant, endpoint, key, step, and the principal where keys are his own."""
    till = make_asking()
    key = new_key()
    found = [keys_of(till, key), keys_of(till, new_key()), keys_of(till, key, path="/other")]
    for tenant in ("a", "b"):
        till.asked.clear()
        headers = kit.keyed(key, X_User="ann", X_Tenant=tenant)
        assert till.app.test_client().post("/charges", json={"amount": 100}, headers=headers).status_code == 201
        found.append(list(till.asked))
    everything = [each for keys in found for each in keys]
    assert len(set(everything)) == len(everything) == 15


def test_two_principals_with_one_key(make_asking):
    """2.6, V13: isolated, each has a provider's key of its own, so nobody gets the other's charge."""
    till = make_asking(FOREIGN_KEY="isolate")
    key = new_key()
    assert not set(keys_of(till, key)) & set(keys_of(till, key, user="bob"))


def test_an_apps_prefix_counts(make_asking):
    key = new_key()
    first = keys_of(make_asking(), key)
    assert not set(first) & set(keys_of(make_asking(KEY_PREFIX="another", name="another"), key))


def test_two_providers_never_share_a_key(make_till, sqlite_url):
    till = make_till(sqlite_url)
    found: list[str] = []

    def take() -> Any:
        found.extend(current_idempotency.provider_key(name) for name in ("stripe", "paypal", "adyen", BANK))
        found.append(current_idempotency.provider_key())
        return "", 201

    till.take = take
    till.take_charges(provider="stripe")
    till.pay(new_key())
    assert len(set(found[:4])) == 4
    assert found[4] == found[0]


def test_an_operation_is_shared_by_a_request_and_a_webhook(make_till, database_url):
    """F112: POST /pay for order 42 and the webhook for order 42 at the same instant: one charge."""
    till = make_till(database_url, engine_options={"pool_size": 5})
    till.idem.tenant_loader(lambda: request.headers.get("X-Tenant"))
    barrier = threading.Barrier(2)
    answers: list[Any] = []

    def take() -> Any:
        order = request.get_json()["amount"]
        found = current_idempotency.provider_key(operation=f"order-{order}")
        till.keys.append(found)
        if len(till.keys) <= 2:
            barrier.wait(kit.WAIT_S)
        for _ in range(50):
            try:
                return {"charge": till.provider.charge(order, key=found)["id"]}, 201
            except Refused as error:
                assert error.code == "idempotency_key_in_use"  # noqa: PT017
        raise AssertionError

    till.take = take
    till.take_charges("/pay")
    till.take_charges("/webhooks")
    answers = kit.together(
        lambda: till.pay(new_key(), 42, path="/pay"), lambda: till.pay(new_key(), 42, path="/webhooks", user="bank")
    )
    assert [answer.status_code for answer in answers] == [201, 201]
    assert answers[0].get_json() == answers[1].get_json()
    assert len(till.provider.entries()) == 1
    assert len(set(till.keys)) == 1
    # Another order, another tenant: other keys.
    till.pay(new_key(), 43, path="/pay")
    headers = kit.keyed(new_key(), X_User="ann", X_Tenant="other")
    till.app.test_client().post("/pay", json={"amount": 42}, headers=headers)
    assert len(set(till.keys)) == 3
    assert len(till.provider.entries()) == 3


def test_an_operation_differs_by_provider_and_step(make_till, sqlite_url):
    till = make_till(sqlite_url)
    found: list[str] = []

    def take() -> Any:
        for provider in ("stripe", BANK):
            for step in (0, 1):
                found.append(current_idempotency.provider_key(provider, step=step, operation="order-42"))
        found.append(current_idempotency.provider_key())
        return "", 201

    till.take = take
    till.take_charges()
    till.pay(new_key())
    assert len(set(found)) == 5
    assert all("42" not in each.rpartition("_")[2] for each in found)


def test_one_key_for_all_attempts(till: Till):
    """F109: two connections that break, then an answer: three sendings in one attempt, and a crash and a retry of our
    own client after them. One key, one charge."""
    till.provider.fault("drop", "before", times=2)

    def charge(amount: int, *, key: str, charge=till.provider.charge) -> Any:
        for _ in range(3):
            try:
                return charge(amount, key=key)
            except NoAnswer:
                continue
        raise AssertionError

    till.provider.charge = charge  # type: ignore[method-assign]
    till.provider.control(search_delay=3600)
    till.ending = lambda charge: die() or ("", 201)
    key = new_key()
    try:
        till.pay(key)
        till.pass_time(37)
        till.ending = lambda charge: ({"charge": charge["id"]}, 201)
        till.assert_one_charge(till.pay(key))
        calls = till.provider.calls()
        assert [call["outcome"] for call in calls] == ["came to nothing", "came to nothing", "done", "repeated"]
        assert len({call["key"] for call in calls}) == 1
        assert till.attempts == [1, 2]
    finally:
        del till.provider.charge


def test_other_parameters_are_not_a_failure(make_till, database_url):
    """F111: the retry sends another note; the provider says "same key, other parameters". That is no decline: the
    outcome is unknown, and looked up; the key stays, one charge."""
    till = make_till(database_url)
    till.take_charges(fields=["amount"])
    till.app.register_error_handler(Refused, lambda error: ({"code": error.code}, 502))

    def take() -> Any:
        till.runs += 1
        found = current_idempotency.provider_key()
        till.keys.append(found)
        charge = till.provider.charge(100, key=found, note=request.get_json()["note"])
        if till.runs == 1:
            die()
        return {"charge": charge["id"]}, 201

    till.take = take
    till.provider.control(search_delay=3600)
    key = new_key()
    till.pay(key, note="first")
    till.pass_time(37)
    second = till.pay(key, note="second")
    assert (second.status_code, second.get_json()) == (502, {"code": "idempotency_key_reused"})
    assert till.row().status == "indeterminate"
    assert_unknown(till.pay(key, note="third"))
    till.provider.control(search_delay=0)
    till.pass_time(6)
    till.assert_one_charge(till.pay(key, note="fourth"))
    assert (len(set(till.keys)), till.runs) == (1, 2)


def test_two_operations_of_one_request(till: Till):
    """F113, F116: a charge and a transfer: two keys, the same two in the second attempt; another request has others."""

    def take() -> Any:
        till.runs += 1
        for step, operation in enumerate(("charges", "transfers")):
            found = current_idempotency.provider_key(step=step)
            till.keys.append(found)
            till.provider.act(operation, key=found, amount=1)
        if till.runs == 1:
            die()
        return "", 201

    till.take = take
    till.provider.control(search_delay=3600)
    key = new_key()
    till.pay(key)
    till.pass_time(37)
    assert till.pay(key).status_code == 201
    till.pay(new_key())
    assert till.keys[:2] == till.keys[2:4]
    assert len(set(till.keys)) == 4
    assert sorted(entry["operation"] for entry in till.provider.entries()) == ["charges"] * 2 + ["transfers"] * 2


def test_what_does_not_count_does_not_change_the_key(make_till, sqlite_url):
    """F115: a time stamp and a blob that is encrypted anew each time, outside of the fingerprint: one key."""
    till = make_till(sqlite_url)
    till.take_charges(fields=["amount"])
    till.ending = lambda charge: ("bad gateway", 502) if till.runs == 1 else ({"charge": charge["id"]}, 201)
    till.provider.control(search_delay=3600)
    key = new_key()
    till.pay(key, at=1, blob="abc")
    till.pass_time(6)
    till.assert_one_charge(till.pay(key, at=2, blob="def"))
    assert (till.attempts, len(set(till.keys))) == ([1, 2], 1)


def test_a_key_in_use_is_not_a_failure(till: Till):
    """F117: the first call timed out and is being worked on; the second is told "in use". The client is told to wait,
    and gets the first one's charge."""
    till.app.register_error_handler(Refused, lambda error: ("the provider is at it", 503))
    till.app.register_error_handler(NoAnswer, lambda error: ("no answer", 504))
    impatient = type(till.provider)(till.provider.url, timeout=0.5)
    till.provider, patient = impatient, till.provider
    patient.fault("wait", "before", seconds=4)  # far longer than it takes to come back
    key = new_key()
    assert till.pay(key).status_code == 504
    with till.outside.begin() as connection:
        till.age(connection, 6)
    assert till.pay(key).status_code == 503  # not found, inside of the window: sent again, and in use
    assert [call["outcome"] for call in patient.calls()] == ["began", "key in use"]
    assert till.row().status == "indeterminate"
    assert_unknown(till.pay(key))
    wait_until(lambda: bool(patient.entries()), "the late charge", 10)
    till.provider = patient
    with till.outside.begin() as connection:
        till.age(connection, 6)
    till.assert_one_charge(till.pay(key))
    assert till.attempts == [1, 2]


@pytest.mark.parametrize(
    ("windows", "allowed", "refused"),
    [
        ({}, 21, 22),
        ({"stripe": {"window": 3600}}, 0.89, 0.91),
        ({"stripe": 7200}, 1.79, 1.81),
    ],
)
def test_the_settings_say_how_long_a_provider_remembers(make_till, sqlite_url, windows, allowed, refused):
    """``IDEMPOTENT_PROVIDERS``, in hours here; a tenth is left for the call."""
    for hours, status in ((allowed, 201), (refused, 409)):
        till = make_till(sqlite_url, PROVIDERS=windows, name=f"{hours}")
        till.take_charges(provider="stripe")
        till.provider.control(search_delay=10 * 86_400)
        till.ending = lambda charge: die() or ("", 201)
        key = new_key()
        till.pay(key)
        till.ending = lambda charge: ({"charge": charge["id"]}, 201)
        till.pass_time(hours * 3600)
        assert till.pay(key).status_code == status
        till.forget_all()


@pytest.mark.parametrize("remembers", ["stripe", "adyen", BANK], ids=["stripe", "adyen", "bank"])
def test_a_key_that_lives_shorter_than_its_provider_remembers_does_not_start(make_till, sqlite_url, remembers):
    """2.9: else an expired key, as if never seen, would get the provider's old result."""
    till = make_till(sqlite_url, TTL=86_399)
    till.take_charges(provider=remembers)
    with pytest.raises(ConfigurationError, match="shorter than what"):
        till.idem.verify(till.app)


def test_what_a_key_needs(make_till, sqlite_url):
    """A provider, from the route or by name; one that is known; a JSON note only on routes that keep one."""
    till = make_till(sqlite_url)
    errors: list[str] = []

    def take() -> Any:
        for ask in (
            lambda: current_idempotency.provider_key(),
            lambda: current_idempotency.provider_key("nobody"),
            lambda: current_idempotency.provider_key(Provider("x", window=1, max_length=32, derive=lambda *_: "ä")),
        ):
            with pytest.raises(ConfigurationError) as caught:
                ask()
            errors.append(str(caught.value))
        return "", 201

    till.take = take
    till.take_charges(provider=None, reconcile=False, recovery="manual")
    assert till.pay(new_key()).status_code == 201
    assert "has no provider=" in errors[0]
    assert "'nobody' is not known" in errors[1]
    assert "others than" in errors[2]


def test_orphan_and_view_ask_for_the_same_key(till: Till):
    """The reconciler's ``provider_key()`` takes what the view's takes."""
    asked: list[str] = []
    asks = [
        {},
        {"step": 3},
        {"operation": "order-1"},
        {"provider": "paypal"},
        {"provider": "adyen", "step": 1, "operation": "o"},
    ]

    def take() -> Any:
        asked.extend(current_idempotency.provider_key(**each) for each in asks)
        return "bad gateway", 502

    till.take = take
    told: list[str] = []

    def settle(orphan: Any) -> Settlement:
        told.extend(orphan.provider_key(**each) for each in asks)
        return Settlement.completed("")

    till.app.view_functions.pop("charges")
    till.settle = settle
    till.take_charges("/again")
    key = new_key()
    till.pay(key, path="/again")
    till.pass_time(6)
    assert till.pay(key, path="/again").status_code == 200
    assert told == asked
    assert len(set(told)) == 5
