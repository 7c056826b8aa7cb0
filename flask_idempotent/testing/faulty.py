"""A store that fails at one of its calls: the process dies there, the call raises, or it takes its time."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Literal, cast, get_args

from flask import Flask

from ..engine import Engine
from ..errors import ConfigurationError, StoreUnavailable
from ..records import Claim
from ..stores.base import NotCommitted
from ..stores.durable import DurableStore
from ..stores.intent import IntentStore
from ..stores.sql import SqlStore
from ..stores.transaction import shared
from ..web.views import EXTENSION

__all__ = ["FaultyStore"]

When = Literal["before", "after"]
Action = Literal["kill", "raise", "delay"]
Layer = Literal["redis", "transaction", "intent"]


class FaultyStore:
    """Passes every call on to a store, and fails once: at the ``n``-th call of the method ``at``.

    It counts from its creation, over all threads. Whatever else the store has is its own.

    :param store: any store of the package, or one of your own.
    :param at: the method: ``"claim"``, ``"renew"``, ``"complete"``, ``"release"``, ``"read"``, or another of the store.
    :param when: ``"before"``: the store never hears of the call. ``"after"``: it did the work, nobody gets its reply.
    :param n: which call of the method, from 1.
    :param action: ``"kill"`` sends SIGKILL to this process. ``"raise"`` raises
        :class:`~flask_idempotent.errors.StoreUnavailable`, as a store does that can't be reached or whose reply was
        lost; where an answer was to be committed in a database, it says that nobody knows whether it was.
        ``"delay"`` sleeps, and goes on.
    :param seconds: how long ``"delay"`` sleeps.
    :raises ValueError: the store has no such method, or an argument is none of those above.
    """

    def __init__(
        self,
        store: Any,
        *,
        at: str = "complete",
        when: When = "before",
        n: int = 1,
        action: Action = "kill",
        seconds: float = 0,
    ) -> None:
        if at.startswith("_") or not callable(getattr(store, at, None)):
            raise ValueError(f"{type(_innermost(store)).__name__} has no method {at!r} to fail at")
        if when not in get_args(When):
            raise ValueError(f"when is 'before' or 'after', and {when!r} is neither")
        if action not in get_args(Action):
            raise ValueError(f"action is 'kill', 'raise' or 'delay', and {action!r} is none of these")
        if n < 1 or seconds < 0:
            raise ValueError("n counts from 1, and seconds from 0")
        self._store = store
        self._at, self._when, self._n, self._action, self._seconds = at, when, n, action, seconds
        self._calls = 0
        self._counting = threading.Lock()

    @classmethod
    def within(
        cls,
        app: Flask,
        layer: Layer,
        *,
        at: str = "complete",
        when: When = "before",
        n: int = 1,
        action: Action = "kill",
        seconds: float = 0,
    ) -> FaultyStore:
        """Put a faulty store into an app, in front of one of the stores that it has; the other arguments as above.

        :param app: an app that ``Idempotent`` was initialised with.
        :param layer: ``"redis"``: Redis, as all routes use it. ``"transaction"``, ``"intent"``: the database, as
            durable routes of that kind use it. ``"redis", at="claim", when="after"`` is between Redis and the
            database.
        :raises ConfigurationError: the app has no such store.
        """
        if layer not in get_args(Layer):
            raise ValueError(f"layer is 'redis', 'transaction' or 'intent', and {layer!r} is none of these")
        protection = app.extensions.get(EXTENSION)
        if protection is None:
            raise ConfigurationError("this app has no Idempotent extension: call init_app(app) first")
        engines: Mapping[str | bool, Engine] = protection.engines
        if layer != "redis" and layer not in engines:
            raise ConfigurationError("this app has no durable routes: give init_app(app, db=db) its database")
        store: Any = engines[False if layer == "redis" else layer].store
        found = cls(store if layer == "redis" else store.back, at=at, when=when, n=n, action=action, seconds=seconds)
        if layer != "redis":
            store.back = found
            return found
        for engine in engines.values():
            if isinstance(engine.store, DurableStore):
                cast("Any", engine.store).front = found
            else:
                engine.store = cast("Any", found)
        return found

    @property
    def calls(self) -> int:
        """How often the method was called so far."""
        return self._calls

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._store, name)
        return self._failing(value) if name == self._at else value

    def _failing(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*arguments: Any, **keywords: Any) -> Any:
            with self._counting:
                self._calls += 1
                now = self._calls == self._n
            if now and self._when == "before":
                self._act(*arguments)
            result = method(*arguments, **keywords)
            if now and self._when == "after":
                self._act(*arguments)
            return result

        return call

    def _act(self, *arguments: Any) -> None:
        if self._action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._action == "raise":
            store = _innermost(self._store)
            _break_off(store, arguments)
            commits = self._at == "complete" and isinstance(store, (SqlStore, IntentStore))
            kind = NotCommitted if commits else StoreUnavailable
            raise kind(f"the store failed {self._when} {self._at}(), as it was told to")
        time.sleep(self._seconds)


def _innermost(store: Any) -> Any:
    """The store itself, behind all the faults that stand in front of it."""
    while isinstance(store, FaultyStore):
        store = store._store
    return store


def _break_off(store: object, arguments: tuple[Any, ...]) -> None:
    """A database that can't be reached has taken back the transaction that was open."""
    claim = getattr(arguments[0], "claim", arguments[0]) if arguments else None
    if isinstance(store, SqlStore) and isinstance(claim, Claim) and shared(claim).is_open:
        shared(claim).part()
        shared(claim).discard()
