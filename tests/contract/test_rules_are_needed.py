"""The suites can fail: each rule of the scripts is taken out once, and a test of it must go red."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from flask_idempotent.records import State
from tests.contract import test_redis_store, test_store_contract
from tests.contract.lua_tools import RULES, Sources, break_rule, replace_once

Suite = test_store_contract.TestRedisStore
Redis = test_redis_store.TestRedisStore

#: rule -> (suite, its test, the test's arguments)
SCENARIOS: dict[str, tuple[type[Any], Callable[..., None], dict[str, object]]] = {}


def needs(rule: str, suite: type[Any], test: Callable[..., None], **arguments: object) -> None:
    assert rule not in SCENARIOS
    SCENARIOS[rule] = (suite, test, arguments)


needs("complete compares the token", Suite, Suite.test_a_lost_claim_completes_nothing)
needs(
    "complete compares the state",
    Suite,
    Suite.test_a_claim_that_is_no_longer_open_completes_nothing,
    state="released",
)
needs("complete overwrites nothing finished", Suite, Suite.test_ones_own_answer_stands_and_comes_back)
needs("complete succeeds on its own finished record", Suite, Suite.test_ones_own_answer_stands_and_comes_back)
needs("complete returns what is stored", Suite, Suite.test_ones_own_answer_stands_and_comes_back)
needs(
    "release compares the token",
    Suite,
    Suite.test_anothers_claim_is_not_given_back,
    state="in_progress",
    forget=True,
)
needs(
    "release overwrites nothing finished",
    Suite,
    Suite.test_what_is_finished_is_not_given_back,
    state="succeeded",
    forget=False,
)
needs("release compares the state", Suite, Suite.test_an_unknown_outcome_is_not_given_back)
needs("renew compares the token", Suite, Suite.test_renewals_of_a_batch_are_told_apart)
needs("renew compares the state", Suite, Suite.test_renewals_of_a_batch_are_told_apart)

needs("claim is harmless when sent twice", Suite, Suite.test_the_same_token_claims_once)
needs("release is harmless when sent twice", Suite, Suite.test_giving_back_twice_is_harmless)
needs("a token given back is over", Suite, Suite.test_a_token_that_was_given_back_is_over)

needs("takeover compares the state", Suite, Suite.test_what_is_finished_is_replayed, state=State.SUCCEEDED)
needs("an unknown outcome is not taken over", Suite, Suite.test_what_is_unknown_does_not_run)
needs("takeover waits for the lease", Suite, Suite.test_takeover_waits_for_lease_and_skew)
needs("takeover adds the skew", Suite, Suite.test_takeover_waits_for_lease_and_skew)
needs("a renewal moves the lease", Suite, Suite.test_a_renewal_begins_the_lease_anew)

needs("the fence is over the old one", Suite, Suite.test_the_fence_rises_when_the_clock_was_turned_back)
needs(
    "the fence is over an expired one",
    Suite,
    Suite.test_the_fence_rises_over_expiry_when_it_was_ahead_of_the_clock,
)
needs("the fence begins with the clock", Suite, Suite.test_the_fence_rises_over_forgetting)
needs("an attempt counts", Suite, Suite.test_attempt_and_created_at_outlive_every_claim)
needs("created_at outlives a claim", Suite, Suite.test_attempt_and_created_at_outlive_every_claim)

needs("another fingerprint is a mismatch", Suite, Suite.test_another_fingerprint_never_runs, state="in_progress")
needs("another fingerprint never takes over", Suite, Suite.test_another_fingerprint_never_runs, state="lapsed")
needs(
    "another fingerprint never follows a release",
    Suite,
    Suite.test_another_fingerprint_never_runs,
    state="released",
)
needs("a record is compared under its own recipe", Suite, Suite.test_a_record_is_compared_under_its_own_recipe)
for _rule, _state, _other in [
    ("the principal is compared", "in_progress", {"principal": "p2"}),
    ("the binding is compared", "in_progress", {"binding": "b2"}),
    ("the principal comes before the state", "succeeded", {"principal": "p2"}),
    ("the principal comes before the fingerprint", "succeeded", {"principal": "p2"}),
]:
    needs(
        _rule,
        Suite,
        Suite.test_another_principal_or_binding_is_told_nothing,
        state=_state,
        other=_other,
    )
needs(
    "a winner's answer is for its principal",
    Suite,
    Suite.test_a_winners_answer_is_for_the_same_request_only,
    other={"principal": "p2"},
)
needs(
    "a winner's answer is for its request",
    Suite,
    Suite.test_a_winners_answer_is_for_the_same_request_only,
    other={"fingerprint": "B"},
)

needs("only what is over expires", Suite, Suite.test_what_runs_does_not_expire)
needs("what is over expires", Suite, Suite.test_what_is_over_expires_before_every_check, state="succeeded", other={})
needs(
    "expiry comes before every check",
    Suite,
    Suite.test_what_is_over_expires_before_every_check,
    state="succeeded",
    other={"principal": "p2"},
)
needs("a tombstone refuses", Suite, Suite.test_a_tombstone_refuses_an_expired_key, state="succeeded")
needs("a tombstone tells strangers nothing", Suite, Suite.test_a_tombstone_tells_strangers_nothing)
needs("a winner's answer expires", Suite, Suite.test_a_winners_answer_expires)
needs("a copy ends with its row", Suite, Suite.test_a_copy_ends_with_its_row)
needs("a copy of an expired row is not made", Suite, Suite.test_a_copy_of_an_expired_row_is_not_made)

needs("an open record keeps its rest", Redis, Redis.test_an_open_record_keeps_its_rest)
needs("an open record lives for lease and skew", Redis, Redis.test_an_open_record_lives_for_lease_and_skew)
needs("an open record lives for its work", Redis, Redis.test_an_open_record_lives_for_its_work)
needs("a renewed record lives on", Redis, Redis.test_a_renewed_record_lives_on)
needs("a renewal does not shorten a life", Redis, Redis.test_a_renewal_does_not_shorten_a_life)
needs("a finished record lives for its time", Redis, Redis.test_an_answer_lives_for_its_whole_time, tombstone_ms=0)
needs("a released record lives for its time", Redis, Redis.test_what_is_given_back_lives_for_its_whole_time)
needs("the index has an end", Redis, Redis.test_no_key_ever_stays_for_good)
needs("a counter has an end", Redis, Redis.test_a_counter_lives_for_its_window)

for _rule in ("the format is compared", "renew compares the format", "an unreadable record is not absent"):
    needs(_rule, Suite, Suite.test_another_format_is_refused_and_left_alone, state="in_progress")
needs(
    "an unknown state is refused",
    Redis,
    Redis.test_a_damaged_record_is_not_absent,
    state="in_progress",
    field="state",
    value="paused",
)
needs(
    "a record without our fields is not absent",
    Redis,
    Redis.test_a_key_of_another_kind_is_not_absent,
    kind="foreign hash",
)

for _rule in ("a refusal names its holder", "a refusal tells what was committed", "a new claim is not committed yet"):
    needs(_rule, Redis, Redis.test_a_refusal_names_the_holder)

needs("new keys are limited", Suite, Suite.test_new_keys_over_the_limit_are_refused)
needs("old keys are not counted", Suite, Suite.test_retries_and_takeovers_are_not_counted)


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


def play(client: redis.Redis, rule: str, sources: Sources) -> None:
    kind, test, arguments = SCENARIOS[rule]
    suite = kind()
    suite.sources = sources
    suite.use(client)
    test(suite, suite.make_store(), **arguments)


def test_every_rule_has_its_scenario() -> None:
    assert SCENARIOS.keys() == RULES.keys()


@pytest.mark.parametrize("rule", SCENARIOS)
def test_the_scenario_holds_with_the_rule(client: redis.Redis, rule: str) -> None:
    play(client, rule, {})


@pytest.mark.parametrize("rule", SCENARIOS)
def test_the_scenario_fails_without_the_rule(client: redis.Redis, rule: str) -> None:
    # Any other exception would mean that the edit broke the script, not the rule.
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        play(client, rule, break_rule(rule))


def test_an_edit_that_finds_nothing_is_an_error() -> None:
    for text in ("", "if a then if a then"):
        with pytest.raises(AssertionError, match="times in the script"):
            replace_once(text, "if a", "if b")
