"""What becomes of a request: every row of the table, on routes that are Redis-only and on those that share a
transaction with their key, under every way to run an app. The effect is an order in the app's own database (SQLite).

A view that ends the transaction itself, and an error at COMMIT on other databases: ``tests/durable``.
"""

import contextlib
import shutil

import pytest
import sqlalchemy as sa
from flask import Response, abort
from sqlalchemy import event

from flask_idempotent import NothingHappened, idempotent
from flask_idempotent.errors import StoreUnavailable
from tests.durable.kit import MANY, Shop

from . import kit
from .kit import keyed

CONFIGS = {
    "production": {},
    "debug": {"DEBUG": True},
    "testing": {"TESTING": True},
    "propagating": {"PROPAGATE_EXCEPTIONS": True},
}
KINDS = {"Redis only": False, "transaction": "transaction"}


class Declined(Exception):
    pass


class Busy(Exception):
    pass


class Site(Shop):
    """A shop whose first request leaves by a way of the test's choice. Every run orders its own number."""

    def protect(self):
        with self.app.app_context():
            event.listen(
                self.db.engine, "connect", lambda connection, _: connection.execute("PRAGMA synchronous = OFF")
            )
        super().protect()

    def arrange(self, durable, leave, above=None, **keywords):
        self.app.register_error_handler(Declined, lambda _: ({"reason": "declined"}, 402))
        self.app.register_error_handler(Busy, lambda _: ("busy", 503))
        self.durable, self.key, self.broken = durable, kit.new_key(), [True]

        def view():
            self.runs += 1
            self.order(f"run {self.runs}")
            self.db.session.commit()
            return leave() if self.runs == 1 else ("second", 201)

        marked = idempotent(durable=durable, **keywords)(view)
        self.app.post("/orders", endpoint="orders")(above(self, marked) if above else marked)

    def send(self, *, raises=None):
        """The answer; or ``None`` where the error goes to the server, as in this configuration it must."""
        if raises is None:
            return self.post(self.key)
        with pytest.raises(raises):
            self.post(self.key)
        return None

    @property
    def propagates(self):
        return bool(self.app.debug or self.app.testing or self.app.config["PROPAGATE_EXCEPTIONS"])

    # What may have become of it

    def assert_stored(self, first, *, undone=False):
        """Kept with its answer. In a transaction a handler's answer is kept, and what the view did is undone."""
        kit.assert_kept(first)
        kit.assert_replay(first, self.send())
        assert self.runs == 1
        self._assert_effects([] if undone and self.durable else ["run 1"])
        assert self._states()[0] in ("succeeded", "failed")

    def assert_released(self, first):
        """Free at once; in a transaction nothing of the first run is there."""
        if first is not None:
            kit.assert_not_kept(first)
        self._assert_effects([] if self.durable else ["run 1"])
        assert self._states() == ([] if self.durable else ["released"])
        second = self.send()
        assert (second.status_code, second.get_data()) == (201, b"second")
        kit.assert_kept(second)
        kit.assert_replay(second, self.send())
        assert self.runs == 2
        self._assert_effects(["run 2"] if self.durable else ["run 1", "run 2"])

    def assert_done(self, first, status=201):
        """Done, and the answer is not there: never a second run. In a transaction it can be taken back, and is."""
        if self.durable:
            self.assert_released(first)
            return
        if first is not None:
            kit.assert_not_kept(first)
        problem = kit.assert_problem(self.send(), "response-unavailable", more={"original_status"})
        assert problem["original_status"] == status
        assert self.runs == 1
        self._assert_effects(["run 1"])

    def assert_nothing(self):
        assert (self.runs, self.orders(), self.states()) == (0, [], [])
        assert self.records() == []

    def _assert_effects(self, orders):
        assert self.orders() == orders

    def _states(self):
        if self.durable:
            return self.states()
        return [record["state"].decode() for record in self.records()]


@pytest.fixture(params=CONFIGS)
def config(request):
    return CONFIGS[request.param]


@pytest.fixture(params=KINDS)
def durable(request):
    return KINDS[request.param]


@pytest.fixture(scope="module")
def empty_database(tmp_path_factory, _embedded_redis):
    """A file with empty tables; made once, since that is slow."""
    path = tmp_path_factory.mktemp("outcomes") / "empty.sqlite"
    with Site(f"sqlite:///{path}", _embedded_redis):
        pass
    return path


@pytest.fixture
def database_url(tmp_path, empty_database):
    return f"sqlite:///{shutil.copy(empty_database, tmp_path)}"


@pytest.fixture
def site(redis_url, database_url, config):
    with Site(database_url, redis_url, config=config, LEASE=0.5, SKEW=0.1) as site:
        yield site


def raising(error):
    def leave():
        raise error

    return leave


def breaks_off():
    def chunks():
        yield "half"
        raise LookupError

    return Response(chunks(), 201)


def raises_above(error):
    """A decorator above that fails once the view is through."""

    def above(site, view):
        def inner():
            value = view()
            if site.broken:
                raise error
            return value

        inner.__wrapped__ = view
        return inner

    return above


def answers_above(answer):
    def above(site, view):
        def inner():
            value = view()
            return answer if site.broken else value

        inner.__wrapped__ = view
        return inner

    return above


# The view returned or aborted


@pytest.mark.parametrize(
    "leave",
    [
        lambda: ("made", 201),
        lambda: ("", 303, {"Location": "/orders/1"}),
        lambda: ("no", 402),
        lambda: abort(410),
        lambda: abort(Response("teapot", 418)),
    ],
    ids=["201", "303", "402", "aborted 410", "aborted with a response"],
)
def test_a_kept_status(site, durable, leave):
    site.arrange(durable, leave)
    site.assert_stored(site.send())


@pytest.mark.parametrize(
    "leave",
    [lambda: ("busy", 503), lambda: abort(409), lambda: abort(Response("", 500))],
    ids=["503", "aborted 409", "aborted with a response"],
)
def test_a_released_status(site, durable, leave):
    site.arrange(durable, leave)
    site.assert_released(site.send())


# The view raised


def test_a_handler_makes_a_kept_status_of_it(site, durable):
    site.arrange(durable, raising(Declined()))
    first = site.send()
    assert (first.status_code, first.get_json()) == (402, {"reason": "declined"})
    site.assert_stored(first, undone=True)


def test_a_handler_makes_a_released_status_of_it(site, durable):
    site.arrange(durable, raising(Busy()))
    site.assert_released(site.send())


def test_nobody_makes_an_answer_of_it(site, durable):
    site.arrange(durable, raising(ValueError("secret")))
    site.assert_released(site.send(raises=ValueError if site.propagates else None))


# The view, or the route, decides


@pytest.mark.parametrize("status", [402, 502])
def test_nothing_happened(site, durable, status):
    """With an answer of a kept status too."""
    site.arrange(durable, raising(NothingHappened(Response("nothing", status))))
    first = site.send()
    assert first.status_code == status
    site.assert_released(first)


def test_the_outcome_callable_says_release(site, durable):
    site.arrange(
        durable,
        lambda: ("pending", 202),
        outcome=lambda response: "release" if response.status_code == 202 else "store",
    )
    site.assert_released(site.send())


def test_the_outcome_keeps_what_is_usually_released(site, durable):
    site.arrange(durable, lambda: ("broken", 500), outcome={201, 500})
    site.assert_stored(site.send())


# A kept answer was returned, and a later layer broke it


@pytest.mark.parametrize("error", [LookupError("a later layer"), Busy()], ids=repr)
def test_a_later_layer_raises(site, durable, error):
    site.arrange(durable, lambda: ("made", 201), above=raises_above(error))
    lets_through = site.propagates and not isinstance(error, Busy)
    first = site.send(raises=type(error) if lets_through else None)
    site.broken.clear()
    site.assert_done(first)


@pytest.mark.parametrize("status", [503, 409])
def test_a_later_layer_replaces_it(site, durable, status):
    site.arrange(durable, lambda: ("made", 201), above=answers_above(("replaced", status)))
    first = site.send()
    assert first.status_code == status
    site.broken.clear()
    site.assert_done(first)


def test_a_later_layer_makes_another_kept_answer_of_it(site, durable):
    """That is the answer then: an envelope, say."""
    site.arrange(durable, lambda: ("made", 201), above=answers_above(("envelope", 202)))
    first = site.send()
    assert (first.status_code, first.get_data()) == (202, b"envelope")
    site.broken.clear()
    site.assert_stored(first)


def test_the_body_breaks_off(site, durable):
    """F95"""
    site.arrange(durable, breaks_off)
    first = site.send()
    assert first.status_code == 500
    site.assert_done(first)


def test_the_view_returns_no_answer(site, durable):
    site.arrange(durable, lambda: None)
    site.assert_done(site.send(raises=TypeError if site.propagates else None), status=200)


def test_a_later_hook_fails(site, durable):
    """After the completion: kept, though this client saw an error."""

    @site.app.after_request
    def fail(response):
        if site.broken:
            raise LookupError("somebody else's bug")
        return response

    site.arrange(durable, lambda: ("made", 201))
    site.send(raises=LookupError if site.propagates else None)
    site.broken.clear()
    second = site.send()
    assert (second.get_data(), second.headers.getlist(kit.REPLAYED)) == (b"made", ["true"])
    assert (site.runs, site.orders()) == (1, ["run 1"])


# The net


@pytest.mark.parametrize("error", [SystemExit(1), GeneratorExit()], ids=repr)
def test_an_exit_in_the_view(site, durable, error):
    site.arrange(durable, raising(error))
    site.assert_released(site.send(raises=type(error)))


def test_an_exit_after_the_view_had_returned(site, durable):
    site.arrange(durable, lambda: ("made", 201), above=raises_above(SystemExit(1)))
    site.send(raises=SystemExit)
    site.broken.clear()
    site.assert_done(None)


# The store


def away(site):
    @contextlib.contextmanager
    def patched():
        real = site.front.complete
        site.front.complete = raising_store  # type: ignore[method-assign]
        try:
            yield
        finally:
            site.front.complete = real  # type: ignore[method-assign]

    return patched()


def raising_store(completion):
    raise StoreUnavailable()


def test_redis_is_away_at_the_completion(site, durable):
    """Redis only: the client gets its answer, and the lease lapses. In a transaction the database decides."""
    site.arrange(durable, lambda: ("made", 201))
    with away(site):
        first = site.send()
    assert (first.status_code, first.get_data()) == (201, b"made")
    if durable:
        kit.assert_kept(first)
        kit.assert_replay(first, kit.until(site.send))
        assert (site.runs, site.orders()) == (1, ["run 1"])
    else:
        kit.assert_not_kept(first)
        kit.assert_problem(site.send(), "in-progress")
        second = kit.until(site.send)
        assert second.get_data() == b"second"
        assert (site.runs, site.orders()) == (2, ["run 1", "run 2"])


def test_the_commit_fails(site):
    """Only of a transaction: not committed, 503, and the retry runs."""
    site.arrange("transaction", lambda: ("made", 201))
    engine = site.engine

    def fail(connection):
        if site.broken:
            raise sa.exc.OperationalError("COMMIT", {}, Exception("disk is full"))

    event.listen(engine, "commit", fail)
    try:
        kit.assert_problem(site.send(), "store-unavailable")
    finally:
        event.remove(engine, "commit", fail)
    assert (site.orders(), site.states()) == ([], [])
    second = kit.until(site.send)
    assert second.get_data() == b"second"
    assert (site.runs, site.orders()) == (2, ["run 2"])


def test_the_lease_is_lost_before_the_completion(redis_url, database_url, config, durable, crowd):
    """Redis only: the winner's answer, told as a replay. In a transaction the row is held: there is no other winner."""
    with Site(
        database_url, redis_url, config=config, engine_options=MANY, HEARTBEAT=False, LEASE=0.5, SKEW=0.1
    ) as site:
        gate = crowd.gate()

        def late():
            gate.hold()
            return "late", 201

        site.arrange(durable, late)
        first = crowd.start(site.send)
        gate.wait_inside()
        if durable:
            site.redis.flushdb()
            kit.assert_problem(site.send(), "in-progress")
            gate.open()
            answer = first.result(kit.WAIT_S)
            kit.assert_kept(answer)
            kit.assert_replay(answer, site.send())
            assert (site.runs, site.orders()) == (1, ["run 1"])
        else:
            winner = kit.until(site.send)
            assert winner.get_data() == b"second"
            gate.open()
            kit.assert_replay(winner, first.result(kit.WAIT_S))
            assert (site.runs, site.orders()) == (2, ["run 1", "run 2"])


# Refused before the view


def refuses(status):
    def above(site, view):
        def inner():
            return ("no", status) if site.broken else view()

        inner.__wrapped__ = view
        return inner

    return above


@pytest.mark.parametrize("status", [401, 422, 503])
def test_a_guard_refuses(site, durable, status):
    site.arrange(durable, lambda: ("made", 201), above=refuses(status))
    refused = site.send()
    assert refused.status_code == status
    kit.assert_not_kept(refused)
    site.assert_nothing()
    site.broken.clear()
    site.assert_stored(site.send())


def test_the_header_is_bad_or_missing(site, durable):
    site.arrange(durable, lambda: ("made", 201))
    client = site.app.test_client()
    kit.assert_problem(client.post("/orders", headers=keyed("a,b")), "invalid-key")
    kit.assert_problem(client.post("/orders"), "missing-key")
    site.assert_nothing()


def test_the_limit_is_hit(site, durable):
    site.arrange(durable, lambda: ("made", 201), rate_limit="1/minute")
    kit.assert_kept(site.post())
    kit.assert_problem(site.send(), "rate-limited")
    assert (site.runs, len(site.records()), len(site.states())) == (1, 1, 1 if durable else 0)
