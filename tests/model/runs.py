"""Which faults are explored together, which run notices that a rule is gone, and what no rule closes."""

from collections.abc import Mapping
from typing import NamedTuple

from .base import Protocol
from .explore import Outcome, explore
from .intent import Intent
from .redis_only import RedisOnly
from .saga import Saga
from .transaction import Transaction
from .vocabulary import JOB, OPERATOR, SWEEP, Actor, requests


class Run(NamedTuple):
    """One configuration, explored to its end."""

    mode: type[Protocol]
    actors: tuple[Actor, ...]
    faults: Mapping[str, int]
    deduplicates: bool = True

    def explore(self, *without: str) -> Outcome:
        return explore(self.mode(self.actors, self.faults, without=without, deduplicates=self.deduplicates))


def _faults(**budget: int) -> dict[str, int]:
    return {name.replace("_", " ").replace("redis", "Redis"): n for name, n in budget.items()}


A, B = "ann/a", "ann/b"  #: ann's request, and another one with the same key
BOB, BOB_B = "bob/a", "bob/b"  #: another principal's
TWO = requests(A, A)
OTHER_BODY = requests(A, A, B)
STRANGER = requests(A, A, BOB_B)
WITH_JOB = (*TWO, Actor(JOB))

RUNS: dict[str, Run] = {
    "redis: lost replies": Run(RedisOnly, OTHER_BODY, _faults(lost_reply=2, transient=1)),
    "redis: pause, crash, skew": Run(RedisOnly, OTHER_BODY, _faults(pause=1, crash=1, skew=1, transient=1)),
    "redis: flush, failover, expiry": Run(
        RedisOnly, STRANGER, _faults(flush=1, failover=1, key_expires=1, transient=1)
    ),
    "redis: full, away": Run(RedisOnly, TWO, _faults(full=1, redis_away=1, lost_reply=1)),
    "redis: unreadable": Run(RedisOnly, TWO, _faults(damage=1)),
    "redis: guards": Run(RedisOnly, OTHER_BODY, _faults(guard=1, transient=1)),
    "redis: a delayed claim": Run(RedisOnly, requests(A), _faults(stray=1, transient=1)),
    "transaction: pause, crash, flush, failover": Run(
        Transaction, OTHER_BODY, _faults(pause=1, crash=1, flush=1, failover=1)
    ),
    "transaction: flush behind a granted claim": Run(
        Transaction, requests(A, A, BOB), _faults(flush=1, redis_away=1, heartbeat=1, transient=1)
    ),
    "transaction: failover behind a granted claim": Run(
        Transaction, OTHER_BODY, _faults(failover=1, pause=1, lost_reply=1)
    ),
    "transaction: a holder whose work was taken back": Run(
        Transaction, OTHER_BODY, _faults(transient=1, crash=1, redis_away=2, undo=1)
    ),
    "transaction: errors at COMMIT": Run(
        Transaction, STRANGER, _faults(lost_reply=1, commit_fails=1, slow_commit=1, transient=1, SQL_away=1)
    ),
    "transaction: expiry, sweep": Run(Transaction, (*OTHER_BODY, Actor(SWEEP)), _faults(expiry=1, redis_away=1)),
    "transaction: work undone": Run(Transaction, OTHER_BODY, _faults(undo=1, flush=1, redis_away=1, lost_reply=1)),
    "transaction: forgetting": Run(Transaction, (*requests(A, A, A), Actor(OPERATOR)), _faults(redis_away=1)),
    "transaction: guards": Run(Transaction, OTHER_BODY, _faults(guard=1, transient=1)),
    "intent: crash, pause": Run(Intent, WITH_JOB, _faults(pause=1, crash=1)),
    "intent: pause, a search that lags": Run(Intent, WITH_JOB, _faults(pause=1, search_lags=1)),
    "intent: other body": Run(Intent, OTHER_BODY, _faults(flush=1, crash=1, timeout=1)),
    "intent: other principal": Run(
        Intent, (*requests(A, BOB_B), Actor(JOB)), _faults(flush=1, pause=1, failover=1, redis_away=1)
    ),
    "intent: heartbeats, skew": Run(Intent, WITH_JOB, _faults(pause=1, heartbeat=1, skew=1, late_renewal=1)),
    "intent: lost replies": Run(Intent, WITH_JOB, _faults(lost_reply=2, timeout=1)),
    "intent: nothing happened": Run(Intent, WITH_JOB, _faults(nothing=1, pause=1, lost_reply=1)),
    "intent: SQL away": Run(Intent, WITH_JOB, _faults(SQL_away=1, flush=1, crash=1, redis_away=1)),
    "intent: provider forgets": Run(
        Intent, WITH_JOB, _faults(window=1, provider_forgets=1, crash=1, timeout=1, search_lags=1)
    ),
    "intent: operator": Run(Intent, (*TWO, Actor(OPERATOR), Actor(JOB)), _faults(crash=1, flush=1, timeout=1)),
    "intent: expiry, sweep": Run(
        Intent, (*TWO, Actor(SWEEP), Actor(JOB)), _faults(expiry=2, window=1, provider_forgets=1, pause=1)
    ),
    "intent: expiry, sweep, crash": Run(
        Intent,
        (*requests(A), Actor(SWEEP), Actor(JOB)),
        _faults(expiry=2, window=1, provider_forgets=1, pause=1, crash=2),
    ),
    "intent: expiry, Redis away": Run(
        Intent, OTHER_BODY, _faults(expiry=1, window=1, provider_forgets=1, redis_away=1)
    ),
    "intent: guards": Run(Intent, WITH_JOB, _faults(pause=1, guard=1)),
    "intent: races in SQL": Run(
        Intent, (*OTHER_BODY, Actor(JOB)), _faults(redis_away=2, pause=1, late_renewal=1, timeout=1)
    ),
    "intent: unreadable": Run(Intent, TWO, _faults(damage=1)),
    "intent: no deduplication, a search that lags": Run(
        Intent, WITH_JOB, _faults(crash=1, search_lags=1, SQL_away=1, timeout=1), deduplicates=False
    ),
    "saga: crash, pause": Run(Saga, WITH_JOB, _faults(crash=1, pause=1, refusal=1)),
    "saga: refusals are not remembered": Run(Saga, WITH_JOB, _faults(crash=1, refusal=1), deduplicates=False),
    "saga: provider forgets": Run(Saga, WITH_JOB, _faults(crash=2, refusal=1, window=1, provider_forgets=1)),
}


class Notice(NamedTuple):
    """That rules are gone was noticed by this run, by this violation."""

    run: str
    violation: str


#: What notices that a rule is switched off.
NOTICED: dict[str, Notice] = {
    "cas_token": Notice("intent: crash, pause", "KEY-AFTER-LAPSE"),
    "cas_state": Notice("intent: heartbeats, skew", "FINAL-CHANGED"),
    "complete_own": Notice("redis: lost replies", "OWN-SUCCESS-DENIED"),
    "stored_bytes": Notice("intent: crash, pause", "WRONG-REPLAY"),
    "claim_twice": Notice("redis: lost replies", "SELF-BLOCK"),
    "dead_token": Notice("redis: a delayed claim", "PHANTOM"),
    "take_version": Notice("intent: expiry, Redis away", "OTHER-REQUEST-RAN"),
    "take_state": Notice("intent: crash, pause", "FINAL-CHANGED"),
    "take_lease": Notice("intent: heartbeats, skew", "TOOK-LIVE-LEASE"),
    "take_keeps": Notice("intent: pause, a search that lags", "OUTCOME-DROPPED"),
    "skew": Notice("redis: pause, crash, skew", "TWO-LIVE"),
    "version_rises": Notice("redis: flush, failover, expiry", "FENCE"),
    "principal_first": Notice("redis: flush, failover, expiry", "TOLD-A-STRANGER"),
    "fp_bound": Notice("redis: lost replies", "OTHER-REQUEST-RAN"),
    "expiry_final": Notice("intent: expiry, sweep", "SWEPT-LIVE"),
    "rel_no_expiry": Notice("intent: expiry, sweep", "SECOND-CHARGE"),
    "open_ttl": Notice("redis: flush, failover, expiry", "TWO-LIVE"),
    "release_ttl": Notice("intent: expiry, sweep", "SWEPT-CHARGE"),
    "unreadable": Notice("redis: unreadable", "SECOND-EFFECT"),
    "old_body": Notice("intent: expiry, Redis away", "OLD-ANSWER"),
    "kept": Notice("redis: full, away", "SECOND-EFFECT"),
    "after_guards": Notice("redis: guards", "LEFT-SOMETHING"),
    "allow_oom": Notice("redis: full, away", "SECOND-EFFECT"),
    "sql_decides": Notice("intent: lost replies", "KEY-AFTER-LAPSE"),
    "confirmed": Notice("intent: other body", "WRONG-REFUSAL"),
    "open_holder": Notice("transaction: flush behind a granted claim", "WRONG-REFUSAL"),
    "giveback_deletes": Notice("intent: other principal", "POISONED"),
    "sql_first": Notice("intent: lost replies", "WRONG-REPLAY"),
    "outage": Notice("intent: SQL away", "TOLD-BUT-NOT-KEPT"),
    "lost_gives_back": Notice("intent: heartbeats, skew", "LEFT-IN-FRONT"),
    "readback_waits": Notice("transaction: errors at COMMIT", "FALSE-503"),
    "copy_ttl": Notice("transaction: expiry, sweep", "REPLAY-WITHOUT-ROW"),
    "copy_until": Notice("transaction: expiry, sweep", "REPLAY-WITHOUT-ROW"),
    "forget_order": Notice("transaction: forgetting", "REPLAY-WITHOUT-ROW"),
    "insert_in_tx": Notice("transaction: flush behind a granted claim", "TWO-LIVE"),
    "never_rerun": Notice("transaction: errors at COMMIT", "RAN-AGAIN"),
    "readback": Notice("transaction: errors at COMMIT", "FALSE-503"),
    "sql_is_lease": Notice("intent: heartbeats, skew", "KEY-AFTER-LAPSE"),
    "local_deadline": Notice("intent: crash, pause", "KEY-AFTER-LAPSE"),
    "late_ind": Notice("intent: crash, pause", "OUTCOME-DROPPED"),
    "late_rel": Notice("intent: crash, pause", "OUTCOME-DROPPED"),
    "inline": Notice("intent: no deduplication, a search that lags", "SECOND-CHARGE"),
    "one_reconciler": Notice("intent: crash, pause", "TWO-RECONCILERS"),
    "transient_ind": Notice("intent: no deduplication, a search that lags", "SECOND-CHARGE"),
    "settle_after": Notice("intent: no deduplication, a search that lags", "SECOND-CHARGE"),
    "look_after": Notice("intent: no deduplication, a search that lags", "SECOND-CHARGE"),
    "window": Notice("intent: expiry, sweep", "SECOND-CHARGE"),
    "job": Notice("intent: crash, pause", "STUCK"),
    "recheck": Notice("intent: expiry, sweep", "SWEPT-CHARGE"),
    "sweep_recheck": Notice("transaction: expiry, sweep", "SWEPT-LIVE"),
    "saga_commit": Notice("saga: crash, pause", "NOT-UNDONE"),
    "saga_hold": Notice("saga: crash, pause", "TWO-LIVE"),
    "saga_failed": Notice("saga: refusals are not remembered", "FORWARD-AFTER-UNDO"),
    "comp_commit": Notice("saga: crash, pause", "SECOND-UNDO"),
}


class Open(NamedTuple):
    """What the rules do not close: this run must find this violation.

    :param text: what it means for the product.
    """

    run: Run
    violation: str
    text: str


OPEN: dict[str, Open] = {
    "a delayed claim after the record is gone": Open(
        Run(RedisOnly, requests(A), _faults(stray=1, flush=1)),
        "PHANTOM",
        "Nobody holds the claim; the lease bounds it.",
    ),
    "a delayed claim after another token had the record": Open(
        Run(RedisOnly, TWO, _faults(stray=1, transient=2)),
        "PHANTOM",
        "Only the last token that was given back is known to be over; the lease bounds it.",
    ),
    "a provider that recognises nothing, and a pause before the call": Open(
        Run(Intent, WITH_JOB, _faults(pause=1), deduplicates=False),
        "SECOND-CHARGE",
        "A process can stand still between the last look at its lease and the call. Such providers go to a human "
        "(`Provider.none()`).",
    ),
    "a saga's step that lands after the undo": Open(
        Run(Saga, WITH_JOB, _faults(pause=1, refusal=1), deduplicates=False),
        "FORWARD-AFTER-UNDO",
        "A process stands still in a step for longer than its lease. Compensation starts `settle_after` after the last "
        "lost lease.",
    ),
}
