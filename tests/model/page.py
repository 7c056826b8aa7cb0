"""The page of the docs, made from what is pinned here: `python -m tests.model --write-docs`."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from flask_idempotent.stores.statements import Statements
from tests.contract.lua_tools import RULES as LUA_RULES

from .rules import NOT_BUILT, RULES
from .runs import NOTICED, OPEN, RUNS
from .sql_rules import SWITCHES

PAGE = Path(__file__).parents[2] / "docs" / "model.md"

#: What the page says of itself.
INTRODUCTION = Path(__file__).with_name("introduction.md")


def table() -> str:
    """Rule, where it lives, what noticed that it was gone."""
    return "\n".join((*_head("rule", "what it says", "where", "the model without it", "in the stores"), *_rules()))


def page() -> str:
    parts = [
        INTRODUCTION.read_text("utf-8"),
        "## Runs\n",
        *_head("run", "requests and others", "what may go wrong, so often"),
        *_runs(),
        "\n## Rules\n",
        "What the model finds without a rule, with the run that finds it; and which scenarios of the stores fail "
        f"without it. “Model only: {NOT_BUILT}”: the product has no code for it.\n",
        table(),
        "\n## What is open\n",
        "The model finds each of these with all rules on. They are pinned, so that it is seen when one is closed.\n",
        *(f"- *{name[0].upper()}{name[1:]}* (`{case.violation}`). {case.text}" for name, case in OPEN.items()),
        "\n## Rules of the stores that the model doesn't tell apart\n",
        "They are taken out in the same way.\n",
        *(f"- Lua: {rule}" for rule in _beyond("lua")),
        *(f"- {_kind(rule)}: {rule}" for rule in _beyond("sql")),
    ]
    return "\n".join(parts) + "\n"


def _head(*columns: str) -> tuple[str, str]:
    return f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"


def _runs() -> Iterator[str]:
    for name, run in RUNS.items():
        who = ", ".join(f"{actor.principal}/{actor.body}" if actor.principal else actor.role for actor in run.actors)
        faults = ", ".join(f"{fault} {count}" for fault, count in run.faults.items())
        yield f"| {name} | {who} | {faults}{'' if run.deduplicates else '; the provider recognises nothing'} |"


def _kind(switch: str) -> str:
    """Whether a switch changes a statement, or the Python around it."""
    return "SQL" if any(edit.owner is Statements for edit in SWITCHES[switch].edits) else "Python"


def _rules() -> Iterator[str]:
    for name, rule in RULES.items():
        model = f"{NOTICED[name].violation} in “{NOTICED[name].run}”"
        stores = [f"Lua: {each}" for each in rule.lua] + [f"{_kind(each)}: {each}" for each in rule.sql]
        place, noticed = rule.place, "; ".join(stores) or f"none: {rule.why}"
        if rule.place == NOT_BUILT:
            place, noticed = "–", f"model only: {NOT_BUILT}"
        yield f"| `{name}` | {rule.text} | {place} | {model} | {noticed} |"


def _beyond(kind: str) -> Iterable[str]:
    known = {each for rule in RULES.values() for each in (rule.lua if kind == "lua" else rule.sql)}
    return [each for each in (LUA_RULES if kind == "lua" else SWITCHES) if each not in known]
