"""The tests' own tools work, and can fail."""

import threading
import time
import urllib.request

import pytest
import redis
import sqlalchemy as sa

from tests.harness import CommandCounter, GunicornApp, Proxy, wait_until

APP = """
import os
from flask import Flask
app = Flask(__name__)
@app.get("/")
def index():
    return f"{os.environ['GREETING']} {os.getpid()}"
"""


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as response:
        return response.read().decode()


@pytest.fixture
def proxy(redis_url):
    with Proxy(redis_url) as proxy:
        yield proxy


@pytest.fixture
def client(proxy):
    """A client that doesn't try again by itself."""
    with redis.Redis.from_url(proxy.url, retry=None, socket_timeout=5) as client:
        client.ping()
        yield client


@pytest.mark.parametrize("worker_class", ["sync", "gthread", "gevent"])
def test_gunicorn_serves_and_replaces_a_killed_worker(worker_class):
    with GunicornApp(APP, worker_class=worker_class, env={"GREETING": "hello"}) as server:
        before = server.worker_pids()
        assert len(before) == 2
        greeting, pid = get(server.url).split()
        assert (greeting, int(pid) in before) == ("hello", True)
        server.kill_worker(before[0])
        server.wait_for_workers(2)
        assert before[1] in server.worker_pids()
        assert before[0] not in server.worker_pids()
        assert get(server.url).startswith("hello")


def test_gunicorn_reports_an_app_that_does_not_load():
    with pytest.raises(AssertionError, match="ZeroDivisionError"), GunicornApp("1 / 0", workers=1):
        pass


def test_gunicorn_is_gone_after_the_block():
    with GunicornApp(APP, workers=1, env={"GREETING": "hello"}) as server:
        pass
    with pytest.raises(OSError, match="refused"):
        get(server.url)


def test_counter_sees_client_commands_and_not_those_of_scripts(redis_url):
    with redis.Redis.from_url(redis_url) as client, CommandCounter(redis_url) as counter:
        client.set("a", 1)
        client.eval("return redis.call('GET', 'a') .. redis.call('INCR', 'a')", 1, "a")
    assert counter.commands == ["SET", "EVAL"]
    assert counter.calls["EVAL"] == 1


def test_proxy_counts_round_trips(proxy, client):
    before = proxy.round_trips
    client.set("a", 1)
    client.get("a")
    with client.pipeline(transaction=False) as pipeline:
        pipeline.incr("a").incr("a").execute()
    assert proxy.round_trips - before == 3


def test_proxy_loses_a_reply_after_the_work_was_done(proxy, client, redis_url):
    proxy.cut_reply(match=b"INCR")
    client.set("other", 1)
    with pytest.raises(redis.ConnectionError):
        client.incr("a")
    assert proxy.cuts == 1
    assert client.get("a") == b"1"
    assert client.incr("a") == 2


def test_proxy_holds_replies_back(proxy, client):
    proxy.delay(0.2)
    begin = time.monotonic()
    client.ping()
    assert time.monotonic() - begin >= 0.2
    proxy.heal()
    begin = time.monotonic()
    client.ping()
    assert time.monotonic() - begin < 0.2


def test_proxy_swallows_and_heals(proxy, redis_url):
    with redis.Redis.from_url(proxy.url, retry=None, socket_timeout=0.2) as client:
        client.ping()
        proxy.black_hole()
        with pytest.raises(redis.RedisError):
            client.incr("a")
        proxy.heal()
        assert client.get("a") is None


def test_what_is_held_arrives_late(redis_url):
    """Though its client has gone away."""
    with Proxy(redis_url) as proxy, redis.Redis.from_url(redis_url) as direct:
        with redis.Redis.from_url(proxy.url, socket_timeout=0.2, retry=None) as client:
            client.ping()
            proxy.hold()
            with pytest.raises(redis.TimeoutError):
                client.set("late", "1")
        assert direct.get("late") is None
        proxy.heal()
        wait_until(lambda: direct.get("late") == b"1", "what was held")


def test_proxy_leaves_no_threads(redis_url):
    before = threading.active_count()
    with Proxy(redis_url) as proxy, redis.Redis.from_url(proxy.url) as client:
        client.ping()
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_proxy_for_databases(postgres_url):
    with Proxy(postgres_url) as proxy:
        engine = sa.create_engine(proxy.url, poolclass=sa.NullPool)
        with engine.connect() as connection:
            assert connection.scalar(sa.text("SELECT 1")) == 1
            proxy.cut_reply(match=b"SELECT 2")
            with pytest.raises(sa.exc.OperationalError):
                connection.scalar(sa.text("SELECT 2"))


def test_redis_client_is_empty_and_gives_bytes(redis_client):
    assert redis_client.keys() == []
    redis_client.set("k", "v")
    assert redis_client.get("k") == b"v"


def test_redis_client_runs_scripts(redis_client):
    assert redis_client.eval("return {KEYS[1], redis.call('TIME')[1]}", 1, "k")[0] == b"k"


@pytest.mark.parametrize("run", [1, 2])
def test_database_is_empty(database_url, run):
    engine = sa.create_engine(database_url)
    assert sa.inspect(engine).get_table_names() == []
    metadata = sa.MetaData()
    sa.Table("left_over", metadata, sa.Column("id", sa.Integer, primary_key=True))
    metadata.create_all(engine)
    engine.dispose()
