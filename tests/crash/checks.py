"""Compares what clients were told with what was done and what is recorded. Knows no servers: it works on notes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from .books import Books, Effect, digest_of
from .history import CHECK, FORGETTING, Mark, Sent
from .plan import Party, Timing, Trial
from .worker import OPERATIONS

__all__ = ["Finding", "Verdict", "check", "strays"]

#: Problems that a client may meet on its way to an answer.
PASSING = frozenset({"in-progress", "lease-lost", "indeterminate", "store-unavailable"})
#: Events after which a call to the provider can arrive late, when a look-up has found nothing.
DELAYING = frozenset({"provider waits", "stall"})
#: Events in which one call can fail for good: it is tried twice.
AWAY = frozenset({"silence redis", "pause redis", "cut redis"})


@dataclass(frozen=True)
class Finding:
    """A broken promise."""

    trial: int
    what: str


@dataclass
class Verdict:
    """What is to be said of one trial. ``excuses``: why it ran again, for each second run of a Redis-only route."""

    findings: list[Finding] = field(default_factory=list)
    excuses: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


def check(trial: Trial, sent: Sequence[Sent], marks: Sequence[Mark], books: Books, timing: Timing) -> Verdict:
    """:param marks: all that was done to servers and workers in the batch."""
    verdict = Verdict()
    case = _Case(trial, sent, marks, books, timing)
    case.count(verdict.counts)
    problems = [*case.everywhere()]
    if trial.kind == "redis":
        excuses = case.second_runs()
        if None in excuses or not excuses:
            problems += [*case.results()]
        if not case.forgotten:
            problems += [*case.refusals()]
        problems += [*case.kept()]
        verdict.excuses = [excuse or "no excuse" for excuse in excuses]
    else:
        problems += [*case.results(), *case.refusals(), *case.recorded()]
    verdict.findings = [Finding(trial.number, problem) for problem in problems]
    return verdict


def strays(trials: Sequence[Trial], books: Books) -> list[str]:
    """What is in the books, and belongs to no trial."""
    wanted = {(kind, party.name) for trial in trials for party in trial.parties for kind in OPERATIONS[trial.kind]}
    digests = {digest_of(trial) for trial in trials}
    effects = [effect for each in books.effects.values() for effect in each]
    charges = {effect.id for effect in effects}
    return [
        *(
            f"an effect that nobody asked for: {effect.operation} {effect.name}"
            for effect in effects
            if (effect.operation, effect.name) not in wanted
        ),
        *(f"a row of an unknown key: {row}" for digest, row in books.rows.items() if digest not in digests),
        *(f"a local row of no charge: {charge}" for charge in books.payments if charge not in charges),
        *(f"a key in Redis that never goes: {key}" for key in books.endless),
    ]


class _Case:
    def __init__(self, trial: Trial, sent: Sequence[Sent], marks: Sequence[Mark], books: Books, timing: Timing) -> None:
        self.trial, self.sent, self.books, self.timing = trial, sent, books, timing
        self.told = [each for each in sent if each.told]
        self.effects = books.of(trial)
        self.began = min((each.at for each in sent), default=0.0)
        self.ended = max((each.until for each in sent), default=0.0)
        self.marks = [mark for mark in marks if mark.meets(self.began, self.ended)]
        self.all_marks = marks
        self.by_worker: dict[str, list[Mark]] = {}
        for mark in marks:
            self.by_worker.setdefault(mark.worker, []).append(mark)

    def count(self, counts: Counter[str]) -> None:
        counts["requests"] += len(self.sent)
        counts["effects"] += len(self.effects)
        counts["replays"] += sum(each.replayed for each in self.told)
        counts["sagas that went back"] += self.undone
        row = self.books.rows.get(digest_of(self.trial))
        if row is not None:
            counts["look-ups in vain"] += row.tries
            counts["settled by a look-up"] += row.reason == "settled by a look-up"
            counts["further attempts"] += row.attempt - 1

    # -- what holds on every route, whatever happens -------------------------------------------------------------------

    def everywhere(self) -> Iterator[str]:
        for each in self.sent:
            if not self._is_known(each):
                yield f"an answer that nobody expects: {each}"
            if each.refused and each.status != self._refusal(self.trial.parties[each.party]):
                yield f"party {each.party} was refused in the wrong words: {each}"
        if not self.told:
            yield "nobody was ever told a result"
        for each in self.told:
            if each.undone:
                continue
            party = self.trial.parties[each.party]
            said = each.json()
            if said["name"] != party.name:
                yield f"party {each.party} was told what is not its own: {each}"
            if not any(self._tells_of(said, effect) for effect in self.effects):
                yield f"party {each.party} was told of an effect that is not there: {each}"
        for number, party in enumerate(self.trial.parties):
            mine = [each for each in self.sent if each.party == number]
            patient = any(client.tries is None for client in party.clients)
            asked_last = any(each.client == CHECK for each in mine)
            if (patient or asked_last) and not any(each.told or each.refused for each in mine):
                yield f"party {number} never came to an end"
        owners = {each.body: each.party for each in self.told}
        for each in self.told:
            if owners[each.body] != each.party:
                yield f"two parties were told the same: {each}"

    def _is_known(self, each: Sent) -> bool:
        if not each.status or each.told or each.refused:
            return True
        return each.code in PASSING or (each.status >= 500 and not each.code)

    def _refusal(self, party: Party) -> int | None:
        """How a party is refused by a record of the others; ``None``: not at all."""
        others = [other for other in self.trial.parties if other is not party]
        if any(other.user != party.user for other in others):
            return 404
        return 422 if others else None

    def _tells_of(self, said: dict[str, object], effect: Effect) -> bool:
        if effect.name != said["name"]:
            return False
        if self.trial.kind == "transaction":
            return True
        return effect.id == said.get("entry" if self.trial.kind == "redis" else "charge")

    # -- what holds where nothing may run twice ------------------------------------------------------------------------

    def results(self) -> Iterator[str]:
        """One effect, or all of a saga's; one party that was told of it, one answer, and that as the first but once."""
        winners = {each.party for each in self.told}
        if len(winners) > 1:
            yield f"parties {sorted(winners)} were both told a result"
        if self.trial.kind == "saga":
            yield from self.steps()
        elif len(self.effects) > 1:
            yield f"{len(self.effects)} effects"
        elif not self.effects:
            yield "no effect"
        if len({(each.status, each.body) for each in self.told}) > 1:
            yield "different results were told"
        if sum(not each.replayed for each in self.told) > 1:
            yield "more than one answer was told as the first"

    def steps(self) -> Iterator[str]:
        """All steps were done, or what was done of them is undone."""
        done = Counter(effect.operation for effect in self.effects)
        if not self.undone:
            if any(self.trial.parties[each.party].declined for each in self.told):
                yield "what was declined has come to its end"
            if done != {"transfers": 1, "charges": 1}:
                yield f"effects of a saga at its end: {dict(done)}"
            return
        # The second step is undone too, whether it was done or not: who knows?
        if done - Counter(charges=1) != {"transfers": 1, "refunds": 2}:
            yield f"effects of a saga that went back: {dict(done)}"
        turned = min((effect.at for effect in self.effects if effect.operation == "refunds"), default=self.ended)
        if (
            any(effect.at > turned for effect in self.effects if effect.operation != "refunds")
            and not self._may_be_late()
        ):
            yield "a step was done when the saga had gone back"

    @property
    def undone(self) -> bool:
        return any(each.undone for each in self.told)

    def refusals(self) -> Iterator[str]:
        """Whose key it is was never told that it is not."""
        for number in {each.party for each in self.told}:
            for each in self.sent:
                if each.party == number and each.refused and not self._was_anothers(each):
                    yield f"party {number}, whose key it is, was refused: {each}"

    def _was_anothers(self, refused: Sent) -> bool:
        """Whether another party's work may have run that came to nothing. On a ``transaction`` route such work leaves
        nothing, so the key was that party's only for as long."""
        if self.trial.kind != "transaction":
            return False
        running = any(
            each.at <= refused.until and ("timed out" in each.error or refused.at <= each.until + self.timing.lapse)
            for each in self.sent
            if each.party != refused.party and (each.error or each.status >= 500)
        )
        # The work that stands says itself when it began. When its request was sent says nothing: it may have waited
        # in front of a process that was paused.
        began = min((each.json()["began"] for each in self.told if each.party == refused.party), default=0.0)
        return running and refused.at <= began

    def recorded(self) -> Iterator[str]:
        """What the database and Redis say is what was done."""
        digest = digest_of(self.trial)
        row, copy = self.books.rows.get(digest), self.books.copies.get(digest)
        if row is None:
            yield "the database knows nothing of the key"
            return
        if row.state != ("failed" if self.undone else "succeeded"):
            yield f"the row is {row.state} ({row.reason})"
        if any(each.body != row.body for each in self.told):
            yield f"the row has another answer: {(row.body or b'')[:120]!r}"
        if copy is not None and copy.confirmed and copy.kind == "full" and copy.body != row.body:
            yield f"Redis has another answer: {copy.body[:120]!r}"
        if self.trial.kind == "intent":
            for effect in self.effects:
                if effect.id not in self.books.payments:
                    yield f"{effect.id} has no local row"
                if effect.key in self.books.repeated and not self._may_be_late():
                    yield f"{effect.id} was sent again when it was done"

    def _may_be_late(self) -> bool:
        """Whether a call to the provider may have arrived when a look-up had found nothing."""
        known = min((each.until for each in self.told), default=self.ended)
        if any(mark.kind in DELAYING and mark.at <= known for mark in self.marks):
            return True
        mine = [each for each in self.sent if each.at <= known]
        return any(self._paused(each) for each in mine)

    def _paused(self, each: Sent) -> bool:
        marks = self.by_worker.get(each.worker, ())
        return any(mark.kind == "pause" and mark.meets(each.at, each.until) for mark in marks)

    def kept(self) -> Iterator[str]:
        """Redis says what was told last, for the routes that have nothing else."""
        if any(mark.kind in FORGETTING and mark.until >= self.began for mark in self.all_marks):
            return  # it may be anybody's by now
        copy = self.books.copies.get(digest_of(self.trial))
        if copy is None or copy.state != "succeeded":
            yield f"Redis has {copy.state if copy is not None else 'nothing'}"
        elif copy.body not in {each.body for each in self.told}:
            yield f"Redis has an answer that nobody was told: {copy.body[:120]!r}"

    # -- second runs, where they may be --------------------------------------------------------------------------------

    def second_runs(self) -> list[str | None]:
        """Why it ran again, for each run after the first; ``None`` where there is no excuse."""
        return [self._excuse(effect.at) for effect in self.effects[1:]]

    @property
    def forgotten(self) -> bool:
        """Whether Redis was emptied meanwhile."""
        return any(mark.kind in FORGETTING for mark in self.marks)

    def _excuse(self, ran_at: float) -> str | None:
        """What happened before this run, for which there may be one more."""
        for mark in self.marks:
            if mark.kind in FORGETTING and mark.at <= ran_at:
                return "Redis forgot"
        for each in self.sent:
            if each.at <= ran_at and (found := self._mishap(each)) is not None:
                return found
        for mark in self.marks:
            if mark.kind in AWAY and not mark.detail.startswith("1 ") and mark.at <= ran_at:
                return "Redis was away"
            if mark.kind == "stall" and mark.at <= ran_at:
                return "the machine stood still"
        return None

    def _mishap(self, each: Sent) -> str | None:
        """What went wrong with one request that may have run."""
        for mark in self.by_worker.get(each.worker, ()):
            killed = mark.kind in ("kill", "relief", "died") or mark.detail.endswith(" kill")
            if killed and each.error:
                return "its process died"
            if mark.kind == "fault" and mark.detail.startswith("redis.") and not killed:
                return "its call to Redis failed"
        if self._paused(each):
            return "its process paused"
        if each.status == 500:
            return "the view failed"
        if "timed out" in each.error:
            return "nobody knows what became of it"
        if each.until - each.at - self._work(each) > self.timing.lease:
            return "the machine had no time for it"
        return None

    def _work(self, each: Sent) -> float:
        """Seconds that a request was meant to take at most."""
        lease = self.timing.lease
        details = [mark.detail for mark in self.by_worker.get(each.worker, ())]
        waits = lease * (("waits" in details) + ("waits after" in details))
        delays = self.timing.long * any(detail.endswith(" delay") for detail in details)
        provider = [
            mark.until - mark.at
            for mark in self.by_worker.get("", ())
            if mark.kind == "provider waits" and mark.at <= each.until
        ]
        return waits + delays + max(provider, default=0.0)
