"""Random crashes: many keys at once, clients that retry, and everything around them that fails; then the books.

A trial is one key, which several clients send at about the same time and again until they are told a result, while
workers are killed and paused, Redis is emptied, restarted and cut off, sessions of the database are ended and the
provider hangs up. When all is calm again the ledger of effects is compared with what the clients were told and with
the records: nothing twice, nothing lost, nothing stuck.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.harness import wait_until

from .books import Books, read_books
from .chaos import Chaos
from .checks import check, strays
from .clients import Clients
from .crew import Crew
from .history import History, Mark
from .plan import FILE_EVENTS, SQL_EVENTS, WEIGHTS, Batch, Timing, draw_batch, draw_fault
from .report import Report, merged, timeline
from .site import Site, site
from .worker import KINDS, Nursery

__all__ = ["Options", "run", "run_beside"]

#: Threads for each key of a batch, which is more than it has clients on the average. Those that wait cost little.
THREADS = 8
#: Seconds between looks at whether a run is stopped.
PAUSE_S = 0.1
#: Timelines that are shown; more don't help.
MOST_TIMELINES = 20
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Options:
    """What is run.

    :param batch: trials under fire at once.
    :param workers: processes that serve.
    :param pause_s: the mean time between two events.
    :param settings: of the workers' extension, in capitals: to take a protection out.
    :param events: the kinds of events that may be drawn.
    :param faults: whether workers are born with faults.
    """

    trials: int
    seed: str = "1"
    kinds: Sequence[str] = KINDS
    batch: int = 60
    workers: int = 4
    pause_s: float = 0.3
    timing: Timing = field(default_factory=Timing)
    settings: Mapping[str, Any] = field(default_factory=dict)
    events: Sequence[str] = tuple(WEIGHTS)
    faults: bool = True
    #: Asked where a run can break off in order, several times a second.
    stopped: Callable[[], bool] = lambda: False


def run(database: str, options: Options, tell: Callable[[str], None] = lambda text: None) -> Report:
    """All trials on one kind of database, in this process.

    :param tell: gets a line after each batch.
    :raises KeyboardInterrupt: it was stopped, and has tidied up.
    """
    report = Report([database], options.seed)
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        with _deaf_children():
            place = stack.enter_context(site(database, options.timing, options.settings))
            nursery = stack.enter_context(Nursery(place.config))
        pool = stack.enter_context(ThreadPoolExecutor(THREADS * options.batch))
        first = number = shown = 0
        while first < options.trials:
            trials = range(first, min(first + options.batch, options.trials))
            _run_batch(place, nursery, pool, options, _draw(place, options, number, trials), report)
            first, number = trials.stop, number + 1
            report.seconds = time.monotonic() - began
            for text in report.timelines[shown:]:
                tell(text)
            shown, found = len(report.timelines), len(report.findings)
            tell(f"{database}: {first} of {options.trials} trials, {report.seconds:.0f} s, {found} findings")
    return report


@contextlib.contextmanager
def _deaf_children() -> Iterator[None]:
    """Processes that start here don't hear of Ctrl-C, which a terminal tells all: they are ended in order."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run_beside(databases: Sequence[str], options: Options, tell: Callable[[str], None]) -> Report:
    """The same on several kinds of databases, each in a process of its own. The trials are shared out."""
    share = -(-options.trials // len(databases))
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(_process(database, share, options, tell)) for database in databases]
        try:
            outputs = [process.stdout.read() for process in processes if process.stdout is not None]
        except BaseException:
            for process in processes:
                process.terminate()  # all at once: each has to tidy up
            raise
    reports = [
        Report.from_json(output) if output else Report([database], options.seed, findings=[f"{database}: broke off"])
        for database, output in zip(databases, outputs, strict=True)
    ]
    return merged(reports)


@contextlib.contextmanager
def _process(
    database: str, trials: int, options: Options, tell: Callable[[str], None]
) -> Iterator[subprocess.Popen[str]]:
    """A run of its own; what it tells is passed on."""
    command = [
        *(sys.executable, "-m", "tests.crash", "--json"),
        *("--trials", str(trials), "--seed", options.seed, "--database", database),
        *("--batch", str(options.batch), "--workers", str(options.workers), "--kinds", ",".join(options.kinds)),
    ]
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    teller = threading.Thread(target=_pass_on, args=(process, tell), daemon=True)
    teller.start()
    try:
        yield process
    finally:
        process.terminate()
        process.wait()
        teller.join()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def _pass_on(process: subprocess.Popen[str], tell: Callable[[str], None]) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        tell(line.rstrip("\n"))


def _draw(place: Site, options: Options, number: int, trials: range) -> Batch:
    absent = SQL_EVENTS if place.sql_wire is None else FILE_EVENTS
    return draw_batch(
        f"{options.seed}/{place.database}",
        number,
        trials,
        kinds=options.kinds,
        events=[kind for kind in options.events if kind not in absent],
        timing=options.timing,
        slots=options.workers,
        pause_s=options.pause_s,
    )


def _run_batch(
    place: Site, nursery: Nursery, pool: ThreadPoolExecutor, options: Options, batch: Batch, report: Report
) -> None:
    history = History()
    timing = options.timing
    cuts = _cuts(place)

    def birth(slot: int, generation: int) -> dict[str, Any] | None:
        if not options.faults:
            return None
        return draw_fault(f"{options.seed}/{place.database}/{batch.number}", slot, generation, options.kinds, timing)

    crew = Crew(nursery, history, options.workers, birth)
    try:
        clients = Clients(pool, crew, history, batch, timing)
        try:
            chaos = Chaos(place, crew, history, batch.events)
            try:
                _pause(timing.window, options)
            finally:
                chaos.end()
            crew.calm()
            clients.wait(lambda: _pause(0, options))
            clients.check(lambda: _pause(0, options))
        finally:
            clients.stop()
    finally:
        crew.close()
    # What a worker sent just before it was killed is received by then.
    time.sleep(PAUSE_S)
    wait_until(place.provider.is_idle, "the end of all calls that were on their way")
    books = read_books(place)
    _note(report, place.database, batch, history, books, timing)
    report.faults["cut replies"] += _cuts(place) - cuts
    place.empty()


def _pause(seconds: float, options: Options) -> None:
    """:raises KeyboardInterrupt: the run is stopped."""
    ends = time.monotonic() + seconds
    while True:
        if options.stopped():
            raise KeyboardInterrupt
        left = ends - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(left, PAUSE_S))


def _cuts(place: Site) -> int:
    return place.redis_wire.cuts + (place.sql_wire.cuts if place.sql_wire is not None else 0)


def _note(report: Report, database: str, batch: Batch, history: History, books: Books, timing: Timing) -> None:
    marks = history.marks
    for mark in marks:
        report.faults[_kind_of(mark)] += 1
        if mark.kind == "died":
            report.findings.append(f"{database}, batch {batch.number}: a worker died {mark.detail}")
    for each in history:
        report.statuses[f"{each.status} {each.code}".strip() if each.status else each.error.partition(":")[0]] += 1
    for stray in strays(batch.trials, books):
        report.findings.append(f"{database}, batch {batch.number}: {stray}")
    for trial in batch.trials:
        sent = history.of(trial.number)
        verdict = check(trial, sent, marks, books, timing)
        report.trials[database] += 1
        report.kinds[trial.kind] += 1
        report.counts.update(verdict.counts)
        report.second_runs.update(verdict.excuses)
        for finding in verdict.findings:
            report.findings.append(f"{database}, trial {trial.number}, {trial.kind}: {finding.what}")
        if verdict.findings and len(report.timelines) < MOST_TIMELINES:
            report.timelines.append(timeline(database, trial, verdict.findings, sent, marks, books))


def _kind_of(mark: Mark) -> str:
    return f"worker {mark.detail}" if mark.kind in ("fault", "habit") else mark.kind
