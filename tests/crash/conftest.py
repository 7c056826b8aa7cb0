"""The ward in which the matrix runs, and its table at the end of the session."""

import contextlib
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from tests import servers
from tests.provider import provider_process

from .matrix import Cell, Hospital, Result, repeated_too_often, table

RESULTS: pytest.StashKey[list[Result]] = pytest.StashKey()


class Ward:
    """All the cells that this session has selected, under way at once; a test waits for its own."""

    def __init__(self, hospital: Hospital, away: dict[str, str], results: list[Result]) -> None:
        self.hospital = hospital
        self.away = away
        self.results = results
        self._coming: dict[tuple[Cell, str], Future[Result]] = {}

    def start(self, cell: Cell, database: str) -> None:
        if database not in self.away:
            self._coming[cell, database] = self.hospital.start(cell, database)

    def result(self, cell: Cell, database: str) -> Result:
        if database in self.away:
            pytest.skip(self.away[database])
        result = self._coming[cell, database].result(300)
        self.results.append(result)
        return result


@pytest.fixture(scope="module")
def ward(request: pytest.FixtureRequest) -> Iterator[Ward]:
    """Servers of its own: what other tests flush and empty meanwhile is not what is looked at here.

    It fails in the end where too many cells had to be repeated: each of them passed, perhaps by luck.
    """
    calls = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    selected = [(params["cell"], params["database"]) for params in calls if isinstance(params.get("cell"), Cell)]
    results = request.config.stash.setdefault(RESULTS, [])
    with contextlib.ExitStack() as stack:
        urls: dict[str, str] = {}
        away: dict[str, str] = {}
        for database in {database for _, database in selected} & {"postgresql", "mariadb"}:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            try:
                urls[database] = stack.enter_context(
                    servers.postgres(directory) if database == "postgresql" else servers.mariadb()
                )
            except pytest.skip.Exception as error:
                away[database] = str(error)
        redis_url = stack.enter_context(servers.embedded_redis())
        provider = stack.enter_context(provider_process())
        hospital = stack.enter_context(Hospital(redis_url, provider, urls.__getitem__))
        ward = Ward(hospital, away, results)
        for cell, database in selected:
            ward.start(cell, database)
        yield ward
    if often := repeated_too_often(results):
        pytest.fail("\n".join(often), pytrace=False)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    results = terminalreporter.config.stash.get(RESULTS, [])
    if results:
        terminalreporter.section("crash matrix")
        terminalreporter.write_line(table(results))
