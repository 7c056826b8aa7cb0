"""A shop on gunicorn: real processes, effects counted in Redis, and gates that a test opens from outside."""

import contextlib
import http.client
import json
import threading
import urllib.parse
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import redis

from tests.harness import GunicornApp
from tests.web import kit

SOURCE = """
import json, os, time, uuid
import redis
from flask import Flask, request
from flask_idempotent import Idempotent, current_idempotency, idempotent

app = Flask(__name__)
app.config.update(json.loads(os.environ["SETTINGS"]))
Idempotent(app)
effects = redis.Redis.from_url(os.environ["EFFECTS"], socket_timeout=60)

def work():
    job = request.get_json()
    name = job["name"]
    effects.rpush(f"runs:{name}", os.getpid())
    if job.get("gate"):
        effects.rpush(f"inside:{name}", os.getpid())
        assert effects.blpop(f"go:{name}", 30), "the gate was never opened"
        effects.rpush(f"go:{name}", "open")
    time.sleep(job.get("seconds", 0))
    return {"name": name, "result": uuid.uuid4().hex}

@app.post("/work")
@idempotent
def protected():
    return {**work(), "attempt": current_idempotency.attempt}, 201

@app.post("/bare")
def bare():
    return work(), 201

@app.get("/pid")
def pid():
    return str(os.getpid())
"""


@dataclass(frozen=True)
class Answer:
    status: int
    headers: "http.client.HTTPMessage"
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def replayed(self) -> bool:
        return self.headers.get_all(kit.REPLAYED) == ["true"]

    @property
    def refused(self) -> bool:
        """In progress, with a time to come back."""
        return self.status == 409 and self.json["code"] == "in-progress" and "Retry-After" in self.headers


class Shop(GunicornApp):
    """The shop, on the server at ``redis_url``; ``settings`` are ``IDEMPOTENT_`` keys without their prefix."""

    def __init__(
        self,
        redis_url: str,
        *,
        proxied_url: "str | None" = None,
        settings: "dict[str, Any] | None" = None,
        options: Sequence[str] = (),
        **gunicorn: Any,
    ) -> None:
        config = {"REDIS_URL": proxied_url or redis_url, "RATE_LIMIT": None, **(settings or {})}
        env = {
            "SETTINGS": json.dumps({f"IDEMPOTENT_{name}": value for name, value in config.items()}),
            "EFFECTS": redis_url,
        }
        super().__init__(SOURCE, env=env, options=options, **gunicorn)
        self.store = redis.Redis.from_url(redis_url)
        self._pool = ThreadPoolExecutor(64)
        self.held: list[str] = []  # gates to open at the end, so that a failed test doesn't hang

    def stop(self) -> None:
        for name in self.held:
            self.open_gate(name)
        if self._directory is not None:
            print(self.log)  # shown where a test fails
        super().stop()
        self._pool.shutdown()
        self.store.close()

    def post(self, name: str, key: str, *, path: str = "/work", **job: Any) -> Answer:
        """One request on a connection of its own."""
        with contextlib.closing(self.connect()) as connection:
            return self.post_on(connection, name, key, path=path, **job)

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(urllib.parse.urlsplit(self.url).netloc, timeout=60)

    def post_on(
        self, connection: http.client.HTTPConnection, name: str, key: str, *, path: str = "/work", **job: Any
    ) -> Answer:
        """One request on a connection that stays open."""
        connection.request("POST", path, job_body(name, **job), {**kit.keyed(key), "Content-Type": "application/json"})
        response = connection.getresponse()
        return Answer(response.status, response.headers, response.read())

    def begin(self, name: str, key: str, **job: Any) -> "Future[Answer]":
        """A request that runs on; with ``gate=True`` until the gate is opened."""
        if job.get("gate"):
            self.held.append(name)
        return self._pool.submit(self.post, name, key, **job)

    def wait_inside(self, name: str) -> int:
        """Until a view is at the gate; gives its process."""
        found = self.store.blpop(f"inside:{name}", kit.WAIT_S)
        assert found, f"no view reached the gate of {name}\n{self.log}"
        return int(found[1])

    def open_gate(self, name: str) -> None:
        """Let all go on that wait there, or will."""
        self.store.rpush(f"go:{name}", "open")

    def runs(self, name: str) -> int:
        return int(self.store.llen(f"runs:{name}"))

    def until(self, name: str, key: str, *, seconds: float = kit.LAPSE_S, **job: Any) -> Answer:
        """Send again until it isn't refused any more."""
        pause = threading.Event()
        for _ in range(int(seconds / 0.02)):
            answer = self.post(name, key, **job)
            if answer.status != 409:
                return answer
            assert answer.refused
            pause.wait(0.02)
        raise AssertionError(f"still refused after {seconds} s")


def job_body(name: str, **job: Any) -> bytes:
    return json.dumps({"name": name, **job}).encode()


def assert_replay(first: Answer, second: Answer) -> None:
    assert (second.status, second.replayed) == (first.status, True)
    assert second.body == first.body
