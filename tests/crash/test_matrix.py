"""7.1: every point at which a process can die has a stated recovery, and a cell that kills it there."""

import dataclasses
import re
from pathlib import Path

import pytest

from .conftest import Ward
from .matrix import (
    BACK,
    CELLS,
    DATABASES,
    RUNS,
    SAGA_CELLS,
    STORES,
    WITHOUT,
    Cell,
    Result,
    missing,
    plan,
    points,
    repeated_too_often,
    table,
)
from .worker import VIEW_POINTS

PAGE = Path(__file__).parents[2] / "docs" / "guarantees.md"

#: The rows of the table "Where a process can die" in the docs, and the cells that they stand for: kind -> points.
ROWS: dict[str, dict[str, tuple[str, ...]]] = {
    "after the claim in Redis": dict.fromkeys(STORES, ("redis.claim after",)),
    "after the claim in the database": {
        "transaction": ("transaction.claim after",),
        "intent": ("intent.claim after",),
    },
    "in the view, before the effect": dict.fromkeys(STORES, ("view.effect before",)),
    "after the effect, before the answer is kept": {
        kind: ("view.effect after", f"{kind}.complete before") for kind in STORES
    },
    "between two steps of a saga, or in one": {"saga": ("view.effect after", "intent.keep_steps after")},
    "while a saga goes back": {"saga": ("intent.keep_steps before", "intent.keep_steps after")},
    "after the commit, before the copy in Redis": {
        "transaction": ("transaction.complete after", "redis.complete before"),
        "intent": ("intent.complete after", "redis.complete before"),
    },
    "after the answer is kept, before it goes out": dict.fromkeys(
        STORES, ("redis.complete after", "view.answer before")
    ),
    "in the reconciler": {"intent": ("view.look_up before", "view.look_up after")},
}


def rows_of_the_page() -> dict[str, set[str]]:
    """The rows of the table, without links, and the columns that say something there."""
    _, _, section = PAGE.read_text("utf-8").partition("\n## Where a process can die\n")
    header, _, *rows = re.findall(r"^\|(.*)\|$", section.partition("\n## ")[0], re.M)
    columns = [cell.strip(" `") for cell in header.split("|")][1:]
    assert columns == ["Redis-only", "transaction", "intent"]
    found = {}
    for row in rows:
        name, *cells = (cell.strip() for cell in re.sub(r"\[(.+?)\]\(.+?\)", r"\1", row).split("|"))
        found[name] = {kind for kind, cell in zip(STORES, cells, strict=True) if cell != "–"}
    return found


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("cell", "database"), [pytest.param(cell, database, id=f"{database}-{cell.id}") for cell, database in plan()]
)
def test_cell(cell: Cell, database: str, ward: Ward) -> None:
    result = ward.result(cell, database)
    if result.error is not None:
        raise result.error
    assert result.met == {cell.point}
    assert result.pids


@pytest.mark.timeout(400)
def test_every_cell_ran(request: pytest.FixtureRequest, ward: Ward) -> None:
    """Where nothing was deselected, nothing is missing."""
    asked = [item for item in request.session.items if getattr(item, "originalname", "") == "test_cell"]
    if len(asked) < len(plan()):
        pytest.skip("some cells were deselected")
    if ward.away:
        pytest.skip(", ".join(ward.away.values()))
    assert missing(ward.results) == []


@pytest.mark.timeout(400)
def test_a_wrong_expectation_is_seen(ward: Ward) -> None:
    """One more effect than there is; an outcome that doesn't come; another point than the one it died at."""
    (cell,) = [cell for cell in CELLS if cell.id == "redis-redis.complete-after"]
    for wrong in (
        {"effects": 2},
        {"outcome": RUNS},
        {"left": ("in_progress", None, 1)},
        {"left": ("succeeded", None, 2)},
        {"attempt": 2},
    ):
        result = ward.hospital.start(dataclasses.replace(cell, **wrong), WITHOUT).result(100)
        assert isinstance(result.error, AssertionError), wrong
        assert str(result) == "FAILED"


def test_every_store_call_has_its_cells() -> None:
    """Before and after each public method of each store, on each kind of route. A new one needs cells of its own."""
    killed = {
        (cell.kind, cell.layer, cell.at, cell.when) for cell in CELLS if cell.action == "kill" and cell.layer in STORES
    }
    assert killed == points()


def test_every_point_in_a_view_has_its_cells() -> None:
    for kind in STORES:
        found = {(cell.at, cell.when) for cell in CELLS if cell.kind == kind and cell.layer == "view"}
        assert found >= {("effect", "before"), ("effect", "after"), ("answer", "before")}
    every = {cell.at for cell in CELLS if cell.layer == "view"}
    assert every == set(VIEW_POINTS)


def test_the_rows_are_those_of_the_docs() -> None:
    """Each row of the page has its points, for each kind of route that it says something of, and no other has any."""
    ours = {row: {"intent" if kind == "saga" else kind for kind in kinds} for row, kinds in ROWS.items()}
    assert rows_of_the_page() == ours


@pytest.mark.parametrize("row", ROWS)
def test_rows_of_the_docs(row: str) -> None:
    for kind, there in ROWS[row].items():
        assert there
        for point in there:
            assert [cell for cell in CELLS if cell.kind == kind and cell.point == point and cell.action == "kill"]


def test_the_store_away_at_completion() -> None:
    """It fails once, before and after the work; and its server is really gone."""
    for kind in STORES:
        assert {cell.when for cell in CELLS if cell.kind == kind and cell.point.startswith(f"{kind}.complete")
                and cell.action == "raise"} == {"before", "after"}  # fmt: skip
        assert [cell for cell in CELLS if cell.kind == kind and cell.action == "away"]


def test_a_saga_has_cells_for_both_ways() -> None:
    """Before and after all that is noted of it, forward and back."""
    noted = {cell.outcome: set() for cell in SAGA_CELLS}
    for cell in SAGA_CELLS:
        if cell.at == "keep_steps":
            noted[cell.outcome].add((cell.n, cell.when))
    assert noted[RUNS] == {(n, when) for n in range(1, 7) for when in ("before", "after")}
    assert noted[BACK] == {(n, when) for n in range(5, 11) for when in ("before", "after")} - {(5, "before")}


def test_cells_have_names_of_their_own() -> None:
    assert len({cell.id for cell in CELLS}) == len(CELLS)


def test_what_did_not_run_is_told() -> None:
    cell = next(cell for cell in CELLS if cell.kind == "intent")
    ran = Result(cell, "mariadb", pids=[7], ledger=["0→1"], met={cell.point})
    absent = missing([ran])
    assert len(absent) == len(plan()) - 1
    assert f"{cell.id} on mariadb" not in absent
    (line,) = [line for line in table([ran]).splitlines() if line.startswith(cell.point)]
    assert line.count("NOT RUN") == len(DATABASES) - 1
    assert "7 ledger 0→1" in line


@pytest.mark.parametrize(("repeated", "of", "found"), [(4, 10, False), (5, 10, True), (5, 100, False), (11, 100, True)])
def test_cells_that_are_tried_again_and_again(repeated: int, of: int, found: bool) -> None:
    results = [
        Result(cell, "mariadb", disturbed=["its lease was lost"] if number < repeated else [])
        for number, cell in zip(range(of), CELLS, strict=False)
    ]
    assert len(results) == of
    assert bool(repeated_too_often(results)) == found
    assert f"of {repeated} cells" in table(results)
