"""A store that can't be asked: refused, or let through unprotected where the route says so."""

import time

import pytest
import redis

from flask_idempotent.testing import EmbeddedRedis

from . import kit
from .kit import EXPIRES, REPLAYED, STATUS, keyed

#: Nothing listens there.
NOBODY = "redis://127.0.0.1:1/0"


def test_closed_by_default(effects):
    app = kit.add_orders(kit.make_app(NOBODY), effects)
    begin = time.monotonic()
    for _ in range(10):  # the breaker opens on the way, and the answer stays the same
        kit.assert_problem(app.test_client().post("/orders", headers=keyed()), "store-unavailable")
    assert time.monotonic() - begin < 5
    assert effects.runs == 0


def test_a_missing_or_bad_key_is_told_before_the_store_is_asked(effects):
    client = kit.add_orders(kit.make_app(NOBODY), effects).test_client()
    kit.assert_problem(client.post("/orders"), "missing-key")
    kit.assert_problem(client.post("/orders", headers=keyed("a,b")), "invalid-key")


def test_a_key_that_is_not_required_needs_no_store(effects):
    client = kit.add_orders(kit.make_app(NOBODY), effects, required=False).test_client()
    assert client.post("/orders").headers[STATUS] == "unprotected"
    kit.assert_problem(client.post("/orders", headers=keyed()), "store-unavailable")
    assert effects.runs == 1


@pytest.mark.parametrize("by", ["setting", "keyword"])
def test_open_runs_and_says_so(effects, by):
    """F79"""
    settings, keywords = ({"ON_STORE_ERROR": "open"}, {}) if by == "setting" else ({}, {"on_store_error": "open"})
    client = kit.add_orders(kit.make_app(NOBODY, **settings), effects, **keywords).test_client()
    headers = keyed()
    for run in (1, 2):
        answer = client.post("/orders", headers=headers)
        assert (answer.status_code, answer.get_json()) == (201, {"id": run})
        assert answer.headers.getlist(STATUS) == ["unprotected"]
        assert [name for name in (REPLAYED, EXPIRES) if name in answer.headers] == []


def test_a_route_can_stay_closed_in_an_open_app(effects):
    app = kit.make_app(NOBODY, ON_STORE_ERROR="open")
    kit.add_orders(app, effects, on_store_error="closed")
    kit.assert_problem(app.test_client().post("/orders", headers=keyed()), "store-unavailable")
    assert effects.runs == 0


def test_open_is_still_protected_while_the_store_is_there(make_app, effects):
    client = kit.add_orders(make_app(ON_STORE_ERROR="open"), effects).test_client()
    headers = keyed()
    first = client.post("/orders", headers=headers)
    kit.assert_kept(first)
    kit.assert_replay(first, client.post("/orders", headers=headers))
    assert effects.runs == 1


@pytest.mark.parametrize("how", ["another format", "no hash", "half a hash"])
@pytest.mark.parametrize("on_store_error", ["open", "closed"])
def test_a_record_that_cannot_be_read_is_not_an_outage(make_app, effects, store, on_store_error, how):
    """What a newer version wrote may be a finished payment: an open route doesn't run over it either."""
    client = kit.add_orders(make_app(ON_STORE_ERROR=on_store_error), effects).test_client()
    headers = keyed()
    client.post("/orders", headers=headers)
    key = kit.record_key(store)
    if how == "another format":
        store.hset(key, "format", "99")
    elif how == "half a hash":
        store.hdel(key, "state", "format")
    else:
        store.delete(key)
        store.set(key, "something else", ex=60)
    for _ in range(2):
        kit.assert_problem(client.post("/orders", headers=headers), "store-unavailable")
    assert effects.runs == 1


def test_a_store_that_comes_back_is_used_again(effects):
    with EmbeddedRedis() as server, redis.Redis.from_url(server.url) as store:
        client = kit.add_orders(kit.make_app(server.url), effects).test_client()
        headers = keyed()
        kit.assert_kept(client.post("/orders", headers=headers))
        store.script_flush()
        kit.assert_kept(client.post("/orders", headers=keyed()))
        server.restart()
        kit.assert_kept(kit.until(lambda: client.post("/orders", headers=headers), differs_from=503))
