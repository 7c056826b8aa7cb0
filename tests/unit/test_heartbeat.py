"""The heartbeat: one thread, few calls, and an end."""

import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

import flask_idempotent.heartbeat as heartbeat_module
from flask_idempotent.errors import StoreUnavailable
from flask_idempotent.heartbeat import Heartbeat
from flask_idempotent.records import Claim, Fingerprint, Scope
from tests.harness import wait_until


def make_claim(token: str = "t1", *, lease_ms: int = 150, work_ms: int = 60_000) -> Claim:
    scope = Scope(None, "orders.create", "ab" * 32)
    return Claim(scope, token, (Fingerprint("r1", "A"),), "", "", lease_ms, 100, work_ms, 60_000)


class Renewals:
    """A store that notes what it is asked to renew; `answer` says what it answers."""

    def __init__(self, answer: Callable[[Sequence[Claim]], list[bool]] | None = None) -> None:
        self.calls: list[tuple[float, list[str]]] = []
        self.threads: set[int] = set()
        self.answer = answer or (lambda claims: [True] * len(claims))

    def renew(self, claims: Sequence[Claim]) -> list[bool]:
        self.calls.append((time.monotonic(), [claim.token for claim in claims]))
        self.threads.add(threading.get_ident())
        return self.answer(claims)

    def count(self, token: str = "t1") -> int:
        return sum(token in tokens for _, tokens in self.calls)

    def wait_for(self, n: int, token: str = "t1") -> None:
        wait_until(lambda: self.count(token) >= n, f"renewal {n} of {token}")


def never() -> None:
    pytest.fail("this claim is not lost")


@pytest.fixture
def beats() -> Iterator[Heartbeat]:
    heartbeat = Heartbeat()
    yield heartbeat
    for beat in list(heartbeat):
        heartbeat.remove(beat)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "idempotent-heartbeat"]


def test_no_thread_before_the_first_claim(beats: Heartbeat) -> None:
    before = set(threads())  # those of earlier tests end meanwhile
    assert len(beats) == 0
    beat = beats.add(Renewals(), make_claim(), on_lost=never)
    (thread,) = set(threads()) - before
    assert thread.daemon
    assert len(beats) == 1
    beats.remove(beat)
    assert len(beats) == 0


def test_one_thread_however_many_claims(beats: Heartbeat) -> None:
    before = set(threads())
    store = Renewals()
    for n in range(50):
        beats.add(store, make_claim(f"t{n}"), on_lost=never)
    for n in range(50):
        store.wait_for(2, f"t{n}")
    assert len(set(threads()) - before) == 1
    assert len(store.threads) == 1


def test_one_thread_when_many_begin_at_once(beats: Heartbeat) -> None:
    before = set(threads())
    store, barrier = Renewals(), threading.Barrier(8)

    def begin(n: int) -> None:
        barrier.wait()
        beats.add(store, make_claim(f"t{n}"), on_lost=never)

    beginners = [threading.Thread(target=begin, args=(n,)) for n in range(8)]
    for each in beginners:
        each.start()
    for each in beginners:
        each.join()
    for n in range(8):
        store.wait_for(1, f"t{n}")
    assert len(set(threads()) - before) == 1


def test_a_claim_is_renewed_at_a_third_of_its_lease(beats: Heartbeat) -> None:
    store = Renewals()
    started = time.monotonic()
    beats.add(store, make_claim(lease_ms=600), on_lost=never)
    store.wait_for(4)
    times = [started, *(at for at, _ in store.calls)]
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    # A pause may be longer on a busy machine, but never much shorter.
    assert min(pauses) > 0.19
    assert sorted(pauses)[0] < 0.4


def test_claims_that_are_due_together_are_one_call(beats: Heartbeat) -> None:
    store = Renewals()
    for n in range(20):
        beats.add(store, make_claim(f"t{n}", lease_ms=900), on_lost=never)
    for n in range(20):
        store.wait_for(2, f"t{n}")
    assert len(store.calls) < 10
    assert max(len(tokens) for _, tokens in store.calls) == 20


def test_a_store_that_hangs_keeps_no_other_claims_from_being_renewed(beats: Heartbeat) -> None:
    stuck, healthy = threading.Event(), Renewals()

    def hang(claims: Sequence[Claim]) -> list[bool]:
        stuck.wait(10)
        return [True] * len(claims)

    hanging = Renewals(hang)
    beats.add(hanging, make_claim("slow"), on_lost=never)
    hanging.wait_for(1, "slow")
    beats.add(healthy, make_claim("t1"), on_lost=never)
    healthy.wait_for(3)
    assert hanging.count("slow") == 1
    stuck.set()


def test_a_thread_without_claims_ends_and_another_one_starts(beats: Heartbeat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat_module, "IDLE_S", 0.05)
    before = set(threads())
    store = Renewals()
    beats.remove(beats.add(store, make_claim(), on_lost=never))
    wait_until(lambda: set(threads()) <= before, "the thread ends")
    beats.add(store, make_claim("t2"), on_lost=never)
    store.wait_for(2, "t2")


def test_claims_of_different_stores_are_different_calls(beats: Heartbeat) -> None:
    stores = [Renewals(), Renewals()]
    for n in range(10):
        beats.add(stores[n % 2], make_claim(f"t{n}"), on_lost=never)
    for n in range(10):
        stores[n % 2].wait_for(1, f"t{n}")
    for which, store in enumerate(stores):
        assert {token for _, tokens in store.calls for token in tokens} == {f"t{n}" for n in range(which, 10, 2)}


def test_a_short_lease_is_not_late_behind_a_long_one(beats: Heartbeat) -> None:
    store = Renewals()
    beats.add(store, make_claim("long", lease_ms=600_000), on_lost=never)
    time.sleep(0.05)  # it sleeps for 200 s now
    beats.add(store, make_claim("short"), on_lost=never)
    store.wait_for(2, "short")
    assert store.count("long") == 0


def test_what_is_removed_is_not_renewed(beats: Heartbeat) -> None:
    store = Renewals()
    beat = beats.add(store, make_claim("gone"), on_lost=never)
    beats.add(store, make_claim("kept"), on_lost=never)
    store.wait_for(1, "gone")
    beats.remove(beat)
    beats.remove(beat)
    renewed = store.count("gone")
    kept = store.count("kept")
    store.wait_for(kept + 3, "kept")
    assert store.count("gone") <= renewed + 1  # one may have been under way


def test_renewals_end_with_the_longest_processing(beats: Heartbeat) -> None:
    store = Renewals()
    started = time.monotonic()
    beats.add(store, make_claim(work_ms=400), on_lost=never)
    beats.add(store, make_claim("other"), on_lost=never)
    wait_until(lambda: len(beats) == 1, "the end of a claim that runs too long")
    assert time.monotonic() - started > 0.39
    renewed = store.count()
    assert renewed > 0
    store.wait_for(store.count("other") + 3, "other")
    assert store.count() == renewed
    assert max(at for at, tokens in store.calls if "t1" in tokens) < started + 0.4 + 0.1


def test_a_lost_claim_is_told_once_and_renewed_no_more(beats: Heartbeat) -> None:
    store = Renewals(lambda claims: [claim.token != "lost" for claim in claims])
    told: list[int] = []
    beats.add(store, make_claim("lost"), on_lost=lambda: told.append(threading.get_ident()))
    beats.add(store, make_claim("kept"), on_lost=never)
    wait_until(lambda: bool(told), "word of the loss")
    store.wait_for(store.count("kept") + 3, "kept")
    assert store.count("lost") == 1
    assert len(told) == 1
    assert set(told) == store.threads
    assert len(beats) == 1


def test_a_claim_that_ended_meanwhile_is_not_told(beats: Heartbeat) -> None:
    asked, removed = threading.Event(), threading.Event()

    def answer(claims: Sequence[Claim]) -> list[bool]:
        asked.set()
        assert removed.wait(10)
        return [False] * len(claims)

    store = Renewals(answer)
    told: list[str] = []
    beat = beats.add(store, make_claim(), on_lost=lambda: told.append("lost"))
    assert asked.wait(10)
    beats.remove(beat)
    removed.set()
    later = Renewals()
    beats.add(later, make_claim("later"), on_lost=never)
    later.wait_for(2, "later")
    assert told == []


@pytest.mark.parametrize("error", [StoreUnavailable(), RuntimeError("a bug")], ids=["outage", "bug"])
def test_an_outage_is_outlived(beats: Heartbeat, error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    failures = iter([error] * 3)

    def answer(claims: Sequence[Claim]) -> list[bool]:
        for failure in failures:
            raise failure
        return [True] * len(claims)

    store = Renewals(answer)
    beats.add(store, make_claim(), on_lost=never)
    store.wait_for(6)
    assert len(beats) == 1
    assert len(store.threads) == 1
    assert bool(caplog.records) == isinstance(error, RuntimeError)


def test_after_an_outage_the_next_try_comes_soon(beats: Heartbeat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flask_idempotent.heartbeat.RETRY_S", 0.05)
    failures = iter([StoreUnavailable()] * 2)

    def answer(claims: Sequence[Claim]) -> list[bool]:
        for failure in failures:
            raise failure
        return [True] * len(claims)

    store = Renewals(answer)
    beats.add(store, make_claim(lease_ms=1_500), on_lost=never)
    store.wait_for(3)
    assert store.calls[2][0] - store.calls[0][0] < 0.5  # two pauses of the lease would be a second


CHILD = """
import os, sys, threading, time
from flask_idempotent.heartbeat import heartbeat
from flask_idempotent.records import Claim, Fingerprint, Scope

def claim(token):
    return Claim(Scope(None, "e", "ab" * 32), token, (Fingerprint("r", "A"),), "", "", 150, 100, 60_000, 60_000)

class Store:
    def __init__(self):
        self.seen = set()
    def renew(self, claims):
        self.seen |= {each.token for each in claims}
        return [True] * len(claims)

def wait_for(condition):
    deadline = time.monotonic() + 10
    while not condition():
        if time.monotonic() > deadline:
            print("in vain", flush=True)
            os._exit(3)
        time.sleep(0.01)

def lost():
    os._exit(4)

store = Store()
heartbeat.add(store, claim("parent"), on_lost=lost)
wait_for(lambda: "parent" in store.seen)
held = threading.Event()
if sys.argv[1] == "locked":  # a fork at the worst moment: another thread holds the heartbeat's lock
    def hold():
        with heartbeat._adding:
            held.set()
            time.sleep(1)
    threading.Thread(target=hold, daemon=True).start()
    held.wait()
child = os.fork()
if child == 0:
    store.seen.clear()
    threads = [each.name for each in threading.enumerate()]
    if len(heartbeat) or "idempotent-heartbeat" in threads:
        os._exit(5)
    heartbeat.add(store, claim("child"), on_lost=lost)
    wait_for(lambda: "child" in store.seen)
    os._exit(0 if store.seen == {"child"} else 6)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
store.seen.clear()
wait_for(lambda: "parent" in store.seen)
sys.exit(status or (7 if "child" in store.seen else 0))
"""


@pytest.mark.parametrize("moment", ["quiet", "locked"])
def test_a_forked_child_begins_with_none(moment: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHILD, moment], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
