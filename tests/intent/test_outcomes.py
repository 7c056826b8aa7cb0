"""What becomes of a record by how its view ended: what isn't known is looked up, and is never sent again blind.

Charges are counted in the provider's ledger, which is a process of its own.
"""

import logging
from functools import wraps

import pytest
from flask import Response, abort, jsonify, make_response

from flask_idempotent import NothingHappened, idempotent
from tests.harness import Proxy
from tests.web import kit

from .kit import LONG, Till, assert_unknown, commit_of, new_key


class Oops(Exception):
    pass


def raising(error: BaseException):
    def end(charge):
        raise error

    return end


UNKNOWN_ENDINGS = {
    "502": lambda charge: ("bad gateway", 502),
    "408": lambda charge: ("time-out", 408),
    "409": lambda charge: ("key in use", 409),
    "425": lambda charge: Response("too early", 425),
    "429": lambda charge: ("slow down", 429),
    "401": lambda charge: ("token expired", 401),
    "abort": lambda charge: abort(503),
    "raised": raising(Oops()),
    "made a 500 by a handler": raising(LookupError()),
}


@pytest.mark.parametrize("ending", ["502", "raised", "made a 500 by a handler"])
def test_an_answer_that_is_not_kept_leaves_an_unknown_outcome(till: Till, ending):
    """V4, F04, F66: the charge may stand, whatever the client was told. The retry looks it up; one charge stands."""
    ends_unknown(till, ending)


@pytest.mark.parametrize("ending", ["408", "409", "425", "429", "401", "abort"])
def test_statuses_that_may_pass_leave_an_unknown_outcome_too(quick: Till, ending):
    """V4: what would release a key elsewhere."""
    ends_unknown(quick, ending)


def ends_unknown(till: Till, ending: str) -> None:
    till.app.register_error_handler(LookupError, lambda error: ("handled", 500))
    till.ending = UNKNOWN_ENDINGS[ending]
    key = new_key()
    first = till.pay(key)
    assert first.status_code in (401, 408, 409, 425, 429, 500, 502, 503)
    kit.assert_not_kept(first)
    row = till.row()
    assert (row.status, row.attempt, row.expires_at) == ("indeterminate", 1, None)
    assert row.reason
    assert till.records() == []
    assert_unknown(till.pay(key))
    assert till.lookups == []  # too early
    till.assert_settled(key)


def test_an_exit_leaves_an_unknown_outcome(till: Till):
    """SystemExit passes through everything; the net ends the claim."""
    till.ending = raising(SystemExit())
    key = new_key()
    with pytest.raises(SystemExit):
        till.pay(key)
    assert till.row().status == "indeterminate"
    assert_unknown(till.pay(key))
    till.assert_settled(key)


def test_an_error_that_propagates_leaves_an_unknown_outcome(make_till, database_url):
    """As in debug mode."""
    till = make_till(database_url, config={"PROPAGATE_EXCEPTIONS": True})
    till.take_charges()
    till.ending = raising(Oops())
    key = new_key()
    with pytest.raises(Oops):
        till.pay(key)
    assert till.row().status == "indeterminate"
    till.assert_settled(key)


@pytest.mark.parametrize("layer", ["after_request", "stream"])
def test_a_kept_answer_that_a_later_layer_broke(till: Till, layer):
    """What the client got is not what the view answered: the charge is looked up."""
    if layer == "after_request":

        @till.app.after_request
        def breaks(response):
            broken.append(response.status_code)
            if len(broken) == 1:
                raise Oops
            return response

        broken: list[int] = []
    else:

        def breaking():
            yield b"charg"
            raise Oops

        till.ending = lambda charge: Response(breaking(), 201)
    key = new_key()
    first = till.pay(key)
    assert first.status_code == 500
    if layer == "after_request":
        # Completion comes before all other after-request work: the answer was kept by then.
        assert till.row().status == "succeeded"
        till.assert_one_charge(till.pay(key))
        assert till.lookups == []
    else:
        assert till.row().status == "indeterminate"
        till.assert_settled(key)


def test_a_serialiser_above_the_mark_that_breaks(make_till, sqlite_url):
    """A decorator outside of the mark makes a 500 of the view's 201."""
    till = make_till(sqlite_url)

    def serialised(view):
        @wraps(view)
        def wrapper():
            view()
            return "not serialisable", 500

        return wrapper

    @idempotent(durable="intent", provider="stripe")
    def marked():
        return till.take()

    marked.reconciler(till.settle)
    till.app.post("/charges")(serialised(marked))
    key = new_key()
    assert till.pay(key).status_code == 500
    assert till.row().status == "indeterminate"
    till.assert_settled(key)


@pytest.mark.parametrize("status", [200, 201, 204, 303, 400, 402, 404, 410, 422])
def test_a_kept_status_is_stored(quick: Till, status):
    quick.ending = lambda charge: (b"" if status == 204 else charge["id"], status)
    key = new_key()
    first = quick.pay(key)
    assert first.status_code == status
    kit.assert_kept(first)
    assert quick.row().status == ("failed" if status >= 400 else "succeeded")
    quick.redis.flushdb()
    kit.assert_replay(first, quick.pay(key))
    assert (quick.runs, len(quick.provider.entries()), quick.lookups) == (1, 1, [])


def test_a_handlers_kept_answer_is_stored(till: Till):
    """The view raised, and a handler made a 402 of it: that is the answer."""

    @till.app.errorhandler(Oops)
    def declined(error):
        return {"error": "declined"}, 402

    till.ending = raising(Oops())
    key = new_key()
    first = till.pay(key)
    assert first.status_code == 402
    kit.assert_kept(first)
    assert (till.row().status, till.answers()) == ("failed", 1)
    till.redis.flushdb()
    kit.assert_replay(first, till.pay(key))
    assert till.runs == 1


def nothing_happened(charge):
    raise NothingHappened(make_response(jsonify(sorry="no connection"), 503))


@pytest.mark.parametrize("how", ["NothingHappened", "outcome"])
def test_where_nothing_happened_the_same_request_runs_again(make_till, database_url, how):
    """The code says so: released. The second run is attempt 2 of a record that began when the first one did."""
    till = make_till(database_url)
    keywords = {} if how == "NothingHappened" else {"outcome": lambda response: by_status[response.status_code]}
    by_status = {503: "release", 201: "store"}
    till.take_charges(**keywords)
    till.charges = False
    till.ending = nothing_happened if how == "NothingHappened" else lambda charge: ({"sorry": "no"}, 503)
    key = new_key()
    first = till.pay(key)
    assert first.status_code == 503
    kit.assert_not_kept(first)
    released = till.row()
    assert (released.status, released.attempt) == ("released", 1)
    kit.assert_problem(till.pay(key, 101), "mismatch")
    till.charges = True
    till.ending = lambda charge: ({"charge": charge["id"]}, 201)
    second = till.pay(key)
    till.assert_one_charge(second)
    kit.assert_kept(second)
    row = till.row()
    assert (row.status, row.attempt, row.created_at) == ("succeeded", 2, released.created_at)
    assert row.lock_version > released.lock_version
    assert (till.attempts, till.lookups) == ([1, 2], [])
    till.redis.flushdb()
    kit.assert_replay(second, till.pay(key))


def test_a_set_of_statuses_never_releases(make_till, database_url):
    """``outcome={200, 201}`` says what is kept. What isn't kept is unknown here, 4xx too."""
    till = make_till(database_url)
    till.take_charges(outcome={200, 201})
    till.ending = lambda charge: ("declined, or was it?", 402)
    key = new_key()
    assert till.pay(key).status_code == 402
    assert till.row().status == "indeterminate"
    till.assert_settled(key)


@pytest.mark.parametrize("said", ["neither", "raised"])
def test_an_outcome_callable_that_fails_releases_nothing(make_till, sqlite_url, caplog, said):
    def outcome(response):
        if said == "raised":
            raise Oops
        return said

    till = make_till(sqlite_url)
    till.take_charges(outcome=outcome)
    till.ending = lambda charge: ("bad gateway", 502)
    key = new_key()
    till.pay(key)
    assert till.row().status == "indeterminate"
    till.assert_settled(key)
    assert "the outcome callable" in caplog.text


@pytest.mark.parametrize("which", ["postgres_url", "mariadb_url"])
def test_the_reply_to_our_commit_is_lost(request, make_till, which):
    """V8: the answer is committed, and the connection broke before it was told so. It is read back; nothing is lost,
    and nothing runs again."""
    with Proxy(request.getfixturevalue(which)) as proxy:
        till = make_till(proxy.url, HEARTBEAT=False)
        till.take_charges()

        def end(charge):
            proxy.cut_reply(match=commit_of(proxy.url))
            return {"charge": charge["id"]}, 201

        till.ending = end
        key = new_key()
        first = till.pay(key)
        assert proxy.cuts == 1
        till.assert_one_charge(first)
        kit.assert_kept(first)
        till.redis.flushdb()
        kit.assert_replay(first, till.pay(key))
        assert (till.runs, till.lookups) == (1, [])


@pytest.mark.parametrize("which", ["postgres_url", "mariadb_url"])
def test_every_reply_to_our_commit_is_lost(request, make_till, caplog, which):
    """The client is told that the outcome isn't known, not the view's 201; the retry gets what is stored."""
    with Proxy(request.getfixturevalue(which)) as proxy:
        till = make_till(proxy.url, HEARTBEAT=False)
        till.take_charges()

        def end(charge):
            proxy.cut_reply(100)
            return {"charge": charge["id"]}, 201

        till.ending = end
        key = new_key()
        with caplog.at_level(logging.CRITICAL):
            assert_unknown(till.pay(key))
        # Nothing in Redis says that it is done.
        assert [record["state"] for record in till.records()] == [b"in_progress"]
        proxy.heal()
        till.pass_time(LONG["LEASE"] + 1)
        answer = till.pay(key)
        till.assert_one_charge(answer)
        assert till.runs == 1


def test_an_unprotected_method_and_a_missing_key_leave_nothing(quick: Till):
    assert quick.app.test_client().post("/charges", json={}).status_code == 400
    assert (quick.runs, quick.states()) == (0, [])
