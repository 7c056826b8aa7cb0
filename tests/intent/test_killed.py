"""A gunicorn worker is killed (SIGKILL) after the claim is in the database: before the provider's call, behind it, and
behind the commit of the answer. The retry settles it; one charge, one local row with its id.
"""

import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import redis
import sqlalchemy as sa

from tests.durable.kit import empty_tables
from tests.harness import GunicornApp, wait_until
from tests.provider import ProviderClient
from tests.web import kit

from .kit import new_key

SOURCE = '''
import os, pathlib, time

import sqlalchemy as sa
from flask import Flask, request
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy.orm import Mapped, mapped_column

from flask_idempotent import Idempotent, Provider, Settlement, current_idempotency, idempotent
from tests.provider import ProviderClient

here = pathlib.Path(__file__).parent
app = Flask(__name__)
app.config.update(
    SQLALCHEMY_DATABASE_URI=os.environ["DATABASE_URL"],
    IDEMPOTENT_REDIS_URL=os.environ["REDIS_URL"],
    IDEMPOTENT_LEASE=0.6, IDEMPOTENT_SKEW=0.1, IDEMPOTENT_SETTLE_AFTER=0.3,
)
db = SQLAlchemy()
idem = Idempotent(app, db=db)
idem.principal_loader(lambda: "ann")
db.init_app(app)
bank = ProviderClient(os.environ["PROVIDER_URL"])


class Payment(db.Model):
    __tablename__ = "payments"
    id: Mapped[int] = mapped_column(primary_key=True)
    charge: Mapped[str] = mapped_column(sa.String(50), unique=True)


def note(charge):
    if db.session.scalar(sa.select(Payment).filter_by(charge=charge)) is None:
        db.session.add(Payment(charge=charge))
        db.session.commit()


def stop_at(moment):
    """The first request that gets here waits to be killed."""
    if os.environ["STOP_AT"] == moment:
        try:
            (here / "stopped").touch(exist_ok=False)
        except FileExistsError:
            return
        time.sleep(60)


@app.post("/charges")
@idempotent(durable="intent", provider=Provider("bank", window=86400, max_length=64))
def charge():
    (here / "runs").open("a").write("x")
    stop_at("after the claim")
    key = current_idempotency.provider_key()
    stop_at("before the call")
    done = bank.charge(100, key=key)
    stop_at("after the call")
    note(done["id"])
    stop_at("after the local write")
    return {"charge": done["id"]}, 201


@charge.reconciler
def settle(orphan):
    found = bank.find(orphan.provider_key())
    if found is None:
        return Settlement.retry()
    note(found["id"])
    return Settlement.completed({"charge": found["id"]}, 201)


@app.after_request
def after(response):
    stop_at("after the commit")
    return response


with app.app_context():
    db.create_all()
'''

MOMENTS = {
    "after the claim": 2,
    "before the call": 2,
    "after the call": 1,
    "after the local write": 1,
    "after the commit": 1,
}


@dataclass
class Sent:
    status: int
    body: bytes
    headers: Any


def send(url: str, key: str) -> Sent:
    asked = urllib.request.Request(
        f"{url}/charges", b'{"amount": 100}', {kit.KEY: key, "Content-Type": "application/json"}, method="POST"
    )
    try:
        with urllib.request.urlopen(asked, timeout=kit.WAIT_S) as answer:
            return Sent(answer.status, answer.read(), answer.headers)
    except urllib.error.HTTPError as error:
        with error:
            return Sent(error.code, error.read(), error.headers)


@pytest.fixture
def urls(database_url: str, redis_url: str, provider: ProviderClient) -> Iterator[dict[str, str]]:
    yield {"DATABASE_URL": database_url, "REDIS_URL": redis_url, "PROVIDER_URL": provider.url}
    engine = sa.create_engine(database_url)
    with engine.begin() as connection:
        connection.execute(sa.text("DROP TABLE IF EXISTS payments"))
    engine.dispose()


def killed_and_retried(urls: "dict[str, str]", provider: ProviderClient, moment: str) -> None:
    """F03, F63, F121: while the dead one's lease lasts, the retry is refused; then it settles what became of it."""
    empty_tables(urls["DATABASE_URL"])
    key = new_key()
    with (
        GunicornApp(SOURCE, workers=1, threads=2, env={**urls, "STOP_AT": moment}) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        (victim,) = server.worker_pids()
        lost = pool.submit(send, server.url, key)
        wait_until((server.directory / "stopped").exists, "the moment")
        server.kill_worker(victim)
        with pytest.raises(OSError):  # noqa: PT011
            lost.result(kit.WAIT_S)
        server.wait_for_workers(1)
        began = time.monotonic()
        statuses = []
        while (answer := send(server.url, key)).status == 409:
            statuses.append(answer.status)
            assert "Retry-After" in answer.headers
            assert time.monotonic() - began < kit.LAPSE_S, answer.body
            time.sleep(0.05)
        (entry,) = provider.entries()
        assert (answer.status, answer.body) == (201, b'{"charge":"%s"}\n' % entry["id"].encode())
        again = send(server.url, key)
        assert (again.status, again.body, again.headers[kit.REPLAYED]) == (201, answer.body, "true")
        assert len((server.directory / "runs").read_text()) == MOMENTS[moment]
    engine = sa.create_engine(urls["DATABASE_URL"])
    with engine.begin() as connection:
        assert connection.execute(sa.text("SELECT charge FROM payments")).scalars().all() == [entry["id"]]
        (row,) = connection.execute(sa.text("SELECT * FROM idempotency_keys"))
    engine.dispose()
    assert (row.status, row.attempt) == ("succeeded", MOMENTS[moment])
    with redis.Redis.from_url(urls["REDIS_URL"]) as client:
        kit.assert_all_end(client)


def test_killed_after_the_call(urls, provider):
    killed_and_retried(urls, provider, "after the call")


@pytest.mark.parametrize("moment", [moment for moment in MOMENTS if moment != "after the call"])
def test_killed_elsewhere(postgres_url, redis_url, provider, moment):
    killed_and_retried(
        {"DATABASE_URL": postgres_url, "REDIS_URL": redis_url, "PROVIDER_URL": provider.url}, provider, moment
    )


def test_killed_and_nobody_retries_until_redis_has_forgotten(sqlite_url, redis_url, provider):
    """The database has it all; Redis is emptied in between."""
    urls = {"DATABASE_URL": sqlite_url, "REDIS_URL": redis_url, "PROVIDER_URL": provider.url}
    key = new_key()
    with GunicornApp(SOURCE, workers=1, threads=2, env={**urls, "STOP_AT": "after the call"}) as server:
        with ThreadPoolExecutor(1) as pool:
            lost = pool.submit(send, server.url, key)
            wait_until((server.directory / "stopped").exists, "the moment")
            server.kill_worker(server.worker_pids()[0])
            with pytest.raises(OSError):  # noqa: PT011
                lost.result(kit.WAIT_S)
        with redis.Redis.from_url(redis_url) as client:
            client.flushdb()
        server.wait_for_workers(1)
        while (answer := send(server.url, key)).status == 409:
            time.sleep(0.05)
        assert answer.status == 201
        assert len(provider.entries()) == 1
        assert os.path.exists(server.directory / "runs")
