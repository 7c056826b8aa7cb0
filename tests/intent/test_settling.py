"""How an unknown outcome is settled: what a look-up may say, when it is believed, and when a human is asked."""

import re
import threading
import time
from contextlib import ExitStack
from datetime import datetime, timedelta, timezone

import pytest
from flask import jsonify

from flask_idempotent import NothingHappened, Provider, Settlement, current_idempotency
from flask_idempotent.errors import ConfigurationError
from tests.provider import NoAnswer, ProviderClient, Refused
from tests.web import kit

from .kit import BANK, LAPSING, Till, assert_unknown, die, new_key


def crash(till: Till, key: str | None = None, *, charged: bool = True) -> str:
    """A first attempt that dies in the view, before its call or after it; its lease has lapsed."""
    key = key or new_key()
    if charged:
        till.ending = lambda charge: die() or ("nobody hears this", 201)
    else:
        till.before = die_and_leave
    with_death(till, key)
    till.pass_time(31)
    till.ending = lambda charge: ({"charge": charge["id"]}, 201)
    till.before = lambda: None
    return key


class Dead(Exception):
    pass


def die_and_leave() -> None:
    die()
    raise Dead


def with_death(till: Till, key: str) -> None:
    till.pay(key)
    assert till.row().status == "in_progress"


def reason(till: Till) -> str:
    return str(till.row().reason)


# When "not found" is believed


def test_found_at_once_is_believed_at_once(till: Till):
    key = crash(till)
    answer = till.pay(key)
    till.assert_one_charge(answer)
    assert answer.headers[kit.REPLAYED] == "true"
    assert (till.runs, len(till.lookups), till.attempts) == (1, 1, [1])
    row = till.row()
    assert (row.status, row.reason, row.settle_token, row.locked_until) == (
        "succeeded",
        "settled by a look-up",
        "",
        None,
    )


def test_not_found_is_believed_after_a_while_only(till: Till):
    """Before ``settle_after``, counted from the lapse, the call may still be on its way."""
    key = crash(till, charged=False)
    assert_unknown(till.pay(key))
    assert (len(till.lookups), till.runs) == (1, 1)
    assert reason(till) == "not found, but the look-up began too early to be believed"
    assert_unknown(till.pay(key))
    assert len(till.lookups) == 1  # there is nothing to be found before
    till.pass_time(6)
    answer = till.pay(key)
    till.assert_one_charge(answer)
    kit.assert_kept(answer)
    assert (len(till.lookups), till.attempts) == (2, [1, 2])
    assert (till.row().attempt, till.row().reason) == (2, "")


def test_a_call_in_flight_is_not_taken_for_none(till: Till):
    """The provider works for a second; the client of the till gave up, and looks again meanwhile. One charge."""
    till.provider = ProviderClient(till.provider.url, timeout=0.2)
    till.provider.fault("wait", "before", seconds=1.0)
    till.ending = lambda charge: ({"charge": charge["id"]}, 201)
    till.app.register_error_handler(NoAnswer, lambda error: ("no answer", 504))
    key = new_key()
    assert till.pay(key).status_code == 504
    assert till.provider.entries() == []
    assert_unknown(till.pay(key))
    deadline = time.monotonic() + kit.LAPSE_S
    while not till.provider.entries():
        assert_unknown(till.pay(key))
        assert time.monotonic() < deadline
    till.assert_settled(key)


def test_a_search_that_lags(make_till, database_url):
    """``settle_after`` follows the search's delay by itself. Found late is found; one charge."""
    bank = Provider("bank", window=86_400, max_length=64, search_delay=60)
    till = make_till(database_url, LEASE=10, SETTLE_AFTER=None)
    till.take_charges(provider=bank)
    till.provider.control(search_delay=60)
    key = crash(till)
    for seconds in (0, 10, 10, 10):
        till.pass_time(seconds)
        assert_unknown(till.pay(key))
    assert till.runs == 1
    till.pass_time(60)
    till.assert_one_charge(till.pay(key))
    assert till.runs == 1


def test_the_settings_name_the_delay_of_a_search(make_till, sqlite_url):
    till = make_till(sqlite_url, PROVIDERS={"bank": {"search_delay": 60}}, SETTLE_AFTER=None)
    till.take_charges()
    key = crash(till, charged=False)
    till.pass_time(60)
    assert_unknown(till.pay(key))
    till.pass_time(40)
    till.assert_one_charge(till.pay(key))


# What a provider has forgotten


@pytest.mark.parametrize("forgetful", [BANK, "stripe"], ids=["bank", "stripe"])
def test_nothing_is_sent_again_outside_the_window(make_till, database_url, forgetful):
    """The provider may have forgotten the key, and its search may have lost the charge. A human is asked."""
    till = make_till(database_url)
    till.take_charges(provider=forgetful)
    name = forgetful if isinstance(forgetful, str) else forgetful.name
    key = crash(till)
    till.provider.control(forget=True, search_delay=10 * 86_400)
    till.pass_time(86_400 * 0.91)
    assert_unknown(till.pay(key))
    assert reason(till) == f"for a human: not found, but {name} may have forgotten the first sending"
    for _ in range(5):
        till.pass_time(600)
        assert_unknown(till.pay(key))
    assert (till.runs, len(till.provider.entries()), len(till.lookups)) == (1, 1, 1)
    # A human makes the charge visible; the next look-up, an hour later, finds it.
    till.provider.control(search_delay=0)
    till.pass_time(3700)
    till.assert_one_charge(till.pay(key))


def test_inside_of_the_window_less_a_margin_it_may_be_sent_again(till: Till):
    key = crash(till, charged=False)
    till.pass_time(86_400 * 0.89)
    till.assert_one_charge(till.pay(key))
    assert till.attempts == [1, 2]


def test_the_window_counts_from_the_first_use_in_the_first_attempt(till: Till):
    """Each retry finds nothing, and sends nothing outside of the first one's window; the key is one and the same."""
    key = new_key()
    till.provider.control(search_delay=10 * 86_400)
    for number in range(4):
        till.ending = lambda charge: die() or ("", 201)
        till.pay(key)
        assert till.row().attempt == number + 1
        till.pass_time(6 * 3600)  # 0, 6, 12, 18 h: inside of 21.6 h
    assert_unknown(till.pay(key))
    assert reason(till).startswith("for a human: not found, but bank may have forgotten")
    assert till.attempts == [1, 2, 3, 4]
    assert len(set(till.keys)) == 1
    assert len(till.provider.entries()) == 1


def test_a_key_is_not_handed_out_outside_of_its_window(make_till, database_url):
    """A view that asks for another provider's key than its route's, too late: nothing is sent, and a human is asked."""
    short = Provider("short", window=100, max_length=64)
    till = make_till(database_url)
    asked = []

    @till.view(rule="/charges", durable="intent", reconcile=lambda orphan: Settlement.retry())
    def view():
        till.runs += 1
        asked.append(current_idempotency.provider_key(short))
        if till.runs < 3:
            return "try again", 503
        return "done"

    key = new_key()
    till.pay(key)
    till.pass_time(50)
    till.pay(key)
    assert len(asked) == 2
    till.pass_time(50)  # 100 s, and 90 are allowed
    assert_unknown(till.pay(key))
    assert (till.runs, len(asked)) == (3, 2)
    row = till.row()
    assert (row.status, row.reason) == (
        "indeterminate",
        "sending again is not safe: short may have forgotten the first sending",
    )


def test_a_rail_without_deduplication_goes_to_a_human(make_till, database_url):
    """``Provider.none()``: "not found" is never a reason to send again, and found is found."""
    till = make_till(database_url)
    till.take_charges(provider=Provider.none("wire"))
    till.provider.control(search_delay=3600)
    key = crash(till)
    till.pass_time(60)
    assert_unknown(till.pay(key))
    assert reason(till) == "for a human: wire does not recognise a key: a human decides whether to send again"
    assert_unknown(till.pay(key))
    till.pass_time(3700)
    till.assert_one_charge(till.pay(key))
    assert (till.runs, len(till.lookups)) == (1, 2)


def test_a_rail_without_deduplication_where_nothing_happened(make_till, database_url):
    """The view said so, after it had asked for its key: the next attempt may have it again."""
    till = make_till(database_url)
    till.take_charges(provider=Provider.none("wire"))
    till.provider.fault("answer", "before", status=503)
    take = till.take

    def take_or_nothing():
        try:
            return take()
        except Refused:
            raise NothingHappened(till.app.make_response(("no", 503))) from None

    till.take = take_or_nothing
    key = new_key()
    assert till.pay(key).status_code == 503
    assert till.row().status == "released"
    till.assert_one_charge(till.pay(key))
    assert till.attempts == [1, 2]


# What a reconciler says


def settled_by(till: Till, *said):
    """The reconciler says these in turn, the last one again and again."""
    said = list(said)

    def settle(orphan):
        till.lookups.append(orphan)
        what = said.pop(0) if len(said) > 1 else said[0]
        if isinstance(what, BaseException):
            raise what
        return what

    till.settle = settle


def said_to_be(make_till, url, *said, **keywords) -> Till:
    till = make_till(url)
    settled_by(till, *said)
    till.take_charges(**keywords)
    return till


COMPLETED = {
    "dict": (Settlement.completed({"id": 1}, 201, {"Location": "/charges/1"}), 201, b'{"id":1}\n'),
    "text": (Settlement.completed("done"), 200, b"done"),
    "bytes": (Settlement.completed(b"\x00\xff"), 200, b"\x00\xff"),
    "null": (Settlement.completed(None), 200, b"null"),
    "number": (Settlement.completed(5), 200, b"5"),
    "list": (Settlement.completed([1, 2]), 200, b"[1,2]\n"),
    "declined": (Settlement.completed({"error": "declined"}, 402), 402, b'{"error":"declined"}\n'),
}


@pytest.mark.parametrize("said", COMPLETED)
def test_completed_with_what_a_view_returns(make_till, sqlite_url, said):
    settlement, status, body = COMPLETED[said]
    till = said_to_be(make_till, sqlite_url, settlement)
    key = crash(till)
    answer = till.pay(key)
    assert (answer.status_code, answer.data, answer.headers[kit.REPLAYED]) == (status, body, "true")
    assert answer.headers.get("Location") == (settlement.headers or {}).get("Location")
    assert till.row().status == ("failed" if status >= 400 else "succeeded")
    kit.assert_replay(answer, till.pay(key))
    till.redis.flushdb()
    kit.assert_replay(answer, till.pay(key))


def test_completed_with_a_response(make_till, sqlite_url):
    till = make_till(sqlite_url)

    def settle(orphan):
        response = jsonify(id=7)
        response.headers["X-Mine"] = "yes"
        response.headers["Set-Cookie"] = "a=b"
        return Settlement.completed(response, 201)

    till.settle = settle
    till.take_charges()
    answer = till.pay(crash(till))
    assert (answer.status_code, answer.get_json(), answer.headers["X-Mine"]) == (201, {"id": 7}, "yes")
    assert "Set-Cookie" not in answer.headers


def test_what_an_orphan_tells(make_till, database_url):
    till = make_till(database_url)
    till.take_charges(scope="charges.create")
    before = datetime.now(timezone.utc) - timedelta(seconds=60)
    key = crash(till)
    till.pay(key)
    (orphan,) = till.lookups
    assert (orphan.scope, orphan.attempt, orphan.context) == ("charges.create", 1, {})
    assert before < orphan.started_at < datetime.now(timezone.utc)
    assert orphan.started_at.tzinfo is timezone.utc
    assert [orphan.provider_key()] == till.keys
    assert orphan.provider_key(step=1) != orphan.provider_key()


FAILING = {
    "raises": (RuntimeError("secret"), "the reconciler failed: RuntimeError"),
    "none": (None, "the reconciler failed: TypeError"),
    "rubbish": ("completed", "the reconciler failed: TypeError"),
    "a body that is none": (Settlement.completed(object()), "the reconciler gave what is no answer: TypeError"),
    "pending": (Settlement.pending(), "looked up, and not known yet"),
}


@pytest.mark.parametrize("said", FAILING)
def test_what_is_no_verdict_is_asked_for_again(make_till, sqlite_url, said):
    """After growing pauses; a failing reconciler is no reason to run again, nor for a 500."""
    what, told = FAILING[said]
    till = said_to_be(make_till, sqlite_url, what, Settlement.completed("found"))
    key = crash(till)
    till.pass_time(6)
    assert_unknown(till.pay(key))
    assert reason(till) == told
    assert_unknown(till.pay(key))  # not before the pause is over
    assert len(till.lookups) == 1
    till.pass_time(2)
    assert till.pay(key).data == b"found"
    assert (till.runs, len(till.lookups)) == (1, 2)


def test_the_pauses_grow_and_then_a_human_is_asked(make_till, database_url):
    till = make_till(database_url, RECONCILE_TRIES=4)
    settled_by(till, Settlement.pending())
    till.take_charges()
    key = crash(till)
    till.pass_time(6)
    for number, pause in enumerate((1, 2, 4)):
        assert_unknown(till.pay(key))
        assert len(till.lookups) == number + 1
        till.pass_time(pause - 0.5)
        assert_unknown(till.pay(key))
        assert len(till.lookups) == number + 1
        till.pass_time(0.7)
    assert_unknown(till.pay(key))
    assert reason(till) == "for a human: looked up, and not known yet"
    assert till.row().settle_tries == 4
    till.pass_time(3000)
    assert_unknown(till.pay(key))
    assert len(till.lookups) == 4
    till.pass_time(700)
    assert_unknown(till.pay(key))
    assert (len(till.lookups), till.runs, till.row().status) == (5, 1, "indeterminate")


def test_a_reconciler_may_ask_for_a_human_itself(make_till, database_url, caplog):
    till = said_to_be(make_till, database_url, Settlement.manual("two charges of the same amount"))
    key = crash(till)
    assert_unknown(till.pay(key))
    assert reason(till) == "for a human: two charges of the same amount"
    assert "waits for a human" in caplog.text
    assert key not in caplog.text
    till.pass_time(600)
    assert_unknown(till.pay(key))
    assert len(till.lookups) == 1


def test_manual_routes_leave_everything_to_a_human(make_till, database_url):
    till = make_till(database_url)
    till.take_charges(reconcile=False, recovery="manual")
    key = crash(till)
    for _ in range(3):
        assert_unknown(till.pay(key))
        till.pass_time(7200)
    assert reason(till) == "for a human: this route leaves what it doesn't know to a human"
    assert (till.runs, till.row().status) == (1, "indeterminate")


def test_abandon_ends_an_orphan_with_a_stored_answer(make_till, database_url):
    till = make_till(database_url)
    till.take_charges(reconcile=False, recovery="abandon")
    key = crash(till)
    answer = till.pay(key)
    body = answer.get_json()
    assert (answer.status_code, body["code"], body["retryable"]) == (409, "response-unavailable", False)
    assert "Retry-After" not in answer.headers
    assert answer.headers[kit.REPLAYED] == "true"
    row = till.row()
    assert (row.status, row.reason) == ("failed", "abandoned: its outcome was never looked up")
    kit.assert_replay(answer, till.pay(key))
    till.redis.flushdb()
    kit.assert_replay(answer, till.pay(key))
    assert till.runs == 1


def test_abandon_also_ends_what_came_back_unknown(make_till, sqlite_url):
    till = make_till(sqlite_url)
    till.take_charges(reconcile=False, recovery="abandon")
    till.ending = lambda charge: ("bad gateway", 502)
    key = new_key()
    till.pay(key)
    assert_unknown(till.pay(key))
    till.pass_time(6)
    assert till.pay(key).get_json()["code"] == "response-unavailable"


def test_a_route_without_anybody_to_ask_does_not_start(make_till, sqlite_url):
    till = make_till(sqlite_url)
    till.take_charges(reconcile=False)
    with pytest.raises(ConfigurationError, match="durable='intent' needs a reconciler"):
        till.idem.verify(till.app)


def test_a_lifetime_below_the_providers_window_does_not_start(make_till, sqlite_url):
    till = make_till(sqlite_url, PROVIDERS={"bank": {"window": 3 * 86_400}})
    till.take_charges()
    with pytest.raises(ConfigurationError, match=re.escape("Set ttl=259200 or more")):
        till.idem.verify(till.app)
    assert till.runs == 0


def test_a_slow_reconciler_stays_the_only_one(make_till, database_url):
    """Its look-up takes longer than a lease and the skew: it is kept alive, and nobody looks beside it."""
    till = make_till(database_url, **{**LAPSING, "HEARTBEAT": True, "LEASE": 0.6})
    till.take_charges()
    till.ending = lambda charge: die() or ("", 201)
    key = new_key()
    till.pay(key)
    till.pass_time(1)
    with kit.Crowd() as crowd:
        gate = crowd.gate()
        till.in_look_up = gate.hold
        slow = crowd.start(till.pay, key)
        gate.wait_inside()
        deadline = time.monotonic() + 1.5
        while time.monotonic() < deadline:
            assert till.pay(key).status_code == 409
            till.redis.flushdb()  # so that the next one gets through to the database
            time.sleep(0.05)
        gate.open()
        answer = slow.result(kit.WAIT_S)
    till.assert_one_charge(answer)
    assert (len(till.lookups), till.most_looking, till.runs) == (1, 1, 1)


def test_a_reconciler_that_died_is_followed_by_another(make_till, database_url):
    """Its lease on the look-up lapses."""
    till = make_till(database_url, HEARTBEAT=False)
    till.take_charges()
    key = crash(till)
    deaths = [SystemExit()]

    def die_once():
        if deaths:
            raise deaths.pop()

    till.in_look_up = die_once
    with pytest.raises(SystemExit):
        till.pay(key)
    assert till.row().settle_token
    assert till.pay(key).status_code == 409
    till.pass_time(31)
    till.assert_one_charge(till.pay(key))
    assert len(till.lookups) == 2


def test_the_database_goes_away_while_it_looks(make_till, database_url):
    """The verdict can't be written: 503 or unknown, and later the same verdict."""
    till = make_till(database_url)
    till.take_charges()
    key = crash(till)
    away = threading.Event()

    def go_away():
        if not away.is_set():
            away.set()
            till.engine.dispose()
            stack.enter_context(till.sql_away())

    till.in_look_up = go_away
    with ExitStack() as stack:
        assert till.pay(key).status_code in (409, 503)
    till.pass_time(31)
    till.assert_one_charge(till.pay(key))
    assert till.runs == 1
