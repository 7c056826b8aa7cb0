"""A gunicorn worker is killed (SIGKILL) between two steps, behind the effect of one, and while it goes back. The retry
goes on; every effect is there once.
"""

import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis
import sqlalchemy as sa

from tests.harness import GunicornApp, wait_until
from tests.provider import ProviderClient
from tests.web import kit

from .kit import new_key

SOURCE = '''
import os, pathlib, time

from flask import Flask
from flask_sqlalchemy import SQLAlchemy

from flask_idempotent import Idempotent, Saga, idempotent
from tests.provider import ProviderClient

here = pathlib.Path(__file__).parent
app = Flask(__name__)
app.config.update(
    SQLALCHEMY_DATABASE_URI=os.environ["DATABASE_URL"],
    IDEMPOTENT_REDIS_URL=os.environ["REDIS_URL"],
    IDEMPOTENT_LEASE=2.5, IDEMPOTENT_SKEW=0.1, IDEMPOTENT_SETTLE_AFTER=0.3,
)
db = SQLAlchemy()
idem = Idempotent(app, db=db)
idem.principal_loader(lambda: "ann")
db.init_app(app)
bank = ProviderClient(os.environ["PROVIDER_URL"])
checkout = Saga("checkout")


def stop_at(moment):
    """The first request that gets here waits to be killed."""
    if os.environ["STOP_AT"] == moment:
        try:
            (here / "stopped").touch(exist_ok=False)
        except FileExistsError:
            return
        time.sleep(60)


def call(name, operation, key):
    (here / "calls").open("a").write(name + "\\n")
    stop_at("before " + name)
    done = bank.act(operation, key=key, what=name)
    stop_at("after " + name)
    return {name: done["id"]}


def release(state, key): return call("release", "refunds", key)
def refund(state, key): return call("refund", "refunds", key)
def recall(state, key): return call("recall", "refunds", key)


@checkout.step(compensate=release)
def reserve(state, key): return call("reserve", "transfers", key)


@checkout.step(compensate=refund)
def charge(state, key): return call("charge", "charges", key)


@checkout.step(compensate=recall)
def ship(state, key):
    if os.environ.get("DECLINE"):
        raise ValueError
    return call("ship", "captures", key)


@app.post("/orders")
@idempotent(durable="intent", saga=checkout)
def order():
    (here / "runs").open("a").write("x")
    return checkout.run({}), 201


with app.app_context():
    db.create_all()
'''

FORWARD = ["reserve", "charge", "ship"]
BACK = ["reserve", "charge", "recall", "refund", "release"]


def send(url: str, key: str) -> Any:
    asked = urllib.request.Request(f"{url}/orders", b"{}", {kit.KEY: key}, method="POST")
    try:
        with urllib.request.urlopen(asked, timeout=kit.WAIT_S) as answer:
            return answer.status, answer.read(), answer.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(), error.headers


@pytest.fixture
def urls(database_url: str, redis_url: str, provider: ProviderClient) -> "dict[str, str]":
    return {"DATABASE_URL": database_url, "REDIS_URL": redis_url, "PROVIDER_URL": provider.url}


@pytest.mark.parametrize(
    ("moment", "calls"),
    [
        ("before charge", ["reserve", "charge", "charge", "ship"]),
        ("after charge", ["reserve", "charge", "charge", "ship"]),
        ("after refund", ["reserve", "charge", "recall", "refund", "refund", "release"]),
        ("before release", ["reserve", "charge", "recall", "refund", "release", "release"]),
    ],
)
def test_killed(urls: "dict[str, str]", provider: ProviderClient, moment: str, calls: "list[str]"):
    """9.1 to 9.3, and the crash matrix' row "between two saga steps"."""
    key, back = new_key(), calls[-1] == "release"
    env = {**urls, "STOP_AT": moment, "DECLINE": "yes" if back else ""}
    with GunicornApp(SOURCE, workers=1, threads=2, env=env) as server, ThreadPoolExecutor(1) as pool:
        (victim,) = server.worker_pids()
        lost = pool.submit(send, server.url, key)
        wait_until((server.directory / "stopped").exists, "the moment")
        server.kill_worker(victim)
        with pytest.raises(OSError):  # noqa: PT011
            lost.result(kit.WAIT_S)
        server.wait_for_workers(1)
        began = time.monotonic()
        while "Retry-After" in (answer := send(server.url, key))[2]:
            assert answer[0] == 409
            assert time.monotonic() - began < kit.WAIT_S, answer[1]
            time.sleep(0.05)
        assert answer[0] == (409 if back else 201)
        assert (b"saga-rolled-back" in answer[1]) is back
        again = send(server.url, key)
        assert (again[0], again[1], again[2][kit.REPLAYED]) == (*answer[:2], "true")
        assert (server.directory / "calls").read_text().split() == calls
        assert len((server.directory / "runs").read_text()) == (1 if back else 2)
    assert [entry["what"] for entry in provider.entries()] == (BACK if back else FORWARD)
    engine = sa.create_engine(urls["DATABASE_URL"])
    with engine.begin() as connection:
        (row,) = connection.execute(sa.text("SELECT * FROM idempotency_keys"))
        (head,) = connection.execute(sa.text("SELECT status FROM idempotency_steps WHERE step = 'saga:checkout'"))
    engine.dispose()
    assert (row.status, row.attempt) == ("failed" if back else "succeeded", 2)
    assert head.status == ("undone" if back else "done")
    with redis.Redis.from_url(urls["REDIS_URL"]) as client:
        kit.assert_all_end(client)
