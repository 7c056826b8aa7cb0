"""What a state of the model is made of. All of it is immutable; equal states are one state.

Time is an order of events, not a number. A lease is `LIVE`, `DISPUTED` (lapsed by a clock that is ahead by less than
the skew) or `LAPSED` for everybody.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

IN_PROGRESS = "in_progress"
SUCCEEDED = "succeeded"
FAILED = "failed"
RELEASED = "released"
INDETERMINATE = "indeterminate"
COMPENSATING = "compensating"  #: of a saga: the undo is the job's
FINISHED = (SUCCEEDED, FAILED)

LIVE, DISPUTED, LAPSED = 0, 1, 2

#: The answer of a record that nobody can read.
UNREADABLE = "unreadable"

REQUEST, JOB, SWEEP, OPERATOR = "request", "job", "sweep", "operator"

# Where an actor stands. An actor that is `DONE` was told its answer; one that is `DEAD` crashed.
START = "start"  #: not asked yet; a job waits here for work
GUARD = "guard"  #: claimed before its guards ran
ASK_ROW = "ask the row"  #: Redis refuses, and nobody has confirmed its record: what does the committed row say?
ASK_HOLDER = "ask for the holder"  #: no row is committed: is the transaction of the record's claim open?
ASK_SQL = "ask SQL"  #: about to claim in the database
UNASKED = "unasked"  #: about to run on Redis' word alone
TAKE = "take"  #: read a row that may be taken, about to compare and swap
LOOK_UP = "look up"  #: about to ask the provider what became of the attempt before
VERDICT = "verdict"  #: about to settle with what the look-up found
VIEW = "view"  #: the view runs
EFFECT = "effect"  #: about to have its effect
COMMIT = "commit"  #: the view is done, key and effect wait in an open transaction
COMMIT_BROKE = "commit broke"  #: an error at COMMIT: nobody knows
UNDO = "undo"  #: the work was taken back, the key is to be claimed again for the answer alone
COMMIT_APART = "commit apart"  #: the effect is committed, the record isn't
NOT_KEPT = "not kept"  #: the view's answer is none that is kept
NOTHING = "nothing happened"  #: the view says that it did nothing
COMPLETE = "complete"  #: about to keep the answer
COPY = "copy"  #: about to copy what SQL keeps to Redis
WRITE_BACK = "write back"  #: about to copy a replay to Redis
GIVE_BACK = "give back"  #: about to give back its claim in Redis, and to answer
NET = "net"  #: gave up on the store; what is open is ended
REFUSED = "refused"  #: a step of a saga was refused for good
RECORD_UNDO = "record the undo"
DELETE = "delete"
FORGET_REDIS, FORGET_SQL = "forget in Redis", "forget in SQL"
DONE, DEAD = "done", "dead"

OVER = (DONE, DEAD)
#: Here an actor may have, or get, its effect.
RUNNING = (VIEW, EFFECT, COMMIT)


class Record(NamedTuple):
    """A record in Redis, or a row in SQL. An actor's number is its token."""

    state: str
    principal: str
    body: str
    token: int
    fence: int = 0
    attempt: int = 1
    lease: int = LIVE
    answer: str | None = None
    #: In Redis: SQL agreed to it.
    confirmed: bool = False
    #: Its TTL is over.
    expired: bool = False
    #: The provider's window, counted from the first attempt, is over (less the margin).
    window_over: bool = False
    #: ``settle_after`` is over.
    settle_due: bool = False
    #: Who settles it, or compensates.
    reconciler: int | None = None


class Actor(NamedTuple):
    """A request, or something else that works on the records."""

    role: str
    principal: str = ""
    body: str = ""
    at: str = START
    #: It holds the claim in Redis, as far as it knows.
    fronted: bool = False
    attempt: int = 0
    #: What it read and will compare.
    seen: Any = None
    #: What its view answered, or what it read.
    answer: str | None = None
    #: What its client was told.
    told: tuple[str, ...] | None = None
    #: Its local deadline is over: the lease may be another's.
    past_deadline: bool = False
    #: A copy of its claim is still on its way.
    stray_claim: bool = False
    #: Its COMMIT was sent on a connection that broke, and the server is still at it.
    commit_in_flight: bool = False


class World(NamedTuple):
    """What is outside, and what happened."""

    charges: int = 0
    #: Keys that the provider remembers.
    remembered: frozenset[str] = frozenset()
    effects: int = 0
    undone: int = 0
    highest_fence: int = 0
    #: Something happened after which a second run is documented.
    excuse: str | None = None
    #: Of a saga: step one, step two (recorded or not), the undo (none, begun, done).
    steps: tuple[int, int, int] = (0, 0, 0)
    #: Answers whose life is over.
    expired_answers: frozenset[str] = frozenset()


class System(NamedTuple):
    """A state of everything."""

    redis: Record | None
    #: Redis before its last write: what a failover brings back.
    replica: Record | None
    row: Record | None
    actors: tuple[Actor, ...]
    world: World
    #: What may still go wrong, in the order of the model's names.
    budget: tuple[int, ...]


class Step(NamedTuple):
    """One atomic action: a script, a transaction, a call to the provider, a turn of the environment."""

    label: str
    system: System
    violation: str | None = None


Steps: TypeAlias = Iterator[Step]


def finished(record: Record | None) -> bool:
    return record is not None and record.state in FINISHED


def requests(*who: str) -> tuple[Actor, ...]:
    """Requests written as ``"ann/a"``: principal and body, all with one key."""
    pairs = [each.split("/") for each in who]
    return tuple(Actor(REQUEST, principal, body) for principal, body in pairs)
