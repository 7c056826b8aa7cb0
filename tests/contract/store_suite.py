"""One suite for every store: subclass `StoreSuite`, say how to make a store and how to move its clock."""

import hashlib
import time
from dataclasses import replace

import pytest

from flask_idempotent.errors import UnreadableRecord
from flask_idempotent.records import (
    Claim,
    Completed,
    Completion,
    CompletionReply,
    Fingerprint,
    KeptResponse,
    RateLimit,
    Record,
    Scope,
    State,
    Verdict,
)
from flask_idempotent.stores.base import Released, Store

ALL_BYTES = bytes(range(256))
CREATED = KeptResponse(201, b'[["Content-Type", "text/plain"]]', b"made", "full")
OTHER = KeptResponse(200, b"[]", b"another answer", "full")

#: Every way in which a record can be there, for rules that hold in all of them.
PRESENT = ("in_progress", "lapsed", "succeeded", "failed", "released", "indeterminate")


def make_scope(key: str = "k") -> Scope:
    return Scope(None, "orders.create", hashlib.sha256(key.encode()).hexdigest())


def make_fingerprints(value: str = "A", recipe: str = "r1") -> tuple[Fingerprint, ...]:
    return (Fingerprint(recipe, value),)


class StoreTools:
    """What a suite needs of a store, and what its tests share.

    The durations suit a clock that the test moves. A subclass whose store has only a running clock sets short ones.
    """

    lease_ms = 30_000
    skew_ms = 5_000
    max_processing_ms = 120_000
    ttl_ms = 3_600_000
    window_ms = 60_000
    #: How far the clock may go by itself between two calls.
    tolerance_ms = 1_000

    # -- what a subclass gives ---------------------------------------------------------------------------------------

    def make_store(self) -> Store:
        """A store that is empty at the start of the test; every call gives one over the same records."""
        raise NotImplementedError

    def advance(self, ms: int) -> None:
        """Let the store's clock go forward."""
        raise NotImplementedError

    def rewind(self, ms: int) -> None:
        """Turn the store's clock back, as a failover to a server with another clock does."""
        pytest.skip("this store's clock can't be turned back")

    def make_indeterminate(self, scope: Scope) -> None:
        """Put the record that is there into the state ``indeterminate``."""
        raise NotImplementedError

    def make_unreadable(self, scope: Scope) -> None:
        """Make the record that is there one of a later version's format."""
        raise NotImplementedError

    def raw(self, scope: Scope) -> object:
        """All that the store holds for a scope, to see that nothing changed it."""
        raise NotImplementedError

    # -- helpers -----------------------------------------------------------------------------------------------------

    @pytest.fixture
    def store(self) -> Store:
        return self.make_store()

    def claim(self, token: str = "t1", *, key: str = "k", fingerprint: str = "A", **changes: object) -> Claim:
        values: dict[str, object] = {
            "scope": make_scope(key),
            "token": token,
            "fingerprints": make_fingerprints(fingerprint),
            "principal": "p1",
            "binding": "b1",
            "lease_ms": self.lease_ms,
            "skew_ms": self.skew_ms,
            "max_processing_ms": self.max_processing_ms,
            "ttl_ms": self.ttl_ms,
            **changes,
        }
        return Claim(**values)  # type: ignore[arg-type]

    def limited(self, token: str, key: str, limit: int = 2, **changes: object) -> Claim:
        """A claim of a key that counts, where it is new, against a limit."""
        rate = RateLimit(limit, self.window_ms, "bucket")
        return self.claim(token, key=key, **{"rate": rate, **changes})  # type: ignore[arg-type]

    def complete(
        self, store: Store, claim: Claim, response: KeptResponse = CREATED, state: State = State.SUCCEEDED
    ) -> CompletionReply:
        return store.complete(Completion(claim, state, response))

    def lapse(self) -> None:
        self.advance(self.lease_ms + self.skew_ms)

    def prepare(self, store: Store, state: str, token: str = "first", **changes: object) -> Claim:
        """A record of p1 for "A" in one of the `PRESENT` states."""
        claim = self.claim(token, **changes)
        assert store.claim(claim).verdict is Verdict.CLAIMED
        if state == "lapsed":
            self.lapse()
        elif state in ("succeeded", "failed"):
            assert self.complete(store, claim, state=State(state)).outcome is Completed.STORED
        elif state == "released":
            assert store.release(claim, reason="status") is Released.RELEASED
        elif state == "indeterminate":
            self.make_indeterminate(claim.scope)
        return claim

    def seen(self, store: Store, key: str = "k") -> Record:
        record = store.read(make_scope(key))
        assert record is not None
        return record


class StoreSuite(StoreTools):
    """The rules of every store."""

    # -- claim: who runs ---------------------------------------------------------------------------------------------

    def test_a_new_key_is_claimed(self, store: Store) -> None:
        reply = store.claim(self.claim())
        assert (reply.verdict, reply.attempt, reply.reclaimed, reply.comparable) == (Verdict.CLAIMED, 1, False, True)
        assert reply.record is None
        record = self.seen(store)
        assert (record.state, record.token, record.attempt) == (State.IN_PROGRESS, "t1", 1)
        assert (record.fence, record.created_at) == (reply.fence, reply.created_at)
        assert abs(record.locked_until - record.created_at - self.lease_ms) <= self.tolerance_ms
        assert (record.fingerprint, record.principal, record.binding) == (Fingerprint("r1", "A"), "p1", "b1")
        assert (record.response, record.completed_at, record.expires_at) == (None, 0, 0)

    def test_what_is_not_there_is_not_read(self, store: Store) -> None:
        assert store.read(make_scope()) is None

    def test_keys_do_not_meet(self, store: Store) -> None:
        for n in range(20):
            assert store.claim(self.claim(f"t{n}", key=f"k{n}")).verdict is Verdict.CLAIMED

    def test_two_stores_share_the_records(self, store: Store) -> None:
        store.claim(self.claim())
        assert self.make_store().claim(self.claim("t2")).verdict is Verdict.IN_PROGRESS

    def test_the_same_token_claims_once(self, store: Store) -> None:
        first = store.claim(self.claim())
        self.advance(10)
        again = store.claim(self.claim())
        assert again == first

    def test_the_same_token_sent_again_begins_the_lease_anew(self, store: Store) -> None:
        store.claim(self.claim())
        self.advance(self.lease_ms // 2)
        store.claim(self.claim())
        self.advance(self.lease_ms // 2 + self.skew_ms)
        assert store.claim(self.claim("t2")).verdict is Verdict.IN_PROGRESS

    def test_the_same_token_sent_again_after_the_answer_is_replayed(self, store: Store) -> None:
        self.prepare(store, "succeeded", "t1")
        assert store.claim(self.claim()).verdict is Verdict.REPLAY

    def test_a_token_that_was_given_back_is_over(self, store: Store) -> None:
        self.prepare(store, "released", "t1")
        for _ in range(2):
            assert store.claim(self.claim()).verdict is Verdict.OVER
        assert self.seen(store).state is State.RELEASED
        assert store.claim(self.claim("t2")).verdict is Verdict.CLAIMED

    def test_a_running_claim_is_waited_for(self, store: Store) -> None:
        store.claim(self.claim())
        reply = store.claim(self.claim("t2"))
        assert (reply.verdict, reply.record) == (Verdict.IN_PROGRESS, None)
        assert 0 < self.lease_ms + self.skew_ms - reply.wait_ms + 1 <= self.tolerance_ms
        self.advance(self.lease_ms // 3)
        assert store.claim(self.claim("t2")).wait_ms <= reply.wait_ms - self.lease_ms // 3
        assert self.seen(store).token == "t1"

    def test_takeover_waits_for_lease_and_skew(self, store: Store) -> None:
        first = store.claim(self.claim())
        self.advance(self.lease_ms)
        waiting = store.claim(self.claim("t2"))
        assert waiting.verdict is Verdict.IN_PROGRESS
        self.advance(waiting.wait_ms)
        taken = store.claim(self.claim("t2"))
        assert (taken.verdict, taken.attempt, taken.reclaimed) == (Verdict.CLAIMED, 2, True)
        assert taken.created_at == first.created_at
        assert taken.fence > first.fence
        record = self.seen(store)
        assert (record.token, record.attempt, record.created_at) == ("t2", 2, first.created_at)

    def test_of_two_that_take_over_one_runs(self, store: Store) -> None:
        self.prepare(store, "lapsed")
        assert store.claim(self.claim("t2")).verdict is Verdict.CLAIMED
        assert store.claim(self.claim("t3")).verdict is Verdict.IN_PROGRESS

    def test_the_skew_is_that_of_the_one_who_asks(self, store: Store) -> None:
        store.claim(self.claim())
        self.advance(self.lease_ms)
        assert store.claim(self.claim("t2", skew_ms=self.skew_ms)).verdict is Verdict.IN_PROGRESS
        assert store.claim(self.claim("t2", skew_ms=0)).verdict is Verdict.CLAIMED

    @pytest.mark.parametrize("state", [State.SUCCEEDED, State.FAILED])
    def test_what_is_finished_is_replayed(self, store: Store, state: State) -> None:
        claim = self.prepare(store, state.value)
        self.lapse()
        for token in ("t2", "t3"):
            reply = store.claim(self.claim(token))
            assert (reply.verdict, reply.comparable) == (Verdict.REPLAY, True)
            assert reply.record == self.seen(store)
            assert reply.record is not None
            assert (reply.record.state, reply.record.response) == (state, CREATED)
            assert reply.record.token == claim.token

    def test_what_is_unknown_does_not_run(self, store: Store) -> None:
        self.prepare(store, "indeterminate")
        self.lapse()
        before = self.raw(make_scope())
        for token in ("first", "t2"):
            assert store.claim(self.claim(token)).verdict is Verdict.INDETERMINATE
        assert self.raw(make_scope()) == before

    # -- fence, attempt, created_at ----------------------------------------------------------------------------------

    def test_attempt_and_created_at_outlive_every_claim(self, store: Store) -> None:
        first = store.claim(self.claim())
        fences = [first.fence]
        for attempt in range(2, 6):
            if attempt % 2:
                self.lapse()
            else:
                store.release(replace(self.claim(), token=self.seen(store).token), reason="status")
                self.advance(1)
            reply = store.claim(self.claim(f"t{attempt}"))
            assert (reply.verdict, reply.attempt) == (Verdict.CLAIMED, attempt)
            assert reply.created_at == first.created_at
            assert reply.reclaimed is bool(attempt % 2)
            fences.append(reply.fence)
        assert fences == sorted(set(fences))

    def test_the_fence_rises_over_forgetting(self, store: Store) -> None:
        first = store.claim(self.claim())
        store.release(self.claim(), reason="status", forget=True)
        self.advance(1)
        assert store.claim(self.claim("t2")).fence > first.fence

    @pytest.mark.parametrize("state", ["succeeded", "released"])
    def test_the_fence_rises_over_expiry(self, store: Store, state: str) -> None:
        self.prepare(store, state)
        fence = self.seen(store).fence
        self.advance(self.ttl_ms)
        assert store.claim(self.claim("t2")).fence > fence

    def test_the_fence_rises_within_a_millisecond(self, store: Store) -> None:
        first = store.claim(self.claim())
        store.release(self.claim(), reason="status")
        assert store.claim(self.claim("t2")).fence > first.fence

    def test_the_fence_rises_when_the_clock_was_turned_back(self, store: Store) -> None:
        self.advance(self.ttl_ms)
        self.prepare(store, "released")
        fences = [self.seen(store).fence]
        self.rewind(self.ttl_ms)
        fences.append(store.claim(self.claim("t2")).fence)
        self.lapse()
        taken = store.claim(self.claim("t3"))
        assert (taken.verdict, taken.attempt) == (Verdict.CLAIMED, 3)
        fences.append(taken.fence)
        assert fences == sorted(set(fences))

    def test_the_fence_rises_over_expiry_when_it_was_ahead_of_the_clock(self, store: Store) -> None:
        self.advance(2 * self.ttl_ms)
        self.prepare(store, "released")
        self.rewind(2 * self.ttl_ms)
        claim = self.claim("t2")
        fence = store.claim(claim).fence
        self.complete(store, claim)
        self.advance(self.ttl_ms)
        reply = store.claim(self.claim("t3"))
        assert (reply.verdict, reply.attempt, reply.fence > fence) == (Verdict.CLAIMED, 1, True)

    # -- whose key it is, and for what -------------------------------------------------------------------------------

    @pytest.mark.parametrize("state", PRESENT)
    @pytest.mark.parametrize("other", [{"principal": "p2"}, {"principal": ""}, {"binding": "b2"}, {"binding": ""}])
    def test_another_principal_or_binding_is_told_nothing(
        self, store: Store, state: str, other: dict[str, object]
    ) -> None:
        self.prepare(store, state)
        before = self.raw(make_scope())
        for fingerprint in ("A", "B"):  # before the fingerprint, too
            for token in ("t2", "first"):
                reply = store.claim(self.claim(token, fingerprint=fingerprint, **other))
                assert reply.verdict is Verdict.FOREIGN
                assert (reply.record, reply.fence, reply.attempt, reply.created_at) == (None, 0, 0, 0)
        assert self.raw(make_scope()) == before

    @pytest.mark.parametrize("state", PRESENT)
    def test_another_fingerprint_never_runs(self, store: Store, state: str) -> None:
        self.prepare(store, state)
        before = self.raw(make_scope())
        for token in ("t2", "first"):
            reply = store.claim(self.claim(token, fingerprint="B"))
            assert (reply.verdict, reply.record) == (Verdict.MISMATCH, None)
        assert self.raw(make_scope()) == before

    def test_a_refusal_tells_whether_the_record_is_confirmed(self, store: Store) -> None:
        claim = self.prepare(store, "in_progress")
        for other in ({"principal": "p2"}, {"fingerprint": "B"}):
            assert not store.claim(self.claim("t2", **other)).confirmed  # type: ignore[arg-type]
        self.complete(store, claim)
        for other in ({"principal": "p2"}, {"fingerprint": "B"}):
            assert store.claim(self.claim("t2", **other)).confirmed  # type: ignore[arg-type]

    def test_a_record_is_compared_under_its_own_recipe(self, store: Store) -> None:
        self.prepare(store, "succeeded")
        new, old, wrong = Fingerprint("r2", "X"), Fingerprint("r1", "A"), Fingerprint("r1", "B")
        for fingerprints, verdict in [
            ((new, old), Verdict.REPLAY),
            ((old, new), Verdict.REPLAY),
            ((new, wrong), Verdict.MISMATCH),
            ((wrong, new), Verdict.MISMATCH),
        ]:
            reply = store.claim(self.claim("t2", fingerprints=fingerprints))
            assert (reply.verdict, reply.comparable) == (verdict, True)

    def test_the_newest_recipe_is_stored(self, store: Store) -> None:
        store.claim(self.claim(fingerprints=(Fingerprint("r2", "X"), Fingerprint("r1", "A"))))
        assert self.seen(store).fingerprint == Fingerprint("r2", "X")

    def test_the_recipe_of_a_later_attempt_is_stored(self, store: Store) -> None:
        self.prepare(store, "released")
        store.claim(self.claim("t2", fingerprints=(Fingerprint("r2", "X"), Fingerprint("r1", "A"))))
        assert self.seen(store).fingerprint == Fingerprint("r2", "X")

    @pytest.mark.parametrize(
        ("state", "verdict"),
        [
            ("in_progress", Verdict.IN_PROGRESS),
            ("succeeded", Verdict.REPLAY),
            ("failed", Verdict.REPLAY),
            ("released", Verdict.CLAIMED),
            ("lapsed", Verdict.CLAIMED),
        ],
    )
    def test_an_unknown_recipe_is_let_through_uncompared(self, store: Store, state: str, verdict: Verdict) -> None:
        self.prepare(store, state)
        reply = store.claim(self.claim("t2", fingerprints=(Fingerprint("r9", "A"),)))
        assert (reply.verdict, reply.comparable) == (verdict, False)

    # -- expiry ------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("state", ["succeeded", "failed", "released"])
    @pytest.mark.parametrize("other", [{}, {"principal": "p2"}, {"binding": "b2"}, {"fingerprint": "B"}])
    def test_what_is_over_expires_before_every_check(self, store: Store, state: str, other: dict[str, object]) -> None:
        self.prepare(store, state)
        record = self.seen(store)
        self.advance(self.ttl_ms)
        reply = store.claim(self.claim("t2", **other))  # type: ignore[arg-type]
        assert (reply.verdict, reply.attempt, reply.reclaimed) == (Verdict.CLAIMED, 1, False)
        assert reply.created_at >= record.created_at + self.ttl_ms

    def test_it_lives_for_its_whole_time(self, store: Store) -> None:
        self.prepare(store, "succeeded")
        self.advance(self.ttl_ms - self.tolerance_ms)
        assert store.claim(self.claim("t2")).verdict is Verdict.REPLAY

    def test_what_runs_does_not_expire(self, store: Store) -> None:
        claim = self.claim(ttl_ms=1)
        store.claim(claim)
        for _ in range(4):
            self.advance(self.lease_ms // 2)
            assert store.renew([claim]) == [True]
            assert store.claim(self.claim("t2", ttl_ms=1)).verdict is Verdict.IN_PROGRESS

    def test_a_later_attempt_does_not_expire_with_the_first(self, store: Store) -> None:
        self.prepare(store, "released")
        self.advance(self.ttl_ms - self.tolerance_ms)
        store.claim(self.claim("t2"))
        self.advance(2 * self.tolerance_ms)
        assert store.claim(self.claim("t3")).verdict is Verdict.IN_PROGRESS

    def test_a_lapsed_claim_is_a_takeover_however_late(self, store: Store) -> None:
        first = store.claim(self.claim())
        self.advance(10 * self.ttl_ms)
        reply = store.claim(self.claim("t2"))
        assert (reply.attempt, reply.reclaimed, reply.created_at) == (2, True, first.created_at)

    def test_an_unknown_outcome_does_not_expire(self, store: Store) -> None:
        self.prepare(store, "indeterminate")
        self.advance(10 * self.ttl_ms)
        assert store.claim(self.claim("t2")).verdict is Verdict.INDETERMINATE

    # -- tombstones --------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("state", ["succeeded", "failed"])
    def test_a_tombstone_refuses_an_expired_key(self, store: Store, state: str) -> None:
        self.prepare(store, state, tombstone_ms=self.ttl_ms)
        self.advance(self.ttl_ms - self.tolerance_ms)
        assert store.claim(self.claim("t2")).verdict is Verdict.REPLAY
        self.advance(2 * self.tolerance_ms)
        reply = store.claim(self.claim("t2"))
        assert (reply.verdict, reply.record) == (Verdict.EXPIRED, None)
        assert store.claim(self.claim("t2", fingerprint="B")).verdict is Verdict.EXPIRED
        self.advance(self.ttl_ms)
        reply = store.claim(self.claim("t2"))
        assert (reply.verdict, reply.attempt) == (Verdict.CLAIMED, 1)

    def test_a_tombstone_tells_strangers_nothing(self, store: Store) -> None:
        self.prepare(store, "succeeded", tombstone_ms=self.ttl_ms)
        self.advance(self.ttl_ms + 1)
        for other in ({"principal": "p2"}, {"binding": "b2"}):
            assert store.claim(self.claim("t2", **other)).verdict is Verdict.FOREIGN  # type: ignore[arg-type]

    def test_what_was_given_back_leaves_no_tombstone(self, store: Store) -> None:
        self.prepare(store, "released", tombstone_ms=self.ttl_ms)
        self.advance(self.ttl_ms)
        assert store.claim(self.claim("t2", fingerprint="B")).verdict is Verdict.CLAIMED

    # -- complete ----------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("state", [State.SUCCEEDED, State.FAILED])
    def test_an_answer_is_kept(self, store: Store, state: State) -> None:
        claim = self.claim()
        claimed = store.claim(claim)
        reply = store.complete(Completion(claim, state, replace(CREATED, cipher="2026"), "view", confirmed=True))
        assert (reply.outcome, reply.record, reply.wait_ms) == (Completed.STORED, None, 0)
        record = self.seen(store)
        assert (record.state, record.response) == (state, replace(CREATED, cipher="2026"))
        assert (record.reason, record.confirmed, record.locked_until) == ("view", True, 0)
        assert (record.token, record.fence, record.attempt) == ("t1", claimed.fence, 1)
        assert record.created_at == claimed.created_at <= record.completed_at
        assert record.expires_at == reply.expires_at == record.completed_at + self.ttl_ms
        assert record.tombstone_until == 0

    def test_a_tombstone_begins_where_the_answer_ends(self, store: Store) -> None:
        self.prepare(store, "succeeded", tombstone_ms=5_000)
        record = self.seen(store)
        assert record.tombstone_until == record.expires_at + 5_000

    def test_an_answer_that_nobody_confirmed_says_so(self, store: Store) -> None:
        claim = self.prepare(store, "in_progress")
        store.complete(Completion(claim, State.SUCCEEDED, CREATED, confirmed=False))
        assert self.seen(store).confirmed is False

    def test_a_copy_ends_with_its_row(self, store: Store) -> None:
        claim = self.prepare(store, "in_progress")
        ends = self.seen(store).created_at + self.ttl_ms // 2
        reply = store.complete(Completion(claim, State.SUCCEEDED, CREATED, expires_at=ends))
        assert (reply.outcome, reply.expires_at) == (Completed.STORED, ends)
        self.advance(self.ttl_ms // 2)
        assert store.claim(self.claim("t2")).verdict is Verdict.CLAIMED

    def test_a_copy_of_an_expired_row_is_not_made(self, store: Store) -> None:
        claim = self.prepare(store, "in_progress")
        ends = self.seen(store).created_at
        self.advance(1)
        assert store.complete(Completion(claim, State.SUCCEEDED, CREATED, expires_at=ends)).outcome is Completed.GONE
        assert store.read(make_scope()) is None

    def test_ones_own_answer_stands_and_comes_back(self, store: Store) -> None:
        claim = self.prepare(store, "in_progress")
        first = self.complete(store, claim)
        self.advance(10)
        kept = self.seen(store)
        for state in (State.FAILED, State.SUCCEEDED):
            again = self.complete(store, claim, OTHER, state)
            assert (again.outcome, again.expires_at, again.record) == (Completed.STORED, first.expires_at, kept)
        assert self.seen(store) == kept

    def test_a_lapsed_claim_that_nobody_took_still_completes(self, store: Store) -> None:
        claim = self.prepare(store, "lapsed")
        assert self.complete(store, claim).outcome is Completed.STORED

    def test_a_lost_claim_completes_nothing(self, store: Store) -> None:
        claim = self.prepare(store, "lapsed")
        store.claim(self.claim("t2"))
        before = self.raw(make_scope())
        reply = self.complete(store, claim)
        assert (reply.outcome, reply.record, reply.expires_at) == (Completed.LOST, None, 0)
        assert 0 < reply.wait_ms <= self.lease_ms
        assert self.raw(make_scope()) == before

    def test_a_lost_claim_gets_the_winners_answer(self, store: Store) -> None:
        claim = self.prepare(store, "lapsed")
        store.claim(self.claim("t2"))
        self.complete(store, self.claim("t2"))
        before = self.raw(make_scope())
        reply = self.complete(store, claim, OTHER)
        assert (reply.outcome, reply.record, reply.wait_ms) == (Completed.LOST, self.seen(store), 0)
        assert reply.record is not None
        assert (reply.record.token, reply.record.response) == ("t2", CREATED)
        assert self.raw(make_scope()) == before

    @pytest.mark.parametrize("other", [{"principal": "p2"}, {"binding": "b2"}, {"fingerprint": "B"}])
    def test_a_winners_answer_is_for_the_same_request_only(self, store: Store, other: dict[str, object]) -> None:
        claim = self.prepare(store, "in_progress")
        store.release(claim, reason="status", forget=True)
        winner = self.claim("t2", **other)  # type: ignore[arg-type]
        store.claim(winner)
        self.complete(store, winner)
        reply = self.complete(store, claim, OTHER)
        assert (reply.outcome, reply.record) == (Completed.LOST, None)

    def test_a_winners_answer_of_another_recipe_is_given(self, store: Store) -> None:
        claim = self.prepare(store, "lapsed")
        winner = self.claim("t2", fingerprints=(Fingerprint("r2", "X"), Fingerprint("r1", "A")))
        store.claim(winner)
        self.complete(store, winner)
        assert self.complete(store, claim, OTHER).record == self.seen(store)

    def test_a_winners_answer_expires(self, store: Store) -> None:
        claim = self.prepare(store, "lapsed")
        winner = self.claim("t2", tombstone_ms=self.ttl_ms)
        store.claim(winner)
        self.complete(store, winner)
        self.advance(self.ttl_ms)
        reply = self.complete(store, claim)
        assert (reply.outcome, reply.record) == (Completed.LOST, None)

    @pytest.mark.parametrize("state", ["released", "indeterminate"])
    def test_a_claim_that_is_no_longer_open_completes_nothing(self, store: Store, state: str) -> None:
        claim = self.prepare(store, state)
        before = self.raw(make_scope())
        reply = self.complete(store, claim)
        assert (reply.outcome, reply.record) == (Completed.LOST, None)
        assert self.raw(make_scope()) == before

    def test_what_is_gone_is_not_brought_back(self, store: Store) -> None:
        claim = self.prepare(store, "in_progress")
        store.release(claim, reason="status", forget=True)
        assert self.complete(store, claim).outcome is Completed.GONE
        assert store.read(make_scope()) is None

    @pytest.mark.parametrize(
        "body", [b"", ALL_BYTES, ALL_BYTES * 4096, b"\r\n$-1\r\n", "\N{SNOWMAN}".encode(), b"\x00"], ids=len
    )
    def test_bytes_come_back_as_they_were(self, store: Store, body: bytes) -> None:
        response = KeptResponse(299, ALL_BYTES, body, "full", "key-1")
        claim = self.prepare(store, "in_progress")
        self.complete(store, claim, response)
        for record in (store.claim(self.claim("t2")).record, self.seen(store), self.complete(store, claim).record):
            assert record is not None
            assert record.response == response

    # -- release -----------------------------------------------------------------------------------------------------

    def test_a_claim_given_back_stays_bound_to_its_request(self, store: Store) -> None:
        claim = self.prepare(store, "in_progress")
        created_at = self.seen(store).created_at
        assert store.release(claim, reason="status-503") is Released.RELEASED
        record = self.seen(store)
        assert (record.state, record.reason, record.locked_until) == (State.RELEASED, "status-503", 0)
        assert record.expires_at > created_at + self.ttl_ms - self.tolerance_ms
        assert record.response is None
        assert store.claim(self.claim("t2", fingerprint="B")).verdict is Verdict.MISMATCH
        again = store.claim(self.claim("t2"))
        assert (again.verdict, again.attempt, again.reclaimed) == (Verdict.CLAIMED, 2, False)
        assert again.created_at == created_at
        assert (self.seen(store).state, self.seen(store).reason) == (State.IN_PROGRESS, "")

    def test_a_claim_that_is_forgotten_leaves_nothing(self, store: Store) -> None:
        claim = self.prepare(store, "in_progress")
        assert store.release(claim, reason="status", forget=True) is Released.RELEASED
        assert store.read(make_scope()) is None
        assert not self.raw(make_scope())
        assert store.claim(self.claim("t2", fingerprint="B", principal="p2")).attempt == 1

    def test_giving_back_twice_is_harmless(self, store: Store) -> None:
        claim = self.prepare(store, "released")
        before = self.raw(make_scope())
        assert store.release(claim, reason="other") is Released.RELEASED
        assert self.raw(make_scope()) == before

    def test_forgetting_twice_finds_nothing(self, store: Store) -> None:
        claim = self.prepare(store, "in_progress")
        store.release(claim, reason="status", forget=True)
        assert store.release(claim, reason="status", forget=True) is Released.GONE
        assert store.release(claim, reason="status") is Released.GONE

    @pytest.mark.parametrize("state", ["succeeded", "failed"])
    @pytest.mark.parametrize("forget", [False, True])
    def test_what_is_finished_is_not_given_back(self, store: Store, state: str, forget: bool) -> None:
        claim = self.prepare(store, state)
        before = self.raw(make_scope())
        assert store.release(claim, reason="status", forget=forget) is Released.FINISHED
        assert self.raw(make_scope()) == before

    @pytest.mark.parametrize("forget", [False, True])
    @pytest.mark.parametrize("state", PRESENT)
    def test_anothers_claim_is_not_given_back(self, store: Store, state: str, forget: bool) -> None:
        self.prepare(store, state)
        before = self.raw(make_scope())
        assert store.release(self.claim("t2"), reason="status", forget=forget) is Released.LOST
        assert self.raw(make_scope()) == before

    def test_an_unknown_outcome_is_not_given_back(self, store: Store) -> None:
        claim = self.prepare(store, "indeterminate")
        assert store.release(claim, reason="status") is Released.LOST

    def test_a_lapsed_claim_can_be_given_back(self, store: Store) -> None:
        claim = self.prepare(store, "lapsed")
        assert store.release(claim, reason="status") is Released.RELEASED

    # -- renew -------------------------------------------------------------------------------------------------------

    def test_a_renewal_begins_the_lease_anew(self, store: Store) -> None:
        claim = self.prepare(store, "in_progress")
        before = self.seen(store)
        self.advance(self.lease_ms - self.tolerance_ms)
        assert store.renew([claim]) == [True]
        after = self.seen(store)
        assert after.locked_until >= before.locked_until + self.lease_ms - self.tolerance_ms
        assert replace(after, locked_until=before.locked_until) == before
        self.advance(self.lease_ms)
        assert store.claim(self.claim("t2")).verdict is Verdict.IN_PROGRESS
        self.advance(self.skew_ms)
        assert store.claim(self.claim("t2")).verdict is Verdict.CLAIMED

    def test_a_renewal_never_shortens_a_lease(self, store: Store) -> None:
        claim = self.prepare(store, "in_progress")
        before = self.seen(store).locked_until
        assert store.renew([replace(claim, lease_ms=1)]) == [True]
        assert self.seen(store).locked_until == before

    def test_a_lapsed_claim_that_nobody_took_is_renewed(self, store: Store) -> None:
        claim = self.prepare(store, "lapsed")
        assert store.renew([claim]) == [True]
        assert store.claim(self.claim("t2")).verdict is Verdict.IN_PROGRESS

    def test_renewals_of_a_batch_are_told_apart(self, store: Store) -> None:
        claims, expected = [], []
        for state in ("in_progress", "succeeded", "failed", "released", "indeterminate", "in_progress"):
            claims.append(self.prepare(store, state, f"t{len(claims)}", key=f"k{len(claims)}"))
            expected.append(state == "in_progress")
        lost = self.claim("lost", key="k0")
        absent = self.claim("absent", key="nowhere")
        before = [self.raw(claim.scope) for claim in claims[1:-1]]
        assert list(store.renew([lost, *claims, absent])) == [False, *expected, False]
        assert [self.raw(claim.scope) for claim in claims[1:-1]] == before
        assert store.read(absent.scope) is None

    def test_a_batch_may_be_large_or_empty(self, store: Store) -> None:
        claims = [self.claim(f"t{n}", key=f"k{n}") for n in range(300)]
        for claim in claims[::3]:
            store.claim(claim)
        assert list(store.renew(claims)) == [n % 3 == 0 for n in range(300)]
        assert list(store.renew([])) == []

    # -- what can't be read is not absent ----------------------------------------------------------------------------

    @pytest.mark.parametrize("state", PRESENT)
    def test_another_format_is_refused_and_left_alone(self, store: Store, state: str) -> None:
        claim = self.prepare(store, state)
        self.make_unreadable(claim.scope)
        self.advance(10 * self.ttl_ms)
        before = self.raw(claim.scope)
        for asked in (claim, self.claim("t2"), self.claim("t2", principal="p2")):
            with pytest.raises(UnreadableRecord):
                store.claim(asked)
        with pytest.raises(UnreadableRecord):
            self.complete(store, claim)
        for forget in (False, True):
            with pytest.raises(UnreadableRecord):
                store.release(claim, reason="status", forget=forget)
        assert store.renew([claim]) == [False]
        with pytest.raises(UnreadableRecord):
            store.read(claim.scope)
        assert self.raw(claim.scope) == before


class RateLimitSuite(StoreSuite):
    """The further rules of a store that limits new keys. The window runs by the store's running clock."""

    def fill(self, store: Store) -> None:
        for n in (1, 2):
            assert store.claim(self.limited(f"t{n}", f"k{n}")).verdict is Verdict.CLAIMED

    def test_new_keys_over_the_limit_are_refused(self, store: Store) -> None:
        self.fill(store)
        for _ in range(3):
            reply = store.claim(self.limited("t3", "k3"))
            assert (reply.verdict, reply.record, reply.fence) == (Verdict.LIMITED, None, 0)
            assert 0 < reply.wait_ms <= self.window_ms
        assert store.read(make_scope("k3")) is None
        assert store.claim(self.claim("t3", key="k3")).verdict is Verdict.CLAIMED  # a route without a limit

    def test_every_bucket_counts_for_itself(self, store: Store) -> None:
        self.fill(store)
        other = RateLimit(2, self.window_ms, "other")
        assert store.claim(self.limited("t3", "k3", rate=other)).verdict is Verdict.CLAIMED

    def test_retries_and_takeovers_are_not_counted(self, store: Store) -> None:
        assert store.claim(self.limited("t1", "k1")).verdict is Verdict.CLAIMED
        for _ in range(3):
            assert store.claim(self.limited("t1", "k1")).verdict is Verdict.CLAIMED
            assert store.claim(self.limited("t2", "k1")).verdict is Verdict.IN_PROGRESS
            assert store.claim(self.limited("t2", "k1", principal="p2")).verdict is Verdict.FOREIGN
            assert store.claim(self.limited("t2", "k1", fingerprint="B")).verdict is Verdict.MISMATCH
        for attempt in (2, 3, 4):
            self.lapse()
            assert store.claim(self.limited(f"t{attempt}", "k1")).verdict is Verdict.CLAIMED
        store.release(self.limited("t4", "k1"), reason="status")
        assert store.claim(self.limited("t5", "k1")).verdict is Verdict.CLAIMED
        self.complete(store, self.limited("t5", "k1"))
        for _ in range(3):
            assert store.claim(self.limited("t6", "k1")).verdict is Verdict.REPLAY
        assert store.claim(self.limited("u", "k2")).verdict is Verdict.CLAIMED
        assert store.claim(self.limited("v", "k3")).verdict is Verdict.LIMITED

    def test_old_keys_pass_a_full_limit(self, store: Store) -> None:
        self.fill(store)
        self.complete(store, self.limited("t1", "k1"))
        assert store.claim(self.limited("t3", "k3")).verdict is Verdict.LIMITED
        assert store.claim(self.limited("t4", "k1")).verdict is Verdict.REPLAY
        assert store.claim(self.limited("t2", "k2")).verdict is Verdict.CLAIMED
        assert store.claim(self.limited("t4", "k2")).verdict is Verdict.IN_PROGRESS

    def test_the_window_frees(self, store: Store) -> None:
        self.window_ms = 150
        started = time.monotonic()
        self.fill(store)
        limited = 0
        while (reply := store.claim(self.limited("t3", "k3"))).verdict is Verdict.LIMITED:
            limited += 1
            assert time.monotonic() - started < 10
            time.sleep(reply.wait_ms / 1000)
        assert reply.verdict is Verdict.CLAIMED
        assert limited or time.monotonic() - started > 0.15
