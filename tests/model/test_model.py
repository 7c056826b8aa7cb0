"""The model, explored to its end; and the page that tells of it."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.contract import test_rules_are_needed
from tests.contract.lua_tools import RULES as LUA_RULES

from .check import Line, check_open, check_rules, check_runs, trace_of, unnoticed
from .page import PAGE, page
from .rules import NOT_BUILT, RULES
from .runs import NOTICED, RUNS
from .sql_rules import SWITCHES


@pytest.mark.timeout(400)
@pytest.mark.parametrize("check", [check_runs, check_rules, check_open])
def test_everything_is_as_expected(check: Callable[[], Iterator[Line]]) -> None:
    lines = list(check())
    assert lines
    wrong = [f"{line}\n" + "\n".join(line.outcome.trace if line.outcome else ()) for line in lines if not line.ok]
    assert not wrong, "\n".join(wrong)


def test_every_rule_has_something_that_notices_its_absence() -> None:
    assert unnoticed() == set()
    assert NOTICED.keys() == RULES.keys()


def test_every_rule_is_asked_for_by_the_model() -> None:
    """A switch that nobody asks for changes nothing, and neither does one whose name is another in the code."""
    folder = Path(__file__).parent
    text = "".join(path.read_text("utf-8") for path in folder.glob("*.py") if not path.name.startswith("test_"))
    assert set(re.findall(r'\bon\("(\w+)"\)', text)) == RULES.keys()


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_of_the_stores_is_noticed_there(rule: str) -> None:
    """In Lua, in SQL, or with a reason why not; each by a scenario that is run."""
    stores = (*RULES[rule].lua, *RULES[rule].sql)
    assert bool(stores) + bool(RULES[rule].why) + (RULES[rule].place == NOT_BUILT) == 1
    assert set(RULES[rule].lua) <= LUA_RULES.keys() == test_rules_are_needed.SCENARIOS.keys()
    assert set(RULES[rule].sql) <= SWITCHES.keys()


def test_a_trace_is_the_shortest_way() -> None:
    where, outcome = trace_of("skew")
    assert where == "without skew, redis: pause, crash, skew"
    assert outcome.trace[-1] == "p1: claimed"
    assert len(outcome.trace) == 3
    with pytest.raises(KeyError):
        trace_of("no such rule")


def test_an_unknown_rule_is_an_error() -> None:
    with pytest.raises(ValueError, match="no such rule"):
        RUNS["redis: unreadable"].explore("no such rule")


def test_the_page_is_what_the_model_says() -> None:
    assert PAGE.read_text("utf-8") == page(), "run `python -m tests.model --write-docs`"
