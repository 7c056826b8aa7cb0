"""C. Request fingerprint and payload checks.

F25: the part about records that are rebuilt from SQL belongs to the durable routes.
"""

import os
import subprocess
import sys

import pytest
from cryptography.fernet import Fernet
from flask import abort

from flask_idempotent import idempotent
from tests.web import kit
from tests.web.kit import KEY, REPLAYED, keyed

JSON = {"content_type": "application/json"}


@pytest.fixture
def orders(make_app, effects):
    """An app of this test, made again for every step: as after a restart of all processes."""

    def client(**settings):
        return kit.add_orders(make_app(RATE_LIMIT=None, **settings), effects).test_client()

    return client


SAME = ['{"b": {"d": 3, "c": 2},\n  "a": 1}', '{"\\u0061":1,"b":{"c":2,"d":3}}', '{"a":1.0,"b":{"c":2,"d":3e0}}']
OTHER = ['{"a":"1","b":{"c":2,"d":3}}', '{"a":1,"b":{"c":3,"d":2}}', '{"a":1}', '{"a":1,"b":{"c":2,"d":3},"e":null}']


def test_order_and_spelling_of_json(orders, effects):
    """F23"""
    client, headers = orders(), keyed()
    first = client.post("/orders", data='{"a":1,"b":{"c":2,"d":3}}', headers=headers, **JSON)
    for text in SAME:
        kit.assert_replay(first, client.post("/orders", data=text, headers=headers, **JSON))
    for text in OTHER:
        kit.assert_problem(client.post("/orders", data=text, headers=headers, **JSON), "mismatch")
    assert effects.runs == 1


def test_lists_and_numbers(orders, effects):
    """F23, documented: the order of a list counts; ``1`` and ``1.0`` are the same, ``"1"`` is not."""
    client, headers = orders(), keyed()
    first = client.post("/orders", data="[1,2]", headers=headers, **JSON)
    kit.assert_replay(first, client.post("/orders", data="[1.0, 2]", headers=headers, **JSON))
    for text in ("[2,1]", '["1",2]', "[1,2,2]"):
        kit.assert_problem(client.post("/orders", data=text, headers=headers, **JSON), "mismatch")
    assert effects.runs == 1


PROCESS = """
import sys
from tests.web import kit
url, key, text = sys.argv[1:]
effects = kit.Effects()
client = kit.add_orders(kit.make_app(url), effects).test_client()
answer = client.post("/orders", data=text, headers={kit.KEY: key}, content_type="application/json")
print(answer.status_code, kit.REPLAYED in answer.headers, effects.runs)
"""


def test_processes_and_hash_seeds_agree(redis_url):
    """F23"""
    key = kit.new_key()
    texts = ['{"a":1,"b":{"c":2,"d":3}}', SAME[0], OTHER[0]]
    said = []
    for seed, text in enumerate(texts):
        command = [sys.executable, "-c", PROCESS, redis_url, key, text]
        env = {**os.environ, "PYTHONHASHSEED": str(seed)}
        said.append(subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.split())
    assert said == [["201", "False", "1"], ["201", "True", "0"], ["422", "False", "0"]]


def check_binding(client, headers, expected):
    """An identical request is answered by ``expected``, a changed one always by a mismatch."""
    kit.assert_problem(client.post("/orders", json={"a": 2}, headers=headers), "mismatch")
    expected(client.post("/orders", json={"a": 1}, headers=headers))
    kit.assert_problem(client.post("/orders", json={"a": 2}, headers=headers), "mismatch")


def test_every_transition_keeps_the_fingerprint(orders, effects, crowd, make_app):
    """F25: running, taken over, done, re-encrypted, unreadable; every step by a new app."""
    old, new = Fernet.generate_key(), Fernet.generate_key()
    brief = {**kit.SHORT, "HEARTBEAT": False}
    gate = crowd.gate()
    slow = kit.add_orders(make_app(FERNET_KEYS=[old], **brief), effects, gate=gate)
    headers = keyed()

    def post():
        return slow.test_client().post("/orders", json={"a": 1}, headers=headers)

    first = crowd.start(post)
    gate.wait_inside()
    keys = {"FERNET_KEYS": [old], **brief}
    check_binding(orders(**keys), headers, lambda answer: kit.assert_problem(answer, "in-progress"))
    second = crowd.start(kit.until, post)
    gate.wait_inside()  # taken over
    kit.assert_problem(orders(**keys).post("/orders", json={"a": 2}, headers=headers), "mismatch")
    gate.open()
    answers = [first.result(), second.result()]
    (done,) = (answer for answer in answers if REPLAYED not in answer.headers and answer.status_code == 201)
    check_binding(orders(**keys), headers, lambda answer: kit.assert_replay(done, answer))
    check_binding(orders(FERNET_KEYS=[new, old]), headers, lambda answer: kit.assert_replay(done, answer))
    check_binding(orders(FERNET_KEYS=[new]), headers, lambda answer: kit.assert_problem(answer, "response-unavailable"))
    check_binding(orders(FERNET_KEYS=[old]), headers, lambda answer: kit.assert_replay(done, answer))
    assert effects.runs == 2


@pytest.mark.parametrize("answer", [("busy", 503), ("x" * 2_000_000, 201)], ids=["given back", "too large"])
def test_a_record_without_a_body_keeps_the_fingerprint(make_app, effects, answer):
    """F25: given back, or done with an answer that was not kept."""
    headers = keyed()
    for step in range(3):
        app = make_app()
        app.add_url_rule("/x", "x", idempotent(kit.answering(effects, answer)), methods=["POST"])
        client = app.test_client()
        again = client.post("/x", json={"a": 1}, headers=headers)
        assert again.status_code == answer[1] or step
        kit.assert_problem(client.post("/x", json={"a": 2}, headers=headers), "mismatch")
    assert effects.runs == (3 if answer[1] == 503 else 1)


def test_a_mismatch_is_never_served_from_a_cache(orders, effects):
    """F26"""
    client, headers = orders(), keyed()
    first = client.post("/orders", json={"a": 1}, headers=headers)
    for _ in range(21):
        kit.assert_problem(client.post("/orders", json={"a": 2}, headers=headers), "mismatch")
    kit.assert_replay(first, client.post("/orders", json={"a": 1}, headers=headers))
    assert effects.runs == 1


@pytest.mark.parametrize("mismatch_status", [422, 409])
def test_a_mismatch_while_the_first_runs(make_app, effects, crowd, mismatch_status):
    """F28: told apart by the code, by ``retryable`` and by ``Retry-After``, also where both are 409."""
    gate = crowd.gate()
    app = kit.add_orders(make_app(MISMATCH_STATUS=mismatch_status), effects, gate=gate)
    headers = keyed()
    crowd.start(app.test_client().post, "/orders", json={"a": 1}, headers=headers)
    gate.wait_inside()
    client = app.test_client()
    for _ in range(3):
        changed = client.post("/orders", json={"a": 2}, headers=headers)
        kit.assert_problem(changed, "mismatch", status=mismatch_status)
        kit.assert_problem(client.post("/orders", json={"a": 1}, headers=headers), "in-progress")
    assert effects.runs == 1


FIRST = {"amount": 5, "note": "a", "card": {"token": "t", "at": 1}}
AMOUNT, NOTE, NO_CARD = {"amount": 6}, {"note": "b"}, {"card": None}
LATER, OTHER_CARD = {"card": {"token": "t", "at": 2}}, {"card": {"token": "u", "at": 1}}
CHANGES = [AMOUNT, NOTE, NO_CARD, LATER, OTHER_CARD]
#: fields= -> the changes that make another request
FIELDS = {
    "whole body": (None, CHANGES),
    "names": (["amount"], [AMOUNT]),
    "pointers": (["amount", "/card/token"], [AMOUNT, NO_CARD, OTHER_CARD]),
    "callable": (lambda request: request.json["note"], [NOTE]),
    "off": (False, []),
}


@pytest.mark.parametrize(("fields", "others"), FIELDS.values(), ids=FIELDS)
def test_what_counts_is_the_routes_choice(make_app, effects, fields, others):
    """F29"""
    client = kit.add_orders(make_app(), effects, fields=fields).test_client()
    headers = keyed()
    first = client.post("/orders", json=FIRST, headers=headers)
    for change in CHANGES:
        answer = client.post("/orders", json={**FIRST, **change}, headers=headers)
        if change in others:
            kit.assert_problem(answer, "mismatch")
        else:
            kit.assert_replay(first, answer)
    assert effects.runs == 1


@pytest.mark.parametrize("fields", [None, False])
def test_the_query_counts_unless_nothing_of_the_request_does(make_app, effects, fields):
    """F29"""
    client = kit.add_orders(make_app(), effects, fields=fields).test_client()
    headers = keyed()
    first = client.post("/orders?a=1&b=2", headers=headers)
    kit.assert_replay(first, client.post("/orders?b=2&a=1", headers=headers))
    other = client.post("/orders?a=2&b=2", headers=headers)
    if fields is False:
        kit.assert_replay(first, other)
    else:
        kit.assert_problem(other, "mismatch")


def test_another_endpoint_is_another_key(make_app):
    """F30"""
    app = make_app()
    projects, applications = kit.Effects(), kit.Effects()
    kit.add_orders(app, projects, "/projects")
    kit.add_orders(app, applications, "/applications")
    client, headers = app.test_client(), keyed()
    for path in ("/projects", "/applications"):
        first = client.post(path, json={"a": 1}, headers=headers)
        kit.assert_kept(first)
        kit.assert_replay(first, client.post(path, json={"a": 1}, headers=headers))
    assert (projects.runs, applications.runs) == (1, 1)


def test_another_method_or_path_is_another_request(make_app, effects):
    """F30"""
    app = make_app()
    view = idempotent(kit.answering(effects, ("ok", 201)))
    app.add_url_rule("/orders/<int:number>/refund", "refund", view, methods=["POST", "PATCH"])
    client, headers = app.test_client(), keyed()
    first = client.post("/orders/1/refund", headers=headers)
    kit.assert_problem(client.post("/orders/2/refund", headers=headers), "mismatch")
    kit.assert_problem(client.patch("/orders/1/refund", headers=headers), "mismatch")
    kit.assert_replay(first, client.post("/orders/1/refund", headers=headers))
    assert effects.runs == 1


def test_the_apps_own_409_and_422(make_app, effects):
    """F33: an app's refusal and ours are told apart by type and code; a replay of the app's carries the marker."""
    app = make_app()
    statuses = {"/invalid": 422, "/conflict": 409, "/kept-conflict": 409}
    for path, status in statuses.items():
        outcome = {409} if path == "/kept-conflict" else None

        def view(status=status):
            effects.add()
            abort(status)

        app.add_url_rule(path, path, idempotent(outcome=outcome)(view), methods=["POST"])
    client = app.test_client()
    for path, status in statuses.items():
        headers = keyed()
        first = client.post(path, json={"a": 1}, headers=headers)
        second = client.post(path, json={"a": 1}, headers=headers)
        for answer in (first, second):
            assert answer.status_code == status
            assert answer.mimetype != "application/problem+json"
        assert (REPLAYED in second.headers) is (path != "/conflict")
        ours = client.post(path, json={"a": 2}, headers=headers)
        kit.assert_problem(ours, "mismatch")
        assert REPLAYED not in ours.headers
    assert effects.runs == 4


def test_the_header_is_no_part_of_the_request(orders, effects):
    """3.2: other headers, and another spelling of the key, are the same request."""
    client, key = orders(), kit.new_key()
    first = client.post("/orders", json={"a": 1}, headers={KEY: key, "X-Trace": "1", "User-Agent": "a"})
    again = client.post("/orders", json={"a": 1}, headers={KEY: f'"{key}"', "X-Trace": "2", "User-Agent": "b"})
    kit.assert_replay(first, again)
    assert effects.runs == 1
