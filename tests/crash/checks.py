"""Compares what clients were told with what was done and what is recorded. Knows no servers: it works on notes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from .books import Books, Copy, Effect, Repeat, digest_of
from .history import CHECK, FORGETTING, Mark, Sent
from .plan import Party, Timing, Trial
from .worker import HOLD_S, OPERATIONS, RAIL_SETTLE_S

__all__ = ["Finding", "Verdict", "check", "strays"]

#: Problems that a client may meet on its way to an answer.
PASSING = frozenset({"in-progress", "lease-lost", "store-unavailable"})
#: Kinds of routes on which nobody may know what happened.
UNKNOWING = frozenset({"intent", "rail", "saga"})
#: What a view may raise where a client is told 500: what it was told to, a provider's fault, and a database's.
CAUSES = frozenset({"Told", "NoAnswer", "Refused", "OperationalError", "InterfaceError", "DatabaseError"})
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
        problems += [*(case.results() if None in excuses or not excuses else case.firsts())]
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


@dataclass(frozen=True)
class _Mishap:
    """What may have made one run more, in a time: from when on, and until when."""

    why: str
    since: float
    until: float = math.inf

    def excuses(self, ran_at: float) -> bool:
        return self.since <= ran_at <= self.until


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
            if each.location != ("" if said["run"].startswith("looked up") else f"/runs/{said['run']}"):
                yield f"party {each.party} was told another answer's Location {each.location!r}: {each}"
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
        if each.status == 500:
            # Without a cause it comes from the server: the session could not be closed behind the answer.
            return each.cause in CAUSES or (not each.cause and self._lost_sessions(each))
        if each.code == "indeterminate":
            return self.trial.kind in UNKNOWING
        return each.code in PASSING or (each.status == 503 and b"nothing happened" in each.body)

    def _lost_sessions(self, each: Sent) -> bool:
        return any(mark.kind.endswith(" sql") and mark.at <= each.until for mark in self.all_marks)

    def _refusal(self, party: Party) -> int | None:
        """How a party is refused by a record of the others; ``None``: not at all."""
        others = [other for other in self.trial.parties if other is not party]
        if any(other.user != party.user for other in others):
            return 404
        return 422 if others else None

    def _tells_of(self, said: dict[str, object], effect: Effect) -> bool:
        if effect.name != said["name"]:
            return False
        names = {"transaction": "run", "redis": "entry"}
        return effect.id == said.get(names.get(self.trial.kind, "charge"))

    # -- what holds where nothing may run twice ------------------------------------------------------------------------

    def results(self) -> Iterator[str]:
        """One effect, or all of a saga's; one party that was told of it, one answer, and that as the first but once."""
        winners = {each.party for each in self.told}
        if len(winners) > 1:
            yield f"parties {sorted(winners)} were both told a result"
        if self.trial.kind == "saga":
            yield from self.steps()
        elif len(self.effects) > 1 and not (self.trial.kind == "rail" and self._late(RAIL_SETTLE_S)):
            yield f"{len(self.effects)} effects"
        elif not self.effects:
            yield "no effect"
        if len({(each.status, each.body) for each in self.told}) > 1:
            yield "different results were told"
        if sum(not each.replayed for each in self.told) > 1:
            yield "more than one answer was told as the first"

    def firsts(self) -> Iterator[str]:
        """Where it ran again: each run's answer was told as the first but once."""
        if any(number > 1 for number in Counter(each.body for each in self.told if not each.replayed).values()):
            yield "more than one answer was told as the first"

    def _late(self, seconds: float) -> bool:
        """Whether a call was on its way for longer than a look-up waits: the look-up can't have found it."""
        return any(effect.late >= seconds for effect in self.effects)

    def steps(self) -> Iterator[str]:
        """All steps were done, or what was done of them is undone."""
        done = Counter(effect.operation for effect in self.effects)
        forward = [effect for effect in self.effects if effect.operation != "refunds"]
        if [effect.operation for effect in forward] != sorted(done.keys() - {"refunds"}, reverse=True):
            yield f"steps in the wrong order: {[effect.operation for effect in forward]}"
        if not self.undone:
            if any(self.trial.parties[each.party].declined for each in self.told):
                yield "what was declined has come to its end"
            if done != {"transfers": 1, "charges": 1}:
                yield f"effects of a saga at its end: {dict(done)}"
            return
        # The second step is undone too, whether it was done or not: who knows?
        if done - Counter(charges=1) != {"transfers": 1, "refunds": 2}:
            yield f"effects of a saga that went back: {dict(done)}"
        undone = [effect for effect in self.effects if effect.operation == "refunds"]
        if [effect.step for effect in undone] != ["pay", "reserve"] and not self._late(self.timing.settle_after):
            yield f"undone in the wrong order: {[effect.step for effect in undone]}"
        turned = min((effect.at for effect in undone), default=self.ended)
        if any(effect.at > turned and effect.late < self.timing.settle_after for effect in forward):
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
        if copy is not None and (copy.state != row.state or not copy.confirmed) and not self._is_left(copy):
            yield f"Redis has {copy.state}{'' if copy.confirmed else ', unconfirmed'}; the row is {row.state}"
        if copy is not None and copy.kind == "full" and copy.body != row.body:
            yield f"Redis has another answer: {copy.body[:120]!r}"
        if self.trial.kind == "intent":
            for effect in self.effects:
                if effect.id not in self.books.payments:
                    yield f"{effect.id} has no local row"
                for repeat in self._repeats():
                    waited = (
                        max((each.late for each in self.effects), default=0.0) if repeat.age is None else repeat.age
                    )
                    if waited < self.timing.settle_after:
                        yield f"{effect.id} was sent again when it was done, or on its way for {waited:.3f} s"
        if self.trial.kind == "saga" and len(self._repeats()) >= row.attempt:
            # An attempt goes on with the call that the one before it was at, and with no other.
            yield f"steps were sent again {len(self._repeats())} times"

    def _paused(self, each: Sent) -> bool:
        marks = self.by_worker.get(each.worker, ())
        return any(mark.kind == "pause" and mark.meets(each.at, each.until) for mark in marks)

    def _repeats(self) -> list[Repeat]:
        keys = {effect.key for effect in self.effects}
        return [repeat for repeat in self.books.repeated if repeat.key in keys]

    def _is_left(self, copy: Copy) -> bool:
        """Whether it may be the claim of another party whose process died. It isn't confirmed, so it refuses nobody."""
        winners = {each.party for each in self.told}
        died = any(each.party not in winners and (each.error or each.status >= 500) for each in self.sent)
        return died and copy.state == "in_progress" and not copy.confirmed

    def kept(self) -> Iterator[str]:
        """Redis says what was told last, for the routes that have nothing else."""
        last = max((each.at for each in self.told), default=self.began)
        if any(mark.kind in FORGETTING and mark.until >= last for mark in self.all_marks):
            return  # it may be anybody's by now
        copy = self.books.copies.get(digest_of(self.trial))
        if copy is None or copy.state != "succeeded":
            yield f"Redis has {copy.state if copy is not None else 'nothing'}"
        elif copy.body not in {each.body for each in self.told}:
            yield f"Redis has an answer that nobody was told: {copy.body[:120]!r}"

    # -- second runs, where they may be --------------------------------------------------------------------------------

    def second_runs(self) -> list[str | None]:
        """Why it ran again, for each run after the first; ``None`` where there is no excuse. A mishap excuses one."""
        runs = [effect.at for effect in self.effects[1:]]
        mishaps = [*self._mishaps()]
        taken: dict[int, int] = {}  # mishap -> run

        def find(run: int, tried: set[int]) -> bool:
            for number, mishap in enumerate(mishaps):
                if number not in tried and mishap.excuses(runs[run]):
                    tried.add(number)
                    if number not in taken or find(taken[number], tried):
                        taken[number] = run
                        return True
            return False

        for run in range(len(runs)):
            find(run, set())
        excuses = {run: mishaps[number].why for number, run in taken.items()}
        return [excuses.get(run) for run in range(len(runs))]

    @property
    def forgotten(self) -> bool:
        """Whether Redis was emptied meanwhile."""
        return any(mark.kind in FORGETTING for mark in self.marks)

    def _mishaps(self) -> Iterator[_Mishap]:
        """All that may have made one run more."""
        faulty = set()
        for each in self.sent:
            found = self._mishap(each)
            if found is not None:
                yield found
            fault = self._fault(each)
            if fault is not None and each.worker not in faulty:
                faulty.add(each.worker)
                yield _Mishap("its call to Redis failed", each.at)
        for mark in self.marks:
            if mark.kind in FORGETTING:
                yield _Mishap("Redis forgot", mark.at)
            elif mark.kind in AWAY and not mark.detail.startswith("1 "):
                yield _Mishap("Redis was away", mark.at)
            elif mark.kind == "stall":
                yield _Mishap("the machine stood still", mark.at)

    def _mishap(self, each: Sent) -> _Mishap | None:
        """What went wrong with one request that may have run."""
        killed = any(
            mark.kind in ("kill", "relief", "died") or mark.detail.endswith(" kill")
            for mark in self.by_worker.get(each.worker, ())
        )
        #: What came to nothing is over when another one was told a result: that is kept.
        told = min((other.until for other in self.told if other.until > each.until), default=math.inf)
        if self._paused(each):
            return _Mishap("its process paused", each.at)
        if each.error and killed and "refused" not in each.error:
            return _Mishap("its process died", each.at, told)
        if each.status == 500:
            return _Mishap("the view failed", each.at, told)
        if "timed out" in each.error:
            return _Mishap("nobody knows what became of it", each.at)
        ran = each.told or each.error or each.status >= 500 or each.code == "lease-lost"
        if ran and each.until - each.at - self._work(each) > self.timing.lease:
            return _Mishap("the machine had no time for it", each.at)
        return None

    def _fault(self, each: Sent) -> Mark | None:
        """The call to Redis that failed in its process, or took longer than a lease."""
        for mark in self.by_worker.get(each.worker, ()):
            if mark.kind == "fault" and mark.detail.startswith("redis.") and not mark.detail.endswith(" kill"):
                _, delay, seconds = mark.detail.partition(" delay ")
                if not delay or float(seconds) > self.timing.lease:
                    return mark
        return None

    def _work(self, each: Sent) -> float:
        """Seconds that a request was meant to take at most."""
        lease = self.timing.lease
        details = [mark.detail for mark in self.by_worker.get(each.worker, ())]
        waits = lease * (("waits" in details) + ("waits after" in details))
        delays = self.timing.long * any(" delay " in detail for detail in details)
        delays += HOLD_S * any(detail.startswith("view.sent") for detail in details)
        provider = [
            mark.until - mark.at
            for mark in self.by_worker.get("", ())
            if mark.kind == "provider waits" and mark.at <= each.until
        ]
        return waits + delays + max(provider, default=0.0)
