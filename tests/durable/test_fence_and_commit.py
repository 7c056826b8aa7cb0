"""The moment of the commit: fenced out, an error with or without effect, a process that is killed there."""

import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest
import redis
import sqlalchemy as sa
from sqlalchemy import event

from flask_idempotent.stores.sql import SqlStore
from tests import servers
from tests.harness import Proxy
from tests.races.shop import Shop as Server
from tests.web import kit
from tests.web.kit import new_key

from .kit import Shop, empty_tables

UNKNOWN = "It is not known whether this was carried out."
NOTHING = "Nothing was carried out."


def assert_away(response: Any, detail: str) -> None:
    """503, with a sentence that claims no more than is known."""
    assert kit.assert_problem(response, "store-unavailable")["detail"].startswith(detail)


# Fenced at the commit


def test_another_request_has_the_key_at_the_commit(make_shop, database_url):
    """Only a view that ended the transaction itself can lose its key. What it does after that isn't committed, and its
    client is never given a second answer of its own."""
    shop = make_shop(database_url, engine_options={"pool_size": 2})

    @shop.view
    def view() -> Any:
        shop.runs += 1
        number = shop.runs
        shop.order(f"{number}")
        if number == 1:
            shop.db.session.flush()
            shop.db.session.execute(sa.text("ROLLBACK"))
            shop.redis.flushdb()
            assert shop.elsewhere(post).status_code == 201
        else:
            shop.db.session.commit()
        return {"run": number}, 201

    post = shop.poster()
    assert_away(post(), UNKNOWN)
    shop.assert_done("2")
    second = post()
    assert second.get_json() == {"run": 2}
    assert shop.runs == 2
    shop.assert_replays(second, post)


def test_another_request_takes_the_key_while_the_work_is_undone(make_shop, database_url, monkeypatch):
    """A handled exception takes the work back and claims anew, for the answer alone. Who comes in between wins, and the
    first client gets the winner's answer."""
    shop = make_shop(database_url, engine_options={"pool_size": 2})

    @shop.app.errorhandler(LookupError)
    def handle(_: LookupError) -> Any:
        return "sold out", 422

    @shop.view
    def view() -> Any:
        shop.runs += 1
        shop.order(f"{shop.runs}")
        shop.db.session.commit()
        if shop.runs == 1:
            raise LookupError()
        return {"run": shop.runs}, 201

    post = shop.poster()
    claim, tokens, answers = SqlStore.claim, [], []

    def claim_late(store: SqlStore, asked: Any) -> Any:
        if asked.token in tokens and not answers:
            shop.redis.flushdb()
            answers.append(shop.elsewhere(post))
        tokens.append(asked.token)
        return claim(store, asked)

    monkeypatch.setattr(SqlStore, "claim", claim_late)
    first = post()
    kit.assert_replay(answers[0], first)
    assert first.get_json() == {"run": 2}
    shop.assert_done("2")
    shop.assert_replays(answers[0], post)


# An error at COMMIT


@pytest.fixture(params=["postgresql", "mariadb"])
def proxied(request, make_shop) -> Iterator["tuple[Shop, Proxy]"]:
    """A shop whose way to its database can be cut."""
    url = request.getfixturevalue(servers.DATABASES[request.param])
    empty_tables(url)
    with Proxy(url) as proxy:
        shop = make_shop(url, config={"SQLALCHEMY_DATABASE_URI": proxy.url})
        shop.take_orders()
        yield shop, proxy


def test_an_error_after_the_commit_was_applied(proxied):
    """The reply is lost, the row is there: the client gets the view's own answer."""
    shop, proxy = proxied
    post = shop.poster()
    with shop.at_commit(lambda: proxy.cut_reply(match=b"COMMIT")):
        first = post()
    assert proxy.cuts == 1
    assert first.get_json() == {"run": 1}
    kit.assert_kept(first)
    shop.assert_done("a")
    shop.assert_replays(first, post)
    assert shop.runs == 1


def test_an_error_before_the_commit_was_applied(proxied):
    """Nothing is there: 503, and the retry runs at once."""
    shop, proxy = proxied
    post = shop.poster()
    with shop.at_commit(proxy.break_connections):
        assert_away(post(), NOTHING)
    shop.assert_nothing()
    first = post()
    assert first.get_json() == {"run": 2}
    shop.assert_done("a")
    shop.assert_replays(first, post)


@pytest.mark.parametrize("applied", [True, False])
def test_an_error_at_the_commit_that_nobody_can_look_into(proxied, applied):
    """503 that claims nothing; the claim in Redis lapses, and the retry is a replay, or the only run with an effect."""
    shop, proxy = proxied
    key = new_key()
    away: list[bool] = []

    def refuse(dialect: Any, *_: object) -> None:
        if away:
            raise dialect.loaded_dbapi.OperationalError("the database is away")

    def act() -> None:
        away.append(True)
        if applied:
            proxy.cut_reply(match=b"COMMIT")
        else:
            proxy.break_connections()

    event.listen(shop.engine, "do_connect", refuse)
    with shop.at_commit(act):
        assert_away(shop.post(key), UNKNOWN)
    assert shop.runs == 1
    away.clear()
    (record,) = shop.records()
    assert record["state"] == b"in_progress"
    first = kit.until(lambda: shop.post(key))
    assert first.status_code == 201
    assert first.headers.get(kit.REPLAYED) == ("true" if applied else None)
    assert shop.runs == (1 if applied else 2)
    shop.assert_done("a")


@pytest.mark.parametrize("notices", [True, False], ids=["the view notices", "at the end"])
@pytest.mark.parametrize("database", ["postgresql", "mariadb"])
def test_a_connection_that_is_killed_in_the_view(request, make_shop, database, notices):
    """Nothing is there; the retry runs."""
    url = request.getfixturevalue(servers.DATABASES[database])
    empty_tables(url)
    shop = make_shop(url)
    number, kill = {
        "postgresql": ("pg_backend_pid()", "SELECT pg_terminate_backend({})"),
        "mariadb": ("CONNECTION_ID()", "KILL {}"),
    }[database]

    @shop.view
    def view() -> Any:
        shop.runs += 1
        shop.order("a")
        shop.db.session.commit()
        if shop.runs == 1:
            found = shop.db.session.execute(sa.text(f"SELECT {number}")).scalar_one()
            shop.db.session.commit()
            shop.ask(kill.format(found))
            if notices:
                shop.order("b")
                shop.db.session.commit()
        return {"run": shop.runs}, 201

    post = shop.poster()
    first = post()
    if notices:
        assert first.status_code == 500
    else:
        assert_away(first, NOTHING)
    shop.assert_nothing()
    second = post()
    assert second.get_json() == {"run": 2}
    shop.assert_done("a")
    shop.assert_replays(second, post)


def test_a_constraint_that_fails_at_the_commit(make_shop, postgres_url):
    """The view's own commit is a savepoint, so it is the outer commit that finds out: 503, no effect."""
    empty_tables(postgres_url)
    shop = make_shop(postgres_url)
    shop.ask("CREATE TABLE IF NOT EXISTS seats (seat INT, CONSTRAINT one UNIQUE (seat) DEFERRABLE INITIALLY DEFERRED)")
    shop.ask("INSERT INTO seats VALUES (1)")

    @shop.view
    def view() -> Any:
        shop.runs += 1
        shop.order("a")
        shop.db.session.execute(sa.text("INSERT INTO seats VALUES (:seat)"), {"seat": shop.runs})
        shop.db.session.commit()
        return {"run": shop.runs}, 201

    post = shop.poster()
    assert_away(post(), NOTHING)
    shop.assert_nothing()
    first = post()
    assert first.get_json() == {"run": 2}
    shop.assert_done("a")
    shop.assert_replays(first, post)


def test_a_commit_that_fails_again_and_again_never_commits(shop, caplog):
    """Every retry runs and none has an effect; the log has no text of the database's error, which may quote data."""
    shop.take_orders()
    post = shop.poster()

    def fail() -> None:
        raise sa.exc.OperationalError("COMMIT", {}, Exception("secret data"))

    for run in (1, 2, 3):
        with shop.at_commit(fail):
            assert_away(post(), NOTHING)
        shop.assert_nothing()
        assert shop.runs == run
    assert post().status_code == 201
    shop.assert_done("a")
    ours = [record for record in caplog.records if record.name == "flask_idempotent"]
    assert ours
    assert not [record for record in ours if "secret data" in record.getMessage() or record.exc_info]


# The process is killed

SOURCE = """
import json, os, signal
import redis
from flask import Flask, request
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import text
from flask_idempotent import Idempotent, idempotent

app = Flask(__name__)
app.config.update(json.loads(os.environ["SETTINGS"]))
db = SQLAlchemy(app)
idem = Idempotent(app, db=db)
idem.principal_loader(lambda: "ann")
effects = redis.Redis.from_url(os.environ["EFFECTS"])

@app.post("/work")
@idempotent(durable="transaction")
def work():
    job = request.get_json()
    name = job["name"]
    effects.rpush(f"runs:{name}", os.getpid())
    db.session.execute(text("INSERT INTO orders (item) VALUES (:item)"), {"item": name})
    db.session.commit()
    if effects.lpop(f"hold:{name}"):
        effects.rpush(f"inside:{name}", os.getpid())
        effects.blpop(f"go:{name}", 30)
    return {"pid": os.getpid()}, 201

# A process that dies between the commit in the database and the copy in Redis.
front = app.extensions["idempotent"].engines["transaction"].store.front
complete = front.complete

def complete_or_die(completion):
    if effects.lpop("die"):
        os.kill(os.getpid(), signal.SIGKILL)
    return complete(completion)

front.complete = complete_or_die
"""


#: How a connection ends whose server was killed.
BROKEN = (OSError, http.client.HTTPException)


@pytest.fixture
def running(redis_url, database_url) -> Iterator["tuple[DurableServer, Shop]"]:
    with Shop(database_url, redis_url) as shop, DurableServer(redis_url, database_url) as server:
        yield server, shop


class DurableServer(Server):
    def __init__(self, redis_url: str, database_url: str) -> None:
        super().__init__(redis_url, settings=kit.SHORT, workers=2, threads=4)
        self.source = SOURCE
        config = {**json.loads(self.env["SETTINGS"]), "SQLALCHEMY_DATABASE_URI": database_url}
        self.env["SETTINGS"] = json.dumps(config)


def test_a_process_that_is_killed(running):
    """In the view: nothing is in the database, and the retry runs once the lease in Redis lapsed. Between the two
    stores: the retry is a replay from the database, and Redis is filled again. In the view, with Redis emptied: the
    open row is all that holds the key, and it goes with the process' connection."""
    server, shop = running
    store: redis.Redis = server.store

    def kill_in_the_view(name: str, key: str, *, forget: bool) -> None:
        store.rpush(f"hold:{name}", "1")
        request = server.begin(name, key)
        pid = server.wait_inside(name)
        if forget:
            for record in shop.redis.scan_iter("idempotent:*"):
                shop.redis.delete(record)
            assert server.post(name, key).refused
        server.kill_worker(pid)
        with pytest.raises(BROKEN):
            request.result(kit.WAIT_S)
        assert name not in shop.orders()
        answer = server.until(name, key)
        assert (answer.status, answer.replayed, server.runs(name)) == (201, False, 2)
        assert shop.orders().count(name) == 1
        again = server.post(name, key)
        assert (again.body, again.replayed) == (answer.body, True)

    kill_in_the_view("in the view", new_key(), forget=False)
    kill_in_the_view("emptied", new_key(), forget=True)

    key = new_key()
    store.rpush("die", "1")
    with pytest.raises(BROKEN):
        server.post("commit", key)
    assert shop.orders() == ["commit", "emptied", "in the view"]
    assert [record["state"] for record in shop.records()].count(b"in_progress") == 1
    answer = server.until("commit", key)
    assert (answer.status, answer.replayed, server.runs("commit")) == (201, True, 1)
    assert [record["state"] for record in shop.records()] == [b"succeeded"] * len(shop.records())
    assert [record["confirmed"] for record in shop.records()] == [b"1"] * len(shop.records())
    assert shop.orders() == ["commit", "emptied", "in the view"]
    assert (shop.states(), shop.answers()) == (["succeeded"] * 3, 3)
