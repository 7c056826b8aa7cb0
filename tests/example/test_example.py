"""The example shop: its routes in one process, and its storm in real ones."""

import json
import os
import signal
import socket
import subprocess
import sys
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flask import Flask
from flask.testing import FlaskClient
from werkzeug.test import TestResponse

import example
from example import effects
from example.ledger import Ledger
from example.storm.clients import Answer, Tally
from example.storm.report import Line, Report, judge
from example.storm.situations import SITUATIONS
from tests import servers
from tests.harness import wait_until

ROOT = Path(example.__file__).parents[1]
ADA, GRACE = ("ada", "demo"), ("grace", "demo")
ORDER = {"reference": "order-1", "item": "tea", "quantity": 2}
CHARGE = {"reference": "order-1", "amount": 4900, "currency": "EUR"}
EMAIL = {"reference": "order-1", "to": "ada@example.com", "subject": "Your tea"}
EVENT = {"id": "evt-1", "type": "payment.succeeded"}


@pytest.fixture
def app(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Flask:
    monkeypatch.setattr(effects, "time", SimpleNamespace(sleep=lambda seconds: None))
    return example.create_app({"IDEMPOTENT_REDIS_URL": redis_url, "SHOP_LEDGER": tmp_path / "ledger.sqlite"})


@pytest.fixture
def client(app: Flask) -> FlaskClient:
    return app.test_client()


@pytest.fixture
def ledger(app: Flask) -> Ledger:
    return app.extensions["ledger"]


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
    client: FlaskClient, ledger: Ledger, path: str, body: dict[str, Any], status: int
) -> None:
    headers = fresh_key()
    first = client.post(path, json=body, headers=headers, auth=ADA)
    again = client.post(path, json=body, headers=headers, auth=ADA)
    assert first.status_code == again.status_code == status
    assert first.data == again.data
    assert "Idempotent-Replayed" not in first.headers
    assert again.headers["Idempotent-Replayed"] == "true"
    assert ledger.runs() == {"order-1": 1}


def test_a_new_key_is_a_new_intent(client: FlaskClient, ledger: Ledger) -> None:
    numbers = {client.post("/orders", json=ORDER, headers=fresh_key(), auth=ADA).get_json()["order"] for _ in range(2)}
    assert len(numbers) == ledger.runs()["order-1"] == 2


def test_another_amount_under_the_same_key_is_refused(client: FlaskClient, ledger: Ledger) -> None:
    headers = fresh_key()
    client.post("/charges", json=CHARGE, headers=headers, auth=ADA)
    other = client.post("/charges", json={**CHARGE, "amount": 9400}, headers=headers, auth=ADA)
    assert other.status_code == 422
    assert problem(other) == "mismatch"
    assert ledger.runs() == {"order-1": 1}


def test_a_key_belongs_to_the_customer_who_used_it_first(client: FlaskClient, ledger: Ledger) -> None:
    headers = fresh_key()
    client.post("/emails", json=EMAIL, headers=headers, auth=ADA)
    assert client.post("/emails", json=EMAIL, headers=headers, auth=GRACE).status_code == 404
    assert ledger.runs() == {"order-1": 1}


def test_a_webhook_runs_once_for_each_event(client: FlaskClient, ledger: Ledger) -> None:
    first = client.post("/webhooks/provider", json={**EVENT, "delivery": 1})
    again = client.post("/webhooks/provider", json={**EVENT, "delivery": 2})
    assert first.status_code == 200
    assert first.data == again.data
    assert again.headers["Idempotent-Replayed"] == "true"
    client.post("/webhooks/provider", json={**EVENT, "id": "evt-2"})
    assert ledger.runs() == {"evt-1": 1, "evt-2": 1}


@pytest.mark.parametrize("body", [{"type": "payment.succeeded"}, [], {"id": "", "type": "x"}])
def test_an_event_without_an_id_is_refused(client: FlaskClient, ledger: Ledger, body: object) -> None:
    assert client.post("/webhooks/provider", json=body).status_code == 400
    assert not ledger.runs()


def test_a_request_without_a_key_or_a_customer_runs_nothing(client: FlaskClient, ledger: Ledger) -> None:
    assert problem(client.post("/orders", json=ORDER, auth=ADA)) == "missing-key"
    assert client.post("/orders", json=ORDER, headers=fresh_key()).status_code == 401
    assert client.post("/orders", json=ORDER, headers=fresh_key(), auth=("ada", "wrong")).status_code == 401
    assert not ledger.runs()


def test_a_wrong_order_is_answered_with_what_is_wrong(client: FlaskClient, ledger: Ledger) -> None:
    answer = client.post("/orders", json={**ORDER, "quantity": 0}, headers=fresh_key(), auth=ADA)
    assert answer.status_code == 400
    assert list(answer.get_json()["errors"]) == ["quantity"]
    assert not ledger.runs()


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
    environment = {name: value for name, value in os.environ.items() if name not in ("REDIS_URL", "SHOP_LEDGER")}
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


def test_the_storm_fails_without_the_claim(environment: dict[str, str]) -> None:
    done = run("--once", "--json", "--break-claim", environment=environment)
    assert done.returncode == 1, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert not report["ok"]
    for line in report["situations"]:
        assert not line["ran_once"], line
        assert line["ran"] > line["intents"]
        assert line["replayed"] == line["refused"] == 0


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
