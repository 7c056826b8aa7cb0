"""A saga that goes forward: its steps in order, each with a key of its own, each remembered by itself."""

import json
from typing import Any

import pytest
from flask import abort

from flask_idempotent import NothingHappened, Saga, TransientStepError, current_idempotency
from flask_idempotent.errors import ConfigurationError
from tests.web import kit

from .kit import Checkout, Declined, assert_rolled_back, assert_unknown, decline, kill, new_key

FORWARD = ["reserve", "charge", "ship"]


def test_every_step_once_and_the_answer_is_replayed(checkout: Checkout):
    """9.1: results are merged into the state of the next steps, and into what run() returns."""
    key = new_key()
    answer = checkout.order(key)
    assert answer.status_code == 201
    ids = {entry["what"]: entry["id"] for entry in checkout.provider.entries()}
    assert answer.get_json() == {"items": checkout.items, "run": 1, **ids}
    assert checkout.done() == FORWARD
    assert [set(state) - {"items", "run"} for _, state, _ in checkout.calls] == [
        set(),
        {"reserve"},
        {"reserve", "charge"},
    ]
    done = {(name, 0): "done" for name in FORWARD}
    assert checkout.steps() == {"saga:checkout": "done", **done}
    kit.assert_replay(answer, checkout.order(key))
    checkout.redis.flushdb()
    kit.assert_replay(answer, checkout.order(key))
    assert checkout.runs == 1
    assert checkout.order(new_key()).get_json()["charge"] != ids["charge"]
    assert checkout.done() == FORWARD * 2


def test_every_call_has_a_key_of_its_own(quick: Checkout):
    """8.1: distinct by record, step, item and direction, and never the client's."""
    quick.hooks["before ship"] = decline
    keys = [new_key() for _ in range(2)]
    for key in keys:
        quick.order(key)
    sent = [key for _, _, key in quick.calls]
    assert quick.names() == ["reserve", "charge", "ship", "recall", "refund", "release"] * 2
    assert len(set(sent)) == 12
    for key in sent:
        assert len(key) <= 64
        assert not any(each in key or each.replace("-", "") in key for each in keys)


def test_a_step_works_on_a_copy(quick: Checkout):
    """What it does to its arguments would be lost by a crash, so it never counts."""
    given = {"items": [1, 2], "order": {"id": 7}}
    spoilt = Saga("spoilt")

    @spoilt.step
    def first(state: dict[str, Any], key: str) -> None:
        state["items"].clear()
        state["order"]["id"] = 8

    @spoilt.step(over="items")
    def second(state: dict[str, Any], key: str, item: Any) -> None:
        state.clear()

    quick.saga = spoilt
    quick.take_orders("/spoilt")
    quick.starts = lambda: spoilt.run(given)
    assert quick.pay(new_key(), path="/spoilt").get_json() == given == {"items": [1, 2], "order": {"id": 7}}


@pytest.mark.parametrize("given", [None, {}, {"nested": {"a": [1, None, "ü", 1.5, True]}}])
def test_a_result_is_json_or_none(quick: Checkout, given):
    quick.results["charge"] = given
    answer = quick.order(new_key())
    assert answer.status_code == 201
    assert {name: value for name, value in answer.get_json().items() if name == "nested"} == (given or {})


ODD = [False, 0, "", "error", ["charge"], ("charge", "failed"), ValueError("no"), {"at": object()}, {"n": float("nan")}]


@pytest.mark.parametrize("given", ODD, ids=repr)
def test_an_error_value_is_a_failure(quick: Checkout, given):
    """F135: a step that swallowed its error and returned it has not succeeded."""
    quick.results["charge"] = given
    assert_rolled_back(quick.order(new_key()))
    assert quick.done() == ["reserve", "charge", "refund", "release"]


@pytest.mark.parametrize("given", [None, [], "state", {"at": object()}])
def test_a_state_is_json(quick: Checkout, given):
    """Nothing was begun, and nothing is kept."""
    quick.app.testing = True
    quick.starts = lambda: quick.saga.run(given)
    with pytest.raises(TypeError):
        quick.order(new_key())
    assert quick.done() == []
    assert quick.row().status == "indeterminate"


def test_a_state_is_what_a_retry_would_have(quick: Checkout):
    """What JSON makes of it, also in the first attempt."""
    quick.items = [(1, 2)]
    quick.results["charge"] = {"by": {1: (2, 3)}}
    answer = quick.order(new_key()).get_json()
    assert quick.calls[0][1]["items"] == [[1, 2]]
    assert quick.calls[2][1]["by"] == {"1": [2, 3]} == answer["by"]


@pytest.mark.parametrize("retries", [0, 2])
def test_retries_are_calls_with_the_same_key(make_checkout, sqlite_url, retries):
    """F136: prior steps are compensated once each when all of them failed."""
    checkout = make_checkout(sqlite_url, retries=retries)
    checkout.hooks["before charge"] = decline
    key = new_key()
    assert_rolled_back(checkout.order(key))
    assert checkout.names() == ["reserve", *["charge"] * (retries + 1), "refund", "release"]
    assert len({sent for name, _, sent in checkout.calls if name == "charge"}) == 1
    assert checkout.ask("SELECT attempt FROM idempotency_steps WHERE step = 'step:reserve'") == [(1,)]
    assert checkout.done() == ["reserve", "refund", "release"]


def test_a_retry_that_succeeds_undoes_nothing(make_checkout, sqlite_url):
    """F136: two failures, three calls, no compensation."""
    checkout = make_checkout(sqlite_url, retries=2)
    answers = [decline, decline, lambda: None]
    checkout.hooks["before charge"] = lambda: answers.pop(0)()
    assert checkout.order(new_key()).status_code == 201
    assert checkout.names() == ["reserve", "charge", "charge", "charge", "ship"]
    assert checkout.ask("SELECT attempt, status FROM idempotency_steps WHERE step = 'step:charge'") == [(3, "done")]
    assert checkout.done() == FORWARD


def test_retries_count_over_crashes(make_checkout, sqlite_url):
    """F136: one failure before the crash, one behind it: that was all."""
    checkout = make_checkout(sqlite_url, retries=1)
    answers = [decline, kill, decline]
    checkout.hooks["before charge"] = lambda: answers.pop(0)()
    key = new_key()
    checkout.killed(key)
    assert_rolled_back(checkout.later(key))
    assert checkout.names() == ["reserve", "charge", "charge", "charge", "refund", "release"]


def test_not_now(checkout: Checkout):
    """9.2: `TransientStepError` leaves it at that step; the retry goes on with the same call."""

    def not_now() -> None:
        raise TransientStepError("the provider is being updated")

    key = new_key()
    checkout.hooks["before charge"] = not_now
    assert_unknown(checkout.order(key))
    assert (checkout.done(), checkout.row().status) == (["reserve"], "indeterminate")
    assert checkout.steps() == {"saga:checkout": "begun", ("reserve", 0): "done", ("charge", 0): "begun"}
    assert "charge" in checkout.row().reason
    assert_unknown(checkout.order(key))  # settle_after
    assert_unknown(checkout.later(key))
    assert checkout.runs == 2
    checkout.hooks.clear()
    answer = checkout.later(key)
    assert answer.status_code == 201
    assert checkout.done() == FORWARD
    assert checkout.names() == ["reserve", "charge", "charge", "charge", "ship"]
    assert len({sent for name, _, sent in checkout.calls if name == "charge"}) == 1
    assert checkout.row().attempt == 3
    kit.assert_replay(answer, checkout.order(key))


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_an_exit_is_a_crash_and_no_failure(quick: Checkout, error):
    """F135: BaseException. What was called may have happened: the same call again, and nothing is undone."""

    def leave() -> None:
        raise error

    key = new_key()
    quick.hooks["after charge"] = leave
    with pytest.raises(error):
        quick.order(key)
    assert quick.row().status == "indeterminate"
    quick.hooks.clear()
    assert quick.later(key).status_code == 201
    assert quick.done() == FORWARD
    assert quick.names() == ["reserve", "charge", "charge", "ship"]


def test_what_certainly_did_not_happen_is_not_compensated(quick: Checkout):
    def refused() -> None:
        raise NothingHappened(quick.app.response_class("", 402))

    quick.hooks["before charge"] = refused
    assert_rolled_back(quick.order(new_key()))
    assert quick.names() == ["reserve", "charge", "release"]


def test_an_abort_in_a_step_is_its_failure(quick: Checkout):
    quick.hooks["before charge"] = lambda: abort(402)
    assert_rolled_back(quick.order(new_key()))
    assert quick.done() == ["reserve", "refund", "release"]


def test_a_step_may_ask_for_a_providers_key(quick: Checkout):
    """Beside its own; that both are there doesn't confuse the rows."""
    asked = []
    quick.hooks["before charge"] = lambda: asked.append(current_idempotency.provider_key("stripe"))
    assert quick.order(new_key()).status_code == 201
    assert len(asked) == 1
    assert quick.done() == FORWARD


def test_the_store_away_between_two_steps(quick: Checkout):
    """The step was called, and can't be noted: 503; the retry calls it again with the same key."""
    key = new_key()
    away = quick.sql_away()
    quick.hooks["after charge"] = away.__enter__
    answer = quick.order(key)
    away.__exit__(None, None, None)
    assert (answer.status_code, answer.get_json()["code"]) == (503, "store-unavailable")
    assert "Nothing was carried out" not in answer.get_json()["detail"]
    quick.hooks.clear()
    assert quick.later(key).status_code == 201
    assert quick.done() == FORWARD


@pytest.mark.parametrize("how", ["swallows", "answers before"])
def test_no_answer_is_kept_while_it_is_at_no_end(quick: Checkout, how):
    """A view that hides a saga's error, or that doesn't come to it in a retry, can't end the record."""
    key = new_key()

    def not_now() -> None:
        raise TransientStepError

    def run() -> Any:
        try:
            return quick.saga.run({"items": []}), 201
        except Exception:
            return {"fine": True}, 200

    quick.hooks["before charge"] = not_now
    quick.starts = run
    assert quick.order(key).status_code == 200
    assert quick.row().status == "indeterminate"
    if how == "answers before":
        quick.starts = lambda: ({"error": "not in stock"}, 404)
        assert quick.later(key).status_code == 404
        assert quick.row().status == "indeterminate"
    quick.hooks.clear()
    quick.starts = run
    assert quick.later(key).status_code == 201
    assert quick.done() == FORWARD


def test_nothing_happened_of_a_view_does_not_free_what_is_half_done(quick: Checkout):
    key = new_key()

    def run() -> Any:
        try:
            return quick.saga.run({}), 201
        except Exception:
            raise NothingHappened(quick.app.response_class("", 503)) from None

    def not_now() -> None:
        raise TransientStepError

    quick.starts = run
    quick.hooks["before charge"] = not_now
    assert quick.order(key).status_code == 503
    assert quick.row().status == "indeterminate"


def test_a_view_that_fails_behind_its_saga_is_run_again_without_it(quick: Checkout):
    key = new_key()
    quick.ends = lambda state: 1 / 0
    assert quick.order(key).status_code == 500
    assert quick.row().status == "indeterminate"
    quick.ends = lambda state: (state, 201)
    answer = quick.later(key)
    assert (answer.status_code, answer.get_json()["run"]) == (201, 1)
    assert (quick.done(), quick.runs, quick.names()) == (FORWARD, 2, FORWARD)


def test_it_runs_once_in_a_request(quick: Checkout):
    quick.app.testing = True
    quick.ends = lambda state: quick.saga.run(state)
    with pytest.raises(ConfigurationError, match="twice"):
        quick.order(new_key())
    assert quick.done() == FORWARD


def test_a_saga_in_a_saga_is_a_failure(quick: Checkout):
    quick.hooks["before charge"] = lambda: quick.saga.run({})
    assert_rolled_back(quick.order(new_key()))


def test_the_route_must_say_so(quick: Checkout):
    """Else a crash would be settled by a reconciler that knows nothing of the steps."""
    quick.app.testing = True
    quick.take_orders("/other", saga=None, recovery="manual")
    with pytest.raises(ConfigurationError, match="saga="):
        quick.pay(new_key(), path="/other")
    assert quick.done() == []


def test_nothing_of_it_is_told_or_logged(quick: Checkout, caplog):
    """10.1: names and classes, no texts."""
    key = new_key()
    quick.hooks["before charge"] = decline
    answer = quick.order(key)
    told = answer.get_data(as_text=True) + caplog.text + json.dumps(list(map(list, quick.ask(REASONS))))
    assert Declined.__name__ in caplog.text
    for secret in ("may hold anything", key, *{sent for _, _, sent in quick.calls}):
        assert secret not in told
    assert "charge" not in answer.get_data(as_text=True)


REASONS = "SELECT reason, step FROM idempotency_steps UNION ALL SELECT reason, status FROM idempotency_keys"
