"""What a provider is, how a key of ours becomes one of its, and what the settings may say about it."""

import re
from datetime import timedelta

import pytest

from flask_idempotent.errors import ConfigurationError
from flask_idempotent.providers import Provider
from flask_idempotent.providers.base import BUILT_IN, resolve

PAYPAL = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-5[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


@pytest.mark.parametrize(
    ("name", "window", "longest"), [("stripe", 24, 255), ("adyen", 30 * 24, 80), ("paypal", 6, 38)]
)
def test_the_built_in_ones(name: str, window: int, longest: int) -> None:
    provider = BUILT_IN[name]
    assert (provider.name, provider.window, provider.max_length) == (name, timedelta(hours=window), longest)
    assert provider.deduplicates
    assert provider.search_delay == timedelta(0)
    for step in (0, 1, 999):
        key = provider.key("material", step)
        assert len(key) <= longest
        assert PAYPAL.fullmatch(key) if name == "paypal" else key.endswith(f"_{step}")


def test_the_keys_stay_what_they_are() -> None:
    """They are part of what a provider remembers: another release must ask for the same."""
    assert BUILT_IN["stripe"].key("record\0abc", 0) == (
        "7f628c583ec95459083a598090263cf04f7ebb6c08d4154613c5d21ed923a080_0"
    )


def test_a_key_is_made_of_provider_material_and_step() -> None:
    stripe, adyen = BUILT_IN["stripe"], BUILT_IN["adyen"]
    keys = {stripe.key("a", 0), stripe.key("a", 1), stripe.key("b", 0), adyen.key("a", 0)}
    assert len(keys) == 4
    assert stripe.key("a", 0) == stripe.key("a", 0)


@pytest.mark.parametrize("length", [32, 40, 64, 68, 255])
def test_a_key_is_as_long_as_the_provider_takes(length: int) -> None:
    provider = Provider("acme", window=60, max_length=length)
    for step in (0, 99, 999):
        assert len(provider.key("a", step)) <= length
    assert len(provider.key("a", 0)) >= min(length - 2, 64)


@pytest.mark.parametrize("step", [1000, 123456])
def test_a_step_that_makes_a_key_too_long_is_told(step: int) -> None:
    with pytest.raises(ConfigurationError, match="longer than 32 characters"):
        Provider("acme", window=60, max_length=32).key("a", step)


def test_a_key_of_ones_own_making() -> None:
    provider = Provider("acme", window=60, max_length=20, derive=lambda digits, step: f"{digits[:16]}-{step}")
    assert re.fullmatch(r"[0-9a-f]{16}-7", provider.key("a", 7))


@pytest.mark.parametrize("derived", ["x" * 21, "", "a b", "ä", "a\n"])
def test_what_the_provider_would_refuse_is_told(derived: str) -> None:
    provider = Provider("acme", window=60, max_length=20, derive=lambda digits, step: derived)
    with pytest.raises(ConfigurationError, match=r"longer than 20 characters, or has others than \[A-Za-z0-9_-\]"):
        provider.key("a", 0)


@pytest.mark.parametrize("window", [90, 90.0, timedelta(seconds=90)])
def test_a_margin_is_left_for_the_call(window: object) -> None:
    assert Provider("acme", window=window, max_length=64).window_ms == 81_000  # type: ignore[arg-type]


def test_a_rail_without_deduplication() -> None:
    wire = Provider.none("wire")
    assert (wire.name, wire.deduplicates, wire.window_ms) == ("wire", False, 0)
    assert wire.key("a", 0) != wire.key("a", 1)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"name": ""}, "name must not be empty"),
        ({"window": 0}, "positive durations"),
        ({"window": -1}, "positive durations"),
        ({"search_delay": -1}, "positive durations"),
        ({"max_length": 31}, "too short for a key that nobody guesses"),
        ({"alphabet": "z-a"}, "alphabet is not the inside"),
    ],
)
def test_what_can_not_be(values: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        Provider(**{"name": "acme", "window": 60, "max_length": 64, **values})  # type: ignore[arg-type]


# The settings


@pytest.mark.parametrize("said", [3600, 3600.0, timedelta(hours=1), {"window": 3600}])
def test_the_settings_state_a_window(said: object) -> None:
    stripe = resolve("stripe", {"stripe": said})
    assert stripe.window == timedelta(hours=1)
    assert stripe.key("a", 0) == BUILT_IN["stripe"].key("a", 0)
    assert resolve("stripe", {}) is BUILT_IN["stripe"]


def test_the_settings_state_a_search_delay_and_of_ones_own_provider_too() -> None:
    acme = Provider("acme", window=60, max_length=64)
    said = {"acme": {"search_delay": 5, "window": 120}, "stripe": {"search_delay": timedelta(minutes=1)}}
    assert (resolve(acme, said).search_delay, resolve(acme, said).window) == (
        timedelta(seconds=5),
        timedelta(seconds=120),
    )
    assert resolve("stripe", said).search_delay == timedelta(minutes=1)
    assert resolve("adyen", said) is BUILT_IN["adyen"]
    assert acme.window == timedelta(seconds=60)


@pytest.mark.parametrize("said", ["a day", {"windows": 1}, {"window": "1"}, {"window": -1}, [1]])
def test_what_the_settings_can_not_state(said: object) -> None:
    with pytest.raises(ConfigurationError, match="window"):
        resolve("stripe", {"stripe": said})


def test_a_name_that_nobody_knows() -> None:
    with pytest.raises(ConfigurationError, match=r"'square' is not known \(stripe, adyen, paypal\)"):
        resolve("square", {})
