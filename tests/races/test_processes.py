"""Workers that are killed, servers that restart, clients that hang up: real processes and real sockets."""

import contextlib
import http.client
import os
import signal
import socket
import struct
import time
import urllib.parse
from functools import partial

import pytest

from tests.harness import wait_until
from tests.web import kit

from .shop import Shop, assert_replay, job_body
from .swarm import request_bytes

LEASE = {"LEASE": 1, "SKEW": 0.2}


def assert_no_key_for_ever(shop):
    """No key of ours without an end, whatever was killed."""
    kit.assert_all_end(shop.store)


def test_a_killed_worker(redis_url):
    """SIGKILL in the middle of the work: refused until lease and skew are over, then attempt 2. F07"""
    with Shop(redis_url, workers=2, threads=4, settings=LEASE) as shop:
        key = kit.new_key()
        first = shop.begin("a", key, gate=True)
        victim = shop.wait_inside("a")
        claimed = int(kit.the_record(shop.store)["locked_until"]) / 1000
        shop.kill_worker(victim, signal.SIGKILL)
        with pytest.raises((http.client.HTTPException, OSError)):
            first.result(kit.WAIT_S)
        begin = time.monotonic()
        assert shop.post("a", key, gate=True).refused
        other = shop.post("b", kit.new_key())
        assert (other.status, other.json["attempt"]) == (201, 1)
        assert time.monotonic() - begin < 1
        assert_no_key_for_ever(shop)
        shop.open_gate("a")
        second = shop.until("a", key, gate=True)
        now, micros = shop.store.time()
        assert now + micros / 1e6 > claimed + 0.2
        assert (second.status, second.replayed, second.json["attempt"]) == (201, False, 2)
        assert shop.runs("a") == 2
        assert_replay(second, shop.post("a", key, gate=True))
        assert_no_key_for_ever(shop)


def test_a_worker_that_the_server_kills_for_being_slow(redis_url):
    """F07: gunicorn's own time-out, on sync workers: no crash loop, and the key is usable after a lease."""
    with Shop(redis_url, workers=2, worker_class="sync", settings=LEASE, options=["--timeout=2"]) as shop:
        key = kit.new_key()
        first = shop.begin("a", key, gate=True)
        victim = shop.wait_inside("a")
        assert shop.post("b", kit.new_key()).status == 201
        with contextlib.suppress(http.client.HTTPException, OSError):
            assert first.result(kit.WAIT_S).status == 500
        wait_until(lambda: victim not in shop.worker_pids(), "the end of the slow worker")
        shop.wait_for_workers(2)
        begin = time.monotonic()
        assert shop.post("c", kit.new_key()).status == 201
        assert time.monotonic() - begin < 1
        shop.open_gate("a")
        second = shop.until("a", key, gate=True)
        assert (second.status, second.json["attempt"]) == (201, 2)
        assert len(set(shop.store.lrange("runs:a", 0, -1))) == 2
        assert_no_key_for_ever(shop)


def test_two_hosts_and_a_rolling_restart(redis_url):
    """F21: 50 pairs, one to each host at once; then one host goes while it works, and finishes."""
    options = ["--graceful-timeout=10"]
    with (
        Shop(redis_url, workers=1, threads=8, options=options) as here,
        Shop(redis_url, workers=1, threads=8) as there,
    ):
        for number in range(50):
            name, key = f"pair {number}", kit.new_key()
            pair = kit.together(*(partial(host.post, name, key) for host in (here, there)))
            assert here.runs(name) == 1
            (first,) = (answer for answer in pair if answer.status == 201 and not answer.replayed)
            (other,) = (answer for answer in pair if answer is not first)
            if not other.refused:
                assert_replay(first, other)
        key = kit.new_key()
        working = here.begin("a", key, gate=True)
        here.wait_inside("a")
        os.kill(here.pid, signal.SIGTERM)
        assert there.post("a", key, gate=True).refused
        here.open_gate("a")
        first = working.result(kit.WAIT_S)
        assert (first.status, first.replayed) == (201, False)
        assert_replay(first, there.post("a", key, gate=True))
        assert here.runs("a") == 1


@pytest.mark.parametrize("how", ["reset", "close"])
@pytest.mark.parametrize("worker_class", ["sync", "gthread"])
def test_a_client_that_hangs_up(redis_url, worker_class, how):
    """The client goes while its work runs: refused, then told the result, and one run. F62, in part"""
    with Shop(redis_url, workers=2, threads=2, worker_class=worker_class) as shop:
        key = kit.new_key()
        parts = urllib.parse.urlsplit(shop.url)
        client = socket.create_connection((parts.hostname, parts.port))
        client.sendall(request_bytes("/work", key, job_body("a", gate=True)))
        shop.wait_inside("a")
        shop.held.append("a")
        if how == "reset":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        assert shop.post("a", key, gate=True).refused
        shop.open_gate("a")
        answer = shop.until("a", key, gate=True)
        assert (answer.status, answer.replayed, answer.json["attempt"]) == (201, True, 1)
        assert shop.runs("a") == 1


def test_many_keys_on_one_thread(redis_url):
    """F13: 50 keys at once on one OS thread under gevent, and a second request for each of two of them."""
    count = 50
    with Shop(redis_url, workers=1, worker_class="gevent") as shop:
        keys = {f"job {number}": kit.new_key() for number in range(count)}
        running = {name: shop.begin(name, key, gate=True) for name, key in keys.items()}
        assert len({shop.wait_inside(name) for name in keys}) == 1
        tokens = [record["token"] for record in kit.records(shop.store)]
        assert len(set(tokens)) == count
        for name in ("job 0", "job 49"):
            assert shop.post(name, keys[name], gate=True).refused
        for name in reversed(keys):  # not in the order in which they came
            shop.open_gate(name)
        for name, key in keys.items():
            first = running[name].result(kit.WAIT_S)
            assert (first.status, first.json["name"], first.replayed) == (201, name, False)
            assert_replay(first, shop.post(name, key, gate=True))
            assert shop.runs(name) == 1
        assert {record["token"] for record in kit.records(shop.store)} == set(tokens)


@pytest.mark.parametrize("workers", [1, 2])
def test_finished_work_is_never_still_running(redis_url, workers):
    """F08: a hundred repeats at once after the answer, on the same process and on two."""
    with Shop(redis_url, workers=workers, threads=4) as shop:
        key = kit.new_key()
        first = shop.post("a", key)
        assert first.status == 201

        def repeat():
            with contextlib.closing(shop.connect()) as connection:
                return [shop.post_on(connection, "a", key) for _ in range(25)]

        for answers in kit.together(*[repeat] * 4):
            for answer in answers:
                assert_replay(first, answer)
        assert shop.runs("a") == 1


def test_workers_that_are_forked_from_a_loaded_app(redis_url):
    """Renewals work in children of a process that has the app already: the heartbeat starts where the claim is."""
    with Shop(redis_url, workers=2, threads=2, settings={"LEASE": 0.5, "SKEW": 0.2}, options=["--preload"]) as shop:
        key = kit.new_key()
        first = shop.begin("a", key, gate=True)
        shop.wait_inside("a")
        end = time.monotonic() + 2
        while time.monotonic() < end:
            assert shop.post("a", key, gate=True).refused
            time.sleep(0.05)
        shop.open_gate("a")
        assert first.result(kit.WAIT_S).json["attempt"] == 1
        assert_replay(first.result(), shop.post("a", key, gate=True))
        assert shop.runs("a") == 1
