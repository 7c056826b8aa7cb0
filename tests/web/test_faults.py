"""Replies that get lost, and a server that is away, at each of the two calls of a request."""

import time

import pytest
import redis

from flask_idempotent import idempotent
from tests.harness import CommandCounter, Proxy

from . import kit
from .kit import keyed


@pytest.fixture
def proxy(redis_url):
    with Proxy(redis_url) as proxy:
        yield proxy


@pytest.fixture
def app(proxy):
    """An app behind the proxy."""
    return kit.make_app(proxy.url, RATE_LIMIT=None, **kit.SHORT)


def serve(app, effects, in_view=lambda run: None):
    """``POST /orders``, with a connection made and the scripts loaded; ``in_view`` gets the number of the run."""
    kit.add_orders(app, kit.Effects(), "/warm")

    @app.post("/orders")
    @idempotent
    def orders():
        run = effects.add()
        in_view(run)
        return {"run": run}, 201

    headers = keyed()
    for _ in range(2):
        assert app.test_client().post("/warm", headers=headers).status_code == 201
    with redis.Redis.from_url(app.config["IDEMPOTENT_REDIS_URL"]) as client:
        client.flushdb()
    return lambda: app.test_client().post("/orders", json={"a": 1}, headers=headers)


def test_the_reply_to_a_claim_is_lost(app, proxy, effects):
    """The claim was made; it is asked for again, and known again by its token."""
    post = serve(app, effects)
    proxy.cut_reply(match=b"EVALSHA")
    first = post()
    assert proxy.cuts == 1
    kit.assert_kept(first)
    kit.assert_replay(first, post())
    assert effects.runs == 1


def test_every_reply_to_a_claim_is_lost(app, proxy, effects, store):
    """Nothing runs, and what was claimed in vain lapses."""
    post = serve(app, effects)
    proxy.cut_reply(n=10, match=b"EVALSHA")
    kit.assert_problem(post(), "store-unavailable")
    assert proxy.cuts >= 1
    assert effects.runs == 0
    proxy.heal()
    kit.assert_problem(post(), "in-progress")
    answer = kit.until(post)
    assert answer.get_json() == {"run": 1}
    kit.assert_replay(answer, post())
    kit.assert_all_end(store)


def test_the_reply_to_a_completion_is_lost(app, proxy, effects):
    post = serve(app, effects, lambda run: proxy.cut_reply(match=b"EVALSHA"))
    first = post()
    assert proxy.cuts == 1
    assert first.status_code == 201
    kit.assert_kept(first)
    proxy.heal()
    kit.assert_replay(first, post())
    assert effects.runs == 1


def test_every_reply_to_a_completion_is_lost(app, proxy, effects):
    """The client gets its answer; the server has it too, as the retry shows."""
    post = serve(app, effects, lambda run: proxy.cut_reply(n=10, match=b"EVALSHA"))
    first = post()
    assert proxy.cuts >= 1
    assert (first.status_code, first.get_json()) == (201, {"run": 1})
    kit.assert_not_kept(first)
    proxy.heal()
    second = post()
    assert (second.get_data(), second.headers[kit.REPLAYED]) == (first.get_data(), "true")
    assert effects.runs == 1


def test_away_at_the_claim(app, proxy, effects):
    """F80: refused in bounded time, as an outage and not as a lock; at once when it goes on."""
    post = serve(app, effects)
    proxy.black_hole()
    begin = time.monotonic()
    kit.assert_problem(post(), "store-unavailable")
    assert time.monotonic() - begin < 5
    for answer in kit.together(*[post] * 5):
        kit.assert_problem(answer, "store-unavailable")
    begin = time.monotonic()
    kit.assert_problem(post(), "store-unavailable")
    assert time.monotonic() - begin < 0.5
    assert effects.runs == 0
    proxy.heal()
    answer = kit.until(post, differs_from=503)
    kit.assert_replay(answer, post())
    assert effects.runs == 1


def test_away_at_the_completion(app, proxy, effects, store):
    """F79: the client gets the view's answer; the key is refused until its lease has lapsed, then free."""
    post = serve(app, effects, lambda run: proxy.black_hole() if run == 1 else None)
    begin = time.monotonic()
    first = post()
    assert time.monotonic() - begin < 6
    assert (first.status_code, first.get_json()) == (201, {"run": 1})
    kit.assert_not_kept(first)
    assert kit.the_record(store)["state"] == b"in_progress"
    proxy.heal()
    second = kit.until(lambda: kit.until(post, differs_from=503))
    assert second.get_json() == {"run": 2}
    kit.assert_replay(second, post())
    kit.assert_all_end(store)


def test_away_at_the_release(app, proxy, effects, store):
    def in_view(run):
        if run == 1:
            proxy.black_hole()
            raise ValueError

    post = serve(app, effects, in_view)
    assert post().status_code == 500
    proxy.heal()
    assert kit.the_record(store)["state"] == b"in_progress"
    second = kit.until(lambda: kit.until(post, differs_from=503))
    kit.assert_replay(second, post())
    assert effects.runs == 2


@pytest.mark.parametrize("how", ["delete", "flush", "script flush"])
def test_the_record_is_lost_while_the_view_runs(app, store, effects, how):
    """F73: the client gets its answer; nothing comes back to life, so a retry is as good as new."""

    def in_view(run):
        if run == 1 and how == "delete":
            store.delete(kit.record_key(store))
        elif run == 1 and how == "flush":
            store.flushall()
        elif run == 1:
            store.script_flush()

    post = serve(app, effects, in_view)
    first = post()
    assert (first.status_code, first.get_json()) == (201, {"run": 1})
    if how == "script flush":
        kit.assert_kept(first)
        kit.assert_replay(first, post())
        assert effects.runs == 1
        return
    kit.assert_not_kept(first)
    assert kit.records(store) == []
    second = post()
    assert second.get_json() == {"run": 2}
    kit.assert_replay(second, post())
    assert effects.runs == 2


@pytest.mark.parametrize("winner", ["finished", "running"])
def test_the_record_is_lost_and_claimed_by_another(app, store, effects, crowd, winner):
    """F73: the late completion resurrects nothing: the second run's record stands."""
    gates = [crowd.gate(), crowd.gate()]

    def in_view(run):
        if run == 1:
            gates[0].hold()
        elif winner == "running":
            gates[1].hold()

    post = serve(app, effects, in_view)
    late = crowd.start(post)
    gates[0].wait_inside()
    store.delete(kit.record_key(store))
    second = crowd.start(post)
    if winner == "finished":
        kit.assert_kept(second.result())
        gates[0].open()
        kit.assert_replay(second.result(), late.result())
    else:
        gates[1].wait_inside()
        gates[0].open()
        kit.assert_problem(late.result(), "lease-lost")
        assert kit.the_record(store)["state"] == b"in_progress"
        gates[1].open()
    assert second.result().get_json() == {"run": 2}
    kit.assert_replay(second.result(), post())
    assert effects.runs == 2


def test_a_server_that_hangs_up_between_requests(app, proxy, effects):
    post = serve(app, effects)
    proxy.break_connections()
    first = post()
    kit.assert_kept(first)
    proxy.break_connections()
    kit.assert_replay(first, post())
    assert effects.runs == 1


# Round trips


def test_round_trips(make_app, redis_url, effects):
    """One to claim, one to complete, one for a replay, a refusal or a release; none for what isn't protected."""
    app = make_app()
    kit.add_orders(app, effects)
    kit.add_orders(app, effects, "/open", required=False)
    view = kit.answering(effects, ("busy", 503))
    app.add_url_rule("/busy", "busy", idempotent(view), methods=["POST"])
    app.get("/plain")(lambda: "plain")
    client, headers = app.test_client(), keyed()

    def trips(path, expected, method="POST", **kwargs):
        with CommandCounter(redis_url) as counter:
            assert client.open(path, method=method, **kwargs).status_code == expected
        return counter.commands

    for path in ("/orders", "/busy"):
        client.post(path, headers=keyed())  # loads the scripts
    assert trips("/orders", 201, headers=headers, json={"a": 1}) == ["EVALSHA", "EVALSHA"]
    assert trips("/orders", 201, headers=headers, json={"a": 1}) == ["EVALSHA"]
    assert trips("/orders", 422, headers=headers, json={"a": 2}) == ["EVALSHA"]
    assert trips("/busy", 503, headers=keyed()) == ["EVALSHA", "EVALSHA"]
    assert trips("/orders", 400, json={"a": 1}) == []
    assert trips("/orders", 400, headers=keyed("a,b")) == []
    assert trips("/open", 201) == []
    assert trips("/plain", 200, method="GET") == []


def test_the_scripts_are_loaded_once(redis_url, effects):
    with redis.Redis.from_url(redis_url) as store:
        store.script_flush()
    client = kit.add_orders(kit.make_app(redis_url), effects).test_client()
    headers = keyed()
    with CommandCounter(redis_url) as counter:
        for _ in range(3):
            client.post("/orders", headers=headers)
    assert counter.commands == ["EVALSHA", "EVAL", "EVALSHA", "EVAL", "EVALSHA", "EVALSHA"]
