"""What is kept of an answer and of what the view noted: where, for whom, and under which key."""

import json
from typing import Any

import pytest
import sqlalchemy as sa
from cryptography.fernet import Fernet

from flask_idempotent import NothingHappened, Settlement, current_idempotency
from flask_idempotent.errors import ConfigurationError
from tests.web import kit

from .kit import Till, assert_unknown, die, new_key

OLD, NEW = (Fernet.generate_key().decode() for _ in range(2))
SECRET = "4929-5555-1234-0001"


def row_bytes(till: Till) -> bytes:
    """All that the three tables hold, as bytes."""
    found = []
    for name in ("idempotency_keys", "idempotency_responses", "idempotency_steps"):
        for row in till.ask(f"SELECT * FROM {name}"):
            found += [bytes(value) if isinstance(value, (bytes, memoryview)) else str(value).encode() for value in row]
    return b"\0".join(found)


@pytest.mark.parametrize("size", [100, 101, 5000])
def test_replays_and_where_their_bodies_are(make_till, database_url, size):
    """Up to ``INLINE_BODY`` a replay asks Redis alone; a larger body is in the database, and Redis has the rest."""
    till = make_till(database_url, INLINE_BODY=100)
    till.take_charges()
    till.ending = lambda charge: (bytes(number % 256 for number in range(size)), 201, {"X-Mine": "yes"})
    key = new_key()
    first = till.pay(key)
    assert len(first.data) == size
    assert len(kit.the_record(till.redis)["body"]) == (size if size <= 100 else 0)
    for flush in (False, True, False):
        if flush:
            till.redis.flushdb()
        with till.statements() as statements:
            again = till.pay(key)
        kit.assert_replay(first, again)
        assert again.headers["X-Mine"] == "yes"
        assert bool(statements) is (size > 100 or flush)
    with till.sql_away():
        away = till.pay(key)
        if size > 100:
            kit.assert_problem(away, "store-unavailable")
        else:
            kit.assert_replay(first, away)
    kit.assert_replay(first, till.pay(key))
    assert (till.runs, till.lookups) == (1, [])


def test_what_a_look_up_found_is_mirrored_too(make_till, sqlite_url):
    till = make_till(sqlite_url, INLINE_BODY=100)
    till.settle = lambda orphan: Settlement.completed("x" * 500, 201)
    till.take_charges()
    till.ending = lambda charge: ("bad gateway", 502)
    key = new_key()
    till.pay(key)
    till.pass_time(6)
    answer = till.pay(key)
    assert answer.data == b"x" * 500
    assert kit.the_record(till.redis)["body"] == b""
    kit.assert_replay(answer, till.pay(key))


def test_a_body_beyond_the_bound(make_till, database_url):
    """F66: the first client gets it all; the record says that it is done, and where to look."""
    till = make_till(database_url, MAX_BODY=1000, INLINE_BODY=100)
    till.take_charges()
    till.ending = lambda charge: ("x" * 1001, 201, {"Location": "/charges/1"})
    key = new_key()
    assert len(till.pay(key).data) == 1001
    for _ in range(2):
        body = kit.assert_problem(till.pay(key), "response-unavailable", more={"original_status", "location"})
        assert (body["original_status"], body["location"]) == (201, "/charges/1")
        till.redis.flushdb()
    assert till.runs == 1


def test_a_reference_is_kept_and_made_an_answer_again(make_till, sqlite_url):
    till = make_till(sqlite_url)
    till.take_charges(store="reference", rebuild=lambda reference: {"charge": reference["id"]})

    def end(charge):
        current_idempotency.reference({"id": charge["id"]})
        return {"charge": charge["id"]}, 201

    till.ending = end
    key = new_key()
    first = till.pay(key)
    for _ in range(2):
        again = till.pay(key)
        assert (again.status_code, again.get_json()) == (201, first.get_json())
        till.redis.flushdb()


def noting(till: Till) -> None:
    """The view notes a secret, and answers with one."""

    def note() -> None:
        current_idempotency.remember(card=SECRET)

    till.before = note
    till.ending = lambda charge: ({"charge": charge["id"], "card": SECRET}, 201, {"X-Card": SECRET})


@pytest.mark.parametrize("encrypted", [True, False])
def test_what_is_kept_is_encrypted(make_till, database_url, encrypted):
    """10.3: body, headers and notes, in every row and in Redis; while it runs, unknown, and done. Without keys it is
    there in clear, so this looks in the right places."""
    till = make_till(database_url, **({"FERNET_KEYS": [NEW]} if encrypted else {}))
    till.take_charges(pii=encrypted)
    noting(till)
    seen: list[bytes] = []
    end = till.ending

    def look(charge: Any) -> Any:
        seen.append(row_bytes(till) + kit.everything(till.redis))
        return end(charge)

    till.ending = look
    key = new_key()
    first = till.pay(key)
    seen.append(row_bytes(till) + kit.everything(till.redis))
    for kept in seen:
        assert (SECRET.encode() in kept) is not encrypted
        assert key.encode() not in kept
    kit.assert_replay(first, till.pay(key))
    till.redis.flushdb()
    kit.assert_replay(first, till.pay(key))
    assert till.row().response_code == (0 if encrypted else 201)


def test_what_a_look_up_found_is_encrypted(make_till, database_url):
    till = make_till(database_url, FERNET_KEYS=[NEW])
    till.settle = lambda orphan: Settlement.completed({"card": orphan.context["card"]}, 201)
    till.take_charges(pii=True)
    noting(till)
    till.ending = lambda charge: ("bad gateway", 502)
    key = new_key()
    till.pay(key)
    till.pass_time(6)
    answer = till.pay(key)
    assert answer.get_json() == {"card": SECRET}
    assert SECRET.encode() not in row_bytes(till) + kit.everything(till.redis)


def test_keys_are_rotated_under_running_and_unknown_records(make_till, sqlite_url):
    """F25, F143: claimed under the old key, settled and replayed under the new one; a finished record of the old one is
    read by both; a changed request is a mismatch all the time."""
    till = make_till(sqlite_url, FERNET_KEYS=[OLD])
    till.take_charges(pii=True)
    noting(till)
    done, open_ = new_key(), new_key()
    first = till.pay(done)
    till.ending = lambda charge: die() or ("", 201)
    till.pay(open_)
    after = make_till(sqlite_url, FERNET_KEYS=[NEW, OLD], name="after")
    after.settle = lambda orphan: Settlement.completed({"card": orphan.context["card"]}, 201)
    after.take_charges(pii=True)
    kit.assert_replay(first, after.pay(done))
    after.redis.flushdb()
    kit.assert_replay(first, after.pay(done))
    after.pass_time(31)
    kit.assert_problem(after.pay(open_, 101), "mismatch")
    settled = after.pay(open_)
    assert settled.get_json() == {"card": SECRET}
    only_new = make_till(sqlite_url, FERNET_KEYS=[NEW], name="only new")
    only_new.take_charges(pii=True)
    # (Time was moved, so the ends that are told have moved too.)
    assert only_new.pay(open_).data == settled.data
    kit.assert_problem(only_new.pay(done), "response-unavailable")
    kit.assert_problem(only_new.pay(done, 101), "mismatch")
    assert (till.runs, after.runs, only_new.runs) == (2, 0, 0)


def test_notes_that_can_not_be_read_are_not_taken_for_none(make_till, sqlite_url):
    """Their key is missing: the look-up isn't made without them, since it might not find what they tell of."""
    till = make_till(sqlite_url, FERNET_KEYS=[OLD])
    till.take_charges()
    noting(till)
    till.ending = lambda charge: die() or ("", 201)
    key = new_key()
    till.pay(key)
    other = make_till(sqlite_url, FERNET_KEYS=[NEW], name="other")
    other.take_charges()
    other.pass_time(37)
    assert_unknown(other.pay(key))
    assert (other.lookups, other.runs) == ([], 0)
    assert other.row().reason == "what the work noted can't be read: is a Fernet key missing?"
    mended = make_till(sqlite_url, FERNET_KEYS=[NEW, OLD], name="mended")
    mended.take_charges()
    mended.pass_time(2)
    mended.assert_one_charge(mended.pay(key))
    assert [orphan.context for orphan in mended.lookups] == [{"card": SECRET}]


def test_a_damaged_row_is_no_second_run(make_till, database_url):
    """F144: one byte of the body, in the database."""
    till = make_till(database_url, FERNET_KEYS=[NEW])
    till.take_charges()
    key = new_key()
    till.pay(key)
    (body,) = till.ask("SELECT body FROM idempotency_responses")[0]
    broken = bytearray(bytes(body))
    broken[40] ^= 1
    with till.outside.begin() as connection:
        connection.execute(sa.text("UPDATE idempotency_responses SET body = :body"), {"body": bytes(broken)})
    till.redis.flushdb()
    for _ in range(2):
        kit.assert_problem(till.pay(key), "response-unavailable")
    assert till.runs == 1


def test_pii_without_keys_does_not_start(make_till, sqlite_url):
    till = make_till(sqlite_url)
    till.take_charges(pii=True)
    with pytest.raises(ConfigurationError, match="FERNET_KEYS"):
        till.idem.verify(till.app)


@pytest.mark.parametrize("noted", [{"a": object()}, {"a": {1, 2}}, {"a": b"x"}])
def test_only_json_can_be_noted(quick: Till, noted):
    errors = []

    def note() -> None:
        try:
            current_idempotency.remember(**noted)
        except TypeError as error:
            errors.append(error)

    quick.before = note
    quick.assert_one_charge(quick.pay(new_key()))
    assert len(errors) == 1


def test_notes_are_of_the_record_and_not_of_the_caller_or_the_process(quick: Till):
    """What a request noted is nobody else's."""
    seen: list[Any] = []

    def note() -> None:
        seen.append(current_idempotency.context)
        current_idempotency.remember(number=len(seen))
        current_idempotency.context["number"] = "changed in a copy"
        assert current_idempotency.context == {"number": len(seen)}

    quick.before = note
    for _ in range(3):
        quick.pay(new_key())
    assert seen == [{}, {}, {}]
    assert sorted(
        json.loads(bytes(context).removeprefix(b":"))["number"]
        for (context,) in quick.ask("SELECT context FROM idempotency_keys")
    ) == [1, 2, 3]


def test_every_step_of_a_record_keeps_its_fingerprint(make_till, database_url):
    """F25, F26, F28: claimed, unknown, looked up, given back, running again, done, rebuilt from the database: another
    body is a mismatch every time, and shows nothing; the same one never is."""
    till = make_till(database_url)
    till.take_charges()
    key = new_key()

    def others() -> None:
        for flush in (False, True):
            if flush:
                till.redis.flushdb()
            for _ in range(2):
                refused = till.pay(key, 999)
                kit.assert_problem(refused, "mismatch")
                assert "Retry-After" not in refused.headers
            kit.assert_problem(till.pay(key, user="bob"), "not-found")

    till.before = others
    till.charges = False
    till.ending = lambda charge: ("bad gateway", 502)
    till.pay(key)
    others()
    till.pass_time(6)
    till.in_look_up = others

    def nothing(charge: Any) -> Any:
        raise NothingHappened(till.app.make_response(("no", 503)))

    till.ending = nothing
    assert till.pay(key).status_code == 503
    others()
    till.charges = True
    till.ending = lambda charge: ({"charge": charge["id"]}, 201)
    first = till.pay(key)
    till.assert_one_charge(first)
    others()
    kit.assert_replay(first, till.pay(key))
    assert (till.attempts, len(till.lookups)) == ([1, 2, 3], 1)
