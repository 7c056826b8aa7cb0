"""From what the clients saw and what the ledger says to the table and its verdicts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .clients import Tally
from .situations import LATER, Situation

__all__ = ["Line", "Report", "judge"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One situation in numbers. ``ran`` is counted where it happened, the rest by the clients.

    Of the intents, ``again`` ran more than once, ``never`` didn't run, ``differing`` have unlike answers; ``without``
    is the number of clients that never got a result.
    """

    name: str
    title: str
    sent: int
    ran: int
    replayed: int
    refused: int
    refusals: Mapping[str, int]
    unanswered: int
    intents: int
    again: int
    never: int
    differing: int
    without: int

    @property
    def ok(self) -> bool:
        """Every intent ran once, and every client got the one result."""
        return self.intents > 0 and not (self.again or self.never or self.differing or self.without)

    @property
    def verdict(self) -> str:
        """The same in a few words."""
        if self.ok:
            return "each ran once"
        faults = (
            (self.again, "ran again"),
            (self.never, "never ran"),
            (self.differing, "got unlike answers"),
            (self.without, "without a result"),
        )
        return ", ".join(f"{count} {what}" for count, what in faults if count) or "nothing was sent"


@dataclass(frozen=True, slots=True)
class Report:
    """The whole table."""

    lines: Sequence[Line]

    @property
    def ok(self) -> bool:
        return bool(self.lines) and all(line.ok for line in self.lines)

    @property
    def words(self) -> str:
        """The table in one sentence."""
        intents, sent = sum(line.intents for line in self.lines), sum(line.sent for line in self.lines)
        ran = sum(line.ran for line in self.lines)
        start = f"{intents} intents were sent {sent} times"
        if self.ok:
            return f"{start}. Each ran once, and everybody who asked got the one answer, to the byte."
        again = sum(line.again for line in self.lines)
        if again:
            return f"{start} and ran {ran} times: {again} of them ran more than once."
        refusals = sum((Counter(line.refusals) for line in self.lines), Counter())
        said = ", ".join(f"{reason} ({count}×)" for reason, count in refusals.most_common())
        return f"{start} and ran {ran} times, but not everybody got the one answer. Refused for: {said or 'nothing'}."

    @property
    def foot(self) -> str:
        """What the table doesn't show."""
        return f"With a later version come {' and '.join(LATER)}."

    def as_json(self) -> dict[str, object]:
        """The table as one JSON object."""
        situations = [
            {
                "name": line.name,
                "sent": line.sent,
                "ran": line.ran,
                "replayed": line.replayed,
                "refused": line.refused,
                "refusals": dict(line.refusals),
                "unanswered": line.unanswered,
                "intents": line.intents,
                "ran_once": not (line.again or line.never),
                "all_answered": not line.without,
                "same_bytes": not line.differing,
                "ok": line.ok,
            }
            for line in self.lines
        ]
        return {"ok": self.ok, "situations": situations, "later": list(LATER)}


def judge(situation: Situation, tally: Tally, runs: Mapping[str, int]) -> Line:
    """One line of the table.

    :param runs: how often something really happened, by reference.
    """
    counts = [runs.get(reference, 0) for reference in tally.results]
    return Line(
        name=situation.name,
        title=situation.title,
        sent=tally.sent,
        ran=sum(counts),
        replayed=tally.replayed,
        refused=tally.refusals.total(),
        refusals=tally.refusals,
        unanswered=tally.unanswered,
        intents=len(counts),
        again=sum(count > 1 for count in counts),
        never=counts.count(0),
        differing=sum(len(set(answers)) > 1 for answers in tally.results.values()),
        without=tally.clients - tally.served,
    )
