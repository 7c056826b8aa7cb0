"""A till that charges cards at the provider, and what its database and the provider's ledger say afterwards."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from flask import request
from sqlalchemy import event
from werkzeug.test import TestResponse

from flask_idempotent import Provider, Settlement, current_idempotency, idempotent
from flask_idempotent.call import current_call
from flask_idempotent.settling import Orphan
from flask_idempotent.stores.durable import DurableIntentStore
from flask_idempotent.stores.intent import IntentStore
from tests.durable.kit import Shop
from tests.harness import wait_until
from tests.provider import LocalClient, ProviderClient
from tests.web import kit
from tests.web.kit import keyed, new_key

#: As the tests' provider remembers.
BANK = Provider("bank", window=86_400, max_length=64)
#: Long leases, since time is made to pass: `Till.pass_time`.
LONG = {"LEASE": 30, "SKEW": 0.1, "SETTLE_AFTER": 5}
#: Leases that a test waits for, and that nothing renews.
LAPSING = {"LEASE": 0.4, "SKEW": 0.1, "SETTLE_AFTER": 0.2, "HEARTBEAT": False}


class Till(Shop):
    """``POST /charges`` charges a card at the provider, and whatever `ending` says comes after that.

    :param settings: ``IDEMPOTENT_`` keys without their prefix; the default leases are long.
    """

    def __init__(
        self,
        database_url: str,
        redis_url: str,
        *,
        provider: "ProviderClient | LocalClient",
        engine_options: "dict[str, Any] | None" = None,
        **options: Any,
    ) -> None:
        if engine_options is None:
            engine_options = {"pool_size": 2, "max_overflow": 0, "pool_timeout": 3}
        options = {name: value for name, value in {**LONG, **options}.items() if value is not None}
        super().__init__(database_url, redis_url, engine_options=engine_options, **options)
        if database_url.startswith("sqlite"):
            for engine in (self.engine, self.outside):
                # Nothing here is about power cuts.
                event.listen(engine, "connect", lambda connection, _: connection.execute("PRAGMA synchronous = OFF"))
                engine.dispose()
        self.provider = provider
        #: What the view does before it charges, and what it answers with a charge.
        self.before: Callable[[], Any] = lambda: None
        self.ending: Callable[[dict[str, Any]], Any] = lambda charge: ({"charge": charge["id"]}, 201)
        #: Whether it charges at all.
        self.charges = True
        #: Inside of the look-up.
        self.in_look_up: Callable[[], Any] = lambda: None
        self.lookups: list[Orphan] = []
        self.keys: list[str] = []
        self.attempts: list[int] = []
        self._looking = 0
        self.most_looking = 0
        self._counts = threading.Lock()

    # -- the views ---------------------------------------------------------------------------------------------------

    def take_charges(self, rule: str = "/charges", *, reconcile: bool = True, **keywords: Any) -> None:
        """:param reconcile: with a reconciler that asks the provider for the charge of the attempt's key."""

        @idempotent(**{"durable": "intent", "provider": BANK, **keywords})
        def take_charge() -> Any:
            return self.take()

        if reconcile:
            take_charge.reconciler(self.settle)
        self.app.post(rule, endpoint=rule.strip("/").replace("/", "_"))(take_charge)

    def take(self) -> Any:
        with self._counts:
            self.runs += 1
            self.attempts.append(current_idempotency.attempt)
        self.before()
        if not self.charges:
            return self.ending({"id": None})
        key = current_idempotency.provider_key()
        self.keys.append(key)
        return self.ending(self.provider.charge((request.get_json(silent=True) or {}).get("amount", 100), key=key))

    def settle(self, orphan: Orphan) -> Any:
        with self._looks(orphan):
            self.in_look_up()
            found = self.provider.find(orphan.provider_key())
            return Settlement.completed({"charge": found["id"]}, 201) if found else Settlement.retry()

    @contextmanager
    def _looks(self, orphan: Orphan) -> Iterator[None]:
        with self._counts:
            self.lookups.append(orphan)
            self._looking += 1
            self.most_looking = max(self.most_looking, self._looking)
        try:
            yield
        finally:
            with self._counts:
                self._looking -= 1

    # -- requests ----------------------------------------------------------------------------------------------------

    def pay(
        self, key: str, amount: int = 100, *, path: str = "/charges", user: str = "ann", **more: Any
    ) -> TestResponse:
        """One request; an exception that passes through the app stays an exception."""
        return self.app.test_client().post(path, json={"amount": amount, **more}, headers=keyed(key, X_User=user))

    def timed(self, key: str, bound: float, **options: Any) -> TestResponse:
        """The same, answered within so many seconds."""
        began = time.monotonic()
        response = self.pay(key, **options)
        took = time.monotonic() - began
        assert took < bound, f"{took:.2f} s, {response.status_code}"
        return response

    def until_settled(self, key: str, seconds: float = kit.LAPSE_S, **options: Any) -> TestResponse:
        """As a client does it: again, while it is told to."""
        deadline = time.monotonic() + seconds
        while (response := self.pay(key, **options)).status_code in (409, 503) and "Retry-After" in response.headers:
            assert time.monotonic() < deadline, f"still {response.get_data(as_text=True)}"
            time.sleep(0.05)
        return response

    # -- stores ------------------------------------------------------------------------------------------------------

    @property
    def store(self) -> DurableIntentStore:  # type: ignore[override]
        store = self.app.extensions["idempotent"].engines["intent"].store
        assert isinstance(store, DurableIntentStore)
        return store

    @property
    def back(self) -> IntentStore:  # type: ignore[override]
        return self.store.back

    def forget_all(self) -> None:
        """Every record, everywhere."""
        for name in ("idempotency_keys", "idempotency_responses", "idempotency_steps"):
            self.ask(f"DELETE FROM {name}")
        self.redis.flushdb()

    # -- time --------------------------------------------------------------------------------------------------------

    def pass_time(self, seconds: float) -> None:
        """For every record, everywhere, and for the provider."""
        with self.outside.begin() as connection:
            self.age(connection, seconds)
        ms = int(seconds * 1000)
        for name in self.redis.scan_iter("idempotent:*:r:*"):
            for field in ("locked_until", "expires_at"):
                if int(self.redis.hget(name, field) or 0):
                    self.redis.hincrby(name, field, -ms)
        self.provider.advance(seconds)

    def age(self, connection: Any, seconds: float) -> None:
        """The rows: all that they say of time moves back."""
        for statement in AGE:
            connection.exec_driver_sql(statement % {"ms": int(seconds * 1000)})

    # -- what is there -----------------------------------------------------------------------------------------------

    def assert_one_charge(self, response: TestResponse) -> None:
        """One charge stands, and the answer tells of it."""
        (entry,) = self.provider.entries()
        assert response.get_json() == {"charge": entry["id"]}
        assert response.status_code == 201

    def assert_settled(self, key: str, *, lookups: int = 1) -> TestResponse:
        """When the time has come, the retry looks the charge up, and from then on it is replayed."""
        runs = self.runs
        self.pass_time(6)
        answer = self.pay(key)
        self.assert_one_charge(answer)
        assert answer.headers[kit.REPLAYED] == "true"
        assert (len(self.lookups), self.runs) == (lookups, runs)
        assert self.row().status == "succeeded"
        kit.assert_replay(answer, self.pay(key))
        self.redis.flushdb()
        kit.assert_replay(answer, self.pay(key))
        assert (len(self.lookups), self.runs) == (lookups, runs)
        return answer

    def __exit__(self, *error: Any) -> None:
        # A heartbeat may be at it still.
        wait_until(lambda: self.checked_out() == 0, "connections that were not given back", 5)
        super().__exit__(*error)


AGE = (
    "UPDATE idempotency_keys SET created_at = created_at - %(ms)d, locked_until = locked_until - %(ms)d,"
    " unknown_since = unknown_since - %(ms)d, completed_at = completed_at - %(ms)d, expires_at = expires_at - %(ms)d",
    "UPDATE idempotency_steps SET began_at = began_at - %(ms)d",
)


def assert_unknown(response: TestResponse) -> None:
    """409, the outcome is not known: ask again in ten seconds."""
    body = response.get_json()
    assert (response.status_code, body and body["code"]) == (409, "indeterminate"), response.get_data(as_text=True)
    assert body["retryable"] is True
    assert response.headers["Retry-After"] == "10"
    assert kit.REPLAYED not in response.headers
    assert kit.EXPIRES not in response.headers


def commit_of(url: str) -> bytes:
    """COMMIT as the driver sends it, and not READ COMMITTED."""
    return b"COMMIT\0" if url.startswith("postgresql") else b"\3COMMIT"


def die() -> None:
    """Inside of a view: from here on it is as if the process was killed, and the stores are told nothing more."""
    call = current_call()
    assert call is not None
    if call.beat is not None:
        call.engine._heartbeat.remove(call.beat)  # type: ignore[union-attr]
        call.beat = None
    call.settled = True


__all__ = ["BANK", "LAPSING", "LONG", "Till", "assert_unknown", "commit_of", "die", "new_key"]
