"""The field reports of classes A, B, C, F and J on routes whose effect is outside, as far as no other file has them.

F04, F66: ``test_outcomes.py``. F07, F121: ``test_killed.py``. F08 is about a cache in the process: there is none. F11,
F12, F14, F132: ``test_takeover.py``. F25, F26, F28, and F66 where the body is gone: ``test_kept.py``. F81, F84 to F86:
``test_session.py``. F109 to F117: ``test_provider_keys.py``. F130: ``test_sql_faults.py``.
"""

import logging
import socket
import time
import urllib.parse

import pytest
from flask import Blueprint, request
from flask.views import MethodView

from flask_idempotent import idempotent
from tests.harness import GunicornApp, wait_until
from tests.web import kit

from .kit import BANK, Till, assert_unknown, die, new_key
from .test_killed import SOURCE, send

MANY = {"pool_size": 10, "max_overflow": 10, "pool_timeout": 10}
AWAY = {"IDEMPOTENT_REDIS_URL": "redis://127.0.0.1:1/0"}


# A


def test_every_open_row_has_a_lease(make_till, database_url):
    """F02: while it runs, and while it is looked up; with the smallest values too. A finished one needs none."""
    till = make_till(database_url, LEASE=0.05, SKEW=0, MAX_PROCESSING=0.05, SETTLE_AFTER=0, HEARTBEAT=False)
    till.take_charges()
    leases = []

    def look() -> None:
        row = till.row()
        leases.append((row.status, row.locked_until - row.created_at))

    till.before = look
    till.charges = False
    till.ending = lambda charge: die() or ("", 201)
    key = new_key()
    till.pay(key)
    time.sleep(0.06)
    till.in_look_up = look
    till.ending = lambda charge: ("", 201)
    assert till.pay(key).status_code == 201
    assert [status for status, _ in leases] == ["in_progress", "indeterminate", "in_progress"]
    assert leases[0][1] == 50
    assert all(0 < length < 60_000 for _, length in leases)
    assert till.row().locked_until is None


@pytest.mark.parametrize("redis_is", ["there", "emptied"])
def test_a_lease_is_of_seconds_by_the_databases_clock(make_till, database_url, monkeypatch, redis_is):
    """F03: refused until lease and skew are over, and not a thousand times as long; a host two hours off counts for
    nothing."""
    till = make_till(database_url, LEASE=5, SKEW=1)
    till.take_charges()
    till.ending = lambda charge: die() or ("", 201)
    key = new_key()
    till.pay(key)
    now = time.time
    for passed, wrong in ((0, 7200), (3, -7200), (1, 7200)):
        till.pass_time(passed)
        if redis_is == "emptied":
            till.redis.flushdb()
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda wrong=wrong: now() + wrong)
            refused = till.pay(key)
        kit.assert_problem(refused, "in-progress")
        assert int(refused.headers["Retry-After"]) <= 6
    till.pass_time(2.1)
    if redis_is == "emptied":
        till.redis.flushdb()
    till.assert_one_charge(till.pay(key))
    assert till.runs == 1


# B


@pytest.mark.parametrize("redis_is", ["there", "away"])
def test_sixteen_at_once(make_till, database_url, caplog, redis_is):
    """F09, F88: one charge; everybody else is refused or replayed, and no conflict in the database shows."""
    till = make_till(database_url, engine_options=MANY, config=AWAY if redis_is == "away" else {})
    till.take_charges()
    with caplog.at_level(logging.ERROR):
        for number in range(3):
            key = new_key()
            answers = kit.together(*[lambda key=key: till.pay(key)] * 16)
            winners = [answer for answer in answers if answer.status_code == 201]
            assert winners
            assert len({answer.data for answer in winners}) == 1
            assert [kit.REPLAYED in answer.headers for answer in winners].count(False) == 1
            for answer in answers:
                if answer.status_code != 201:
                    kit.assert_problem(answer, "in-progress")
            assert (till.runs, len(till.provider.entries())) == (number + 1, number + 1)
    assert [record for record in caplog.records if record.exc_info] == []


def test_no_gap_between_the_answer_and_its_copy(make_till, database_url):
    """F15: Redis takes its time over the copy. Duplicates meanwhile are refused or replayed; none runs."""
    till = make_till(database_url, engine_options=MANY)
    till.take_charges()
    complete = till.front.complete

    def slowly(completion):
        time.sleep(0.5)
        return complete(completion)

    till.front.complete = slowly
    key = new_key()
    with kit.Crowd() as crowd:
        first = crowd.start(till.pay, key)
        wait_until(lambda: till.runs == 1, "the view")
        codes = set()
        while not first.done():
            codes.add(till.pay(key).status_code)
    assert codes <= {201, 409}
    till.assert_one_charge(first.result())
    kit.assert_replay(first.result(), till.pay(key))
    assert till.runs == 1


def test_a_row_that_vanishes_between_the_insert_and_the_read(make_till, database_url):
    """F19: an operator, or the sweep, took it away just then: it is claimed anew, and never run without a claim."""
    till = make_till(database_url, TTL=90_000)
    till.take_charges()
    key = new_key()
    till.pay(key)
    till.redis.flushdb()
    meet = till.back._meet
    vanished = []

    def meet_nothing(connection, claim):
        if not vanished:
            vanished.append(True)
            till.elsewhere(till.forget_all)
        return meet(connection, claim)

    if database_url.startswith("sqlite"):
        # One writer: the row goes before the claim's transaction begins.
        settled = till.back._rows.settled

        def between(work):
            if not vanished and settled_calls:
                vanished.append(True)
                till.forget_all()
            settled_calls.append(True)
            return settled(work)

        settled_calls = []
        till.back._rows.settled = between
    else:
        till.back._meet = meet_nothing
    answer = till.pay(key)
    assert vanished
    assert answer.status_code == 201
    assert kit.REPLAYED not in answer.headers
    assert till.row().status == "succeeded"
    assert till.runs == 2
    assert len(till.provider.entries()) == 1  # the key is the record's, and the provider knows it


def test_a_duplicate_that_waits(make_till, database_url):
    """F20: it gets the result as soon as it is there; and where the first one dies, it settles what that left."""
    till = make_till(database_url, engine_options=MANY, LEASE=0.6, SKEW=0.1, SETTLE_AFTER=0.1)
    till.take_charges(on_in_progress="wait", wait_timeout=5)
    key = new_key()
    with kit.Crowd() as crowd:
        gate = crowd.gate()
        till.before = gate.hold
        first = crowd.start(till.pay, key)
        gate.wait_inside()
        waiting = [crowd.start(till.pay, key) for _ in range(2)]
        time.sleep(0.3)
        gate.open()
        answers = [each.result(kit.WAIT_S) for each in (first, *waiting)]
    till.assert_one_charge(answers[0])
    for answer in answers[1:]:
        kit.assert_replay(answers[0], answer)
    till.provider.reset()
    till.before = lambda: None
    till.ending = lambda charge: die() or ("", 201)
    key = new_key()
    till.pay(key)
    till.assert_one_charge(till.pay(key))
    assert (till.runs, len(till.lookups)) == (2, 1)


# C


def test_off_means_off_and_a_subset_is_one(make_till, sqlite_url):
    """F29, on both stores and on an unknown outcome."""
    till = make_till(sqlite_url)
    till.take_charges("/off", fields=False)
    till.take_charges("/amount", fields=["amount"])
    till.ending = lambda charge: ("bad gateway", 502)
    key = new_key()
    till.pay(key, path="/amount", note="a")
    assert_unknown(till.pay(key, path="/amount", note="b"))
    kit.assert_problem(till.pay(key, 7, path="/amount", note="a"), "mismatch")
    other = new_key()
    till.pay(other, path="/off")
    assert_unknown(till.pay(other, 7, path="/off"))


def test_the_same_key_on_another_endpoint(make_till, sqlite_url):
    """F30: both run, each with a provider's key of its own."""
    till = make_till(sqlite_url)
    till.take_charges("/charges")
    till.take_charges("/transfers")
    key = new_key()
    assert till.pay(key).get_json() != till.pay(key, path="/transfers").get_json()
    assert (till.runs, len(set(till.keys))) == (2, 2)


@pytest.mark.parametrize("stranger", [{"amount": 7}, {"user": "bob"}], ids=["another body", "another user"])
@pytest.mark.parametrize("record", ["done", "unknown"])
def test_a_stranger_after_a_flush_does_not_shut_the_owner_out(make_till, database_url, stranger, record):
    """V9: while the stranger's claim is in Redis and on its way to the database, the owner gets what is his."""
    till = make_till(database_url)
    till.take_charges()
    if record == "unknown":
        till.ending = lambda charge: ("bad gateway", 502)
    key = new_key()
    first = till.pay(key)
    till.redis.flushdb()
    claim, answers = till.back.claim, []

    def claim_late(asked):
        if not answers:
            answers.append(None)
            answers[0] = till.elsewhere(lambda: till.pay(key))
        return claim(asked)

    till.back.claim = claim_late
    kit.assert_problem(till.pay(key, **stranger), "mismatch" if "amount" in stranger else "not-found")
    till.back.claim = claim
    if record == "done":
        kit.assert_replay(first, answers[0])
    elif answers[0].get_json()["code"] != "in-progress":  # all that Redis can say while somebody asks the database
        assert_unknown(answers[0])
    assert till.records() == []
    if record == "unknown":
        till.assert_settled(key)
    assert till.runs == 1


# F


@pytest.mark.parametrize("protect", ["decorator", "blueprint", "endpoint", "app", "class", "method"])
def test_one_failure_policy(make_till, sqlite_url, protect):
    """F60: however a view is protected, what failed is unknown and looked up; and nothing runs again blind."""
    till = make_till(sqlite_url)
    keywords = {"durable": "intent", "provider": BANK, "reconcile": till.settle}
    app, view = till.app, lambda: till.take()
    if protect == "decorator":
        till.take_charges()
    elif protect == "blueprint":
        blueprint = Blueprint("b", __name__)
        blueprint.post("/charges")(view)
        till.idem.protect(blueprint, **keywords)
        app.register_blueprint(blueprint)
    elif protect in ("endpoint", "app"):
        app.add_url_rule("/charges", "charges", view, methods=["POST"])
        till.idem.protect("charges" if protect == "endpoint" else app, **keywords)
    else:

        class Charges(MethodView):
            decorators = [idempotent(**keywords)] if protect == "class" else []

            def post(self):
                return till.take()

        if protect == "method":
            Charges.post = idempotent(**keywords)(Charges.post)
        app.add_url_rule("/charges", view_func=Charges.as_view("charges"))
    till.ending = lambda charge: ("bad gateway", 502)
    key = new_key()
    till.pay(key)
    assert till.row().status == "indeterminate"
    till.assert_settled(key)


def test_a_declined_card_and_another_one(till: Till):
    """F61: the decline is kept. Another card under that key is told to take a new one, and then goes through at once,
    under another key of the provider's."""
    till.ending = lambda charge: (
        ({"error": "declined"}, 402) if request.get_json()["card"] == "A" else ({"charge": charge["id"]}, 201)
    )
    key = new_key()
    first = till.pay(key, card="A")
    assert first.status_code == 402
    kit.assert_replay(first, till.pay(key, card="A"))
    body = kit.assert_problem(till.pay(key, card="B"), "mismatch")
    assert "new key" in body["detail"]
    assert till.pay(new_key(), card="B").status_code == 201
    assert len(set(till.keys)) == 2


@pytest.mark.parametrize("worker_class", ["sync", "gthread"])
def test_a_client_that_goes(sqlite_url, redis_url, provider, worker_class):
    """F62: with a reset, in the middle of the provider's call. The work goes on, and the retry gets its answer."""
    env = {"DATABASE_URL": sqlite_url, "REDIS_URL": redis_url, "PROVIDER_URL": provider.url, "STOP_AT": "never"}
    provider.fault("wait", "before", seconds=0.7)
    key = new_key()
    with GunicornApp(SOURCE, workers=1, threads=2, worker_class=worker_class, env=env) as server:
        address = urllib.parse.urlsplit(server.url)
        with socket.create_connection((address.hostname, address.port)) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            body = b'{"amount": 100}'
            client.sendall(
                b"POST /charges HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Idempotency-Key: %s\r\nContent-Length: %d\r\n\r\n%s" % (key.encode(), len(body), body)
            )
            wait_until(lambda: bool(provider.calls()), "the provider's call")
        while (answer := send(server.url, key)).status == 409:
            time.sleep(0.05)
        assert (answer.status, answer.headers[kit.REPLAYED]) == (201, "true")
        assert len((server.directory / "runs").read_text()) == 1
    assert len(provider.entries()) == 1


def test_a_charge_without_its_order(till: Till):
    """F63: charged, and the local write failed. The retry ends with a 201 for that very charge, and never with "already
    exists"."""

    def end(charge):
        till.order("a")
        till.db.session.flush()
        till.db.session.rollback()
        raise RuntimeError("the order could not be written")

    till.ending = end
    key = new_key()
    assert till.pay(key).status_code == 500
    till.assert_settled(key)


# J


def test_a_client_that_is_cut_off_before_the_provider_answers(make_till, database_url):
    """F119: the first answer takes longer than the client waits. Its retries are refused, and then replayed: one run,
    one charge."""
    till = make_till(database_url, engine_options=MANY)
    till.take_charges()
    till.provider.fault("wait", "after", seconds=0.8)
    key = new_key()
    with kit.Crowd() as crowd:
        first = crowd.start(till.pay, key)
        wait_until(lambda: till.runs == 1, "the view")
        retries = 0
        while not first.done():
            again = till.pay(key)
            if again.status_code == 201:
                break  # the first one has just ended
            kit.assert_problem(again, "in-progress")
            retries += 1
            time.sleep(0.05)
    assert retries > 3
    kit.assert_replay(first.result(), till.pay(key))
    till.assert_one_charge(first.result())
    assert (till.runs, till.lookups) == (1, [])
