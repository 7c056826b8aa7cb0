"""Runs all that is pinned, and says of each whether it is as expected."""

import time
from collections.abc import Iterator
from typing import NamedTuple

from .explore import Outcome
from .rules import RULES
from .runs import NOTICED, OPEN, RUNS


class Line(NamedTuple):
    """One thing that was checked."""

    kind: str
    name: str
    ok: bool
    said: str
    outcome: Outcome | None = None

    def __str__(self) -> str:
        return f"{'ok  ' if self.ok else 'FAIL'} {self.kind:7} {self.name:66} {self.said}"


def check_runs() -> Iterator[Line]:
    """With all rules on every run is clean."""
    for name, run in RUNS.items():
        began = time.perf_counter()
        outcome = run.explore()
        took = time.perf_counter() - began
        said = f"{outcome.states} states, {took:.1f} s, {outcome.violation or 'clean'}"
        yield Line("run", name, outcome.violation is None, said, outcome)


def check_rules() -> Iterator[Line]:
    """With a rule off its run finds its violation."""
    for rule, notice in NOTICED.items():
        outcome = RUNS[notice.run].explore(rule)
        said = f"{notice.run}: {outcome.violation or 'UNNOTICED'} ({len(outcome.trace)} steps)"
        yield Line("without", rule, outcome.name == notice.violation, said, outcome)


def check_open() -> Iterator[Line]:
    """What is open is still open."""
    for name, case in OPEN.items():
        outcome = case.run.explore()
        said = f"{outcome.violation or 'closed'} ({len(outcome.trace)} steps)"
        yield Line("open", name, outcome.name == case.violation, said, outcome)


def unnoticed() -> set[str]:
    """Rules without anything that would notice their absence."""
    return RULES.keys() - NOTICED.keys()


def check_all() -> Iterator[Line]:
    yield from check_runs()
    yield from check_rules()
    yield from check_open()
    missing = unnoticed()
    yield Line(
        "rules", f"{len(RULES)} rules", not missing, f"nothing notices {missing}" if missing else "each is noticed"
    )


def trace_of(name: str) -> tuple[str, Outcome]:
    """The shortest way to what a rule prevents, or to what is open.

    :raises KeyError: there is no such name.
    """
    if name in OPEN:
        return f"open: {name}", OPEN[name].run.explore()
    notice = NOTICED[name]
    return f"without {name}, {notice.run}", RUNS[notice.run].explore(name)
