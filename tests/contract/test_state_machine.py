"""A store and a plain model of the rules, kept in step through random histories."""

import itertools
from dataclasses import dataclass, replace
from types import MappingProxyType

import pytest
import redis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from flask_idempotent.records import Claim, Completed, Completion, Fingerprint, KeptResponse, State, Verdict
from flask_idempotent.stores.base import Released
from flask_idempotent.stores.redis import RedisStore
from tests.contract.lua_tools import ScriptedClock, Sources, break_rule
from tests.contract.redis_backend import record_key
from tests.contract.store_suite import make_scope

LEASE, SKEW, WORK, TTL, TOMBSTONE = 30_000, 5_000, 120_000, 3_600_000, 1_800_000

KEYS = ("plain", "tombstoned")
TOKENS = ("t1", "t2", "t3", "t4")
PRINCIPALS = ("p1", "p2")
A, B, UNKNOWN = Fingerprint("r1", "A"), Fingerprint("r1", "B"), Fingerprint("r2", "A")
STEPS = (
    1,
    SKEW - 1,
    SKEW,
    LEASE - 1,
    LEASE,
    LEASE + SKEW - 1,
    LEASE + SKEW,
    TTL - 1,
    TTL,
    TOMBSTONE,
    10 * TTL,
    -10_000,
)

OVER = {State.SUCCEEDED, State.FAILED, State.RELEASED}
FINISHED = {State.SUCCEEDED, State.FAILED}


@dataclass
class Entry:
    state: State
    token: str
    principal: str
    fingerprint: Fingerprint
    fence: int
    attempt: int
    created_at: int
    locked_until: int
    expires_at: int = 0
    tombstone_until: int = 0
    body: bytes | None = None


class Model:
    """The rules, written from the design and not from the scripts."""

    def __init__(self, now: int) -> None:
        self.now = now
        self.entries: dict[str, Entry] = {}

    def claim(self, key: str, token: str, principal: str, fingerprint: Fingerprint) -> tuple[object, ...]:
        """The verdict, and what must come with it."""
        entry = self.entries.get(key)
        fence = self.now
        if entry and entry.state in OVER and self.now >= entry.expires_at:
            if self.now < entry.tombstone_until:
                return (Verdict.FOREIGN,) if entry.principal != principal else (Verdict.EXPIRED,)
            fence = max(entry.fence + 1, fence)
            entry = None
        if entry is None:
            return self._run(key, Entry(State.IN_PROGRESS, token, principal, fingerprint, fence, 1, self.now, 0))
        if entry.principal != principal:
            return (Verdict.FOREIGN,)
        comparable = entry.fingerprint.recipe == fingerprint.recipe
        if comparable and entry.fingerprint != fingerprint:
            return (Verdict.MISMATCH,)
        if entry.state in FINISHED:
            return Verdict.REPLAY, comparable, entry.token, entry.body
        if entry.state is State.INDETERMINATE:
            return (Verdict.INDETERMINATE,)
        if entry.token == token:
            if entry.state is State.RELEASED:
                return (Verdict.OVER,)
            return self._run(key, replace(entry, fingerprint=fingerprint), comparable)
        reclaimed = entry.state is State.IN_PROGRESS
        if reclaimed and self.now < entry.locked_until + SKEW:
            return Verdict.IN_PROGRESS, comparable, entry.locked_until + SKEW - self.now
        fence = max(entry.fence + 1, self.now)
        taken = Entry(State.IN_PROGRESS, token, principal, fingerprint, fence, entry.attempt + 1, entry.created_at, 0)
        return self._run(key, taken, comparable, reclaimed)

    def _run(self, key: str, entry: Entry, comparable: bool = True, reclaimed: bool = False) -> tuple[object, ...]:
        entry.locked_until = self.now + LEASE
        self.entries[key] = entry
        return Verdict.CLAIMED, comparable, entry.fence, entry.attempt, entry.created_at, reclaimed

    def renew(self, key: str, token: str) -> bool:
        entry = self.entries.get(key)
        if entry is None or entry.state is not State.IN_PROGRESS or entry.token != token:
            return False
        entry.locked_until = max(entry.locked_until, self.now + LEASE)
        return True

    def complete(
        self, key: str, token: str, principal: str, fingerprint: Fingerprint, state: State, body: bytes
    ) -> tuple[object, ...]:
        entry = self.entries.get(key)
        if entry is None:
            return (Completed.GONE,)
        if entry.token == token and entry.state in FINISHED:
            return Completed.STORED, entry.expires_at, entry.body
        if entry.token == token and entry.state is State.IN_PROGRESS:
            entry.state, entry.body, entry.locked_until = state, body, 0
            entry.expires_at = self.now + TTL
            entry.tombstone_until = entry.expires_at + TOMBSTONE if key == "tombstoned" else 0
            return Completed.STORED, entry.expires_at, None
        same = entry.principal == principal and (
            entry.fingerprint == fingerprint or entry.fingerprint.recipe != fingerprint.recipe
        )
        winner = entry.state in FINISHED and self.now < entry.expires_at and same
        return Completed.LOST, max(0, entry.locked_until - self.now), entry.body if winner else None

    def release(self, key: str, token: str, forget: bool) -> Released:
        entry = self.entries.get(key)
        if entry is None:
            return Released.GONE
        if entry.token != token or entry.state is State.INDETERMINATE:
            return Released.LOST
        if entry.state in FINISHED:
            return Released.FINISHED
        if entry.state is State.IN_PROGRESS:
            if forget:
                del self.entries[key]
            else:
                entry.state, entry.locked_until, entry.expires_at = State.RELEASED, 0, self.now + TTL
        return Released.RELEASED


class Lockstep(RuleBasedStateMachine):
    """Does the same to a store and to the model, and compares what they say and what they hold."""

    client: redis.Redis
    sources: Sources = MappingProxyType({})
    numbers = itertools.count()

    keys = st.sampled_from(KEYS)
    tokens = st.sampled_from(TOKENS)
    principals = st.sampled_from(PRINCIPALS + PRINCIPALS[:1] * 3)
    fingerprints = st.sampled_from((A, A, A, A, A, B, UNKNOWN))

    @initialize()
    def begin(self) -> None:
        self.prefix = f"machine{next(self.numbers)}"
        self.clock = ScriptedClock(self.client)
        self.store = RedisStore(self.client, prefix=self.prefix, sources=self.clock.sources(self.sources))
        self.model = Model(self.clock.now_ms)
        self.fences: dict[str, int] = {}

    def make_claim(self, key: str, token: str, principal: str = "p1", fingerprint: Fingerprint = A) -> Claim:
        tombstone = TOMBSTONE if key == "tombstoned" else 0
        return Claim(
            make_scope(key), token, (fingerprint,), principal, "", LEASE, SKEW, WORK, TTL, tombstone_ms=tombstone
        )

    @rule(key=keys, token=tokens, principal=principals, fingerprint=fingerprints)
    def claim(self, key: str, token: str, principal: str, fingerprint: Fingerprint) -> None:
        reply = self.store.claim(self.make_claim(key, token, principal, fingerprint))
        said: tuple[object, ...] = (reply.verdict,)
        if reply.verdict is Verdict.CLAIMED:
            said += (reply.comparable, reply.fence, reply.attempt, reply.created_at, reply.reclaimed)
        elif reply.verdict is Verdict.IN_PROGRESS:
            said += (reply.comparable, reply.wait_ms)
        elif reply.verdict is Verdict.REPLAY:
            assert reply.record is not None
            assert reply.record.response is not None
            said += (reply.comparable, reply.record.token, reply.record.response.body)
        assert said == self.model.claim(key, token, principal, fingerprint)
        assert (reply.record is not None) == (reply.verdict is Verdict.REPLAY)

    @rule(asked=st.lists(st.tuples(keys, tokens), max_size=5, unique=True))
    def renew(self, asked: list[tuple[str, str]]) -> None:
        renewed = self.store.renew([self.make_claim(key, token) for key, token in asked])
        assert list(renewed) == [self.model.renew(key, token) for key, token in asked]

    @rule(
        key=keys,
        token=tokens,
        principal=principals,
        fingerprint=fingerprints,
        state=st.sampled_from(sorted(FINISHED)),
        body=st.binary(max_size=4),
    )
    def complete(
        self, key: str, token: str, principal: str, fingerprint: Fingerprint, state: State, body: bytes
    ) -> None:
        claim = self.make_claim(key, token, principal, fingerprint)
        reply = self.store.complete(Completion(claim, state, KeptResponse(200, b"", body, "full")))
        said: tuple[object, ...] = (reply.outcome,)
        if reply.outcome is not Completed.GONE:
            kept = reply.record.response.body if reply.record and reply.record.response else None
            said += (reply.expires_at if reply.outcome is Completed.STORED else reply.wait_ms, kept)
        assert said == self.model.complete(key, token, principal, fingerprint, state, body)

    @rule(key=keys, token=tokens, forget=st.sampled_from((False, False, True)))
    def release(self, key: str, token: str, forget: bool) -> None:
        reply = self.store.release(self.make_claim(key, token), reason="status", forget=forget)
        assert reply is self.model.release(key, token, forget)

    @rule(key=keys, forget=st.booleans(), finish=st.booleans())
    def end_by_its_holder(self, key: str, forget: bool, finish: bool) -> None:
        """What random tokens seldom hit."""
        if key in self.model.entries:
            token = self.model.entries[key].token
            if finish:
                self.complete(key, token, "p1", A, State.SUCCEEDED, b"done")
            else:
                self.release(key, token, forget)

    @rule(key=keys)
    def ask_again(self, key: str) -> None:
        """The last claim of a key, sent once more."""
        if key in self.model.entries:
            entry = self.model.entries[key]
            self.claim(key, entry.token, entry.principal, entry.fingerprint)

    @rule(ms=st.sampled_from(STEPS))
    def let_time_pass(self, ms: int) -> None:
        self._set_clock(self.model.now + ms)

    @rule(key=keys, edge=st.sampled_from(("lease", "skew", "life", "tombstone")), ms=st.sampled_from((-1, 0, 1)))
    def go_to_an_edge(self, key: str, edge: str, ms: int) -> None:
        entry = self.model.entries.get(key)
        if entry is not None:
            edges = {
                "lease": entry.locked_until,
                "skew": entry.locked_until + SKEW,
                "life": entry.expires_at,
                "tombstone": entry.tombstone_until,
            }
            if edges[edge] + ms > self.model.now:
                self._set_clock(edges[edge] + ms)

    @precondition(lambda self: any(entry.state is State.IN_PROGRESS for entry in self.model.entries.values()))
    @rule(data=st.data())
    def lose_track(self, data: st.DataObject) -> None:
        running = sorted(key for key, entry in self.model.entries.items() if entry.state is State.IN_PROGRESS)
        key = data.draw(st.sampled_from(running))
        self.client.hset(
            record_key(make_scope(key), self.prefix), mapping={"state": "indeterminate", "locked_until": "0"}
        )
        self.model.entries[key].state = State.INDETERMINATE
        self.model.entries[key].locked_until = 0

    @invariant()
    def they_hold_the_same(self) -> None:
        for key in KEYS:
            record, entry = self.store.read(make_scope(key)), self.model.entries.get(key)
            if entry is None:
                assert record is None
                self.fences.pop(key, None)  # what was forgotten is known no more
                continue
            if record is None:  # the server may drop what is over, by its own clock
                assert entry.state in OVER
                assert self.model.now >= max(entry.expires_at, entry.tombstone_until)
                continue
            assert (
                Entry(
                    record.state,
                    record.token,
                    record.principal,
                    record.fingerprint,
                    record.fence,
                    record.attempt,
                    record.created_at,
                    record.locked_until,
                    record.expires_at,
                    record.tombstone_until,
                    record.response.body if record.response else None,
                )
                == entry
            )
            assert record.fence >= self.fences.get(key, 0)
            self.fences[key] = record.fence

    def _set_clock(self, ms: int) -> None:
        self.clock.advance(ms - self.clock.now_ms)
        self.model.now = ms


def machine(client: redis.Redis, sources: Sources = MappingProxyType({})) -> type[Lockstep]:
    return type("Machine", (Lockstep,), {"client": client, "sources": sources})


SETTINGS = settings(
    deadline=None,
    database=None,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def test_store_and_model_stay_in_step(redis_client: redis.Redis) -> None:
    run_state_machine_as_test(machine(redis_client), settings=settings(SETTINGS, max_examples=40))


@pytest.mark.parametrize(
    "rule",
    [
        "complete compares the token",
        "release overwrites nothing finished",
        "takeover adds the skew",
        "another fingerprint never takes over",
        "what is over expires",
    ],
)
def test_a_broken_rule_brings_them_out_of_step(redis_url: str, rule: str) -> None:
    with redis.Redis.from_url(redis_url) as client, pytest.raises(AssertionError):
        run_state_machine_as_test(
            machine(client, break_rule(rule)),
            settings=settings(SETTINGS, max_examples=300, derandomize=True, phases=[Phase.generate], print_blob=False),
        )
