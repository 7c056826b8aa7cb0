"""I. Flask and Werkzeug: hooks, bodies, blueprints, async views and neighbours.

F91: ``test_an_exception`` and ``test_a_later_layer_that_fails_changes_nothing_that_is_kept`` in
``tests/web/test_exits.py``, and all of ``tests/web/test_views_outcomes.py``; here is the debugger's page.
F92: ``tests/web/test_guards.py::test_a_refusal_leaves_nothing``.
F93: ``tests/web/test_exits.py::test_an_exception_that_a_handler_makes_an_answer_of``.
F97: ``tests/web/test_untouched.py::test_nothing_sticks``; here is memory.
F99: ``tests/web/bodies/test_the_view_sees_all.py`` and ``test_on_the_wire.py``; F101: there too, and
``tests/unit/test_fingerprint.py``.
F102: the async views of ``tests/web/test_views_kinds.py`` and ``tests/web/frameworks/test_apiflask.py``; here are
flask-smorest and Flask-Limiter.
F103: ``test_nested_blueprints`` in ``tests/web/test_apps.py`` and in ``tests/web/test_views_declared.py``.
F105: ``tests/web/frameworks/test_cors.py`` and ``tests/web/test_untouched.py``.
"""

import contextlib
import gc
import io
import json
import os
import socket
import struct
import threading
import urllib.parse
from importlib.metadata import version

import marshmallow as ma
import pytest
from flask import Flask, Response, request, send_file, send_from_directory, session, stream_with_context
from flask_limiter import Limiter
from flask_limiter.util import get_remote_address
from flask_smorest import Api, Blueprint
from werkzeug.serving import make_server

from flask_idempotent import Idempotent, current_idempotency, idempotent
from tests.harness import GunicornApp, wait_until
from tests.web import kit
from tests.web.kit import keyed


@pytest.mark.parametrize("config", [{"DEBUG": True}, {"DEBUG": True, "PROPAGATE_EXCEPTIONS": False}, {}], ids=str)
def test_no_debuggers_page_is_kept(make_app, effects, store, config):
    """F91: neither the page nor the text of the error."""
    from werkzeug.debug import DebuggedApplication

    app: Flask = make_app(config=config)

    @app.post("/orders")
    @idempotent
    def orders():
        if effects.add() == 1:
            raise ValueError("a secret in an error")
        return "second", 201

    app.wsgi_app = DebuggedApplication(app.wsgi_app, evalex=False)
    client, headers = app.test_client(), keyed()
    page = client.post("/orders", headers=headers)
    assert page.status_code == 500
    kit.assert_not_kept(page)
    assert b"Traceback" not in kit.everything(store)
    assert b"secret" not in kit.everything(store)
    second = client.post("/orders", headers=headers)
    kit.assert_replay(second, client.post("/orders", headers=headers))
    assert effects.runs == 2


@pytest.mark.parametrize("context", [False, True])
@pytest.mark.parametrize("bound", [False, True])
def test_a_stream_that_raises_on_its_sixth_chunk(make_app, effects, store, bound, context):
    """F95: no half of a body is kept. The request is still there in a generator with its context."""
    app: Flask = make_app(config={"SECRET_KEY": "secret"}, **({"MAX_BODY": 200, "INLINE_BODY": 200} if bound else {}))
    seen = []

    @app.post("/report")
    @idempotent
    def report():
        effects.add()

        def chunks():
            for number in range(10):
                if context:
                    seen.append((request.path, session.get("x"), current_idempotency.attempt))
                if number == 5:
                    raise LookupError("broken off")
                yield b"x" * 100

        return Response(stream_with_context(chunks()) if context else chunks(), 201)

    client, headers = app.test_client(), keyed()
    if bound:  # the first chunks are on the wire when it breaks
        with pytest.raises(LookupError):
            client.post("/report", headers=headers, buffered=True)
    else:
        broken = client.post("/report", headers=headers)
        assert broken.status_code == 500
        kit.assert_not_kept(broken)
    problem = kit.assert_problem(
        client.post("/report", headers=headers), "response-unavailable", more={"original_status"}
    )
    assert problem["original_status"] == 201
    assert b"xxx" not in kit.everything(store)
    assert effects.runs == 1
    assert seen == ([("/report", None, 1)] * 6 if context else [])


# F96: the client leaves in the middle of a stream

SOURCE = """
import json, os, time
import redis
from flask import Flask, Response, g, request
from flask_idempotent import Idempotent, idempotent

def create_app(settings=None, effects_url=None):
    app = Flask("streams")
    app.config.update(settings or json.loads(os.environ["SETTINGS"]))
    Idempotent(app)
    effects = redis.Redis.from_url(effects_url or os.environ["EFFECTS"])

    @app.before_request
    def before():
        g.clean = not hasattr(g, "dirt")
        g.dirt = request.path

    @app.teardown_request
    def after(error):
        effects.incr(f"teardowns:{request.path}")

    @app.post("/stream")
    @idempotent
    def stream():
        effects.incr("runs")
        def chunks():
            try:
                for number in range(10):
                    if number == 2:
                        effects.rpush("at chunk 2", "here")
                    yield b"x" * 100_000
                    time.sleep(0.02)
            finally:
                effects.incr("closed")
        return Response(chunks(), 201)

    @app.post("/next")
    @idempotent
    def following():
        return {"clean": g.clean, "path": g.dirt}, 201

    return app

app = create_app() if "SETTINGS" in os.environ else None
"""


@contextlib.contextmanager
def dev_server(settings, redis_url):
    """What ``flask run`` serves with."""
    namespace = {"__name__": "streams"}
    exec(compile(SOURCE, "streams.py", "exec"), namespace)
    server = make_server("127.0.0.1", 0, namespace["create_app"](settings, redis_url), threaded=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextlib.contextmanager
def served_by(kind, settings, redis_url):
    if kind == "dev server":
        with dev_server(settings, redis_url) as url:
            yield url
    else:
        env = {"SETTINGS": json.dumps(settings), "EFFECTS": redis_url}
        with GunicornApp(SOURCE, workers=1, threads=2, worker_class=kind, env=env) as server:
            yield server.url


@pytest.mark.parametrize("bound", [1024 * 1024, 150_000], ids=["buffered", "over the bound"])
@pytest.mark.parametrize("kind", ["sync", "gthread", "gevent", "dev server"])
def test_a_client_that_leaves_in_the_middle_of_a_stream(redis_url, store, kind, bound):
    """F96: the claim ends, the generator is closed, and the next request of that worker starts clean."""
    settings = {"IDEMPOTENT_REDIS_URL": redis_url, "IDEMPOTENT_MAX_BODY": bound, "IDEMPOTENT_INLINE_BODY": 1000}
    with served_by(kind, settings, redis_url) as url:
        parts = urllib.parse.urlsplit(url)

        def send(path, headers):
            lines = "".join(f"{name}: {value}\r\n" for name, value in {**headers, "Host": parts.netloc}.items())
            connection = socket.create_connection((parts.hostname, parts.port), timeout=kit.WAIT_S)
            connection.sendall(
                f"POST {path} HTTP/1.1\r\n{lines}Content-Length: 0\r\nConnection: close\r\n\r\n".encode()
            )
            return connection

        def answer(path, headers):
            with send(path, headers) as connection:
                data = b"".join(iter(lambda: connection.recv(65536), b""))
            head, _, body = data.partition(b"\r\n\r\n")
            return int(head.split()[1]), body

        headers = keyed()
        leaving = send("/stream", headers)
        leaving.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert store.blpop("at chunk 2", kit.WAIT_S)
        leaving.close()
        wait_until(lambda: store.get("closed") == b"1", "the end of the generator")
        wait_until(lambda: answer("/stream", headers)[0] != 409 or bound < 1_000_000, "the end of the claim")
        status, body = answer("/stream", headers)
        if bound < 1_000_000:
            assert (status, json.loads(body)["code"]) == (409, "response-unavailable")
        else:
            assert status == 201
            assert b"x" * 1000 in body
        for _ in range(3):
            status, body = answer("/next", keyed())
            assert status == 201
            assert b'"clean":true' in body
            assert b'"path":"/next"' in body
        assert (store.get("runs"), store.get("closed")) == (b"1", b"1")
        wait_until(lambda: store.get("teardowns:/next") == b"3", "the teardowns of the next requests")


def test_memory_does_not_grow(make_app, effects):
    """F97: firsts, replays and refusals leave nothing in the process, but for what a rate limiter or a pool may."""
    app = kit.add_orders(make_app(RATE_LIMIT=None), effects)
    client, replayed = app.test_client(), keyed()

    def rounds(count):
        for _ in range(count):
            client.post("/orders", headers=keyed())
            client.post("/orders", headers=replayed)
            client.post("/orders", json={"a": 1}, headers=replayed)
            client.post("/orders")
        effects.lines.clear()
        gc.collect()
        return len(gc.get_objects())

    rounds(50)
    before = rounds(50)
    after = rounds(500)
    assert after - before < 500, "one object a request would be 2,000"


# F102: async views between a framework's decorators

SMOREST = tuple(int(part) for part in version("flask-smorest").split(".")[:2])


class OrderIn(ma.Schema):
    item = ma.fields.String(required=True)


class OrderOut(ma.Schema):
    id = ma.fields.Integer()
    item = ma.fields.String()


@pytest.mark.skipif(SMOREST < (0, 47), reason="flask-smorest awaits views since 0.47")
@pytest.mark.parametrize("place", ["above", "below"])
def test_async_views_of_flask_smorest(redis_url, effects, place):
    """F102"""
    settings = {"API_TITLE": "Shop", "API_VERSION": "1", "OPENAPI_VERSION": "3.0.3"}
    app = kit.make_app(redis_url, config=settings)
    api, shop = Api(app), Blueprint("shop", __name__)

    async def create(data):
        return {"id": effects.add(), "item": data["item"], "attempt": current_idempotency.attempt}

    decorators = [shop.arguments(OrderIn), shop.response(201, OrderOut)]
    for decorator in reversed([idempotent, *decorators] if place == "above" else [*decorators, idempotent]):
        create = decorator(create)
    shop.route("/orders", methods=["POST"])(create)
    api.register_blueprint(shop)
    client, headers = app.test_client(), keyed()
    first = client.post("/orders", json={"item": "book"}, headers=headers)
    assert (first.status_code, first.get_json()) == (201, {"id": 1, "item": "book"})
    kit.assert_replay(first, client.post("/orders", json={"item": "book"}, headers=headers))
    assert effects.runs == 1


def test_async_views_of_flask_limiter(redis_url, effects):
    """F102: a limit above the mark; the other way round is refused (``tests/web/frameworks/test_limiter.py``)."""
    app = kit.bare_app(redis_url)
    limiter = Limiter(get_remote_address, app=app, storage_uri="memory://")
    Idempotent(app)

    @app.post("/orders")
    @limiter.limit("3/hour")
    @idempotent
    async def orders():
        return {"id": effects.add()}, 201

    client, headers = app.test_client(), keyed()
    first = client.post("/orders", headers=headers)
    kit.assert_replay(first, client.post("/orders", headers=headers))
    kit.assert_kept(client.post("/orders", headers=keyed()))
    assert client.post("/orders", headers=keyed()).status_code == 429
    assert effects.runs == 2


# F107: files

FILE = os.urandom(200_000)


@pytest.mark.parametrize("bound", [1024 * 1024, 100_000], ids=["kept", "over the bound"])
@pytest.mark.parametrize("kind", ["path", "handle", "directory", "attachment"])
def test_files(make_app, effects, tmp_path, kind, bound):
    """F107: all bytes, twice, or marked as not kept; handles are closed; conditions and ranges of a retry change
    nothing of the answer that is told again."""
    (tmp_path / "receipt.bin").write_bytes(FILE)
    app: Flask = make_app(MAX_BODY=bound, INLINE_BODY=1000)
    handles = []

    @app.post("/receipts")
    @idempotent
    def receipt():
        effects.add()
        if kind == "handle":
            handles.append(io.BytesIO(FILE))
            return send_file(handles[-1], mimetype="application/pdf", etag="v1", last_modified=1)
        if kind == "directory":
            return send_from_directory(tmp_path, "receipt.bin")
        return send_file(tmp_path / "receipt.bin", as_attachment=kind == "attachment", max_age=60)

    def open_files():
        return [name for name in os.listdir("/proc/self/fd") if _target(name).endswith("receipt.bin")]

    client, headers = app.test_client(), keyed()
    first = client.post("/receipts", headers=headers, buffered=True)
    assert first.get_data() == FILE
    assert open_files() == []
    assert all(handle.closed for handle in handles)
    etag = first.headers.get("ETag", '"v1"')
    conditions = [
        {},
        {"Range": "bytes=0-9"},
        {"If-None-Match": etag},
        {"If-Match": '"another"'},
        {"If-Modified-Since": "Fri, 31 Dec 2100 00:00:00 GMT"},
        {"If-Range": etag, "Range": "bytes=5-"},
    ]
    for condition in conditions:
        replay = client.post("/receipts", headers={**headers, **condition}, buffered=True)
        if bound < len(FILE):
            kit.assert_problem(replay, "response-unavailable", more={"original_status"})
        else:
            kit.assert_replay(first, replay)
            assert replay.get_data() == FILE
            assert replay.headers.getlist("Content-Length") == [str(len(FILE))]
    assert effects.runs == 1
    assert open_files() == []


def _target(name):
    try:
        return os.readlink(f"/proc/self/fd/{name}")
    except OSError:
        return ""
