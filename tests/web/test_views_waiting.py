"""Duplicates that wait for the first one's result. F20

Short leases and times-out, which no production would use.
"""

import contextlib
import http.client
import json
import time
import urllib.parse

import pytest
from flask import Flask, request

from flask_idempotent import Idempotent, current_idempotency, idempotent
from tests.durable.kit import MANY, Shop
from tests.harness import CommandCounter, GunicornApp, Proxy, wait_until

from . import kit
from .kit import keyed

#: Room for a slow machine; the longest pause between two questions is half a second.
SOON_S = 1.5


class Waiting:
    """An app whose first request stays at a gate, and requests with that key."""

    def __init__(self, app: Flask, effects: kit.Effects, crowd: kit.Crowd, **keywords) -> None:
        self.app, self.effects, self.crowd, self.gate = app, effects, crowd, crowd.gate()
        self.headers = keyed()
        answers = keywords.pop("answers", [("made", 201)])

        @app.post("/orders")
        @idempotent(**{"on_in_progress": "wait", **keywords})
        def orders():
            run = effects.add(current_idempotency.attempt)
            if run == 1:
                self.gate.hold()
            return answers[min(run, len(answers)) - 1]

    def post(self, *, json=None, **headers):
        """The answer, and how many seconds it took."""
        began = time.monotonic()
        answer = self.app.test_client().post("/orders", json=json, headers={**self.headers, **headers})
        return answer, time.monotonic() - began

    def start(self, **options):
        return self.crowd.start(self.post, **options)

    def first(self):
        future = self.start()
        self.gate.wait_inside()
        return future

    def free_places(self) -> int:
        return self.app.extensions["idempotent"].engines[False]._waiters._value


def test_the_result_as_soon_as_it_is_there(make_app, effects, crowd):
    site = Waiting(make_app(MAX_WAITERS=4), effects, crowd)
    first = site.first()
    waiting = [site.start() for _ in range(4)]
    wait_until(lambda: site.free_places() == 0, "four that wait")
    time.sleep(0.3)
    assert not any(future.done() for future in waiting)
    opened = time.monotonic()
    site.gate.open()
    answer, _ = first.result(kit.WAIT_S)
    kit.assert_kept(answer)
    for future in waiting:
        kit.assert_replay(answer, future.result(kit.WAIT_S)[0])
    assert time.monotonic() - opened < SOON_S
    assert site.free_places() == 4
    assert effects.runs == 1


def test_refused_when_the_time_is_up(make_app, effects, crowd):
    site = Waiting(make_app(), effects, crowd, wait_timeout=0.7)
    site.first()
    answer, seconds = site.post()
    kit.assert_problem(answer, "in-progress")
    assert 0.7 <= seconds < 0.7 + SOON_S
    assert site.free_places() == 4
    assert effects.runs == 1


@pytest.mark.parametrize("keywords", [{"on_in_progress": "reject"}, {"wait_timeout": 0}])
def test_no_wait(make_app, effects, crowd, keywords):
    site = Waiting(make_app(), effects, crowd, **keywords)
    site.first()
    answer, seconds = site.post()
    kit.assert_problem(answer, "in-progress")
    assert seconds < SOON_S


def test_more_than_may_wait_are_refused_at_once(make_app, effects, crowd):
    site = Waiting(make_app(MAX_WAITERS=2), effects, crowd)
    first = site.first()
    waiting = [site.start() for _ in range(2)]
    wait_until(lambda: site.free_places() == 0, "two that wait")
    for _ in range(3):
        answer, seconds = site.post()
        kit.assert_problem(answer, "in-progress")
        assert seconds < SOON_S
    assert not any(future.done() for future in waiting)
    site.gate.open()
    kit.assert_kept(first.result(kit.WAIT_S)[0])
    assert [future.result(kit.WAIT_S)[0].headers[kit.REPLAYED] for future in waiting] == ["true", "true"]
    assert site.free_places() == 2
    assert effects.runs == 1


def test_the_places_are_the_process_s_not_the_routes(make_app, effects, crowd):
    site = Waiting(make_app(MAX_WAITERS=1), effects, crowd)
    gate = crowd.gate()
    kit.add_orders(site.app, effects, "/others", gate=gate, on_in_progress="wait")
    site.first()
    others = keyed()
    crowd.start(site.app.test_client().post, "/others", headers=others)
    gate.wait_inside()
    site.start()
    wait_until(lambda: site.free_places() == 0, "one that waits")
    kit.assert_problem(site.app.test_client().post("/others", headers=others), "in-progress")


@pytest.mark.parametrize("case", ["another body", "another caller"])
def test_who_may_not_have_the_result_is_not_kept_waiting(redis_url, effects, crowd, case):
    idem = Idempotent()
    idem.principal_loader(lambda: request.headers.get("X-User"))
    site = Waiting(kit.make_app(redis_url, idem=idem), effects, crowd)
    site.first()
    answer, seconds = site.post(json={"a": 1}) if case == "another body" else site.post(**{"X-User": "bob"})
    kit.assert_problem(answer, "mismatch" if case == "another body" else "not-found")
    assert seconds < SOON_S
    assert effects.runs == 1


def test_a_claim_that_lapses_is_taken_over(make_app, effects, crowd):
    """The waiter runs in its place; the late first one is told what the second did."""
    site = Waiting(make_app(HEARTBEAT=False, **kit.SHORT), effects, crowd, answers=[("late", 201), ("second", 201)])
    late = site.first()
    answer, seconds = site.post()
    assert (answer.status_code, answer.get_data()) == (201, b"second")
    kit.assert_kept(answer)
    assert 0.5 < seconds < kit.LAPSE_S
    site.gate.open()
    kit.assert_replay(answer, late.result(kit.WAIT_S)[0])
    assert effects.lines == [1, 2]


def test_a_claim_that_is_given_back_is_taken(make_app, effects, crowd):
    """One of the waiters runs; the others wait on, for that one."""
    site = Waiting(make_app(), effects, crowd, answers=[("busy", 503), ("made", 201)])
    first = site.first()
    waiting = [site.start() for _ in range(3)]
    wait_until(lambda: site.free_places() == 1, "three that wait")
    site.gate.open()
    assert first.result(kit.WAIT_S)[0].status_code == 503
    answers = [future.result(kit.WAIT_S)[0] for future in waiting]
    assert [answer.get_data() for answer in answers] == [b"made"] * 3
    assert sorted(kit.REPLAYED in answer.headers for answer in answers) == [False, True, True]
    assert effects.lines == [1, 2]


def test_a_result_without_its_body(make_app, effects, crowd):
    site = Waiting(make_app(), effects, crowd, answers=[("x" * 2_000_000, 201)])
    first = site.first()
    waiting = site.start()
    wait_until(lambda: site.free_places() == 3, "one that waits")
    site.gate.open()
    assert len(first.result(kit.WAIT_S)[0].get_data()) == 2_000_000
    kit.assert_problem(waiting.result(kit.WAIT_S)[0], "response-unavailable", more={"original_status"})


def test_the_store_goes_away_meanwhile(redis_url, effects, crowd):
    """F80: away is not "in progress": 503, and within a bound."""
    with Proxy(redis_url) as proxy:
        site = Waiting(kit.make_app(proxy.url), effects, crowd, wait_timeout=30)
        site.first()
        waiting = site.start()
        wait_until(lambda: site.free_places() == 3, "one that waits")
        proxy.stop()
        answer, seconds = waiting.result(kit.WAIT_S)
        kit.assert_problem(answer, "store-unavailable")
        assert seconds < 10
        assert site.free_places() == 4
        site.gate.open()
        proxy.start()


def test_few_questions(redis_url, make_app, effects, crowd):
    """A wait of a second and a half, with growing pauses: no busy loop."""
    site = Waiting(make_app(HEARTBEAT=False), effects, crowd, wait_timeout=1.5)
    site.first()
    with CommandCounter(redis_url) as counter:
        kit.assert_problem(site.post()[0], "in-progress")
    assert 4 <= counter.calls["EVALSHA"] <= 10


def test_async_views_wait_too(make_app, effects, crowd):
    app, gate, headers = make_app(), crowd.gate(), keyed()

    @app.post("/orders")
    @idempotent(on_in_progress="wait")
    async def orders():
        effects.add()
        gate.hold()
        return "made", 201

    first = crowd.start(app.test_client().post, "/orders", headers=headers)
    gate.wait_inside()
    second = crowd.start(app.test_client().post, "/orders", headers=headers)
    wait_until(lambda: app.extensions["idempotent"].engines[False]._waiters._value == 3, "one that waits")
    gate.open()
    kit.assert_replay(first.result(kit.WAIT_S), second.result(kit.WAIT_S))
    assert effects.runs == 1


@pytest.mark.parametrize("timeout", [0.5, 10])
def test_a_durable_route(redis_url, sqlite_url, crowd, timeout):
    """The one that waits holds no connection, and gets what was committed, or is refused."""
    with Shop(sqlite_url, redis_url, engine_options=MANY) as shop:
        shop.take_orders(on_in_progress="wait", wait_timeout=timeout)
        shop.gate, key = crowd.gate(), kit.new_key()
        first = crowd.start(shop.post, key)
        shop.gate.wait_inside()
        if timeout < 1:
            kit.assert_problem(shop.post(key), "in-progress")
        else:
            second = crowd.start(shop.post, key)
            wait_until(lambda: shop.app.extensions["idempotent"].engines[False]._waiters._value == 3, "one that waits")
            assert shop.checked_out() <= 1
        shop.gate.open()
        answer = first.result(kit.WAIT_S)
        kit.assert_replay(answer, shop.post(key) if timeout < 1 else second.result(kit.WAIT_S))
        shop.assert_done("a")


SOURCE = """
import json, os, time
import redis
from flask import Flask
from flask_idempotent import Idempotent, idempotent

app = Flask(__name__)
app.config.update(json.loads(os.environ["SETTINGS"]))
Idempotent(app)
effects = redis.Redis.from_url(os.environ["EFFECTS"])

@app.post("/work")
@idempotent(on_in_progress="wait", wait_timeout=15)
def work():
    run = effects.incr("runs")
    effects.rpush("inside", run)
    assert effects.blpop("go", 30), "the gate was never opened"
    return {"run": run}, 201

@app.get("/plain")
def plain():
    return "plain"
"""


def test_waiters_leave_room_for_others(redis_url, store, crowd):
    """Eight threads, eight duplicates of a request that runs: an unrelated GET is answered at once."""
    settings = {"IDEMPOTENT_REDIS_URL": redis_url, "IDEMPOTENT_MAX_WAITERS": 4}
    env = {"SETTINGS": json.dumps(settings), "EFFECTS": redis_url}
    with GunicornApp(SOURCE, workers=1, threads=8, env=env) as server:
        host, headers = urllib.parse.urlsplit(server.url).netloc, keyed()

        def send(method, path):
            with contextlib.closing(http.client.HTTPConnection(host, timeout=kit.WAIT_S)) as connection:
                connection.request(method, path, headers={} if method == "GET" else headers)
                response = connection.getresponse()
                return response.status, response.read(), response.headers.get(kit.REPLAYED)

        first = crowd.start(send, "POST", "/work")
        assert store.blpop("inside", kit.WAIT_S)
        with kit.Crowd(9) as others:
            duplicates = [others.start(send, "POST", "/work") for _ in range(8)]
            wait_until(lambda: sum(future.done() for future in duplicates) == 4, "four that are refused")
            began = time.monotonic()
            for _ in range(5):
                assert send("GET", "/plain")[:2] == (200, b"plain")
            assert time.monotonic() - began < 2
            store.rpush("go", "go")
            answers = [future.result(kit.WAIT_S) for future in duplicates]
        assert first.result(kit.WAIT_S) == (201, b'{"run":1}\n', None)
        assert sorted(status for status, _, _ in answers) == [201] * 4 + [409] * 4
        assert {(body, replayed) for status, body, replayed in answers if status == 201} == {(b'{"run":1}\n', "true")}
        assert store.get("runs") == b"1"
