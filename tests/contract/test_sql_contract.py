"""The rules of every store, as far as they apply where key, effect and answer are one transaction.

No lease is held in the database and nothing is taken over; until its end a claim is seen by nobody, and given back it
leaves nothing. The rest is as everywhere.
"""

import time
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from flask_idempotent.errors import ConfigurationError, UnreadableRecord
from flask_idempotent.records import (
    Claim,
    Completed,
    Completion,
    CompletionReply,
    Fingerprint,
    KeptResponse,
    State,
    Verdict,
)
from flask_idempotent.stores.base import NotCommitted, Released, Store
from flask_idempotent.stores.rows import is_mysql
from flask_idempotent.stores.transaction import Transaction
from tests.web.kit import together

from .sql_backend import DurableBackend, SqlBackend
from .store_suite import ALL_BYTES, CREATED, OTHER, StoreSuite, StoreTools, make_scope


class TransactionSuite(StoreTools):
    """Over a backend whose claims come with a transaction."""

    def prepare(self, store: Store, state: str, token: str = "first", **changes: Any) -> Claim:
        """Also rows that other versions, or operators, leave: given back, unknown, or open and seen."""
        if state in ("in_progress", "succeeded", "failed"):
            return super().prepare(store, state, token, **changes)
        claim = super().prepare(store, "succeeded", token, **changes)
        self.change(claim.scope, status="in_progress" if state == "left open" else state)
        self.forget_in_front()
        return claim

    def forget_in_front(self) -> None:
        """Where there is a Redis, let it know nothing."""

    # The rules that are the same

    test_what_is_not_there_is_not_read = StoreSuite.test_what_is_not_there_is_not_read
    test_the_same_token_sent_again_after_the_answer_is_replayed = (
        StoreSuite.test_the_same_token_sent_again_after_the_answer_is_replayed
    )
    test_a_record_is_compared_under_its_own_recipe = StoreSuite.test_a_record_is_compared_under_its_own_recipe
    test_it_lives_for_its_whole_time = StoreSuite.test_it_lives_for_its_whole_time
    test_a_tombstone_refuses_an_expired_key = StoreSuite.test_a_tombstone_refuses_an_expired_key
    test_a_tombstone_tells_strangers_nothing = StoreSuite.test_a_tombstone_tells_strangers_nothing
    test_a_tombstone_begins_where_the_answer_ends = StoreSuite.test_a_tombstone_begins_where_the_answer_ends
    test_a_claim_that_is_forgotten_leaves_nothing = StoreSuite.test_a_claim_that_is_forgotten_leaves_nothing

    # -- claim -------------------------------------------------------------------------------------------------------

    def test_a_new_key_is_claimed_and_seen_by_nobody(self, store: Store) -> None:
        reply = store.claim(self.claim())
        assert (reply.verdict, reply.attempt, reply.reclaimed, reply.comparable) == (Verdict.CLAIMED, 1, False, True)
        assert (reply.record, reply.fence, reply.created_at) == (None, reply.created_at, reply.fence)
        if not self.one_writer():
            assert store.read(make_scope()) is None
        assert self.raw(make_scope()) == []

    @pytest.mark.parametrize("state", [State.SUCCEEDED, State.FAILED])
    def test_what_is_finished_is_replayed(self, store: Store, state: State) -> None:
        claim = self.prepare(store, state.value)
        for token in ("t2", "first"):
            reply = store.claim(self.claim(token))
            assert (reply.verdict, reply.comparable) == (Verdict.REPLAY, True)
            assert reply.record is not None
            assert (reply.record.state, reply.record.response, reply.record.token) == (state, CREATED, claim.token)
            assert reply.record.expires_at == self.seen(store).expires_at
            self.forget_in_front()

    def test_keys_do_not_meet(self, store: Store) -> None:
        for n in range(8):
            claim = self.claim(f"t{n}", key=f"k{n}")
            assert store.claim(claim).verdict is Verdict.CLAIMED
            if self.one_writer():
                self.complete(store, claim)

    def test_one_of_many_at_once_has_the_key(self, store: Store) -> None:
        for round_ in range(10):
            claims = [self.claim(f"t{n}", key=f"k{round_}") for n in range(4)]
            began = time.monotonic()
            replies = together(*[lambda claim=claim: store.claim(claim) for claim in claims])  # type: ignore[misc]
            assert time.monotonic() - began < 2
            verdicts = [reply.verdict for reply in replies]
            assert sorted(verdicts) == [Verdict.CLAIMED, *[Verdict.IN_PROGRESS] * 3]
            self.complete(store, claims[verdicts.index(Verdict.CLAIMED)])

    def test_a_running_claim_is_waited_for(self, store: Store) -> None:
        store.claim(self.claim())
        for other in (store, self.make_store()):
            reply = other.claim(self.claim("t2"))
            assert (reply.verdict, reply.record) == (Verdict.IN_PROGRESS, None)
            assert reply.wait_ms > 0

    def test_nothing_is_taken_over(self, store: Store) -> None:
        claim = self.claim()
        store.claim(claim)
        self.forget_in_front()
        assert store.claim(self.claim("t2", lease_ms=1, skew_ms=0)).verdict is Verdict.IN_PROGRESS
        assert store.renew([claim, self.claim("t3")]) == [True, True]
        assert self.complete(store, claim).outcome is Completed.STORED
        assert store.claim(self.claim("t2")).verdict is Verdict.REPLAY

    @pytest.mark.parametrize("state", ["indeterminate", "left open"])
    def test_what_is_unknown_does_not_run(self, store: Store, state: str) -> None:
        """A row in progress that can be seen was committed by its view, which nobody can take back."""
        self.prepare(store, state)
        self.advance(10 * self.ttl_ms)
        before = self.raw(make_scope())
        for token in ("first", "t2"):
            assert store.claim(self.claim(token)).verdict is Verdict.INDETERMINATE
        assert self.raw(make_scope()) == before

    def test_a_row_that_was_given_back_is_the_next_attempts(self, store: Store) -> None:
        first = self.seen(store) if self.prepare(store, "released") else None
        claim = self.claim("t2")
        reply = store.claim(claim)
        assert (reply.verdict, reply.attempt, reply.created_at) == (Verdict.CLAIMED, 2, first.created_at)
        assert reply.fence > first.fence
        assert self.complete(store, claim, OTHER).outcome is Completed.STORED
        record = self.seen(store)
        assert (record.token, record.attempt, record.response) == ("t2", 2, OTHER)

    # -- identity, fingerprint, state, in this order -----------------------------------------------------------------

    @pytest.mark.parametrize("state", ["succeeded", "failed", "released", "indeterminate", "left open"])
    def test_another_principal_or_binding_is_told_nothing(self, store: Store, state: str) -> None:
        self.prepare(store, state)
        before = self.raw(make_scope())
        others: list[dict[str, str]] = [{"principal": "p2"}, {"principal": ""}, {"binding": "b2"}, {"binding": ""}]
        for other in others:
            for fingerprint, token in (("A", "t2"), ("B", "t2"), ("A", "first"), ("B", "first")):
                reply = store.claim(self.claim(token, fingerprint=fingerprint, **other))
                assert (reply.verdict, reply.confirmed) == (Verdict.FOREIGN, True)
                assert (reply.record, reply.wait_ms, reply.fence, reply.attempt, reply.created_at) == (None, 0, 0, 0, 0)
        assert self.raw(make_scope()) == before

    @pytest.mark.parametrize("state", ["succeeded", "failed", "released", "indeterminate", "left open"])
    def test_another_fingerprint_never_runs(self, store: Store, state: str) -> None:
        self.prepare(store, state)
        before = self.raw(make_scope())
        for token in ("t2", "first"):
            reply = store.claim(self.claim(token, fingerprint="B"))
            assert (reply.verdict, reply.record, reply.confirmed) == (Verdict.MISMATCH, None, True)
        assert self.raw(make_scope()) == before

    def test_the_newest_recipe_is_stored(self, store: Store) -> None:
        claim = self.claim(fingerprints=(Fingerprint("r2", "X"), Fingerprint("r1", "A")))
        store.claim(claim)
        self.complete(store, claim)
        assert self.seen(store).fingerprint == Fingerprint("r2", "X")

    def test_an_unknown_recipe_is_let_through_uncompared(self, store: Store) -> None:
        self.prepare(store, "succeeded")
        for _ in range(2):
            reply = store.claim(self.claim("t2", fingerprints=(Fingerprint("r9", "A"),)))
            assert (reply.verdict, reply.comparable) == (Verdict.REPLAY, False)
            self.forget_in_front()

    # -- expiry and fence --------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("other", [{}, {"principal": "p2"}, {"binding": "b2"}, {"fingerprint": "B"}])
    def test_what_is_over_expires_before_every_check(self, store: Store, other: dict[str, object]) -> None:
        self.prepare(store, "failed")
        old = self.seen(store)
        self.advance(self.ttl_ms)
        claim = self.claim("t2", **other)
        reply = store.claim(claim)
        assert (reply.verdict, reply.attempt, reply.reclaimed) == (Verdict.CLAIMED, 1, False)
        assert reply.created_at >= old.created_at
        self.complete(store, claim, OTHER)
        assert self.seen(store).response == OTHER
        assert len(self.raw(make_scope())) == 2  # the old answer is gone

    def test_an_expired_row_stays_where_the_new_claim_is_given_back(self, store: Store) -> None:
        self.prepare(store, "succeeded")
        self.advance(self.ttl_ms)
        before = self.raw(make_scope())
        claim = self.claim("t2")
        store.claim(claim)
        store.release(claim, reason="status")
        assert self.raw(make_scope()) == before
        assert store.claim(self.claim("t3")).verdict is Verdict.CLAIMED

    def test_the_fence_rises_over_forgetting(self, store: Store) -> None:
        claim = self.claim()
        first = store.claim(claim)
        store.release(claim, reason="status")
        time.sleep(0.002)
        assert store.claim(self.claim("t2")).fence > first.fence

    def test_the_fence_rises_over_expiry_when_it_was_ahead_of_the_clock(self, store: Store) -> None:
        self.prepare(store, "succeeded")
        self.rewind(2 * self.ttl_ms)
        fence = self.seen(store).fence
        self.change(make_scope(), expires_at=1)
        self.forget_in_front()
        reply = store.claim(self.claim("t2"))
        assert (reply.verdict, reply.attempt, reply.fence) == (Verdict.CLAIMED, 1, fence + 1)

    # -- complete ----------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("state", [State.SUCCEEDED, State.FAILED])
    def test_an_answer_is_kept(self, store: Store, state: State) -> None:
        claim = self.claim()
        claimed = store.claim(claim)
        reply = store.complete(Completion(claim, state, replace(CREATED, cipher="2026"), "view"))
        assert (reply.outcome, reply.record, reply.wait_ms) == (Completed.STORED, None, 0)
        record = self.seen(store)
        assert (record.state, record.response) == (state, replace(CREATED, cipher="2026"))
        assert (record.reason, record.confirmed, record.locked_until) == ("view", True, 0)
        assert (record.token, record.fence, record.attempt) == ("t1", claimed.fence, 1)
        assert (record.fingerprint, record.principal, record.binding) == (Fingerprint("r1", "A"), "p1", "b1")
        assert record.created_at == claimed.created_at <= record.completed_at
        assert record.expires_at == reply.expires_at == record.completed_at + self.ttl_ms
        assert record.tombstone_until == 0

    def fail_at_commit(self, transaction: Transaction, *, applied: bool) -> None:
        commit = transaction.commit

        def fails() -> None:
            if applied:
                commit()
            raise sa.exc.OperationalError("COMMIT", {}, Exception("the reply was lost"))

        transaction.commit = fails  # type: ignore[method-assign]

    def test_ones_own_answer_stands_and_comes_back(self, store: Store) -> None:
        """The commit's reply is lost: the row has our token, and what is stored is what is answered."""
        claim = self.claim()
        store.claim(claim)
        self.fail_at_commit(claim.backing, applied=True)  # type: ignore[arg-type]
        reply = self.complete(store, claim)
        assert reply.outcome is Completed.STORED
        assert reply.record is not None
        assert replace(reply.record, read_at=0) == replace(self.seen(store), read_at=0)
        assert store.claim(self.claim("t2")).verdict is Verdict.REPLAY

    def test_what_was_not_committed_is_not_there(self, store: Store) -> None:
        claim = self.claim()
        store.claim(claim)
        self.fail_at_commit(claim.backing, applied=False)  # type: ignore[arg-type]
        with pytest.raises(NotCommitted) as caught:
            self.complete(store, claim)
        assert caught.value.absent
        assert self.raw(make_scope()) == []
        assert store.claim(self.claim("t2", fingerprint="B", principal="p2")).verdict is Verdict.CLAIMED

    def lose(self, claim: Claim) -> None:
        """The view ended the transaction, and the key's row went."""
        claim.backing.connection.exec_driver_sql("ROLLBACK")  # type: ignore[union-attr]
        self.forget_in_front()

    def test_a_lost_claim_overwrites_nothing(self, store: Store) -> None:
        claim = self.claim()
        store.claim(claim)
        self.lose(claim)
        winner = self.claim("t2")
        store.claim(winner)
        self.complete(store, winner)
        before = self.raw(make_scope())
        with pytest.raises(NotCommitted):
            self.complete(store, claim, OTHER)
        assert self.raw(make_scope()) == before
        assert store.claim(self.claim("t3")).record.response == CREATED  # type: ignore[union-attr]

    def undo(self, store: Store, claim: Claim) -> CompletionReply:
        return store.complete(Completion(claim, State.FAILED, OTHER, undo=True))

    def test_an_answer_without_the_work(self, store: Store) -> None:
        """What was done in the transaction is taken back; key and answer are kept."""
        claim = self.claim()
        store.claim(claim)
        connection = claim.backing.connection  # type: ignore[union-attr]
        work = self.claim("work", key="work")
        connection.execute(
            sa.insert(self.tables.keys).values(
                endpoint="work",
                key_digest=work.scope.digest,
                recipe="r",
                request_hash="h",
                claim_token="w",
                status="succeeded",
                lock_version=1,
                created_at=1,
            )
        )
        reply = self.undo(store, claim)
        assert reply.outcome is Completed.STORED
        record = self.seen(store)
        assert (record.state, record.response, record.token) == (State.FAILED, OTHER, "t1")
        assert record.expires_at == reply.expires_at
        assert self.raw(work.scope) == []

    @pytest.mark.parametrize(
        "body", [b"", ALL_BYTES, ALL_BYTES * 4096, b"\r\n$-1\r\n", "\N{SNOWMAN}".encode(), b"\x00"], ids=len
    )
    def test_bytes_come_back_as_they_were(self, store: Store, body: bytes) -> None:
        response = KeptResponse(299, ALL_BYTES, body, "full", "key-1")
        claim = self.prepare(store, "in_progress")
        self.complete(store, claim, response)
        for forget in (False, True, False):
            if forget:
                self.forget_in_front()
            for record in (store.claim(self.claim("t2")).record, self.seen(store)):
                assert record is not None
                assert record.response == response

    # -- release -----------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("forget", [False, True])
    def test_a_claim_given_back_leaves_nothing(self, store: Store, forget: bool) -> None:
        claim = self.prepare(store, "in_progress")
        assert store.release(claim, reason="status", forget=forget) is Released.RELEASED
        assert self.raw(make_scope()) == []
        for _ in range(2):
            assert store.release(claim, reason="status", forget=forget) is Released.GONE
        again = store.claim(self.claim("t2", fingerprint="B", principal="p2"))
        assert (again.verdict, again.attempt) == (Verdict.CLAIMED, 1)

    @pytest.mark.parametrize("forget", [False, True])
    def test_what_is_finished_is_not_given_back(self, store: Store, forget: bool) -> None:
        claim = self.prepare(store, "succeeded")
        before = self.raw(make_scope())
        assert store.release(claim, reason="status", forget=forget) is not Released.RELEASED
        assert store.release(self.claim("t2"), reason="status", forget=forget) is not Released.RELEASED
        assert self.raw(make_scope()) == before
        assert store.claim(self.claim("t3")).verdict is Verdict.REPLAY

    def test_a_claim_that_its_view_committed_is_unknown(self, store: Store) -> None:
        """Giving it back can't take back what is there."""
        claim = self.prepare(store, "in_progress")
        claim.backing.connection.exec_driver_sql("COMMIT")  # type: ignore[union-attr]
        assert store.release(claim, reason="status") is Released.LOST
        self.forget_in_front()
        assert store.claim(self.claim("t2")).verdict is Verdict.INDETERMINATE

    # -- what can't be read is not absent ----------------------------------------------------------------------------

    @pytest.mark.parametrize("state", ["succeeded", "released", "indeterminate", "left open"])
    def test_another_format_is_refused_and_left_alone(self, store: Store, state: str) -> None:
        claim = self.prepare(store, state)
        self.make_unreadable(claim.scope)
        self.forget_in_front()
        self.advance(10 * self.ttl_ms)
        before = self.raw(claim.scope)
        for asked in (self.claim("first"), self.claim("t2"), self.claim("t2", principal="p2")):
            with pytest.raises(UnreadableRecord):
                store.claim(asked)
            assert not asked.backing.is_open  # type: ignore[union-attr]
        with pytest.raises(UnreadableRecord):
            store.read(claim.scope)
        assert self.raw(claim.scope) == before

    def test_a_tenant_of_any_length_is_stored_whole_or_refused(self, store: Store) -> None:
        longest = self.claim(scope=replace(make_scope(), tenant="ü" * 255, endpoint="ö" * 255))
        assert store.claim(longest).verdict is Verdict.CLAIMED
        self.complete(store, longest)
        assert store.read(longest.scope) is not None
        with pytest.raises(ConfigurationError, match="at most 255 characters"):
            store.claim(self.claim(scope=replace(make_scope("other"), tenant="u" * 256)))

    def one_writer(self) -> bool:
        return self.engine.dialect.name == "sqlite"


class TestSqlStore(SqlBackend, TransactionSuite):
    """Alone, as with Redis away."""

    def test_names_are_compared_byte_by_byte(self, store: Store) -> None:
        """Whatever the database's collation says of case, and accents."""
        names = ["Tenant", "tenant", "tenänt", "ténant"]
        for token, name in enumerate(names):
            claim = self.claim(f"t{token}", scope=replace(make_scope(), tenant=name))
            assert store.claim(claim).verdict is Verdict.CLAIMED
            self.complete(store, claim)
        for token, name in enumerate(names):
            record = store.read(replace(make_scope(), tenant=name))
            assert record is not None
            assert record.token == f"t{token}"

    def test_who_inserts_takes_turns_on_mysql(self, store: Store) -> None:
        if not is_mysql(self.engine.dialect):
            pytest.skip("nobody has to wait for an INSERT here")
        claim = self.claim()
        turn = f"idempotent:{claim.scope.digest}"[:64]
        with self.engine.connect() as other:
            assert other.execute(sa.select(sa.func.get_lock(turn, 0))).scalar_one() == 1
            began = time.monotonic()
            assert store.claim(claim).verdict is Verdict.IN_PROGRESS
            assert time.monotonic() - began < 1
            assert store.claim(self.claim("t2", key="another")).verdict is Verdict.CLAIMED
            assert other.execute(sa.select(sa.func.release_lock(turn))).scalar_one() == 1
            assert store.claim(claim).verdict is Verdict.CLAIMED
            assert store.claim(self.claim("t3")).verdict is Verdict.IN_PROGRESS
            # Held for the INSERT alone: what is held after that is the row.
            assert other.execute(sa.select(sa.func.is_free_lock(turn))).scalar_one() == 1


class TestDurableStore(DurableBackend, TransactionSuite):
    """With Redis in front."""

    def forget_in_front(self) -> None:
        for name in self.client.scan_iter("suite:*"):
            self.client.delete(name)

    def test_redis_holds_the_claim_and_then_the_copy(self, store: Store) -> None:
        claim = self.claim()
        store.claim(claim)
        front = store.front  # type: ignore[attr-defined]
        held = front.read(claim.scope)
        assert (held.state, held.token, held.confirmed) == (State.IN_PROGRESS, "t1", False)
        self.complete(store, claim)
        copy, row = front.read(claim.scope), self.seen(store)
        assert (copy.state, copy.response, copy.confirmed) == (row.state, row.response, True)
        assert copy.expires_at == row.expires_at

    @pytest.mark.parametrize("other", [{"principal": "p2"}, {"fingerprint": "B"}])
    def test_what_the_database_does_not_agree_to_leaves_nothing_in_redis(
        self, store: Store, other: dict[str, object]
    ) -> None:
        self.prepare(store, "succeeded")
        self.forget_in_front()
        store.claim(self.claim("t2", **other))
        assert store.front.read(make_scope()) is None  # type: ignore[attr-defined]
        assert store.claim(self.claim("t3")).verdict is Verdict.REPLAY
        assert store.front.read(make_scope()).confirmed  # type: ignore[attr-defined]

    def test_a_claim_that_the_database_can_not_take_leaves_nothing_in_redis(self, store: Store) -> None:
        claim = self.claim(scope=replace(make_scope(), tenant="u" * 256))
        with pytest.raises(ConfigurationError):
            store.claim(claim)
        assert store.front.read(claim.scope) is None  # type: ignore[attr-defined]
