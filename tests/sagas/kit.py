"""A checkout in three steps at the provider, and what its ledger and the rows say afterwards."""

import copy
from collections.abc import Callable
from typing import Any

from werkzeug.test import TestResponse

from flask_idempotent import Saga, idempotent
from flask_idempotent.response.cipher import Cipher
from tests.intent.kit import Till, assert_unknown, die, new_key

__all__ = ["Checkout", "Declined", "Killed", "assert_rolled_back", "assert_unknown", "decline", "kill", "new_key"]

#: Each step of the checkout, what it is to the provider, and what undoes it.
STEPS = {"reserve": "transfers", "charge": "charges", "ship": "captures"}
UNDO = {"reserve": "release", "charge": "refund", "ship": "recall"}


class Declined(Exception):
    """A provider's "no"."""


class Killed(BaseException):
    """What a killed process does not live to see."""


class Checkout(Till):
    """``POST /orders`` reserves, charges and ships, each at the provider and each with the key that it is given.

    ``hooks`` are called inside of the calls: ``"before charge"``, ``"after charge"``, ``"before refund"``, … What is
    named in ``over`` runs for each item of the order.
    """

    def __init__(self, *args: Any, over: tuple[str, ...] = (), retries: int = 0, **options: Any) -> None:
        super().__init__(*args, **options)
        self.hooks: dict[str, Callable[[], Any]] = {}
        #: Every call: its name, the state that it got, its key.
        self.calls: list[tuple[str, dict[str, Any], str]] = []
        #: What a call returns instead of its result.
        self.results: dict[str, Any] = {}
        self.ends: Callable[[dict[str, Any]], Any] = lambda state: (state, 201)
        self.starts: Callable[[], Any] = lambda: None
        self.items: list[Any] = ["a", "b", "c", "d", "e"]
        self.saga = Saga("checkout")
        for name, operation in STEPS.items():
            act, undo = self._call(name, operation), self._call(UNDO[name], "refunds")
            act.__name__ = name
            options = {"compensate": undo, "retries": retries, "over": "items" if name in over else None}
            if name in over:
                act, options["compensate"] = self._for_item(act, name), self._for_item(undo, name)
            self.saga.step(**options)(act)

    def _call(self, name: str, operation: str) -> Callable[..., Any]:
        def call(state: dict[str, Any], key: str, **more: Any) -> Any:
            self.calls.append((name, copy.deepcopy(state), key))
            self.hook(f"before {name}")
            done = self.provider.act(operation, key=key, what=name, **more)
            self.hook(f"after {name}")
            return self.results[name] if name in self.results else {name: done["id"]}

        return call

    def _for_item(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def for_item(state: dict[str, Any], key: str, item: Any) -> Any:
            return call(state, key, item=item)

        for_item.__name__ = name
        return for_item

    def hook(self, moment: str) -> None:
        self.hooks.get(moment, lambda: None)()

    def take_orders(self, rule: str = "/orders", **keywords: Any) -> None:
        @idempotent(**{"durable": "intent", "saga": self.saga, **keywords})
        def take_order() -> Any:
            self.runs += 1
            started = self.starts()
            if started is not None:
                return started
            return self.ends(self.saga.run({"items": self.items, "run": self.runs}))

        self.app.post(rule, endpoint=rule.strip("/"))(take_order)

    # -- requests ------------------------------------------------------------------------------------------------------

    def order(self, key: str, **options: Any) -> TestResponse:
        return self.pay(key, path="/orders", **options)

    def later(self, key: str, seconds: float = 40, **options: Any) -> TestResponse:
        """A retry, when lease, skew and ``settle_after`` are over."""
        self.pass_time(seconds)
        answer = self.order(key, **options)
        if answer.status_code == 409 and self.row().reason == "looked up, and not known yet":
            raise AssertionError("the retry was too early")
        return answer

    def killed(self, key: str, **options: Any) -> None:
        """A request in which the process is killed, by a hook that is `kill`."""
        try:
            self.order(key, **options)
        except Killed:
            return
        raise AssertionError("it was not killed")

    def use_keys(self, *keys: bytes) -> None:
        """As after a restart with these ``FERNET_KEYS``."""
        engine = self.app.extensions["idempotent"].engines["intent"]
        engine._cipher = Cipher(keys)

    # -- what is there -------------------------------------------------------------------------------------------------

    def done(self) -> list[Any]:
        """What the provider did, in order; with the item where there is one."""
        return [
            (entry["what"], entry["item"]) if "item" in entry else entry["what"] for entry in self.provider.entries()
        ]

    def steps(self) -> dict[Any, Any]:
        """The rows: the status of each, by name, or by name and item."""
        rows = self.ask("SELECT step, item, status FROM idempotency_steps ORDER BY 1, 2")
        return {
            name if name.startswith("saga:") else (name.removeprefix("step:"), item): status
            for name, item, status in rows
            if not name.startswith("provider:")
        }

    def names(self) -> list[str]:
        """The calls, by name."""
        return [name for name, _, _ in self.calls]


def decline() -> None:
    """The provider says no, for good."""
    raise Declined("the text of this may hold anything")


def kill() -> None:
    """From here on it is as if the process was killed."""
    die()
    raise Killed


def assert_rolled_back(response: TestResponse) -> None:
    """409, kept: nothing is left of it, and it takes another key."""
    body = response.get_json()
    assert (response.status_code, body and body["code"]) == (409, "saga-rolled-back"), response.get_data(as_text=True)
    assert body["retryable"] is False
    assert "Retry-After" not in response.headers
    assert "Idempotency-Expires" in response.headers
