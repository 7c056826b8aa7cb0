"""What the storm shows: a progress bar and a table, with rich on a terminal and in plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TextIO, TypeAlias

from .report import Report
from .situations import Situation

__all__ = ["Display", "display_on"]

Advance: TypeAlias = Callable[[Situation], None]

_COLUMNS = ("sent", "ran", "replayed", "refused", "intents")


class Display(Protocol):
    """Where the storm is shown."""

    def progress(self, situations: Sequence[Situation]) -> AbstractContextManager[Advance]:
        """Shows how far each situation is; what the ``with`` block gives is called for each client that is through."""

    def table(self, report: Report) -> None:
        """Shows the table, its foot, and the sentence below it."""


def display_on(stream: TextIO) -> Display:
    """Rich on a terminal where it is installed, else plain text."""
    if stream.isatty():
        try:
            return _Rich(stream)
        except ImportError:
            pass
    return _Plain(stream)


class _Plain:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @contextmanager
    def progress(self, situations: Sequence[Situation]) -> Iterator[Advance]:
        done = dict.fromkeys((situation.name for situation in situations), 0)

        def advance(situation: Situation) -> None:
            done[situation.name] += 1
            if done[situation.name] == situation.clients:
                self._say(f"{situation.title}: {situation.clients} clients are through")

        yield advance

    def table(self, report: Report) -> None:
        width = max(len(line.title) for line in report.lines)
        self._say("")
        self._say("  ".join([" " * width, *(f"{column:>8}" for column in _COLUMNS)]))
        for line in report.lines:
            numbers = (f"{getattr(line, column):>8}" for column in _COLUMNS)
            self._say("  ".join([f"{line.title:<{width}}", *numbers, "ok  " if line.ok else "FAIL", line.verdict]))
        self._say(report.foot)
        self._say("")
        self._say(report.words)

    def _say(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


class _Rich:
    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console

        self._console = Console(file=stream, highlight=False)

    @contextmanager
    def progress(self, situations: Sequence[Situation]) -> Iterator[Advance]:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("clients"))
        with Progress(*columns, console=self._console, transient=True) as progress:
            tasks = {
                situation.name: progress.add_task(situation.title, total=situation.clients) for situation in situations
            }
            yield lambda situation: progress.advance(tasks[situation.name])

    def table(self, report: Report) -> None:
        from rich import box
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("situation")
        for column in _COLUMNS:
            table.add_column(column, justify="right")
        table.add_column("verdict")
        for line in report.lines:
            mark = f"[green]✓ {line.verdict}[/]" if line.ok else f"[bold red]✗ {line.verdict}[/]"
            table.add_row(line.title, *(str(getattr(line, column)) for column in _COLUMNS), mark)
        self._console.print(table)
        self._console.print(report.foot + "\n", style="dim")
        self._console.print(report.words, style="green" if report.ok else "bold red")
