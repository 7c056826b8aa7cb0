"""The provider deduplicates, forgets, hides and breaks as real ones do: else the tests upon it would prove nothing."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from . import NoAnswer, ProviderClient, Refused, provider_process
from .process import ROOT


@pytest.fixture(scope="module")
def _process() -> Iterator[ProviderClient]:
    with provider_process() as client:
        yield client


@pytest.fixture
def provider(_process: ProviderClient) -> ProviderClient:
    _process.reset()
    return _process


def test_a_key_is_done_once(provider):
    first = provider.charge(5, key="k")
    assert provider.charge(5, key="k") == first
    assert [(entry["id"], entry["amount"]) for entry in provider.entries()] == [(first["id"], 5)]
    assert [call["outcome"] for call in provider.calls()] == ["done", "repeated"]
    assert provider.find("k") == first
    assert provider.find("other") is None


def test_without_a_key_nothing_is_remembered(provider):
    assert provider.charge()["id"] != provider.charge()["id"]


@pytest.mark.parametrize("change", [{"amount": 6}, {"note": "x"}])
def test_a_key_stands_for_its_parameters(provider, change):
    provider.charge(5, key="k")
    with pytest.raises(Refused, match="400 idempotency_key_reused"):
        provider.charge(**{"amount": 5, "key": "k", **change})
    with pytest.raises(Refused, match="400 idempotency_key_reused"):
        provider.act("refunds", key="k", amount=5)
    assert len(provider.entries()) == 1


def test_a_key_is_forgotten_after_its_window(provider):
    provider.control(window=60)
    provider.charge(key="k")
    provider.advance(59)
    provider.charge(key="k")
    assert len(provider.entries()) == 1
    provider.advance(2)
    provider.charge(key="k")
    assert len(provider.entries()) == 2
    provider.control(forget=True)
    provider.charge(key="k")
    assert len(provider.entries()) == 3


def test_its_search_lags(provider):
    provider.control(search_delay=60)
    provider.charge(key="k")
    assert provider.find("k") is None
    provider.advance(61)
    assert provider.find("k") is not None


@pytest.mark.parametrize(("when", "charges"), [("before", 0), ("after", 1)])
def test_a_connection_that_breaks(provider, when, charges):
    provider.fault("drop", when)
    with pytest.raises(NoAnswer):
        provider.charge(key="k")
    assert len(provider.entries()) == charges
    provider.charge(key="k")
    assert len(provider.entries()) == 1


@pytest.mark.parametrize(("when", "charges"), [("before", 0), ("after", 1)])
def test_an_error_for_an_answer(provider, when, charges):
    provider.fault("answer", when, status=503, code="down", times=2)
    for _ in range(2):
        with pytest.raises(Refused, match="503 down"):
            provider.charge()
    assert len(provider.entries()) == 2 * charges
    provider.charge()
    assert len(provider.entries()) == 2 * charges + 1


@pytest.mark.parametrize(("when", "charges"), [("before", 0), ("after", 1)])
def test_a_late_answer(provider, when, charges):
    """It comes after its client has gone, and the work is done all the same."""
    impatient = ProviderClient(provider.url, timeout=0.2)
    provider.fault("wait", when, seconds=0.6)
    with pytest.raises(NoAnswer):
        impatient.charge(key="k")
    assert len(provider.entries()) == charges
    time.sleep(0.6)
    assert len(provider.entries()) == 1


def test_a_key_in_use(provider):
    provider.fault("wait", "before", seconds=0.5)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(provider.charge, key="k")
        while not provider.calls():
            time.sleep(0.01)
        with pytest.raises(Refused, match="409 idempotency_key_in_use"):
            provider.charge(key="k")
        assert provider.charge(key="k2")["id"]
        assert first.result()["id"]
    assert len(provider.entries()) == 2


def test_it_prints_its_ledger_at_the_end():
    with subprocess.Popen(
        [sys.executable, "-m", "tests.provider", "--print-ledger"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        client = ProviderClient(process.stdout.readline().strip())
        done = client.charge(7, key="k")
        process.send_signal(signal.SIGTERM)
        assert [json.loads(line) for line in process.stdout] == [done]
        assert process.wait(10) == 0
