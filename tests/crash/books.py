"""What really happened, and what is recorded of it: effects, the keys' rows, and what Redis holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from flask_idempotent.request.scope import make_scope

from .plan import Trial
from .site import Site
from .worker import ENDPOINTS

__all__ = ["Books", "Copy", "Effect", "Repeat", "Row", "digest_of", "read_books"]

#: What becomes of a call with a key that the provider has got before.
AGAIN = ("repeated", "key in use", "key reused")


@dataclass(frozen=True)
class Effect:
    """Something that was done. ``at``: seconds since the epoch, where it is known. ``key``: the provider's. ``late``:
    for how many seconds the call was on its way. ``step``: which one of a saga it undid."""

    operation: str
    id: str
    name: str
    at: float = 0.0
    key: str = ""
    late: float = 0.0
    step: str = ""


@dataclass(frozen=True)
class Repeat:
    """A call to the provider with a key that it has got before. ``age``: for how many seconds the other one has been on
    its way, where it isn't done."""

    key: str
    age: float | None = None


@dataclass(frozen=True)
class Row:
    """A key's row, with its answer."""

    state: str
    attempt: int
    reason: str
    tries: int
    body: bytes | None


@dataclass(frozen=True)
class Copy:
    """A key's record in Redis."""

    state: str
    confirmed: bool
    body: bytes
    kind: str


@dataclass(frozen=True)
class Books:
    """``effects``: by what they were done for. ``rows``, ``copies``: by the key's digest. ``payments``: the local rows
    of charges. ``repeated``: what the provider got again when it had done it, or was about to. ``endless``: keys in
    Redis that never go."""

    effects: Mapping[str, Sequence[Effect]] = field(default_factory=dict)
    rows: Mapping[str, Row] = field(default_factory=dict)
    copies: Mapping[str, Copy] = field(default_factory=dict)
    payments: Sequence[str] = ()
    repeated: Sequence[Repeat] = ()
    endless: Sequence[str] = ()

    def of(self, trial: Trial) -> list[Effect]:
        """All effects of a trial, whoever asked for them."""
        names = sorted({party.name for party in trial.parties})
        found = [effect for name in names for effect in self.effects.get(name, ())]
        return sorted(found, key=lambda effect: effect.at)


def digest_of(trial: Trial) -> str:
    """What the key is filed under."""
    return make_scope("idempotent", None, ENDPOINTS[trial.kind], trial.key).digest


def read_books(site: Site) -> Books:
    effects: defaultdict[str, list[Effect]] = defaultdict(list)
    for entry in site.provider.entries():
        late = entry["at"] - entry["sent_at"]
        effect = Effect(
            entry["operation"],
            entry["id"],
            entry["reference"],
            entry["at"],
            entry["key"],
            late,
            entry.get("step", ""),
        )
        effects[effect.name].append(effect)
    with site.engine.connect() as connection:
        for run, name in connection.execute(sa.text("SELECT run, name FROM orders ORDER BY id")):
            effects[name].append(Effect("orders", run, name))
        payments = connection.execute(sa.text("SELECT charge FROM payments")).scalars().all()
        bodies = {
            row.key_digest: bytes(row.body)
            for row in connection.execute(sa.text("SELECT key_digest, body FROM idempotency_responses"))
        }
        rows = {
            row.key_digest: Row(row.status, row.attempt, row.reason, row.settle_tries, bodies.get(row.key_digest))
            for row in connection.execute(sa.text("SELECT * FROM idempotency_keys"))
        }
    repeated = [Repeat(call["key"], call.get("age")) for call in site.provider.calls() if call["outcome"] in AGAIN]
    copies, endless = _read_redis(site)
    return Books(dict(effects), rows, copies, payments, repeated, endless)


def _read_redis(site: Site) -> tuple[dict[str, Copy], list[str]]:
    copies, endless = {}, []
    for key in site.redis.scan_iter(count=1000):
        if site.redis.pttl(key) == -1:
            endless.append(key.decode())
        if b":r:" in key:
            fields: dict[Any, Any] = site.redis.hgetall(key)
            copies[key.rsplit(b":", 1)[1].decode()] = Copy(
                fields[b"state"].decode(), fields[b"confirmed"] == b"1", fields[b"body"], fields[b"kind"].decode()
            )
    return copies, endless
