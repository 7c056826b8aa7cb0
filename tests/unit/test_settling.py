"""The engine of effects outside, over a store that says what a test wants: what it asks, what it does then."""

import dataclasses
import time
from types import SimpleNamespace
from typing import Any

import pytest

from flask_idempotent import signals
from flask_idempotent.call import Call
from flask_idempotent.errors import EncryptionError, Indeterminate, LeaseLost, StoreUnavailable
from flask_idempotent.providers import Provider
from flask_idempotent.records import (
    Claim,
    ClaimReply,
    Fingerprint,
    Record,
    Scope,
    Settlement,
    State,
    StoredResponse,
    Verdict,
)
from flask_idempotent.response.cipher import Cipher
from flask_idempotent.settling import IntentEngine
from flask_idempotent.stores.backing import Lease

BANK = Provider("bank", window=1000, max_length=64)
KEY = b"q83vEjRWeJCrze8SNFZ4kKvN7xI0VniQq83vEjRWeJA="


class Store:
    """Answers with ``orphan`` to look up, and notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.reply = ClaimReply(Verdict.SETTLE)
        self.settled: Any = None
        self.retried: Any = ClaimReply(Verdict.CLAIMED, fence=9, attempt=2)
        self.noted = True
        self.since = 0
        self.first: int | None = 0
        self.away = False

    def _asked(self, *what: Any) -> None:
        if self.away:
            raise StoreUnavailable()
        self.asked.append(what)

    def claim(self, claim: Claim) -> ClaimReply:
        return self.reply

    def read(self, scope: Scope) -> Any:
        self._asked("read")
        return self.reply.record

    def suspend(self, claim: Claim, *, reason: str) -> None:
        self._asked("suspend", reason)

    def note(self, claim: Claim, context: bytes) -> bool:
        self._asked("note", context)
        return self.noted

    def first_use(self, claim: Claim, name: str) -> int:
        self._asked("first_use", name)
        return self.since

    def since_first_use(self, claim: Claim) -> "int | None":
        self._asked("since_first_use")
        return self.first

    def settle_completed(self, claim: Claim, orphan: Record, completion: Any) -> Any:
        self._asked("completed", completion.state, completion.reason)
        if self.settled is None:
            return None
        return dataclasses.replace(orphan, state=completion.state, response=completion.response)

    def settle_retry(self, claim: Claim, orphan: Record) -> Any:
        self._asked("retry")
        return self.retried

    def settle_later(self, claim: Claim, orphan: Record, *, pause_ms: int, reason: str) -> None:
        self._asked("later", pause_ms, reason)


def orphan(**changes: Any) -> Record:
    values: dict[str, Any] = {
        "digest": "d" * 64,
        "state": State.INDETERMINATE,
        "token": "old",
        "fence": 5,
        "attempt": 1,
        "created_at": 1_000_000,
        "locked_until": 0,
        "fingerprint": Fingerprint("r", "f"),
        "unknown_since": 2_000_000,
        "read_at": 2_006_000,
    }
    return Record(**{**values, **changes})


@pytest.fixture
def store() -> Store:
    return Store()


def make_claim() -> Claim:
    held = Lease()
    held.holds_from(time.monotonic(), 30_000)
    return Claim(
        Scope(None, "charges", "d" * 64),
        "new",
        [Fingerprint("r", "f")],
        "",
        "",
        lease_ms=30_000,
        skew_ms=1_000,
        max_processing_ms=60_000,
        ttl_ms=1_000_000,
        settle_after_ms=5_000,
        backing=held,
    )


def make_call(engine: IntentEngine, settle: Any = None, **policy: Any) -> Call:
    values = {"recovery": None, "provider": BANK, "saga": None, "wait_ms": None, **policy}
    call = Call(object(), SimpleNamespace(**values), "charges", engine, None)  # type: ignore[arg-type]
    call.settle = settle
    call.make_answer = lambda settlement: StoredResponse(settlement.status, (), b"answer")
    call.derive_key = lambda provider, step, operation: f"key {step}"
    return call


def make_engine(store: Store, keys: Any = (), tries: int = 8) -> IntentEngine:
    return IntentEngine(store, Cipher(keys), sender=object(), heartbeat=None, tries=tries)  # type: ignore[arg-type]


def settle(store: Store, said: Any, *, tries: int = 8, keys: Any = (), **changes: Any) -> Any:
    """What a claim that meets an orphan gives, where the reconciler says so."""
    engine = make_engine(store, keys, tries)
    policy = {name: changes.pop(name) for name in ("recovery", "provider") if name in changes}
    store.reply = ClaimReply(Verdict.SETTLE, record=orphan(**changes))

    def reconcile(orphan: Any) -> Any:
        if isinstance(said, Exception):
            raise said
        return said

    call = make_call(engine, reconcile, **policy)
    try:
        return call, engine.claim(call, make_claim())
    except Indeterminate as error:
        return call, error


def test_found(store: Store) -> None:
    store.settled = True
    call, replay = settle(store, Settlement.completed("x", 201))
    assert replay.response.body == b"answer"
    assert store.asked == [("completed", State.SUCCEEDED, "settled by a look-up")]
    assert call.claim is None


def test_found_declined(store: Store) -> None:
    store.settled = True
    settle(store, Settlement.completed("x", 402))
    assert store.asked == [("completed", State.FAILED, "settled by a look-up")]


def test_found_and_somebody_else_settled_meanwhile(store: Store) -> None:
    _, refused = settle(store, Settlement.completed("x"))
    assert isinstance(refused, Indeterminate)
    assert [what[0] for what in store.asked] == ["completed"]


def test_not_found_late_enough(store: Store) -> None:
    call, held = settle(store, Settlement.retry())
    assert held is None
    assert [what[0] for what in store.asked] == ["since_first_use", "retry"]
    assert (call.attempt, call.fence) == (2, 9)


def test_not_found_and_somebody_else_settled_meanwhile(store: Store) -> None:
    store.retried = None
    call, refused = settle(store, Settlement.retry())
    assert isinstance(refused, Indeterminate)
    assert call.claim is None


@pytest.mark.parametrize(("read_at", "believed"), [(2_004_999, False), (2_005_000, True)])
def test_what_counts_is_when_the_look_up_began(store: Store, read_at: int, believed: bool) -> None:
    settle(store, Settlement.retry(), read_at=read_at)
    if believed:
        assert store.asked[-1] == ("retry",)
    else:
        # Again when the time is over. The pause counts with the skew on top.
        assert store.asked == [("later", 0, "not found, but the look-up began too early to be believed")]


def test_the_pause_of_an_early_look_up_ends_when_it_would_be_believed(store: Store) -> None:
    settle(store, Settlement.retry(), read_at=2_001_000)
    assert store.asked[0][:2] == ("later", 3_000)


@pytest.mark.parametrize(("first", "believed"), [(None, True), (0, True), (900_000, True), (900_001, False)])
def test_what_counts_is_the_first_use_of_a_key(store: Store, first: "int | None", believed: bool) -> None:
    store.first = first
    settle(store, Settlement.retry())
    if believed:
        assert store.asked[-1] == ("retry",)
    else:
        assert store.asked[-1] == (
            "later",
            3_600_000,
            "for a human: not found, but bank may have forgotten the first sending",
        )


def test_without_a_provider_only_the_time_counts(store: Store) -> None:
    store.first = 10**9
    settle(store, Settlement.retry(), provider=None)
    assert store.asked == [("retry",)]


def test_a_rail_without_deduplication_is_never_sent_again(store: Store) -> None:
    settle(store, Settlement.retry(), provider=Provider.none("wire"))
    assert store.asked == [
        ("later", 3_600_000, "for a human: wire does not recognise a key: a human decides whether to send again")
    ]


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (Settlement.pending(), "looked up, and not known yet"),
        (Settlement("pending", reason="the bank is closed"), "the bank is closed"),
        (ValueError("secret"), "the reconciler failed: ValueError"),
    ],
)
@pytest.mark.parametrize(("tries", "pause_ms"), [(0, 1_000), (1, 2_000), (4, 16_000), (6, 60_000)])
def test_pauses_grow(store: Store, said: Any, reason: str, tries: int, pause_ms: int) -> None:
    settle(store, said, settle_tries=tries)
    assert store.asked == [("later", pause_ms, reason)]


@pytest.mark.parametrize(("made", "tries"), [(7, 8), (0, 1), (20, 8)])
def test_after_so_many_tries_a_human_is_asked(store: Store, made: int, tries: int, caplog: Any) -> None:
    settle(store, Settlement.pending(), settle_tries=made, tries=tries)
    assert store.asked == [("later", 3_600_000, "for a human: looked up, and not known yet")]
    assert "waits for a human" in caplog.text


def test_manual_routes_never_ask(store: Store) -> None:
    settle(store, AssertionError("asked"), recovery="manual")
    assert store.asked == [
        ("later", 3_600_000, "for a human: this route leaves what it doesn't know to a human"),
    ]


def test_a_result_that_can_not_be_noted_is_looked_up_again(store: Store) -> None:
    store.away = True
    _, refused = settle(store, Settlement.pending())
    assert isinstance(refused, Indeterminate)


def test_what_makes_no_answer_is_no_verdict(store: Store) -> None:
    engine = make_engine(store)
    store.reply = ClaimReply(Verdict.SETTLE, record=orphan())
    call = make_call(engine, lambda orphan: Settlement.completed(object()))

    def fail(settlement: Settlement) -> StoredResponse:
        raise TypeError("no answer")

    call.make_answer = fail
    with pytest.raises(Indeterminate):
        engine.claim(call, make_claim())
    assert store.asked == [("later", 1_000, "the reconciler gave what is no answer: TypeError")]


def test_the_notes_of_the_orphan(store: Store) -> None:
    cipher = Cipher((KEY,))
    seen: list[Any] = []
    engine = make_engine(store, (KEY,))
    store.reply = ClaimReply(Verdict.SETTLE, record=orphan(context=cipher.seal_text("d" * 64, b'{"a": 1}')))
    call = make_call(engine, lambda orphan: seen.append(orphan) or Settlement.retry())
    assert engine.claim(call, make_claim()) is None
    (found,) = seen
    assert (found.scope, found.attempt, found.context) == ("charges", 1, {"a": 1})
    assert found.started_at.timestamp() == 1_000
    assert found.provider_key(step=3) == "key 3"
    assert call.context == {"a": 1}


@pytest.mark.parametrize("context", [b"12345678:gAAAA", b":not json", b"no colon"])
def test_notes_that_can_not_be_read(store: Store, context: bytes) -> None:
    settle(store, AssertionError("asked without its notes"), context=context)
    assert store.asked == [("later", 1_000, "what the work noted can't be read: is a Fernet key missing?")]
    with pytest.raises(EncryptionError):
        make_engine(store)._context(make_claim(), orphan(context=context))


def test_a_takeover_is_told(store: Store) -> None:
    told: list[dict[str, Any]] = []

    def note(sender: object, **arguments: Any) -> None:
        told.append(arguments)

    with signals.reclaimed.connected_to(note):
        settle(store, Settlement.pending())
    assert [(each["scope"], each["digest"], each["attempt"]) for each in told] == [("charges", "d" * 12, 1)]


# While it runs


def running(store: Store, **policy: Any) -> "tuple[IntentEngine, Call]":
    engine = make_engine(store)
    call = make_call(engine, **policy)
    call.claim = make_claim()
    return engine, call


def test_a_note_is_added_to_the_ones_before(store: Store) -> None:
    engine, call = running(store)
    engine.remember(call, {"a": 1})
    engine.remember(call, {"b": 2})
    assert call.context == {"a": 1, "b": 2}
    assert store.asked[-1] == ("note", b':{"a":1,"b":2}')


@pytest.mark.parametrize("lost", ["told", "lapsed", "settled", "by the note"])
def test_a_lost_claim_hands_out_nothing(store: Store, lost: str) -> None:
    engine, call = running(store)
    if lost == "told":
        call.lost = True
    elif lost == "lapsed":
        assert call.claim is not None
        call.claim = dataclasses.replace(call.claim, backing=Lease())
    elif lost == "settled":
        call.settled = True
    else:
        store.noted = False
    with pytest.raises(LeaseLost):
        engine.remember(call, {"a": 1})
    with pytest.raises(LeaseLost):
        engine.hand_out(call, BANK, "key", "name")
    assert [what[0] for what in store.asked] == (["note"] if lost == "by the note" else [])


def test_a_lease_that_lapses_while_the_use_is_noted(store: Store) -> None:
    engine, call = running(store)

    def slowly(claim: Claim, name: str) -> int:
        assert call.claim is not None
        call.claim = dataclasses.replace(call.claim, backing=Lease())
        return 0

    store.first_use = slowly  # type: ignore[method-assign]
    with pytest.raises(LeaseLost):
        engine.hand_out(call, BANK, "key", "name")


@pytest.mark.parametrize(("since", "handed_out"), [(0, True), (1, True), (900_000, True), (900_001, False)])
def test_a_key_is_handed_out_inside_of_its_window(store: Store, since: int, handed_out: bool) -> None:
    engine, call = running(store)
    store.since = since
    if handed_out:
        assert engine.hand_out(call, BANK, "key", "name") == "key"
        assert store.asked == [("first_use", "name")]
        return
    with pytest.raises(Indeterminate):
        engine.hand_out(call, BANK, "key", "name")
    assert store.asked[-1] == (
        "suspend",
        "sending again is not safe: bank may have forgotten the first sending",
    )
    assert call.settled


@pytest.mark.parametrize(("routes_own", "handed_out"), [(True, True), (False, False)])
def test_the_key_of_a_rail_without_deduplication(store: Store, routes_own: bool, handed_out: bool) -> None:
    """Used before: on its own route that was an attempt that said "nothing happened", or the same one. Elsewhere it may
    have been a look-up for another provider that led here."""
    wire = Provider.none("wire")
    engine, call = running(store, provider=wire if routes_own else BANK)
    assert engine.hand_out(call, wire, "key", "name") == "key"
    store.since = 5
    if handed_out:
        assert engine.hand_out(call, wire, "key", "name") == "key"
    else:
        with pytest.raises(Indeterminate):
            engine.hand_out(call, wire, "key", "name")


def test_no_key_goes_out_that_could_not_be_noted(store: Store) -> None:
    engine, call = running(store)
    store.away = True
    for ask in (lambda: engine.hand_out(call, BANK, "key", "name"), lambda: engine.remember(call, {"a": 1})):
        with pytest.raises(StoreUnavailable):
            ask()
    engine.suspend(call, reason="gone")  # the lease lapses
    assert call.settled
