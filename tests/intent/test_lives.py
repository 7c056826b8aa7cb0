"""How long a record lives: what is finished expires, what is unknown or given back never expires into a second run."""

import pytest
from flask import make_response

from flask_idempotent import NothingHappened
from tests.web import kit

from .kit import Till, assert_unknown, die, new_key

#: Longer than the bank's memory, as it must be; the tests let a week pass.
TTL = 86_400 * 1.5
WEEK = 7 * 86_400


def nothing(charge):
    raise NothingHappened(make_response(("nothing", 503)))


@pytest.mark.parametrize("open_as", ["in_progress", "indeterminate"])
def test_an_unknown_outcome_never_expires(make_till, database_url, open_as):
    """V5: long after the lifetime it is looked up, and not begun anew."""
    till = make_till(database_url, TTL=TTL)
    till.take_charges()
    till.ending = (lambda charge: die() or ("", 201)) if open_as == "in_progress" else (lambda charge: ("bad", 502))
    key = new_key()
    till.pay(key)
    assert till.row().status == open_as
    till.pass_time(WEEK)
    till.redis.flushdb()
    answer = till.pay(key)
    till.assert_one_charge(answer)
    assert (till.runs, len(till.lookups)) == (1, 1)
    # From now on it lives for its full time.
    kit.assert_replay(answer, till.pay(key))
    till.pass_time(TTL - 60)
    assert till.pay(key).data == answer.data
    assert till.runs == 1


def test_an_unknown_outcome_that_nothing_is_found_of_stays_unknown_for_ever(make_till, database_url):
    """Out of the provider's memory nothing is sent again, whatever the lifetime."""
    till = make_till(database_url, TTL=TTL)
    till.take_charges()
    till.ending = lambda charge: die() or ("", 201)
    till.provider.control(search_delay=100 * 86_400)
    key = new_key()
    till.pay(key)
    for _ in range(3):
        till.pass_time(WEEK)
        till.redis.flushdb()
        assert_unknown(till.pay(key))
    assert (till.runs, till.row().status) == (1, "indeterminate")


@pytest.mark.parametrize("flushed", [False, True])
def test_a_released_row_does_not_expire_in_a_claim(make_till, database_url, flushed):
    """It becomes attempt 2, with the time at which the first one began: the provider's window counts from there."""
    till = make_till(database_url, TTL=TTL)
    till.take_charges()
    till.ending = nothing
    key = new_key()
    till.pay(key)
    released = till.row()
    assert released.status == "released"
    assert released.expires_at > released.created_at
    till.pass_time(WEEK)
    aged = till.row()
    if flushed:
        till.redis.flushdb()
    kit.assert_problem(till.pay(key, 101), "mismatch")
    till.ending = lambda charge: ({"charge": charge["id"]}, 201)
    # The first attempt had asked for its key, a week ago: handing it out again is not safe.
    assert_unknown(till.pay(key))
    row = till.row()
    assert (row.attempt, row.created_at) == (2, aged.created_at)
    assert row.reason == "sending again is not safe: bank may have forgotten the first sending"
    assert len(till.provider.entries()) == 1


def test_a_released_row_whose_key_never_went_out_runs_again(make_till, database_url):
    till = make_till(database_url, TTL=TTL)
    till.take_charges()
    till.charges = False
    till.ending = nothing
    key = new_key()
    till.pay(key)
    till.pass_time(WEEK)
    aged = till.row()
    till.charges = True
    till.ending = lambda charge: ({"charge": charge["id"]}, 201)
    till.assert_one_charge(till.pay(key))
    row = till.row()
    assert (row.status, row.attempt, row.created_at) == ("succeeded", 2, aged.created_at)


def test_a_finished_row_expires_and_its_key_is_new(make_till, database_url):
    """The old answer and the old first use of the provider's key go with it. (The provider remembers for a shorter
    time than the record: requirement 2.9.)"""
    till = make_till(database_url, TTL=TTL)
    till.take_charges()
    key = new_key()
    first = till.pay(key)
    till.pass_time(TTL - 60)
    assert till.pay(key).data == first.data
    till.pass_time(120)
    till.redis.flushdb()
    second = till.pay(key)
    kit.assert_kept(second)
    assert second.get_json() != first.get_json()
    assert len(till.provider.entries()) == 2
    row = till.row()
    assert (row.status, row.attempt, till.answers()) == ("succeeded", 1, 1)
    assert len(till.ask("SELECT * FROM idempotency_steps")) == 1
    kit.assert_replay(second, till.pay(key))


def test_an_expired_row_under_a_tombstone(make_till, database_url):
    till = make_till(database_url, TTL=TTL, ON_EXPIRED="reject", TOMBSTONE=86_400)
    till.take_charges()
    key = new_key()
    till.pay(key)
    till.pass_time(TTL + 60)
    for _ in range(2):
        kit.assert_problem(till.pay(key), "expired-key")
        till.redis.flushdb()
    assert till.runs == 1


def test_retries_of_an_open_outcome_are_not_new_keys(make_till, sqlite_url):
    """10.4 limits new keys. One that only the database knows is none."""
    till = make_till(sqlite_url, config={"IDEMPOTENT_RATE_LIMIT": "1/minute"})
    till.take_charges()
    till.ending = lambda charge: ("bad gateway", 502)
    key = new_key()
    till.pay(key)
    for _ in range(3):
        assert_unknown(till.pay(key))
    kit.assert_problem(till.pay(new_key()), "rate-limited")
    till.assert_settled(key)


def test_retries_of_a_released_key_are_not_new_keys(make_till, sqlite_url):
    till = make_till(sqlite_url, config={"IDEMPOTENT_RATE_LIMIT": "1/minute"})
    till.take_charges()
    till.charges = False
    till.ending = nothing
    key = new_key()
    for _ in range(3):
        assert till.pay(key).status_code == 503
    till.charges = True
    till.ending = lambda charge: ({"charge": charge["id"]}, 201)
    till.assert_one_charge(till.pay(key))
    assert till.attempts == [1, 2, 3, 4]


def test_every_key_in_redis_has_an_end(till: Till):
    """F02, for what stands in front of the database: while it runs, unknown, settled, replayed."""
    ends = []
    till.before = lambda: ends.append(kit.assert_all_end(till.redis))
    till.ending = lambda charge: ("bad gateway", 502)
    key = new_key()
    till.pay(key)
    till.pass_time(6)
    till.pay(key)
    till.pay(key)
    kit.assert_all_end(till.redis)
    row = till.row()
    assert (len(ends), row.status) == (1, "succeeded")
    assert till.redis.pexpiretime(kit.record_key(till.redis)) == row.expires_at
