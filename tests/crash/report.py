"""What a run has to say: its counts, and for each broken promise all that is known of the key."""

from __future__ import annotations

import datetime
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .books import Books, digest_of
from .checks import Finding
from .history import CHECK, Mark, Sent
from .plan import Trial

__all__ = ["Report", "merged", "show", "timeline"]


@dataclass
class Report:
    """``counts``: sums. ``trials``: by database. ``statuses``: answers. ``faults``: what was done.
    ``second_runs``: those of Redis-only routes, by their excuse. ``timelines``: for each broken promise."""

    databases: list[str]
    seed: str
    counts: Counter[str] = field(default_factory=Counter)
    trials: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    second_runs: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    timelines: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.findings

    def to_json(self) -> str:
        return json.dumps({"ok": self.ok, **vars(self)})

    @classmethod
    def from_json(cls, text: str) -> Report:
        values: dict[str, Any] = json.loads(text)
        values.pop("ok")
        for name, value in values.items():
            if isinstance(value, dict):
                values[name] = Counter(value)
        return cls(**values)


def merged(reports: Sequence[Report]) -> Report:
    """Several runs beside each other as one."""
    whole = Report([name for report in reports for name in report.databases], reports[0].seed)
    for report in reports:
        for mine, its in (
            (whole.counts, report.counts),
            (whole.trials, report.trials),
            (whole.kinds, report.kinds),
            (whole.statuses, report.statuses),
            (whole.faults, report.faults),
            (whole.second_runs, report.second_runs),
        ):
            mine.update(its)
        whole.findings += report.findings
        whole.timelines += report.timelines
    whole.seconds = max(report.seconds for report in reports)
    return whole


def show(report: Report) -> str:
    """The report as a person reads it."""
    trials = report.trials.total()
    lines = [*report.timelines, ""] if report.timelines else []
    lines.append(f"{trials} trials in {report.seconds:.0f} s ({trials / max(report.seconds, 1):.1f} a second)")
    lines.append(f"seed {report.seed}")
    for title, counts in (
        ("trials", report.trials),
        ("kinds of routes", report.kinds),
        ("counts", report.counts),
        ("answers", report.statuses),
        ("faults", report.faults),
        ("second runs on Redis-only routes", report.second_runs),
    ):
        lines.append(f"\n{title}")
        lines += _table(counts)
    lines.append("")
    lines += [f"FAILED {finding}" for finding in report.findings]
    lines.append("OK" if report.ok else "FAILED")
    return "\n".join(lines)


def _table(counts: Mapping[str, int]) -> list[str]:
    return [f"  {number:>8}  {name}" for name, number in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]


def timeline(
    title: str, trial: Trial, findings: Iterable[Finding], sent: Sequence[Sent], marks: Sequence[Mark], books: Books
) -> str:
    """All that is known of a key."""
    began = min((each.at for each in sent), default=0.0)
    ended = max((each.until for each in sent), default=0.0)
    lines = [f"--- {title}: trial {trial.number}, {trial.kind}, key {trial.key}"]
    lines += [f"    {finding.what}" for finding in findings]
    for number, party in enumerate(trial.parties):
        late = ", after the owner's result" if party.late else ""
        lines.append(f"    party {number}: {party.user}, {party.body}, {len(party.clients)} clients{late}")
    moments: list[tuple[float, str]] = []
    for each in sent:
        who = "check" if each.client == CHECK else f"client {each.client}"
        moments.append(
            (each.at, f"party {each.party} {who} -> {each.worker}, answered {each.until - began:.3f}: {each}")
        )
    for mark in marks:
        if mark.meets(began - 1, ended):
            lasted = f" until {mark.until - began:.3f}" if mark.until - mark.at > 0.01 else ""
            moments.append((mark.at, f"        * {mark}{lasted}"))
    for effect in books.of(trial):
        moments.append((effect.at or ended, f"        = {effect.operation} {effect.id} {effect.name} {effect.key}"))
    for at, text in sorted(moments):
        lines.append(f"  {at - began:8.3f}  {text}")
    digest = digest_of(trial)
    lines.append(f"    row: {_short(books.rows.get(digest))}")
    lines.append(f"    Redis: {_short(books.copies.get(digest))}")
    lines.append(f"    began at {datetime.datetime.fromtimestamp(began).time()}")
    return "\n".join(lines)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) < 400 else text[:400] + "…"
