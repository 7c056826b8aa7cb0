"""Uploads through a real server: 50 MiB whose memory is never needed, and bodies that come in chunks. F99"""

import contextlib
import hashlib
import http.client
import json
import urllib.parse
from pathlib import Path

import pytest
import redis

from tests.harness import GunicornApp

from .. import kit

MIB = 1024 * 1024

SOURCE = """
import hashlib, json, os
import redis
from flask import Flask, abort, request
from flask_idempotent import Idempotent, idempotent

app = Flask(__name__)
app.config.update(json.loads(os.environ["CONFIG"]))
Idempotent(app)
effects = redis.Redis.from_url(app.config["IDEMPOTENT_REDIS_URL"])

def digest(read):
    total = hashlib.sha256()
    length = 0
    while piece := read(65536):
        total.update(piece)
        length += len(piece)
    return [length, total.hexdigest()]

@app.post("/files")
@idempotent
def files():
    effects.incr("runs")
    found = request.files.items()
    seen = {name: [file.filename, file.stream.tell(), *digest(file.stream.read)] for name, file in found}
    return {"files": seen, "form": request.form.to_dict()}, 201

@app.post("/stream")
@idempotent
def stream():
    effects.incr("runs")
    return digest(request.stream.read), 201

@app.post("/data")
@idempotent
def data():
    effects.incr("runs")
    found = request.get_data(cache=False)
    return [len(found), hashlib.sha256(found).hexdigest()], 201

@app.post("/json")
@idempotent
def as_json():
    effects.incr("runs")
    return {"seen": request.get_json()}, 201

@app.post("/form")
@idempotent
def form():
    effects.incr("runs")
    return request.form.to_dict(flat=False), 201

def guarded(view):
    def inner():
        abort(401)
    inner.__wrapped__ = view
    return inner

@app.post("/guarded")
@guarded
@idempotent
def secret():
    effects.incr("runs")
    return "secret"

@app.get("/peak")
def peak():
    (line,) = (line for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return str(int(line.split()[1]) * 1024)
"""


class Site(GunicornApp):
    def __init__(self, redis_url, **config):
        config = {"IDEMPOTENT_REDIS_URL": redis_url, "IDEMPOTENT_RATE_LIMIT": None, **config}
        super().__init__(SOURCE, workers=1, threads=2, env={"CONFIG": json.dumps(config)})

    def send(self, method, path, body=None, headers=None, *, chunked=False):
        connection = http.client.HTTPConnection(urllib.parse.urlsplit(self.url).netloc, timeout=kit.WAIT_S)
        with contextlib.closing(connection):
            connection.request(method, path, body, headers or {}, encode_chunked=chunked)
            response = connection.getresponse()
            return response.status, response.headers, response.read()

    def post(self, path, body, headers, *, content_type, length=None):
        """``body`` is an iterable of bytes. Without a length it goes out in chunks."""
        headers = {**headers, "Content-Type": content_type}
        headers.update({"Transfer-Encoding": "chunked"} if length is None else {"Content-Length": str(length)})
        return self.send("POST", path, iter(body), headers, chunked=length is None)


@pytest.fixture
def site(redis_url):
    with Site(redis_url) as site:
        yield site


@pytest.fixture
def runs(redis_url):
    with contextlib.closing(redis.Redis.from_url(redis_url)) as client:
        yield lambda: int(client.get("runs") or 0)


class Upload:
    """A multipart body with one generated file, made as it is sent."""

    def __init__(self, size, boundary="frontier-1", *, flip=None, note="a scan"):
        self.content_type = f"multipart/form-data; boundary={boundary}"
        self.size, self.flip = size, flip
        self.head = (
            f'--{boundary}\r\nContent-Disposition: form-data; name="note"\r\n\r\n{note}\r\n'
            f'--{boundary}\r\nContent-Disposition: form-data; name="scan"; filename="scan.tif"\r\n'
            "Content-Type: image/tiff\r\n\r\n"
        ).encode()
        self.tail = f"\r\n--{boundary}--\r\n".encode()
        self.length = len(self.head) + size + len(self.tail)

    def file(self):
        for number in range(self.size // MIB):
            piece = bytearray(hashlib.sha256(b"%d" % number).digest() * (MIB // 32))
            if self.flip == number:
                piece[MIB // 2] ^= 1
            yield bytes(piece)

    def __iter__(self):
        yield self.head
        yield from self.file()
        yield self.tail

    def digest(self):
        total = hashlib.sha256()
        for piece in self.file():
            total.update(piece)
        return total.hexdigest()


def is_replay(first, second):
    assert second[1].get_all(kit.REPLAYED) == ["true"]
    assert (second[0], second[2]) == (first[0], first[2])
    assert kit.REPLAYED not in first[1]


def is_problem(answer, status, code):
    assert (answer[0], json.loads(answer[2])["code"]) == (status, code)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from Linux's /proc")
@pytest.mark.parametrize("framing", ["with its length", "in chunks"])
def test_fifty_mebibytes(site, runs, framing):
    """The view has the whole file, rewound; no copy of it was ever in memory; one bit is another request."""

    def send(upload, headers):
        length = upload.length if framing == "with its length" else None
        return site.post("/files", upload, headers, content_type=upload.content_type, length=length)

    headers = kit.keyed()
    small = send(Upload(MIB), kit.keyed())
    assert small[0] == 201, small
    before = int(site.send("GET", "/peak")[2])
    upload = Upload(50 * MIB)
    first = send(upload, headers)
    assert first[0] == 201, first
    seen = json.loads(first[2])
    assert seen == {
        "files": {"scan": ["scan.tif", 0, 50 * MIB, upload.digest()]},
        "form": {"note": "a scan"},
    }
    is_replay(first, send(Upload(50 * MIB, "another-frontier"), headers))
    is_problem(send(Upload(50 * MIB, flip=49), headers), 422, "mismatch")
    is_problem(send(Upload(50 * MIB, note="a can"), headers), 422, "mismatch")
    assert int(site.send("GET", "/peak")[2]) - before < 16 * MIB
    assert runs() == 2


BODIES = {
    "/stream": ("application/octet-stream", [b"\0" * 100_000, b"\xff", b"x" * 70_000]),
    "/data": ("text/plain", [b"one ", b"two ", b"three"]),
    "/json": ("application/json", [b'{"amount"', b": 1, ", b'"note": "gr\xc3\xbcn"}']),
    "/form": ("application/x-www-form-urlencoded", [b"item=tea", b"&item=mi", b"lk"]),
}


@pytest.mark.parametrize("first_framing", ["in chunks", "with its length"])
def test_chunks(site, runs, first_framing):
    """A body counts the same however it is framed, and its view sees it all."""
    for number, (path, (content_type, pieces)) in enumerate(BODIES.items(), 1):
        headers, whole = kit.keyed(), b"".join(pieces)

        def send(pieces, framing, path=path, content_type=content_type, headers=headers):
            length = sum(map(len, pieces)) if framing == "with its length" else None
            return site.post(path, pieces, headers, content_type=content_type, length=length)

        first = send(pieces, first_framing)
        assert first[0] == 201, (path, first)
        seen = json.loads(first[2])
        if path in ("/stream", "/data"):
            assert seen == [len(whole), hashlib.sha256(whole).hexdigest()]
        elif path == "/json":
            assert seen == {"seen": json.loads(whole)}
        else:
            assert seen == {"item": ["tea", "milk"]}
        is_replay(first, send([whole], "in chunks"))
        is_replay(first, send(pieces, "with its length"))
        for framing in ("in chunks", "with its length"):
            is_problem(send([*pieces[:-1], pieces[-1].swapcase()], framing), 422, "mismatch")
        assert runs() == number


def test_empty_chunks(site, runs):
    headers = kit.keyed()
    first = site.post("/stream", [], headers, content_type="application/octet-stream")
    assert first[0] == 201
    assert json.loads(first[2]) == [0, hashlib.sha256().hexdigest()]
    is_replay(first, site.post("/stream", [], headers, content_type="application/octet-stream", length=0))
    is_problem(site.post("/stream", [b"x"], headers, content_type="application/octet-stream"), 422, "mismatch")
    assert runs() == 1


def test_chunks_beyond_the_limit(redis_url, runs):
    """413 though no length was said; nothing is left, and the key works with less."""
    with Site(redis_url, MAX_CONTENT_LENGTH=100_000) as site:
        for path, content_type in (("/data", "text/plain"), ("/form", "application/x-www-form-urlencoded")):
            headers, before = kit.keyed(), runs()
            answer = site.post(path, [b"x" * 60_000] * 2, headers, content_type=content_type)
            assert answer[0] == 413
            assert runs() == before
            first = site.post(path, [b"x" * 60_000], headers, content_type=content_type)
            assert first[0] == 201
            is_replay(first, site.post(path, [b"x" * 60_000], headers, content_type=content_type, length=60_000))
        with contextlib.closing(redis.Redis.from_url(redis_url)) as store:
            assert len(kit.records(store)) == 2


def test_a_stranger_is_answered_before_the_upload_is_there(site, runs, redis_url):
    """401 while most of the body was never sent."""
    parts = urllib.parse.urlsplit(site.url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=kit.WAIT_S)
    with contextlib.closing(connection):
        connection.putrequest("POST", "/guarded")
        for name, value in {**kit.keyed(), "Content-Type": "image/png", "Content-Length": str(50 * MIB)}.items():
            connection.putheader(name, value)
        connection.endheaders(b"x" * 1000)
        assert connection.getresponse().status == 401
    assert runs() == 0
    with contextlib.closing(redis.Redis.from_url(redis_url)) as store:
        assert kit.our_keys(store) == []
