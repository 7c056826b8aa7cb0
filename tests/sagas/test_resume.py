"""A saga that was interrupted: the retry goes on at the first step that isn't done, or says that it can't."""

import threading
from typing import Any

import pytest
from sqlalchemy import event

from flask_idempotent import Provider, Saga
from flask_idempotent.call import current_call
from tests.intent.kit import BANK, LAPSING
from tests.web import kit

from .kit import Checkout, assert_rolled_back, assert_unknown, decline, kill, new_key

RAIL = Provider.none("rail")
FORWARD = ["reserve", "charge", "ship"]
KEYS = [b"q83vEjRWeJCrze8SNFZ4kKvN7xI0VniQq83vEjRWeJA=", b"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="]

#: Where the process dies: what was called by then, and what the retry calls.
MOMENTS = {
    "before reserve": ([], FORWARD),
    "after reserve": (["reserve"], FORWARD),
    "before charge": (["reserve"], ["charge", "ship"]),
    "after charge": (["reserve", "charge"], ["charge", "ship"]),
    "after ship": (FORWARD, ["ship"]),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed(checkout: Checkout, moment: str):
    """F134 and 9.1: done steps are not called again, one that was begun is, with the same key."""
    done, again = MOMENTS[moment]
    key = new_key()
    checkout.hooks[moment] = kill
    checkout.killed(key)
    assert checkout.done() == done
    first = list(checkout.calls)
    checkout.hooks.clear()
    assert kit.assert_problem(checkout.order(key), "in-progress")
    answer = checkout.later(key)
    assert answer.status_code == 201
    assert checkout.done() == FORWARD
    assert checkout.names() == [name for name, _, _ in first] + again
    sent = {name: {key for called, _, key in checkout.calls if called == name} for name in FORWARD}
    assert all(len(keys) == 1 for keys in sent.values())
    ids = {entry["what"]: entry["id"] for entry in checkout.provider.entries()}
    assert answer.get_json() == {"items": checkout.items, "run": 1, **ids}
    assert checkout.calls[-1][1] == {"items": checkout.items, "run": 1, **{n: ids[n] for n in FORWARD[:2]}}
    kit.assert_replay(answer, checkout.order(key))
    assert checkout.runs == 2


def test_killed_behind_the_last_step(quick: Checkout):
    key = new_key()
    quick.ends = lambda state: kill()
    quick.killed(key)
    quick.ends = lambda state: (state, 201)
    answer = quick.later(key).get_json()
    assert (answer["run"], set(answer)) == (1, {"items", "run", *FORWARD})
    assert quick.names() == FORWARD


def test_killed_again_and_again(quick: Checkout):
    """One retry a step, and Redis empty each time."""
    key = new_key()
    for moment in ("after reserve", "before charge", "after charge", "before ship", "after ship"):
        quick.hooks = {moment: kill}
        quick.pass_time(40)
        quick.killed(key)
        quick.redis.flushdb()
    quick.hooks.clear()
    assert quick.later(key).status_code == 201
    assert quick.done() == FORWARD
    assert quick.row().attempt == 6


def test_it_waits_until_what_was_under_way_has_landed(make_checkout, sqlite_url):
    """A retry between the lapse and `settle_after` is told to wait; the next one isn't."""
    checkout = make_checkout(sqlite_url, SETTLE_AFTER=600)
    key = new_key()
    checkout.hooks["after charge"] = kill
    checkout.killed(key)
    checkout.hooks.clear()
    for _ in range(2):
        checkout.pass_time(200)
        assert_unknown(checkout.order(key))
        assert checkout.runs == 1
    checkout.pass_time(300)
    assert checkout.order(key).status_code == 201


@pytest.mark.parametrize("over", [("reserve",), ("charge",), ("reserve", "charge", "ship")], ids="+".join)
def test_five_items_and_a_crash_behind_three(make_checkout, database_url, over):
    """F138: the resume does items 4 and 5 only; a new key does all; the finished key replays, and says so."""
    checkout = make_checkout(database_url, over=over)
    key = new_key()
    step = over[0]
    count = iter(range(1, 100))
    checkout.hooks[f"before {step}"] = lambda: kill() if next(count) == 4 else None
    checkout.killed(key)
    assert [each for each in checkout.done() if isinstance(each, tuple)] == [(step, item) for item in "abc"]
    checkout.hooks.clear()
    checkout.calls.clear()
    answer = checkout.later(key)
    assert answer.status_code == 201
    assert checkout.names()[:2] == [step, step]
    assert checkout.names()[2:3] != [step]
    everything = [each for name in FORWARD for each in ([(name, item) for item in "abcde"] if name in over else [name])]
    assert checkout.done() == everything
    assert checkout.steps()[step, 4] == "done"
    kit.assert_replay(answer, checkout.order(key))
    assert checkout.done() == everything
    assert checkout.order(new_key()).status_code == 201
    assert checkout.done() == everything * 2


def test_an_item_has_a_key_of_its_own(make_checkout, sqlite_url):
    checkout = make_checkout(sqlite_url, over=("reserve",))
    checkout.items = ["a", "a", "a"]
    assert checkout.order(new_key()).status_code == 201
    assert checkout.done() == [("reserve", "a")] * 3 + ["charge", "ship"]
    checkout.items = []
    assert checkout.order(new_key()).status_code == 201
    assert checkout.done()[5:] == ["charge", "ship"]


def test_over_what_is_no_list(make_checkout, sqlite_url):
    """A failure at that step: nothing of it was called."""
    checkout = make_checkout(sqlite_url, over=("charge",))
    checkout.items = "abc"
    assert_rolled_back(checkout.order(new_key()))
    assert checkout.done() == ["reserve", "release"]


def test_a_step_may_give_the_list_that_the_next_runs_over_and_change_it(make_checkout, sqlite_url):
    """The items are those of the moment in which the step was reached, in every attempt."""
    checkout = make_checkout(sqlite_url, over=("charge", "ship"))
    checkout.items = ["a"]
    checkout.results = {"reserve": {"items": ["b", "c"]}, "charge": {"items": ["d"]}}
    checkout.hooks["before ship"] = kill
    key = new_key()
    checkout.killed(key)
    checkout.hooks["before ship"] = decline
    assert_rolled_back(checkout.later(key))
    expected = ["reserve", ("charge", "b"), ("charge", "c")]
    assert checkout.done() == [*expected, ("recall", "d"), ("refund", "c"), ("refund", "b"), "release"]


# -- the window --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("remembers", [None, BANK, "paypal"], ids=["default", "bank", "paypal"])
def test_inside_of_the_window_it_is_called_again(make_checkout, sqlite_url, remembers):
    hours = 5 if remembers == "paypal" else 21
    checkout = make_checkout(sqlite_url, route={"provider": remembers})
    key = new_key()
    checkout.hooks["after charge"] = kill
    checkout.killed(key)
    checkout.hooks.clear()
    assert checkout.later(key, hours * 3600).status_code == 201
    assert checkout.done() == FORWARD


@pytest.mark.parametrize("remembers", [None, BANK, "paypal", RAIL], ids=["default", "bank", "paypal", "none"])
def test_past_the_window_it_is_for_a_human(make_checkout, database_url, remembers):
    """8.2: the provider may have forgotten the first sending. What is done stays done, and nothing is sent."""
    hours = {None: 22, BANK: 22, "paypal": 5.5}.get(remembers, 0.1)
    checkout = make_checkout(database_url, route={"provider": remembers})
    key = new_key()
    checkout.hooks["after charge"] = kill
    checkout.killed(key)
    checkout.hooks.clear()
    for _ in range(2):
        assert_unknown(checkout.later(key, hours * 3600))
        assert checkout.row().status == "indeterminate"
        assert "charge" in checkout.row().reason
    assert checkout.names() == ["reserve", "charge"]
    # An operator found it, and says so.
    checkout.ask("UPDATE idempotency_steps SET status = 'done' WHERE step = 'step:charge'")
    assert checkout.later(key).status_code == 201
    assert checkout.names() == FORWARD


def test_a_window_counts_for_its_step_alone(quick: Checkout):
    """Not for steps that were done in time, nor for one that was never called."""
    key = new_key()
    quick.hooks["before charge"] = lambda: None
    quick.hooks["before ship"] = kill
    quick.killed(key)
    quick.ask("DELETE FROM idempotency_steps WHERE step = 'step:ship'")  # as if it had been killed a moment earlier
    quick.hooks.clear()
    assert quick.later(key, 40 * 3600).status_code == 201
    assert quick.done() == FORWARD


# -- who holds it ------------------------------------------------------------------------------------------------------


def test_duplicates_at_once(make_checkout, database_url):
    """One runs; the others are told so, or get its answer."""
    checkout = make_checkout(database_url, engine_options={"pool_size": 8, "max_overflow": 8})
    key = new_key()
    answers = kit.together(*[lambda: checkout.order(key)] * 8)
    for answer in answers:
        assert answer.status_code in (201, 409)
    assert checkout.done() == FORWARD
    assert checkout.runs == 1


def test_two_retries_race(make_checkout, database_url):
    checkout = make_checkout(database_url, engine_options={"pool_size": 8, "max_overflow": 8})
    key = new_key()
    checkout.hooks["after charge"] = kill
    checkout.killed(key)
    checkout.hooks.clear()
    checkout.pass_time(40)
    answers = kit.together(*[lambda: checkout.order(key)] * 6)
    assert {answer.status_code for answer in answers} <= {201, 409}
    assert checkout.until_settled(key, path="/orders").status_code == 201
    assert checkout.runs == 2
    assert checkout.names() == ["reserve", "charge", "charge", "ship"]
    assert checkout.done() == FORWARD


def test_the_lease_is_over_before_a_step(make_checkout, sqlite_url):
    """Past its own deadline a step isn't called: 409, and the retry goes on."""
    checkout = make_checkout(sqlite_url, **LAPSING)
    pause = threading.Event()
    checkout.hooks["after charge"] = lambda: pause.wait(0.6)
    key = new_key()
    kit.assert_problem(checkout.order(key), "lease-lost")
    assert checkout.names() == ["reserve", "charge"]
    assert checkout.steps()["charge", 0] == "begun"
    checkout.hooks.clear()
    assert checkout.until_settled(key, path="/orders").status_code == 201
    assert checkout.done() == FORWARD


def test_the_lease_is_over_before_a_step_is_called_again(make_checkout, sqlite_url):
    """It was begun by the one before, so nothing is written in between: a slow database is enough."""
    checkout = make_checkout(sqlite_url, **LAPSING)
    checkout.hooks["before charge"] = kill
    key = new_key()
    checkout.killed(key)
    checkout.hooks.clear()
    looks: list[str] = []

    def look(_: Any, __: Any, statement: str, *___: Any) -> None:
        if statement.startswith("SELECT") and "began_at" in statement and "idempotency_steps.result" in statement:
            looks.append(statement)
            if len(looks) == 2:  # the view's own
                threading.Event().wait(0.6)

    event.listen(checkout.engine, "after_cursor_execute", look)
    while len(looks) < 2:
        answer = checkout.order(key)
    event.remove(checkout.engine, "after_cursor_execute", look)
    kit.assert_problem(answer, "lease-lost")
    assert checkout.names() == ["reserve", "charge"]
    assert checkout.until_settled(key, path="/orders").status_code == 201
    assert checkout.done() == FORWARD


def test_one_that_was_taken_over_writes_nothing(make_checkout, database_url):
    """5.2: it wakes up in the middle of a step, when another holds the key: what it found out is fenced out."""
    checkout = make_checkout(database_url, engine_options={"pool_size": 5})
    key = new_key()
    with kit.Crowd() as crowd:
        gate = crowd.gate()
        first = [True]

        def hold() -> None:
            if first:
                first.clear()
                call = current_call()
                assert call is not None
                call.engine._heartbeat.remove(call.beat)  # type: ignore[union-attr, arg-type]
                gate.hold()

        checkout.hooks["after charge"] = hold
        paused = crowd.start(checkout.order, key)
        gate.wait_inside()
        checkout.hooks["before ship"] = decline
        assert_rolled_back(checkout.later(key))
        rows = checkout.ask("SELECT step, status, done_at FROM idempotency_steps ORDER BY 1")
        gate.open()
        answer = paused.result(kit.WAIT_S)
    kit.assert_problem(answer, "lease-lost")
    assert checkout.ask("SELECT step, status, done_at FROM idempotency_steps ORDER BY 1") == rows
    assert checkout.names() == ["reserve", "charge", "charge", "ship", "recall", "refund", "release"]
    assert_rolled_back(checkout.order(key))


# -- what is kept ------------------------------------------------------------------------------------------------------


def test_states_and_results_are_encrypted(make_checkout, database_url):
    """10.3: and a retry reads them, also when the key was rotated meanwhile."""
    checkout = make_checkout(database_url, FERNET_KEYS=KEYS[:1], route={"pii": True})
    checkout.items = ["a secret"]
    checkout.results["charge"] = {"card": "a secret too"}
    key = new_key()
    checkout.hooks["before ship"] = kill
    checkout.killed(key)
    kept = b"".join(bytes(result or b"") for (result,) in checkout.ask("SELECT result FROM idempotency_steps"))
    assert b"gAAAA" in kept
    assert b"secret" not in kept
    checkout.hooks.clear()
    checkout.use_keys(KEYS[1], KEYS[0])
    answer = checkout.later(key)
    assert (answer.status_code, answer.get_json()["card"]) == (201, "a secret too")
    assert checkout.names() == ["reserve", "charge", "ship", "ship"]


def test_what_cant_be_read_is_not_done_again(make_checkout, sqlite_url):
    checkout = make_checkout(sqlite_url, FERNET_KEYS=KEYS[:1])
    key = new_key()
    checkout.hooks["before ship"] = kill
    checkout.killed(key)
    checkout.hooks.clear()
    checkout.use_keys(KEYS[1])
    assert_unknown(checkout.later(key))
    assert (checkout.runs, checkout.names()) == (1, FORWARD)
    assert "Fernet" in checkout.row().reason
    checkout.use_keys(*KEYS)
    assert checkout.later(key).status_code == 201


def test_it_goes_on_with_the_state_that_it_began_with(quick: Checkout):
    """Whatever the view of the retry brings: the keys stand for that."""
    key = new_key()
    quick.hooks["before charge"] = kill
    quick.killed(key)
    quick.hooks.clear()
    quick.items = ["something else"]
    answer = quick.later(key)
    assert answer.get_json()["items"] == ["a", "b", "c", "d", "e"]
    assert answer.get_json()["run"] == 1


def changed(quick: Checkout, names: "list[str]", name: str = "checkout") -> None:
    """Another version of the code, in which the saga has these steps."""
    saga = Saga(name)
    for each in names:
        old = quick.saga._steps.get(each)

        def act(state: dict[str, Any], key: str, each: str = each, old: Any = old) -> Any:
            if old is not None:
                return old.act(state, key)
            quick.calls.append((each, {}, key))
            return None

        act.__name__ = each
        saga.step(compensate=old and old.undo)(act)
    quick.saga._steps, quick.saga.name = saga._steps, name


@pytest.mark.parametrize(
    ("names", "name"),
    [
        (["reserve", "pay", "ship"], "checkout"),
        (["check", "reserve", "charge", "ship"], "checkout"),
        (["charge", "ship"], "checkout"),
        (["charge", "reserve", "ship"], "checkout"),
        (FORWARD, "another"),
    ],
)
@pytest.mark.parametrize("way", ["forward", "back"])
def test_other_steps_than_it_was_begun_with(quick: Checkout, names, name, way):
    """A step that was renamed would be called under a new key: so nothing is called at all."""
    if way == "back" and names[:2] == ["charge", "reserve"]:
        pytest.skip("both are undone, by their names")
    key = new_key()
    if way == "back":
        quick.hooks = {"before charge": decline, "before refund": kill}
    else:
        quick.hooks = {"before charge": kill}
    quick.killed(key)
    quick.hooks.clear()
    before = quick.names()
    old = dict(quick.saga._steps)
    changed(quick, names, name)
    assert_unknown(quick.later(key))
    assert quick.row().status == "indeterminate"
    assert quick.names() == before
    quick.saga._steps, quick.saga.name = old, "checkout"
    answer = quick.later(key)
    assert answer.status_code == 201 if way == "forward" else 409
    assert quick.row().status in ("succeeded", "failed")


def test_a_step_that_was_added_behind(quick: Checkout):
    """It is done by whoever is not at the end; one that is at its end doesn't begin anew."""
    keys = [new_key(), new_key()]
    quick.hooks["before ship"] = kill
    quick.killed(keys[0])
    quick.hooks.clear()
    quick.ends = lambda state: kill()
    quick.killed(keys[1])
    quick.ends = lambda state: (state, 201)
    changed(quick, [*FORWARD, "thank"])
    quick.pass_time(40)
    assert [quick.order(key).status_code for key in keys] == [201, 201]
    assert quick.names().count("thank") == 1
