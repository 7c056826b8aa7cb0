"""A saga that goes back: what was done is undone once, in reverse order, and nothing goes forward any more."""

import threading
from typing import Any

import pytest

from flask_idempotent import Provider, SagaFailed, TransientStepError, signals
from tests.intent.kit import LAPSING
from tests.provider import NoAnswer
from tests.web import kit

from .kit import Checkout, Declined, assert_rolled_back, assert_unknown, decline, kill, new_key

BACK = ["refund", "release"]


@pytest.mark.parametrize("failing", ["reserve", "charge", "ship"])
def test_failure_for_good(checkout: Checkout, failing: str):
    """9.2 and F135: the failed step counts as unknown, so it is undone too. The answer is kept; it takes a new key."""
    key = new_key()
    checkout.hooks[f"before {failing}"] = decline
    answer = checkout.order(key)
    assert_rolled_back(answer)
    steps = ["reserve", "charge", "ship"]
    begun = steps[: steps.index(failing) + 1]
    assert checkout.names() == begun + {"reserve": ["release"], "charge": BACK, "ship": ["recall", *BACK]}[failing]
    assert checkout.steps() == {"saga:checkout": "undone", **{(name, 0): "undone" for name in begun}}
    row = checkout.row()
    assert (row.status, row.response_code) == ("failed", 409)
    assert row.reason == f"rolled back: step {failing}: Declined"
    done = checkout.done()
    checkout.hooks.clear()
    kit.assert_replay(answer, checkout.order(key))
    checkout.redis.flushdb()
    kit.assert_replay(answer, checkout.order(key))
    assert checkout.done() == done
    assert checkout.order(new_key()).status_code == 201
    assert checkout.done() == [*done, *steps]


def test_what_a_compensation_sees(quick: Checkout):
    """The state that the saga began with, and the results: its own too, unless its step failed."""
    quick.hooks["before ship"] = decline
    quick.order(new_key())
    given = {"items": quick.items, "run": 1}
    ids = {entry["what"]: entry["id"] for entry in quick.provider.entries() if entry["what"] in ("reserve", "charge")}
    assert [state for _, state, _ in quick.calls[3:]] == [{**given, **ids}] * 3


def test_items_are_undone_one_by_one_and_see_their_own_result(make_checkout, database_url):
    checkout = make_checkout(database_url, over=("charge",))
    count = iter(range(1, 100))
    checkout.hooks["before charge"] = lambda: decline() if next(count) == 4 else None
    assert_rolled_back(checkout.order(new_key()))
    charged = [("charge", item) for item in "abc"]
    assert checkout.done() == ["reserve", *charged, *[("refund", item) for item in "dcba"], "release"]
    ids = [entry["id"] for entry in checkout.provider.entries() if entry["what"] == "charge"]
    seen = [state["charge"] for name, state, _ in checkout.calls if name == "refund"]
    assert seen == [ids[-1], *reversed(ids)]  # that of the fourth is the state's


def test_items_are_those_that_were_done(make_checkout, sqlite_url):
    """Also where a later step has put another list in their place."""
    checkout = make_checkout(sqlite_url, over=("reserve",))
    checkout.items = ["a", "b"]
    checkout.results["charge"] = {"items": ["x", "y", "z"]}
    checkout.hooks["before ship"] = decline
    assert_rolled_back(checkout.order(new_key()))
    assert checkout.done() == [
        ("reserve", "a"),
        ("reserve", "b"),
        "charge",
        "recall",
        "refund",
        ("release", "b"),
        ("release", "a"),
    ]


@pytest.mark.parametrize("after", [True, False], ids=["after", "before"])
@pytest.mark.parametrize("moment", ["recall", "refund", "release"])
def test_killed_while_it_goes_back(checkout: Checkout, moment: str, after: bool):
    """9.3: the retry goes on with that, under the same key, and never forward; the view doesn't even run."""
    key = new_key()
    checkout.hooks = {"before ship": decline, f"{'after' if after else 'before'} {moment}": kill}
    checkout.killed(key)
    assert checkout.steps()["saga:checkout"] == "undoing"
    assert checkout.row().status == "in_progress"
    checkout.hooks.clear()
    checkout.starts = lambda: ({"error": "not in stock"}, 404)
    answer = checkout.later(key)
    assert_rolled_back(answer)
    assert checkout.runs == 1
    assert checkout.done() == ["reserve", "charge", "recall", *BACK]
    back = ["recall", *BACK]
    place = back.index(moment)
    assert checkout.names()[3:] == back[: place + 1] + back[place:]
    assert len({sent for name, _, sent in checkout.calls if name == moment}) == 1
    kit.assert_replay(answer, checkout.order(key))
    assert (checkout.row().status, checkout.runs) == ("failed", 1)


def test_killed_when_it_is_back(quick: Checkout):
    """All is undone, and the answer is not there yet: the retry gives it, and nothing is called."""
    key = new_key()

    @quick.app.errorhandler(SagaFailed)
    def restyle(error: SagaFailed) -> Any:
        if quick.hooks:
            kill()
        return {"rolled back": error.step, "status": error.status}, 409

    quick.hooks["before charge"] = decline
    quick.killed(key)
    calls = quick.names()
    quick.hooks.clear()
    answer = quick.later(key)
    assert (answer.status_code, answer.get_json()) == (409, {"rolled back": "charge", "status": "ROLLED_BACK"})
    assert quick.names() == calls
    assert (quick.row().status, quick.runs) == ("failed", 1)
    kit.assert_replay(answer, quick.order(key))


def test_two_retries_race_to_undo(make_checkout, database_url):
    """9.3: whoever undoes holds the outer claim."""
    checkout = make_checkout(database_url, engine_options={"pool_size": 8, "max_overflow": 8})
    key = new_key()
    checkout.hooks = {"before ship": decline, "after refund": kill}
    checkout.killed(key)
    checkout.hooks.clear()
    checkout.pass_time(40)
    answers = kit.together(*[lambda: checkout.order(key)] * 6)
    assert {answer.status_code for answer in answers} == {409}
    assert_rolled_back(checkout.until_settled(key, path="/orders"))
    assert checkout.done() == ["reserve", "charge", "recall", *BACK]
    assert checkout.names()[3:] == ["recall", "refund", *BACK]


def test_not_now_while_it_goes_back(checkout: Checkout):
    """A compensation that says "later" stays where it is; a retry goes on there."""

    def not_now() -> None:
        raise TransientStepError

    key = new_key()
    checkout.hooks = {"before ship": decline, "before refund": not_now}
    assert_unknown(checkout.order(key))
    assert checkout.row().status == "indeterminate"
    checkout.hooks.clear()
    assert_rolled_back(checkout.later(key))
    assert checkout.done() == ["reserve", "charge", "recall", *BACK]
    assert checkout.runs == 1


def test_a_compensation_has_the_retries_of_its_step(make_checkout, sqlite_url):
    checkout = make_checkout(sqlite_url, retries=1)
    failures = iter([decline, lambda: None])
    checkout.hooks = {"before ship": decline, "before refund": lambda: next(failures)()}
    assert_rolled_back(checkout.order(new_key()))
    assert checkout.names() == ["reserve", "charge", "ship", "ship", "recall", "refund", "refund", "release"]
    assert checkout.done() == ["reserve", "charge", "recall", *BACK]


@pytest.mark.parametrize("given", [False, "failed", ValueError()], ids=repr)
def test_a_compensation_that_returns_an_error_has_failed(quick: Checkout, given):
    quick.hooks["before charge"] = decline
    quick.results["release"] = given
    assert_unknown(quick.order(new_key()))


def test_a_compensation_that_fails_for_good(checkout: Checkout, caplog):
    """F137: neither success nor plain failure, told once to who is on duty, and it stays until a human has decided."""
    key = new_key()
    checkout.hooks = {"before ship": decline, "before refund": decline}
    assert_unknown(checkout.order(key))
    human = [record.getMessage() for record in caplog.records if "waits for a human" in record.getMessage()]
    assert len(human) == 1
    assert "refund" not in human[0]
    assert "step charge" in human[0]
    assert checkout.steps() == {
        "saga:checkout": "undo_failed",
        ("reserve", 0): "done",
        ("charge", 0): "undo_failed",
        ("ship", 0): "undone",
    }
    assert checkout.row().reason == "for a human: the compensation of step charge failed: Declined"
    checkout.hooks.clear()
    calls = checkout.names()
    for _ in range(3):
        assert_unknown(checkout.later(key, 7 * 86_400))
        row = checkout.row()
        assert (row.status, row.expires_at) == ("indeterminate", None)
        assert row.reason == "for a human: the compensation of step charge failed: Declined"
    assert (checkout.names(), checkout.runs) == (calls, 1)
    assert len([record for record in caplog.records if "waits for a human" in record.getMessage()]) == 1


@pytest.mark.parametrize("decision", ["done", "undone"])
def test_a_human_has_decided(quick: Checkout, decision: str):
    """F137: tried again, or undone by hand; the retry takes it from there."""
    key = new_key()
    quick.hooks = {"before ship": decline, "before refund": decline}
    quick.order(key)
    quick.hooks.clear()
    quick.ask(f"UPDATE idempotency_steps SET status = '{decision}' WHERE status = 'undo_failed' AND step LIKE 'step:%'")
    assert_rolled_back(quick.later(key))
    assert quick.done() == ["reserve", "charge", "recall", *(BACK if decision == "done" else BACK[1:])]
    assert quick.row().reason == "rolled back: step ship: Declined"
    assert quick.row().status == "failed"


@pytest.mark.parametrize("remembers", [None, Provider.none("rail")], ids=["default", "none"])
def test_an_undo_past_its_window_is_for_a_human(make_checkout, sqlite_url, remembers):
    """8.2: it was begun, and its key may be forgotten by now."""
    checkout = make_checkout(sqlite_url, route={"provider": remembers})
    key = new_key()
    checkout.hooks = {"before ship": decline, "after refund": kill}
    checkout.killed(key)
    checkout.hooks.clear()
    assert_unknown(checkout.later(key, 23 * 3600))
    assert checkout.steps()["charge", 0] == checkout.steps()["saga:checkout"] == "undo_failed"
    assert checkout.done() == ["reserve", "charge", "recall", "refund"]


def test_an_undo_has_a_window_of_its_own(quick: Checkout):
    """Its key is first used when it is undone, however long ago the step was."""
    key = new_key()
    quick.hooks["before ship"] = kill
    quick.killed(key)
    quick.ask("DELETE FROM idempotency_steps WHERE step = 'step:ship'")
    quick.hooks = {"before ship": decline, "after refund": kill}
    quick.pass_time(30 * 3600)
    quick.killed(key)
    quick.hooks.clear()
    assert_rolled_back(quick.later(key, 20 * 3600))
    assert quick.done() == ["reserve", "charge", "recall", *BACK]


def test_the_lease_is_over_while_it_goes_back(make_checkout, sqlite_url):
    checkout = make_checkout(sqlite_url, **LAPSING)
    checkout.hooks = {"before ship": decline, "after refund": lambda: threading.Event().wait(0.6)}
    key = new_key()
    kit.assert_problem(checkout.order(key), "lease-lost")
    assert checkout.names()[-1] == "refund"
    checkout.hooks.clear()
    assert_rolled_back(checkout.until_settled(key, path="/orders"))
    assert checkout.done() == ["reserve", "charge", "recall", *BACK]


def test_the_store_away_when_a_step_has_failed(quick: Checkout):
    """It can't turn back: nothing is undone, and the retry calls the step again."""
    key = new_key()
    away = quick.sql_away()

    def fail() -> None:
        away.__enter__()
        decline()

    quick.hooks["before charge"] = fail
    answer = quick.order(key)
    away.__exit__(None, None, None)
    assert (answer.status_code, answer.get_json()["code"]) == (503, "store-unavailable")
    assert quick.done() == ["reserve"]
    quick.hooks.clear()
    assert quick.later(key).status_code == 201


def test_a_timeout_of_a_step_that_happened(quick: Checkout):
    """An exception says nothing certain: the charge is there, and it is refunded."""
    quick.hooks["before charge"] = lambda: quick.provider.fault("drop", "after")
    assert_rolled_back(quick.order(new_key()))
    assert quick.done() == ["reserve", "charge", *BACK]
    assert quick.row().reason.endswith(NoAnswer.__name__)


# -- what a view makes of it -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [200, 303, 402, 409])
def test_a_view_may_answer_itself(quick: Checkout, status: int):
    """Also with a status that is else released: there is nothing that could pass. The record says how it ended."""
    found: list[SagaFailed] = []

    def run() -> Any:
        try:
            return quick.saga.run({"items": []}), 201
        except SagaFailed as error:
            found.append(error)
            return {"declined": error.step}, status

    quick.starts = run
    quick.hooks["before charge"] = decline
    key = new_key()
    answer = quick.order(key)
    assert (answer.status_code, answer.get_json()) == (status, {"declined": "charge"})
    (error,) = found
    assert (error.step, error.status) == ("charge", SagaFailed.ROLLED_BACK)
    assert isinstance(error.__cause__, Declined)
    kit.assert_replay(answer, quick.order(key))
    assert quick.row().status == "failed"


def test_an_answer_that_is_none_is_made_again(quick: Checkout):
    """A 500 behind the rollback: nothing is kept, and the retry tells how it ended, without the view."""
    key = new_key()
    broken = [True]

    @quick.app.errorhandler(SagaFailed)
    def breaks(error: SagaFailed) -> Any:
        if broken:
            raise RuntimeError("the template is broken")
        return {"rolled back": error.step}, 409

    quick.hooks["before charge"] = decline
    assert quick.order(key).status_code == 500
    assert quick.row().status == "indeterminate"
    broken.clear()
    answer = quick.later(key)
    assert answer.get_json() == {"rolled back": "charge"}
    assert quick.row().status == "failed"
    assert quick.names() == ["reserve", "charge", *BACK]


def test_a_view_that_hides_what_is_left_is_not_believed(quick: Checkout):
    def run() -> Any:
        try:
            return quick.saga.run({"items": []}), 201
        except SagaFailed as error:
            return {"step": error.step, "status": error.status}, 200

    quick.starts = run
    quick.hooks = {"before charge": decline, "before release": decline}
    key = new_key()
    assert quick.order(key).get_json() == {"step": "reserve", "status": SagaFailed.COMPENSATION_FAILED}
    assert quick.row().status == "indeterminate"
    assert_unknown(quick.later(key))


@pytest.mark.parametrize("outcome", [{200, 409}, lambda response: "release"], ids=["set", "callable"])
def test_outcome_has_no_say(make_checkout, sqlite_url, outcome):
    checkout = make_checkout(sqlite_url, route={"outcome": outcome})
    key = new_key()

    def not_now() -> None:
        raise TransientStepError

    checkout.hooks = {"before charge": not_now}
    assert_unknown(checkout.order(key))
    assert checkout.row().status == "indeterminate"
    checkout.hooks = {"before charge": decline}
    assert_rolled_back(checkout.later(key))
    assert checkout.row().status == "failed"


def test_the_kept_answer_is_whole_where_others_are_references(make_checkout, sqlite_url):
    checkout = make_checkout(sqlite_url, route={"store": "reference", "rebuild": lambda reference: {"id": reference}})
    checkout.hooks["before charge"] = decline
    key = new_key()
    answer = checkout.order(key)
    assert_rolled_back(answer)
    kit.assert_replay(answer, checkout.order(key))


def test_signals(quick: Checkout):
    """Who watches refusals sees both ends."""
    seen: list[Any] = []

    def note(sender: Any, **said: Any) -> None:
        seen.append((said["reason"], said["scope"]))

    quick.hooks["before charge"] = decline
    with signals.refused.connected_to(note, quick.app), signals.completed.connected_to(note, quick.app):
        quick.order(new_key())
        quick.hooks["before release"] = decline
        quick.order(new_key())
    assert seen == [
        ("saga-rolled-back", "orders"),
        ("rolled back: step charge: Declined", "orders"),
        ("indeterminate", "orders"),
    ]
