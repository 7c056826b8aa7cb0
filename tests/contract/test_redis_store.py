"""What the Redis store promises beyond the rules of every store: keys, lives, the index, its own clock."""

import time
from dataclasses import replace

import pytest
import redis

from flask_idempotent.errors import StoreUnavailable, UnreadableRecord
from flask_idempotent.records import Claim, Completed, Completion, State, Verdict
from flask_idempotent.stores.base import Released
from flask_idempotent.stores.redis import RedisStore
from tests.contract.redis_backend import PREFIX, RedisBackend, index_key, record_key
from tests.contract.store_suite import CREATED, PRESENT, StoreTools, make_scope

COUNTER = f"{PREFIX}:rate:bucket"


class TestRedisStore(RedisBackend, StoreTools):
    """On fakeredis, Valkey and Redis."""

    #: A slow machine may take this long between a script and the look at its key.
    slack_ms = 10_000
    max_processing_ms = 120_000
    lease_ms = 60_000
    skew_ms = 20_000

    @pytest.fixture
    def store(self) -> RedisStore:
        return self.make_store()

    def lives(self, least_ms: int, key: str = "") -> bool:
        """Whether a key lives that long from now, and not for ever. (The server rounds to its own clock.)"""
        return least_ms - self.slack_ms < self.life(key) <= least_ms

    # -- keys --------------------------------------------------------------------------------------------------------

    def test_the_layout_is_part_of_the_format(self, store: RedisStore) -> None:
        self.prepare(store, "in_progress")
        scope = make_scope()
        names = set(self.client.keys(f"{PREFIX}:*"))
        assert names == {record_key(scope).encode(), index_key(scope).encode()}
        assert set(self.client.hgetall(record_key(scope))) == {
            name.encode()
            for names in (
                ["format", "state", "token", "fence", "attempt", "created_at", "locked_until"],
                ["recipe", "fingerprint", "principal", "binding"],
                ["status", "headers", "body", "kind", "cipher", "context", "reason", "confirmed"],
                ["completed_at", "expires_at", "tombstone_until"],
            )
            for name in names
        }

    def test_no_key_ever_stays_for_good(self, store: RedisStore) -> None:
        def check() -> None:
            assert [key for key in self.client.keys(f"{PREFIX}:*") if self.client.pttl(key) < 0] == []

        for number, state in enumerate(PRESENT):
            claim = self.prepare(store, state, f"t{number}", key=f"k{number}", tombstone_ms=5, rate=None)
            check()
            store.renew([claim])
            check()
            store.claim(self.limited("later", f"k{number}", limit=9))
            check()
        store.claim(self.limited("t", "counted"))
        check()
        self.client.persist(COUNTER)
        self.client.set(COUNTER, 99)  # whatever took its end away, the next call gives it one
        assert store.claim(self.limited("t", "counted too")).verdict is Verdict.CLAIMED
        check()

    # -- who refuses -------------------------------------------------------------------------------------------------

    def test_a_refusal_names_the_holder(self, store: RedisStore) -> None:
        claim = self.prepare(store, "in_progress")
        for other in ({"principal": "p2"}, {"fingerprint": "B"}):
            reply = store.claim(self.claim("t2", **other))
            assert (reply.holder, reply.confirmed) == (claim.token, False)
            assert 0 < reply.wait_ms <= self.lease_ms + self.skew_ms
        self.lapse()
        assert store.claim(self.claim("t2", principal="p2")).wait_ms == 0
        assert store.claim(self.claim("t3")).verdict is Verdict.CLAIMED
        assert store.claim(self.claim("t2", principal="p2")).holder == "t3"

    # -- how long they live ------------------------------------------------------------------------------------------

    def test_an_open_record_lives_for_its_work(self, store: RedisStore) -> None:
        store.claim(self.claim())
        assert self.lives(self.max_processing_ms)

    def test_an_open_record_lives_for_lease_and_skew(self, store: RedisStore) -> None:
        store.claim(self.claim(max_processing_ms=1))
        assert self.lives(self.lease_ms + self.skew_ms)

    def test_an_open_record_keeps_its_rest(self, store: RedisStore) -> None:
        claim = self.prepare(store, "in_progress")
        store.release(claim, reason="status")
        assert self.lives(self.ttl_ms)
        store.claim(self.claim("t2"))
        assert self.lives(self.ttl_ms)

    def test_an_open_record_outlives_the_rest_of_its_first_attempt(self, store: RedisStore) -> None:
        self.prepare(store, "released")
        self.client.pexpire(record_key(make_scope()), 1_000)
        store.claim(self.claim("t2"))
        assert self.lives(self.max_processing_ms)

    def test_a_renewed_record_lives_on(self, store: RedisStore) -> None:
        claim = self.prepare(store, "in_progress")
        for work_ms, least_ms in ((self.max_processing_ms, self.max_processing_ms), (1, self.lease_ms + self.skew_ms)):
            self.client.pexpire(record_key(make_scope()), 1_000)
            self.client.pexpire(index_key(make_scope()), 1_000)
            store.renew([replace(claim, max_processing_ms=work_ms)])
            assert self.lives(least_ms)
            assert self.lives(least_ms, index_key(make_scope()))

    def test_a_renewal_does_not_shorten_a_life(self, store: RedisStore) -> None:
        claim = self.prepare(store, "in_progress")
        self.client.pexpire(record_key(make_scope()), self.ttl_ms)
        store.renew([claim])
        assert self.lives(self.ttl_ms)

    @pytest.mark.parametrize("tombstone_ms", [0, 7_200_000])
    def test_an_answer_lives_for_its_whole_time(self, store: RedisStore, tombstone_ms: int) -> None:
        self.prepare(store, "succeeded", tombstone_ms=tombstone_ms)
        assert self.lives(self.ttl_ms + tombstone_ms)

    def test_a_copy_lives_as_long_as_its_row(self, store: RedisStore) -> None:
        claim = self.prepare(store, "in_progress")
        ends = self.seen(store).created_at + 1_800_000
        store.complete(Completion(claim, State.SUCCEEDED, CREATED, expires_at=ends))
        assert self.lives(1_800_000)

    def test_what_is_given_back_lives_for_its_whole_time(self, store: RedisStore) -> None:
        self.prepare(store, "released", tombstone_ms=7_200_000)
        assert self.lives(self.ttl_ms)

    def test_a_counter_lives_for_its_window(self, store: RedisStore) -> None:
        store.claim(self.limited("t1", "k1"))
        assert self.lives(self.window_ms, COUNTER)
        self.client.pexpire(COUNTER, 30_000)
        store.claim(self.limited("t2", "k2"))
        assert self.lives(30_000, COUNTER)

    # -- the in-flight index -----------------------------------------------------------------------------------------

    def members(self) -> dict[bytes, float]:
        return dict(self.client.zrange(index_key(make_scope()), 0, -1, withscores=True))

    def test_the_index_holds_what_runs_by_its_deadline(self, store: RedisStore) -> None:
        claim = self.prepare(store, "in_progress")
        digest = claim.scope.digest.encode()
        assert self.members() == {digest: self.seen(store).locked_until}
        self.advance(self.lease_ms // 2)
        store.renew([claim])
        assert self.members() == {digest: self.seen(store).locked_until}
        self.lapse()
        assert list(self.members()) == [digest]
        store.claim(self.claim("t2"))
        assert self.members() == {digest: self.seen(store).locked_until}

    @pytest.mark.parametrize("state", ["succeeded", "failed", "released"])
    def test_the_index_drops_what_is_over(self, store: RedisStore, state: str) -> None:
        self.prepare(store, state)
        assert self.members() == {}

    def test_the_index_drops_what_is_forgotten(self, store: RedisStore) -> None:
        store.release(self.prepare(store, "in_progress"), reason="status", forget=True)
        assert self.members() == {}

    def test_a_stranger_changes_nothing_in_the_index(self, store: RedisStore) -> None:
        self.prepare(store, "in_progress")
        before = self.members()
        stranger = self.claim("t2")
        store.claim(stranger)
        store.renew([stranger])
        self.complete(store, stranger)
        store.release(stranger, reason="status")
        assert self.members() == before

    def test_the_index_forgets_what_died_a_day_ago(self, store: RedisStore) -> None:
        digest = make_scope().digest
        twin = replace(self.claim("t2"), scope=replace(make_scope(), digest="0" * 62 + digest[-2:]))
        store.claim(self.claim())
        self.advance(86_400_000)
        store.claim(twin)
        assert len(self.members()) == 2
        self.advance(self.lease_ms + 1)
        store.claim(replace(twin, token="t3", skew_ms=0))
        assert list(self.members()) == [twin.scope.digest.encode()]

    # -- what can't be read ------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("kind", ["string", "list", "foreign hash"])
    def test_a_key_of_another_kind_is_not_absent(self, store: RedisStore, kind: str) -> None:
        claim, name = self.claim(), record_key(make_scope())
        if kind == "string":
            self.client.set(name, "theirs")
        elif kind == "list":
            self.client.rpush(name, "theirs")
        else:
            self.client.hset(name, "theirs", "1")
        with pytest.raises(UnreadableRecord):
            store.claim(claim)
        with pytest.raises(UnreadableRecord):
            self.complete(store, claim)
        with pytest.raises(UnreadableRecord):
            store.release(claim, reason="status", forget=True)
        mine = self.claim("mine", key="mine")
        store.claim(mine)
        assert list(store.renew([claim, mine])) == [False, True]
        with pytest.raises(UnreadableRecord):
            store.read(make_scope())
        assert self.client.type(name) == {"string": b"string", "list": b"list"}.get(kind, b"hash")
        assert self.client.pttl(name) == -1

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("state", "paused"),
            ("state", None),
            ("token", None),
            ("fence", "many"),
            ("attempt", None),
            ("expires_at", ""),
            ("principal", None),
            ("confirmed", None),
        ],
    )
    @pytest.mark.parametrize("state", ["in_progress", "succeeded", "released"])
    def test_a_damaged_record_is_not_absent(self, store: RedisStore, state: str, field: str, value: str | None) -> None:
        claim = self.prepare(store, state)
        if value is None:
            self.client.hdel(record_key(claim.scope), field)
        else:
            self.client.hset(record_key(claim.scope), field, value)
        before = self.raw(claim.scope)
        with pytest.raises(UnreadableRecord):
            store.claim(self.claim("t2"))
        with pytest.raises(UnreadableRecord):
            store.release(claim, reason="status")
        with pytest.raises(UnreadableRecord):
            store.read(claim.scope)
        assert self.raw(claim.scope) == before

    def test_an_answer_that_is_damaged_is_not_absent(self, store: RedisStore) -> None:
        claim = self.prepare(store, "succeeded")
        self.client.hdel(record_key(claim.scope), "body")
        with pytest.raises(UnreadableRecord):
            store.claim(self.claim("t2"))

    def test_an_unreadable_record_is_not_an_outage(self, store: RedisStore) -> None:
        """So that a route that runs unprotected in an outage doesn't for such a key; and the breaker stays closed."""
        self.client.set(record_key(make_scope()), "theirs")
        for _ in range(10):
            with pytest.raises(UnreadableRecord):
                store.claim(self.claim())
        assert store.claim(self.claim(key="other")).verdict is Verdict.CLAIMED


class TestByTheServersOwnClock:
    """The scripts as they are, with short leases."""

    @pytest.fixture
    def store(self, redis_client: redis.Redis) -> RedisStore:
        self.client = redis_client
        return RedisStore(redis_client, prefix=PREFIX)

    def claim(self, token: str, **changes: object) -> Claim:
        claim = StoreTools().claim(token, lease_ms=300, skew_ms=200, max_processing_ms=60_000, ttl_ms=400)
        return replace(claim, **changes)  # type: ignore[arg-type]

    def wait_for(self, store: RedisStore, verdict: Verdict, token: str) -> float:
        """Claim until the verdict comes; the seconds that took."""
        started = time.monotonic()
        while (reply := store.claim(self.claim(token))).verdict is not verdict:
            assert time.monotonic() - started < 10, reply
            time.sleep(0.02)
        return time.monotonic() - started

    def test_a_takeover_waits_for_lease_and_skew(self, store: RedisStore) -> None:
        started = time.monotonic()
        first = store.claim(self.claim("t1"))
        assert abs(first.created_at / 1000 - float(self.client.time()[0])) < 60
        self.wait_for(store, Verdict.CLAIMED, "t2")
        assert time.monotonic() - started > 0.49
        assert store.complete(Completion(self.claim("t1"), State.SUCCEEDED, CREATED)).outcome is Completed.LOST

    def test_a_renewed_claim_is_not_taken_over(self, store: RedisStore) -> None:
        store.claim(self.claim("t1"))
        started = time.monotonic()
        while time.monotonic() - started < 0.8:
            assert list(store.renew([self.claim("t1")])) == [True]
            assert store.claim(self.claim("t2")).verdict is Verdict.IN_PROGRESS
            time.sleep(0.02)

    def test_an_answer_expires(self, store: RedisStore) -> None:
        store.claim(self.claim("t1"))
        store.complete(Completion(self.claim("t1", ttl_ms=400), State.SUCCEEDED, CREATED))
        assert self.wait_for(store, Verdict.CLAIMED, "t2") > 0.3
        assert store.release(self.claim("t2"), reason="status", forget=True) is Released.RELEASED

    def test_an_answer_leaves_the_server_with_its_life(self, store: RedisStore) -> None:
        claim = self.claim("t1", ttl_ms=100, tombstone_ms=100)
        store.claim(claim)
        store.complete(Completion(claim, State.SUCCEEDED, CREATED))
        started = time.monotonic()
        while self.client.exists(record_key(claim.scope)):
            assert time.monotonic() - started < 10
            time.sleep(0.02)
        assert time.monotonic() - started > 0.1


def test_a_refusal_by_the_server_is_an_outage(redis_client: redis.Redis) -> None:
    """Whatever else a server says (read-only, loading, no permission) is said as one error."""
    store = RedisStore(redis_client, prefix=PREFIX, sources={"claim": "return redis.call('NO-SUCH-COMMAND')"})
    with pytest.raises(StoreUnavailable) as raised:
        store.claim(StoreTools().claim())
    assert not isinstance(raised.value, UnreadableRecord)
