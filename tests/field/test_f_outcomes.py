"""F. Which outcomes are kept, and unknown outcomes.

F63 needs a provider, and so ``durable="intent"``. What holds without one: an exception after the work has been
committed inside a transaction takes it back, and the retry runs
(``tests/web/test_views_outcomes.py::test_nobody_makes_an_answer_of_it``).
F62, a client that goes in the middle of the work on sync and gthread: ``tests/races/test_processes.py`` too.
"""

import contextlib
import http.client
import json
import socket
import struct
import urllib.parse

import pytest
from flask import Blueprint, Flask, abort, request
from flask.views import MethodView

from flask_idempotent import Idempotent, idempotent
from tests.durable.kit import Shop
from tests.harness import GunicornApp, wait_until
from tests.web import kit
from tests.web.kit import keyed

# F60: one failure policy, however a view is protected


def decorator(app, idem, view):
    app.post("/orders", endpoint="orders")(idempotent(view))


def decorator_on_an_async_view(app, idem, view):
    async def orders():
        return view()

    app.post("/orders")(idempotent(orders))


def endpoint(app, idem, view):
    app.post("/orders", endpoint="orders")(view)
    idem.protect("orders")


def blueprint(app, idem, view):
    shop = Blueprint("shop", __name__)
    shop.post("/orders", endpoint="orders")(view)
    app.register_blueprint(shop)
    idem.protect(shop)


def parent_blueprint(app, idem, view):
    shop, api = Blueprint("shop", __name__), Blueprint("api", __name__)
    shop.post("/orders", endpoint="orders")(view)
    api.register_blueprint(shop)
    app.register_blueprint(api)
    idem.protect(api)


def whole_app(app, idem, view):
    app.post("/orders", endpoint="orders")(view)
    idem.protect(app)


def method(app, idem, view):
    orders = type("Orders", (MethodView,), {"post": idempotent(lambda self: view())})
    app.add_url_rule("/orders", view_func=orders.as_view("orders"))


def class_decorators(app, idem, view):
    orders = type("Orders", (MethodView,), {"post": lambda self: view(), "decorators": (idempotent,)})
    app.add_url_rule("/orders", view_func=orders.as_view("orders"))


def declared_class(app, idem, view):
    orders = type("Orders", (MethodView,), {"post": lambda self: view()})
    app.add_url_rule("/orders", view_func=orders.as_view("orders"))
    idem.protect("orders")


PROTECTIONS = [
    decorator, decorator_on_an_async_view, endpoint, blueprint, parent_blueprint, whole_app, method, class_decorators,
    declared_class,
]  # fmt: skip


def fails():
    raise ValueError("secret")


FAILURES = {
    "raises": (fails, 500, True),
    "returns 503": (lambda: ("busy", 503), 503, True),
    "aborts 409": (lambda: abort(409), 409, True),
    "returns 402": (lambda: ("declined", 402), 402, False),
    "aborts 410": (lambda: abort(410), 410, False),
}


@pytest.mark.parametrize(("failure", "status", "runs_again"), FAILURES.values(), ids=FAILURES)
@pytest.mark.parametrize("protect", PROTECTIONS)
def test_one_failure_policy(redis_url, store, effects, protect, failure, status, runs_again):
    """F60: fail once, then the retry runs; or is told the failure, by the same rule everywhere."""
    idem = Idempotent()
    app = kit.make_app(redis_url, idem=idem)

    def view():
        return failure() if effects.add() == 1 else ("made", 201)

    protect(app, idem, view)
    client, headers = app.test_client(), keyed()
    first = client.post("/orders", headers=headers)
    assert first.status_code == status
    assert kit.the_record(store)["state"] == (b"released" if runs_again else b"failed")
    second = client.post("/orders", headers=headers)
    if runs_again:
        assert (second.status_code, second.get_data()) == (201, b"made")
        kit.assert_replay(second, client.post("/orders", headers=headers))
        assert effects.runs == 2
    else:
        kit.assert_replay(first, second)
        assert effects.runs == 1


@pytest.mark.parametrize("mismatch_status", [422, 409])
def test_a_declined_card_and_another_one(make_app, effects, mismatch_status):
    """F61: the decline is kept; another card under that key is told to take a new one, and then works at once. (The
    provider's keys differ with the key: ``provider_key()``, on routes with a provider.)"""
    app: Flask = make_app(MISMATCH_STATUS=mismatch_status)

    @app.post("/charges")
    @idempotent(fields=["card", "amount"])
    def charge():
        card = request.get_json()["card"]
        effects.add(card)
        return ({"error": "declined"}, 402) if card == "A" else ({"charged": card}, 201)

    client, headers = app.test_client(), keyed()
    declined = client.post("/charges", json={"card": "A", "amount": 5}, headers=headers)
    assert declined.status_code == 402
    kit.assert_replay(
        declined, client.post("/charges", json={"card": "A", "amount": 5, "at": "later"}, headers=headers)
    )
    told = kit.assert_problem(
        client.post("/charges", json={"card": "B", "amount": 5}, headers=headers), "mismatch", status=mismatch_status
    )
    assert "new key" in told["detail"]
    assert told["retryable"] is False
    charged = client.post("/charges", json={"card": "B", "amount": 5}, headers=keyed())
    assert (charged.status_code, charged.get_json()) == (201, {"charged": "B"})
    assert effects.lines == ["A", "B"]


# F62: the client goes

SOURCE = """
import json, os
import redis
from flask import Flask, Response, request
from flask_idempotent import Idempotent, idempotent

app = Flask(__name__)
app.config.update(json.loads(os.environ["SETTINGS"]))
Idempotent(app)
effects = redis.Redis.from_url(os.environ["EFFECTS"])

def wait(name):
    effects.rpush(f"at:{name}", "here")
    assert effects.blpop(f"go:{name}", 30), "the gate was never opened"

@app.post("/work")
@idempotent
def work():
    point = request.get_json()["point"]
    if point == "mid-handler":
        wait(point)
    effects.incr(f"runs:{point}")
    return Response("x" * 900_000, 201, {"Location": f"/work/{point}"}, content_type="text/plain")

@app.after_request
def after(response):
    if request.method == "POST" and request.get_json()["point"] == "after-commit" and response.status_code == 201:
        if not effects.set("held", 1, nx=True):
            return response
        wait("after-commit")
    return response
"""


@pytest.mark.parametrize("worker_class", ["sync", "gthread", "gevent"])
def test_a_client_that_goes(redis_url, store, worker_class):
    """F62: with a reset, in the middle of the work, after it was kept, and while the answer is being written."""
    env = {"SETTINGS": json.dumps({"IDEMPOTENT_REDIS_URL": redis_url}), "EFFECTS": redis_url}
    with GunicornApp(SOURCE, workers=2, threads=4, worker_class=worker_class, env=env) as server:
        parts = urllib.parse.urlsplit(server.url)

        def send(body, headers):
            with contextlib.closing(http.client.HTTPConnection(parts.netloc, timeout=kit.WAIT_S)) as connection:
                connection.request("POST", "/work", body, {**headers, "Content-Type": "application/json"})
                response = connection.getresponse()
                return response.status, response.read(), response.headers

        for point in ("mid-handler", "after-commit", "while-written"):
            headers, body = keyed(), json.dumps({"point": point})
            client = socket.create_connection((parts.hostname, parts.port))
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            head = {**headers, "Host": parts.netloc, "Content-Type": "application/json", "Content-Length": len(body)}
            lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
            client.sendall(f"POST /work HTTP/1.1\r\n{lines}\r\n{body}".encode())
            if point == "while-written":
                assert client.recv(1000).startswith(b"HTTP/1.1 201")
            else:
                assert store.blpop(f"at:{point}", kit.WAIT_S)
            client.close()
            if point == "mid-handler":
                assert send(body, headers)[0] == 409
            if point != "while-written":
                store.rpush(f"go:{point}", "go")
            wait_until(lambda: send(body, headers)[0] != 409, "the end of the first request")  # noqa: B023
            status, data, told = send(body, headers)
            assert (status, len(data), told[kit.REPLAYED]) == (201, 900_000, "true")
            assert told["Location"] == f"/work/{point}"
            assert store.get(f"runs:{point}") == b"1"


# F66: the client never learnt what it made


@pytest.mark.parametrize("redis_lost_it", [False, True])
def test_the_retry_learns_the_id(redis_url, sqlite_url, redis_lost_it):
    """F66: the original 201 with the number of what was made, and not just "a duplicate"; from SQL too."""
    with Shop(sqlite_url, redis_url) as shop:
        shop.take_orders()
        post = shop.poster()
        lost = post()  # nobody reads it
        if redis_lost_it:
            shop.redis.flushdb()
        retry = post()
        assert (retry.status_code, retry.get_json()) == (201, {"run": 1})
        kit.assert_replay(lost, retry)
        shop.assert_done("a")


@pytest.mark.parametrize("durable", [False, "transaction"])
def test_a_body_that_was_not_kept_has_a_handle(redis_url, sqlite_url, durable):
    """F66: it is done, with which status, and where to look."""
    with Shop(sqlite_url, redis_url, MAX_BODY=100, INLINE_BODY=100) as shop:

        @shop.view(durable=durable)
        def orders():
            shop.runs += 1
            shop.order("a")
            shop.db.session.commit()
            return "x" * 101, 201, {"Location": f"/orders/{shop.runs}"}

        post = shop.poster()
        assert len(post().get_data()) == 101
        for _ in range(2):
            problem = kit.assert_problem(post(), "response-unavailable", more={"original_status", "location"})
            assert (problem["original_status"], problem["location"]) == (201, "/orders/1")
            if durable:
                shop.redis.flushdb()
        assert (shop.runs, shop.orders()) == (1, ["a"])
