"""The example shop: its routes in one process, and its storm in real ones."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flask import Flask
from flask.testing import FlaskClient
from werkzeug.test import TestResponse

import example
from example import effects
from example.bank import Bank
from example.books import Books
from example.models import Order, db
from example.provider import BankServer
from example.storm.clients import Answer, Tally
from example.storm.report import Line, Report, judge
from example.storm.situations import SITUATIONS
from tests import servers
from tests.harness import wait_until

ROOT = Path(example.__file__).parents[1]
SETTINGS = ("REDIS_URL", "DATABASE_URL", "SHOP_LEDGER", "SHOP_PREFIX", "SHOP_BANK_URL")
ADA, GRACE = ("ada", "demo"), ("grace", "demo")
ORDER = {"reference": "order-1", "item": "tea", "quantity": 2}
CHARGE = {"reference": "order-1", "amount": 4900, "currency": "EUR"}
EMAIL = {"reference": "order-1", "to": "ada@example.com", "subject": "Your tea"}
EVENT = {"id": "evt-1", "type": "payment.succeeded"}


@pytest.fixture
def bank() -> Iterator[BankServer]:
    """The bank, in a thread and without delay."""
    with BankServer(socket.create_server(("127.0.0.1", 0)), seconds=0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def app(
    redis_url: str, sqlite_url: str, bank: BankServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Flask]:
    monkeypatch.setattr(effects, "time", SimpleNamespace(sleep=lambda seconds: None))
    app = example.create_app(
        {
            "IDEMPOTENT_REDIS_URL": redis_url,
            "IDEMPOTENT_SKEW": 0,
            "SQLALCHEMY_DATABASE_URI": sqlite_url,
            "SHOP_BANK_URL": bank.url,
            "SHOP_LEDGER": tmp_path / "ledger.sqlite",
        }
    )
    yield app
    app.extensions["bank"].close()
    with app.app_context():
        db.engine.dispose()


@pytest.fixture
def client(app: Flask) -> FlaskClient:
    return app.test_client()


@pytest.fixture
def books(app: Flask) -> Books:
    return app.extensions["books"]


@pytest.fixture
def fail_after(app: Flask) -> Callable[[str, str], None]:
    bank: Bank = app.extensions["bank"]
    return bank.fail_after


def fresh_key() -> dict[str, str]:
    return {"Idempotency-Key": str(uuid.uuid4())}


def problem(response: TestResponse) -> str:
    assert response.content_type == "application/problem+json"
    return response.get_json()["code"]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [("/orders", ORDER, 201), ("/charges", CHARGE, 201), ("/emails", EMAIL, 202)],
)
def test_a_repeat_gets_the_first_answer_and_runs_nothing(
    client: FlaskClient, books: Books, path: str, body: dict[str, Any], status: int
) -> None:
    headers = fresh_key()
    first = client.post(path, json=body, headers=headers, auth=ADA)
    again = client.post(path, json=body, headers=headers, auth=ADA)
    assert first.status_code == again.status_code == status
    assert first.data == again.data
    assert "Idempotent-Replayed" not in first.headers
    assert again.headers["Idempotent-Replayed"] == "true"
    assert books.runs() == {"order-1": 1}


def test_a_new_key_is_a_new_intent(client: FlaskClient, books: Books) -> None:
    numbers = {client.post("/orders", json=ORDER, headers=fresh_key(), auth=ADA).get_json()["order"] for _ in range(2)}
    assert len(numbers) == books.runs()["order-1"] == 2


def test_another_amount_under_the_same_key_is_refused(client: FlaskClient, books: Books) -> None:
    headers = fresh_key()
    client.post("/charges", json=CHARGE, headers=headers, auth=ADA)
    other = client.post("/charges", json={**CHARGE, "amount": 9400}, headers=headers, auth=ADA)
    assert other.status_code == 422
    assert problem(other) == "mismatch"
    assert books.runs() == {"order-1": 1}


def test_a_key_belongs_to_the_customer_who_used_it_first(client: FlaskClient, books: Books) -> None:
    headers = fresh_key()
    client.post("/emails", json=EMAIL, headers=headers, auth=ADA)
    assert client.post("/emails", json=EMAIL, headers=headers, auth=GRACE).status_code == 404
    assert books.runs() == {"order-1": 1}


def test_a_webhook_runs_once_for_each_event(client: FlaskClient, books: Books) -> None:
    first = client.post("/webhooks/provider", json={**EVENT, "delivery": 1})
    again = client.post("/webhooks/provider", json={**EVENT, "delivery": 2})
    assert first.status_code == 200
    assert first.data == again.data
    assert again.headers["Idempotent-Replayed"] == "true"
    client.post("/webhooks/provider", json={**EVENT, "id": "evt-2"})
    assert books.runs() == {"evt-1": 1, "evt-2": 1}


@pytest.mark.parametrize("body", [{"type": "payment.succeeded"}, [], {"id": "", "type": "x"}])
def test_an_event_without_an_id_is_refused(client: FlaskClient, books: Books, body: object) -> None:
    assert client.post("/webhooks/provider", json=body).status_code == 400
    assert not books.runs()


def test_a_request_without_a_key_or_a_customer_runs_nothing(client: FlaskClient, books: Books) -> None:
    assert problem(client.post("/orders", json=ORDER, auth=ADA)) == "missing-key"
    assert client.post("/orders", json=ORDER, headers=fresh_key()).status_code == 401
    assert client.post("/orders", json=ORDER, headers=fresh_key(), auth=("ada", "wrong")).status_code == 401
    assert not books.runs()


def test_a_wrong_order_is_answered_with_what_is_wrong(client: FlaskClient, books: Books) -> None:
    answer = client.post("/orders", json={**ORDER, "quantity": 0}, headers=fresh_key(), auth=ADA)
    assert answer.status_code == 400
    assert list(answer.get_json()["errors"]) == ["quantity"]
    assert not books.runs()


def test_an_order_is_committed_with_its_key(app: Flask, client: FlaskClient) -> None:
    client.post("/orders", json=ORDER, headers=fresh_key(), auth=ADA)
    with app.app_context():
        keys = db.metadata.tables["idempotency_keys"]
        assert db.session.execute(db.select(keys.c.endpoint, keys.c.status)).one() == ("orders.create", "succeeded")
        assert db.session.scalars(db.select(Order.reference)).all() == ["order-1"]


def test_the_page_counts_what_was_sent_and_what_ran(client: FlaskClient) -> None:
    headers = fresh_key()
    for _ in range(3):
        client.post("/orders", json=ORDER, headers=headers, auth=ADA)
    client.post("/orders", json={**ORDER, "quantity": 3}, headers=headers, auth=ADA)

    orders, *others = client.get("/activity").get_json()["rows"]
    assert orders == {
        "name": "Orders",
        "sent": 4,
        "ran": 1,
        "replayed": 2,
        "refused": 1,
        "reasons": {"mismatch": 1},
    }
    assert all(row["sent"] == 0 for row in others)

    page = client.get("/")
    assert page.status_code == 200
    assert "mismatch × 1" in page.text
    assert "order 1: 2 × tea" in page.text
    assert page.headers["Cache-Control"] == "no-store"


def test_the_page_shows_all_kinds_of_effects(client: FlaskClient) -> None:
    for path, body in (("/orders", ORDER), ("/charges", CHARGE), ("/emails", EMAIL)):
        client.post(path, json=body, headers=fresh_key(), auth=ADA)
    client.post("/webhooks/provider", json=EVENT)
    client.post("/orders/form", data={"item": "tea", "quantity": 1, **form_key(client)})
    activity = client.get("/activity").get_json()
    assert [row["ran"] for row in activity["rows"]] == [2, 1, 1, 1]
    assert {effect["kind"] for effect in activity["effects"]} == {"order", "charge", "email", "payment"}
    assert activity["total"]["sent"] == activity["total"]["ran"] == 5


# A charge whose answer is lost


def test_a_charge_without_an_answer_is_looked_up(
    client: FlaskClient, bank: BankServer, fail_after: Callable[[str, str], None]
) -> None:
    headers = fresh_key()
    fail_after("order-1", "drop")
    lost = client.post("/charges", json=CHARGE, headers=headers, auth=ADA)
    assert lost.status_code == 504
    early = client.post("/charges", json=CHARGE, headers=headers, auth=ADA)
    assert (early.status_code, problem(early)) == (409, "indeterminate")
    settled = until_settled(client, headers)
    assert settled.status_code == 201
    assert settled.get_json() == {"charge": 1, **CHARGE}
    assert settled.headers["Idempotent-Replayed"] == "true"
    assert client.post("/charges", json=CHARGE, headers=headers, auth=ADA).data == settled.data
    assert len(bank.ledger) == 1


def test_a_charge_that_never_arrived_is_sent_again(
    client: FlaskClient, bank: BankServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    headers, keys = fresh_key(), []

    def lose(server: BankServer, key: str, wanted: dict[str, Any]) -> None:
        keys.append(key)
        raise ConnectionError

    with monkeypatch.context() as patch:
        patch.setattr(BankServer, "charge", lose)
        patch.setattr(BankServer, "handle_error", lambda *_: None)
        assert client.post("/charges", json=CHARGE, headers=headers, auth=ADA).status_code == 504
    settled = until_settled(client, headers)
    assert settled.status_code == 201
    assert "Idempotent-Replayed" not in settled.headers
    assert [entry["key"] for entry in bank.ledger] == keys


def test_a_bank_that_is_away_is_no_charge(app: Flask, client: FlaskClient, bank: BankServer) -> None:
    headers = fresh_key()
    away, there = Bank("http://127.0.0.1:1"), app.extensions["bank"]
    with contextlib.closing(away):
        app.extensions["bank"] = away
        refused = client.post("/charges", json=CHARGE, headers=headers, auth=ADA)
    app.extensions["bank"] = there
    assert (refused.status_code, refused.headers["Retry-After"]) == (503, "5")
    assert client.post("/charges", json=CHARGE, headers=headers, auth=ADA).status_code == 201
    assert len(bank.ledger) == 1


def test_the_bank_charges_once_for_a_key(app: Flask, bank: BankServer) -> None:
    shop: Bank = app.extensions["bank"]
    assert shop.charge("key-1", CHARGE) == shop.charge("key-1", CHARGE) == shop.find("key-1")
    assert shop.find("key-2") is None
    assert bank.charge("key-1", {**CHARGE, "amount": 1})[0] == 422
    assert len(shop.ledger()) == 1


def until_settled(client: FlaskClient, headers: dict[str, str]) -> TestResponse:
    deadline = time.monotonic() + 15
    while True:
        answer = client.post("/charges", json=CHARGE, headers=headers, auth=ADA)
        if answer.status_code != 409 or time.monotonic() > deadline:
            return answer
        time.sleep(0.1)


# The form


def form_key(client: FlaskClient) -> dict[str, str]:
    found = re.search(r'name="idempotency_key" value="([^"]+)"', client.get("/").text)
    assert found is not None
    return {"idempotency_key": found[1]}


def test_a_form_sent_twice_is_one_order(client: FlaskClient, books: Books) -> None:
    form = {"item": "tea", "quantity": "3", **form_key(client)}
    first, again = (client.post("/orders/form", data=form) for _ in range(2))
    assert first.status_code == again.status_code == 303
    assert first.location == again.location
    assert "Your order number 1: 3 × tea" in client.get(first.location).text
    assert books.effects()["order"] == 1

    changed = client.post("/orders/form", data={**form, "quantity": "4"})
    assert changed.status_code == 422
    assert changed.mimetype == "text/html"
    assert "used for another request" in changed.text
    assert client.get("/orders/form-unknown").status_code == 404


def test_a_form_without_a_key_or_an_order(client: FlaskClient, books: Books) -> None:
    for form, words in (
        ({"item": "tea", "quantity": "3"}, "key is required"),
        ({"item": "tea", "quantity": "none", **form_key(client)}, "That is no order"),
    ):
        refused = client.post("/orders/form", data=form)
        assert refused.status_code == 400
        assert words in refused.text
    assert books.effects()["order"] == 0


def test_the_page_needs_nothing_from_elsewhere(client: FlaskClient) -> None:
    page = client.get("/").text
    assert "https://" not in page
    assert page.count("http://") == page.count("xmlns='http://www.w3.org/2000/svg'")
    assert " src=" not in page


# Verdicts


def test_a_verdict_needs_one_run_one_answer_and_content_clients() -> None:
    one = Answer(201, b"1")

    def line(runs: int, answers: list[Answer], *, clients: int = 2, served: int = 2) -> Line:
        return judge(SITUATIONS[0], Tally(clients=clients, served=served, results={"a": answers}), {"a": runs})

    assert line(1, [one, one]).ok
    assert line(2, [one, one]).verdict == "1 ran again"
    assert line(0, [one, one]).verdict == "1 never ran"
    assert line(1, [one, Answer(201, b"2")]).verdict == "1 got unlike answers"
    assert line(1, [one, Answer(200, b"1")]).verdict == "1 got unlike answers"
    assert line(1, [one], served=1).verdict == "1 without a result"
    assert not judge(SITUATIONS[0], Tally(), {}).ok
    assert not Report([]).ok


# In real processes


@pytest.fixture
def environment(redis_url: str) -> dict[str, str]:
    """As a newcomer has it: no server of one's own, but where no embedded one exists."""
    environment = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    return environment if servers.HAS_EMBEDDED else {**environment, "REDIS_URL": redis_url}


def run(*arguments: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "example", *arguments],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )


def test_the_storm_passes(environment: dict[str, str]) -> None:
    done = run("--once", "--json", environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["ok"]
    assert [line["name"] for line in report["situations"]] == [situation.name for situation in SITUATIONS]
    for line in report["situations"]:
        assert line["ok"], line
        assert line["ran"] == line["intents"] > 0
        assert line["replayed"] >= line["intents"]
        assert line["sent"] > line["ran"]
    retry = next(line for line in report["situations"] if line["name"] == "client-retry")
    assert retry["unanswered"] >= retry["intents"]
    partition = next(line for line in report["situations"] if line["name"] == "partition")
    assert partition["refusals"]["504"] >= 1  # the bank hung up
    assert partition["refusals"]["indeterminate"] >= 1  # and was asked later
    assert partition["unanswered"] >= 1  # the instance was killed
    assert report["later"]


def test_the_storm_fails_without_the_claim(environment: dict[str, str]) -> None:
    done = run("--once", "--json", "--break-claim", environment=environment)
    assert done.returncode == 1, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert not report["ok"]
    for line in report["situations"]:
        assert not line["ran_once"], line
        assert line["ran"] > line["intents"]
        assert line["replayed"] == 0
        assert set(line["refusals"]) <= {"504"}  # where the bank hung up


def test_a_taken_port_is_said_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("--port", str(port), environment={**os.environ, "REDIS_URL": "redis://127.0.0.1:1"})
    assert done.returncode == 2
    assert f"Port {port} is taken" in done.stderr
    assert "--port" in done.stderr


@pytest.mark.parametrize(("ending", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_nothing_is_left_over(environment: dict[str, str], tmp_path: Path, ending: signal.Signals, code: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "example", "--port", str(port)],
        cwd=ROOT,
        env={**environment, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("A double-click")  # in the middle of the storm
        process.send_signal(ending)
        try:
            assert process.wait(20) == code
        finally:
            process.kill()
    wait_until(lambda: _nobody_listens(port), "the end of the server processes")


def _nobody_listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0
