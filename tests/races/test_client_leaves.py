"""Clients that hang up with a reset, wherever they can: the work runs once, nothing is stuck, and whoever asks again is
told what became of it; the worker's next request starts clean. F62, F96"""

import contextlib
import http.client
import json
import socket
import struct
import subprocess
import sys
import tempfile
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.harness import GunicornApp, wait_until
from tests.web import kit

from .shop import Answer

MIB = 1024 * 1024

SOURCE = """
import json, os
import redis
from flask import Flask, Response, g, has_app_context, request, stream_with_context
from flask_idempotent import Idempotent, idempotent

app = Flask(__name__)
app.config.update(json.loads(os.environ["CONFIG"]))
Idempotent(app)
effects = redis.Redis.from_url(app.config["IDEMPOTENT_REDIS_URL"])

def hold(place):
    name = g.name
    effects.rpush(f"at:{name}:{place}", os.getpid())
    assert effects.blpop(f"go:{name}:{place}", 30), "the gate was never opened"

def chunks(size):
    try:
        for number in range(10):
            if number == 2:
                hold("chunk")
            yield bytes([48 + number]) * size
    finally:
        effects.rpush(f"closed:{g.name}", request.path)

@app.post("/work")
@idempotent
def work():
    body = request.get_json()
    g.name, g.at = body["name"], body["at"]
    effects.rpush(f"runs:{g.name}", os.getpid())
    if body["at"] == "view":
        hold("view")
    if body["at"] == "write":
        return Response(b"x" * 8 * 1024 * 1024)
    if body["at"] == "stream":
        return Response(stream_with_context(chunks(100)))
    if body["at"] == "large stream":
        return Response(stream_with_context(chunks(5 * 1024 * 1024)), 201, {"Location": "/results/1"})
    return {"name": g.name}, 201

@app.after_request
def after(response):
    if g.get("at") == "after":
        hold("after")
    return response

@app.teardown_request
def teardown(error):
    if "name" in g:
        effects.rpush(f"torn down:{g.name}", os.getpid())

@app.get("/clean")
def clean():
    return {"pid": os.getpid(), "left": list(g), "nested": request.environ["nested"]}

inner = app.wsgi_app
def outermost(environ, start_response):
    environ["nested"] = has_app_context()
    return inner(environ, start_response)
app.wsgi_app = outermost
"""

DEV_SERVER = """
import logging, pathlib
from app_under_test import app
from werkzeug.serving import make_server
server = make_server("127.0.0.1", 0, app, threaded=True)
pathlib.Path("port.new").write_text(str(server.port))
pathlib.Path("port.new").rename("port")
server.serve_forever()
"""


class DevServer:
    """Werkzeug's own server, in a process of its own."""

    def __init__(self, env):
        self.env = env
        self.url = ""

    def __enter__(self):
        self._directory = tempfile.TemporaryDirectory(prefix="dev-server-")
        here = Path(self._directory.name)
        (here / "app_under_test.py").write_text(SOURCE)
        with (here / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-c",
                    f"import sys; sys.path[:0] = [{str(here)!r}, {str(Path.cwd())!r}]\n{DEV_SERVER}",
                ],
                cwd=here,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        wait_until((here / "port").exists, "werkzeug's server")
        self.url = f"http://127.0.0.1:{(here / 'port').read_text()}"
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.wait()
        self._directory.cleanup()

    @property
    def log(self):
        return (Path(self._directory.name) / "log").read_text(errors="replace")


SERVERS = {
    "sync": {"worker_class": "sync", "workers": 2},
    "gthread": {"worker_class": "gthread", "workers": 1, "threads": 4},
    "gevent": {"worker_class": "gevent", "workers": 1},
    "dev server": None,
}


@pytest.fixture(scope="module", params=SERVERS)
def site(request, _embedded_redis):
    config = {"REDIS_URL": _embedded_redis, "RATE_LIMIT": None, "MAX_BODY": 8 * MIB}
    config = {"CONFIG": json.dumps({f"IDEMPOTENT_{name}": value for name, value in config.items()})}
    options = SERVERS[request.param]
    server = GunicornApp(SOURCE, env=config, **options) if options else DevServer({**GunicornApp("").env, **config})
    with server, contextlib.closing(redis.Redis.from_url(_embedded_redis)) as store:
        yield Site(server, store, alone=request.param == "sync")


class Site:
    """The server, what its views did, and clients that leave."""

    def __init__(self, server: Any, store: "redis.Redis", *, alone: bool) -> None:
        self.server = server
        self.store = store
        #: Whether a worker has one request at a time.
        self.alone = alone

    def body(self, name: str, at: str) -> bytes:
        return json.dumps({"name": name, "at": at}).encode()

    def send(self, name: str, at: str, key: str) -> "tuple[socket.socket, bytes]":
        """A request on a socket of its own, and what was sent."""
        parts = urllib.parse.urlsplit(self.server.url)
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)  # so that a large answer doesn't fit
        client.settimeout(kit.WAIT_S)
        client.connect((parts.hostname, parts.port))
        body = self.body(name, at)
        client.sendall(self.head(key, len(body)) + body)
        return client, body

    def head(self, key: str, length: int, content_type: str = "application/json") -> bytes:
        lines = ["POST /work HTTP/1.1", "Host: shop", f"{kit.KEY}: {key}", f"Content-Type: {content_type}"]
        return "\r\n".join([*lines, f"Content-Length: {length}", "", ""]).encode()

    def post(self, name: str, at: str, key: str) -> Answer:
        return self.request(
            "POST", "/work", self.body(name, at), {**kit.keyed(key), "Content-Type": "application/json"}
        )

    def request(self, method: str, path: str, body: "bytes | None" = None, headers: Any = None) -> Answer:
        connection = http.client.HTTPConnection(urllib.parse.urlsplit(self.server.url).netloc, timeout=kit.WAIT_S)
        with contextlib.closing(connection):
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            return Answer(response.status, response.headers, response.read())

    def wait_at(self, name: str, place: str) -> int:
        found = self.store.blpop([f"at:{name}:{place}"], kit.WAIT_S)
        assert found, f"{name} never came to {place}\n{self.server.log}"
        return int(found[1])

    def go(self, name: str, place: str) -> None:
        self.store.rpush(f"go:{name}:{place}", "on")

    def count(self, what: str, name: str) -> int:
        return int(self.store.llen(f"{what}:{name}"))

    def wait_torn_down(self, name: str) -> None:
        wait_until(lambda: self.count("torn down", name) > 0, f"the teardown of {name}\n{self.server.log}")

    def assert_clean(self, name: str) -> None:
        """The next request of the worker that ran this has nothing of it, and it was torn down once."""
        (pid,) = self.store.lrange(f"torn down:{name}", 0, -1)
        seen = set()
        for _ in range(200):
            found = self.request("GET", "/clean").json
            assert (found["left"], found["nested"]) == ([], False)
            seen.add(found["pid"])
            if int(pid) in seen:
                return
        raise AssertionError(f"worker {pid} never answered, only {seen}\n{self.server.log}")

    def runs(self, name: str) -> int:
        return self.count("runs", name)


def reset(client: socket.socket) -> None:
    """Close, with RST instead of FIN."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def read(client: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        piece = client.recv(min(65536, length - len(data)))
        assert piece, f"the server hung up after {len(data)} bytes"
        data += piece
    return bytes(data)


def is_replay(answer: Answer, status: int) -> None:
    assert (answer.status, answer.replayed) == (status, True), answer


@pytest.fixture
def name(request):
    return request.node.name


def test_in_the_view(site, name):
    key = kit.new_key()
    client, _ = site.send(name, "view", key)
    site.wait_at(name, "view")
    reset(client)
    assert site.post(name, "view", key).refused
    site.go(name, "view")
    site.wait_torn_down(name)
    answer = site.post(name, "view", key)
    is_replay(answer, 201)
    assert answer.json == {"name": name}
    assert site.runs(name) == 1
    site.assert_clean(name)


def test_behind_the_view(site, name):
    """The answer is kept, and no byte of it has gone out."""
    key = kit.new_key()
    client, _ = site.send(name, "after", key)
    site.wait_at(name, "after")
    reset(client)
    is_replay(site.post(name, "after", key), 201)
    site.go(name, "after")
    site.wait_torn_down(name)
    is_replay(site.post(name, "after", key), 201)
    assert site.runs(name) == 1
    site.assert_clean(name)


def test_while_the_answer_is_written(site, name):
    key = kit.new_key()
    client, _ = site.send(name, "write", key)
    assert read(client, 1000).startswith(b"HTTP/1.1 200")
    reset(client)
    answer = site.post(name, "write", key)
    is_replay(answer, 200)
    assert answer.body == b"x" * 8 * MIB
    assert site.runs(name) == 1
    site.wait_torn_down(name)
    site.assert_clean(name)


def test_while_a_stream_is_made(site, name):
    """At chunk 2 of 10: the stream is read to its end all the same, and kept."""
    key = kit.new_key()
    client, _ = site.send(name, "stream", key)
    site.wait_at(name, "chunk")
    reset(client)
    assert site.post(name, "stream", key).refused
    site.go(name, "chunk")
    site.wait_torn_down(name)
    answer = site.post(name, "stream", key)
    is_replay(answer, 200)
    assert answer.body == b"".join(b"%d" % number * 100 for number in range(10))
    assert (site.runs(name), site.count("closed", name)) == (1, 1)
    site.assert_clean(name)


def test_while_a_stream_larger_than_what_is_kept_is_sent(site, name):
    """At chunk 2 of 10, 10 MiB after the head: the generator is closed, the record says "done", and where."""
    key = kit.new_key()
    client, _ = site.send(name, "large stream", key)
    with ThreadPoolExecutor(1) as reader:
        reading = reader.submit(read, client, 9 * MIB)
        site.wait_at(name, "chunk")
        assert reading.result(kit.WAIT_S).startswith(b"HTTP/1.1 201")
    reset(client)
    assert_done(site.post(name, "large stream", key))
    site.go(name, "chunk")
    site.wait_torn_down(name)
    assert_done(site.post(name, "large stream", key))
    assert (site.runs(name), site.count("closed", name)) == (1, 1)
    site.assert_clean(name)


def assert_done(answer: Answer) -> None:
    assert (answer.status, answer.json["code"]) == (409, "response-unavailable")
    assert (answer.json["original_status"], answer.json["location"]) == (201, "/results/1")
    assert "Retry-After" not in answer.headers


@pytest.mark.parametrize("how", ["reset", "close"])
@pytest.mark.parametrize("kind", ["JSON", "large multipart"])
def test_while_the_request_is_sent(site, name, kind, how):
    """Half a body is no request: it claims nothing, runs nothing, and the whole one is no other than itself."""
    key = kit.new_key()
    if kind == "JSON":
        body, content_type = site.body(name, "none"), "application/json"
    else:
        content_type = "multipart/form-data; boundary=frontier"
        head = '--frontier\r\nContent-Disposition: form-data; name="scan"; filename="a"\r\n\r\n'
        body = head.encode() + b"x" * 2 * MIB + b"\r\n--frontier--\r\n"
    before = len(kit.our_keys(site.store))
    parts = urllib.parse.urlsplit(site.server.url)
    client = socket.create_connection((parts.hostname, parts.port), kit.WAIT_S)
    client.sendall(site.head(key, len(body), content_type) + body[: len(body) // 2])
    if how == "close":
        client.shutdown(socket.SHUT_WR)
        assert client.recv(1000).split(b" ")[1:2] in ([b"400"], [])
        client.close()
    else:
        reset(client)
    assert len(kit.our_keys(site.store)) == before
    answer = site.request("POST", "/work", body, {**kit.keyed(key), "Content-Type": content_type})
    assert not answer.replayed
    if kind == "JSON":
        assert (answer.status, answer.json, site.runs(name)) == (201, {"name": name}, 1)
    else:
        assert answer.status == 415  # the view's own answer: it wants JSON
