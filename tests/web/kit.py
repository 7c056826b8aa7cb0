"""Small apps with counted effects, and what can be said about their answers."""

import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from email.utils import parsedate_to_datetime
from typing import Any

import redis
from flask import Flask, request
from werkzeug.test import TestResponse

from flask_idempotent import Idempotent, idempotent

KEY = "Idempotency-Key"
REPLAYED = "Idempotent-Replayed"
EXPIRES = "Idempotency-Expires"
STATUS = "Idempotency-Status"

#: Leases that a test can wait for. No production's values: the skew that the package wants is 2 to 5 seconds.
SHORT = {"LEASE": 0.5, "SKEW": 0.2}
#: What a lapsed lease needs at most, with room for a slow machine.
LAPSE_S = 10.0
#: How long a gate, a thread or a server may take before a test fails.
WAIT_S = 20.0

#: code -> status, retryable: the table in the public contract.
PROBLEMS = {
    "missing-key": (400, False),
    "invalid-key": (400, False),
    "principal-required": (401, False),
    "not-found": (404, False),
    "in-progress": (409, True),
    "lease-lost": (409, True),
    "response-unavailable": (409, False),
    "saga-rolled-back": (409, False),
    "expired-key": (410, False),
    "mismatch": (422, False),
    "rate-limited": (429, True),
    "store-unavailable": (503, True),
}
MEMBERS = {"type", "title", "status", "detail", "instance", "code", "retryable"}


def make_app(
    redis_url: str,
    name: str = "shop",
    *,
    config: dict[str, Any] | None = None,
    idem: Idempotent | None = None,
    client: "redis.Redis | None" = None,
    principal: Callable[[], Any] | None = None,
    **settings: Any,
) -> Flask:
    """An app with the extension; ``settings`` are ``IDEMPOTENT_`` keys without their prefix."""
    app = bare_app(redis_url, name, config=config, **settings)
    idem = idem or Idempotent()
    if principal is not None:
        idem.principal_loader(principal)
    idem.init_app(app, redis=client)
    return app


def user_header() -> str | None:
    """A principal loader for tests: the caller is who ``X-User`` says."""
    return request.headers.get("X-User")


def bare_app(redis_url: str, name: str = "shop", *, config: dict[str, Any] | None = None, **settings: Any) -> Flask:
    """The same app before ``init_app``."""
    app = Flask(name)
    app.config["IDEMPOTENT_REDIS_URL"] = redis_url
    app.config.update({f"IDEMPOTENT_{name}": value for name, value in settings.items()})
    app.config.update(config or {})
    return app


def new_key() -> str:
    return str(uuid.uuid4())


def keyed(key: str | None = None, **headers: str) -> dict[str, str]:
    """Headers with a key: the given one, or a fresh one. ``X_User="ann"`` adds ``X-User: ann``."""
    return {KEY: key or new_key(), **{name.replace("_", "-"): value for name, value in headers.items()}}


class Effects:
    """What the views did: a line for each run."""

    def __init__(self) -> None:
        self.lines: list[Any] = []

    def add(self, line: Any = None) -> int:
        self.lines.append(line)
        return len(self.lines)

    @property
    def runs(self) -> int:
        return len(self.lines)


class Gate:
    """Holds a view: the test waits until it is inside, and lets it go on."""

    def __init__(self) -> None:
        self._inside = threading.Semaphore(0)
        self._open = threading.Event()

    def hold(self) -> None:
        """For the view."""
        self._inside.release()
        assert self._open.wait(WAIT_S), "the gate was never opened"

    def wait_inside(self) -> None:
        assert self._inside.acquire(timeout=WAIT_S), "the view was never reached"

    def open(self) -> None:
        self._open.set()


class Crowd:
    """Threads for requests that overlap; all are joined at the end."""

    def __init__(self, workers: int = 8) -> None:
        self._pool = ThreadPoolExecutor(workers)
        self.gates: list[Gate] = []

    def start(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> "Future[Any]":
        return self._pool.submit(call, *args, **kwargs)

    def gate(self) -> Gate:
        """A gate that is opened at the end at the latest, so that a failed test doesn't hang."""
        self.gates.append(Gate())
        return self.gates[-1]

    def __enter__(self) -> "Crowd":
        return self

    def __exit__(self, *_: object) -> None:
        for gate in self.gates:
            gate.open()
        self._pool.shutdown()


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Call all at once, each from a thread of its own, released by one barrier; what they gave, in order."""
    barrier = threading.Barrier(len(calls))

    def release(call: Callable[[], Any]) -> Any:
        barrier.wait(WAIT_S)
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(WAIT_S) for future in [pool.submit(release, call) for call in calls]]


def until(call: Callable[[], TestResponse], *, differs_from: int = 409, seconds: float = LAPSE_S) -> TestResponse:
    """Send again until the answer has another status: how a client waits for a lease."""
    deadline = time.monotonic() + seconds
    while (response := call()).status_code == differs_from:
        assert time.monotonic() < deadline, f"still {differs_from} after {seconds} s: {response.get_data(as_text=True)}"
        time.sleep(0.02)
    return response


# What an answer says


def assert_problem(
    response: TestResponse, code: str, *, status: int | None = None, docs_url: str | None = None, more: Any = ()
) -> dict[str, Any]:
    """One of the package's own answers, complete and with nothing that doesn't belong to it."""
    usual, retryable = PROBLEMS[code]
    status = status or usual
    assert response.status_code == status, response.get_data(as_text=True)
    assert response.headers["Content-Type"] == "application/problem+json"
    body: dict[str, Any] = response.get_json()
    assert body["code"] == code
    assert set(body) == MEMBERS | set(more)
    assert body["status"] == status
    assert type(body["status"]) is int
    assert body["retryable"] is retryable
    assert body["type"] == (f"{docs_url}#{code}" if docs_url else f"urn:flask-idempotent:{code}")
    for member in ("title", "detail"):
        assert isinstance(body[member], str)
        assert body[member]
    assert body["instance"] == uuid.UUID(body["instance"].removeprefix("urn:uuid:")).urn
    assert response.headers.getlist("Content-Language") == ["en"]
    assert response.headers.get("Link") == (f'<{docs_url}>; rel="describedby"' if docs_url else None)
    waits = response.headers.getlist("Retry-After")
    assert bool(waits) is retryable
    if retryable:
        assert len(waits) == 1
        assert int(waits[0]) >= 1
        assert code not in ("in-progress", "lease-lost") or int(waits[0]) <= 10
        assert code != "store-unavailable" or waits == ["5"]
    assert REPLAYED not in response.headers
    assert STATUS not in response.headers
    assert (EXPIRES in response.headers) is (code == "response-unavailable")
    return body


def assert_kept(response: TestResponse) -> float:
    """A first answer that a record holds now; gives the seconds that it will be replayed."""
    assert REPLAYED not in response.headers
    assert STATUS not in response.headers
    expires = response.headers.getlist(EXPIRES)
    assert len(expires) == 1
    left = parsedate_to_datetime(expires[0]).timestamp() - time.time()
    assert left > -1
    return left


def assert_not_kept(response: TestResponse) -> None:
    """An answer of which nothing is held: none of our headers."""
    assert [name for name in (REPLAYED, EXPIRES, STATUS) if name in response.headers] == []


def assert_replay(first: TestResponse, second: TestResponse) -> None:
    """The second answer is the first one, told again."""
    assert second.status_code == first.status_code, second.get_data(as_text=True)
    assert second.get_data() == first.get_data()
    assert second.headers.getlist(REPLAYED) == ["true"]
    for name in (EXPIRES, "Content-Length"):
        assert second.headers.getlist(name) == first.headers.getlist(name)
    assert app_headers(second) == app_headers(first)


def app_headers(response: TestResponse) -> list[tuple[str, str]]:
    """The headers in order, without the markers and what the server adds."""
    others = {REPLAYED.lower(), EXPIRES.lower(), "content-length", "date", "server"}
    return [(name, value) for name, value in response.headers if name.lower() not in others]


# What Redis holds


def our_keys(client: "redis.Redis", prefix: str = "idempotent") -> list[bytes]:
    return sorted(client.scan_iter(f"{prefix}:*"))


def records(client: "redis.Redis", prefix: str = "idempotent") -> list[dict[str, bytes]]:
    """All records, as their fields."""
    hashes = [client.hgetall(key) for key in client.scan_iter(f"{prefix}:*:r:*")]
    return [{name.decode(): value for name, value in fields.items()} for fields in hashes]


def the_record(client: "redis.Redis", prefix: str = "idempotent") -> dict[str, bytes]:
    (record,) = records(client, prefix)
    return record


def record_key(client: "redis.Redis", prefix: str = "idempotent") -> bytes:
    (key,) = client.scan_iter(f"{prefix}:*:r:*")
    return bytes(key)


def assert_all_end(client: "redis.Redis", prefix: str = "idempotent") -> None:
    """No key of ours without an end of its life."""
    keys = our_keys(client, prefix)
    assert keys
    assert [key for key in keys if client.pttl(key) == -1] == []


def everything(client: "redis.Redis") -> bytes:
    """All names and all values in the database."""
    parts: list[bytes] = []
    for key in client.scan_iter():
        parts.append(key)
        kind = client.type(key)
        if kind == b"hash":
            parts += [part for pair in client.hgetall(key).items() for part in pair]
        elif kind == b"zset":
            parts += client.zrange(key, 0, -1)
        elif kind == b"list":
            parts += client.lrange(key, 0, -1)
        else:
            parts.append(client.get(key))
    return b"\0".join(parts)


# A view


def add_orders(
    app: Flask, effects: Effects, rule: str = "/orders", *, gate: Gate | None = None, **keywords: Any
) -> Flask:
    """``POST`` at the rule: counts, waits at the gate, answers 201 with the number of the run."""

    @app.post(rule, endpoint=rule.strip("/").replace("/", "_"))
    @idempotent(**keywords)
    def create_order(**_: Any) -> Any:
        number = effects.add(request.get_json(silent=True))
        if gate is not None:
            gate.hold()
        return {"id": number}, 201

    return app


def answering(effects: Effects, *answers: Any) -> Callable[..., Any]:
    """A view that counts, and gives the answers in order; the last one again and again."""

    def view(**_: Any) -> Any:
        return answers[min(effects.add(), len(answers)) - 1]

    return view


def assert_problem_for(seconds: float, call: Callable[[], TestResponse], code: str) -> int:
    """Every answer in this time is that problem; gives how many there were."""
    end = time.monotonic() + seconds
    count = 0
    while time.monotonic() < end:
        assert_problem(call(), code)
        count += 1
        time.sleep(0.05)
    return count


def wait_gone(client: "redis.Redis") -> None:
    """Until no record is left."""
    deadline = time.monotonic() + LAPSE_S
    while records(client):
        assert time.monotonic() < deadline, f"{len(records(client))} records are still there"
        time.sleep(0.02)


def assert_kept_by_the_server(response: TestResponse, client: "redis.Redis") -> None:
    """The end that the client is told is the record's own, by the server's clock."""
    told = parsedate_to_datetime(response.headers[EXPIRES]).timestamp()
    assert any(int(record["expires_at"]) // 1000 == int(told) for record in records(client))
    now, _ = client.time()
    assert 0 < told - now <= 48 * 3600 + 1
