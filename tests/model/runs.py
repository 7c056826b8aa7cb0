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
        Transaction, requests(A, A, BOB), _faults(flush=1, mark=2, redis_away=1, heartbeat=1)
    ),
    "transaction: failover behind a granted claim": Run(
        Transaction, OTHER_BODY, _faults(failover=1, mark=2, pause=1, lost_reply=1)
    ),
    "transaction: errors at COMMIT": Run(
        Transaction, STRANGER, _faults(lost_reply=1, commit_fails=1, transient=1, flush=1, SQL_away=1)
    ),
    "transaction: expiry, sweep": Run(Transaction, (*OTHER_BODY, Actor(SWEEP)), _faults(expiry=1, redis_away=1)),
    "transaction: forgetting": Run(Transaction, (*requests(A, A, A), Actor(OPERATOR)), _faults(redis_away=1)),
    "transaction: guards": Run(Transaction, OTHER_BODY, _faults(guard=1, transient=1)),
    "intent: crash, pause": Run(Intent, WITH_JOB, _faults(pause=1, crash=1)),
    "intent: pause, a search that lags": Run(Intent, WITH_JOB, _faults(pause=1, search_lags=1)),
    "intent: other body": Run(Intent, OTHER_BODY, _faults(flush=1, crash=1, timeout=1, mark=1)),
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
        Intent,
        (*TWO, Actor(SWEEP), Actor(JOB)),
        _faults(expiry=2, window=1, provider_forgets=1, pause=1, crash=1),
    ),
    "intent: expiry, Redis away": Run(
        Intent, requests(A, A, B, A), _faults(expiry=1, window=1, provider_forgets=1, redis_away=1)
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
