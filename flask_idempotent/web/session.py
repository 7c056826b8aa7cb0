"""The app's session, joined to the transaction that a key shares with the view's work."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from flask import current_app, has_app_context, has_request_context, request
from flask.globals import request_ctx
from sqlalchemy.orm import Session

from ..call import ENVIRON_KEY, Call
from ..errors import ConfigurationError
from ..stores.transaction import Transaction

if TYPE_CHECKING:
    from flask import Flask
    from flask_sqlalchemy import SQLAlchemy
    from sqlalchemy.engine import Engine

__all__ = ["SharedSession", "request_bounds"]

log = logging.getLogger("flask_idempotent")

#: The transaction of the view that runs here. Threads of the view's own don't have it.
_running: ContextVar[weakref.ref[Transaction] | None] = ContextVar("flask_idempotent.transaction", default=None)


class SharedSession:
    """What a ``durable="transaction"`` route does with the app's ``db.session``.

    Every session of the app is of a class that asks, for each statement, whether the current request shares a
    transaction: so ``remove()``, nested app contexts, objects that guards loaded and async views all work in it, and a
    ``commit()`` of the view releases a savepoint.

    :param bind_key: the bind whose engine the views write to.
    """

    def __init__(self, app: Flask, db: SQLAlchemy, bind_key: str | None) -> None:
        self._app = app
        self._db = db
        self._bind_key = bind_key
        self._engine: Engine | None = None
        _join_class(db)

    @property
    def engine(self) -> Engine:
        """The app's engine of the bind.

        :raises ConfigurationError: there is no such bind, or its database can't be shared by two connections.
        """
        if self._engine is None:
            self._engine = self._find_engine()
        return self._engine

    def _find_engine(self) -> Engine:
        # Also for threads without an app context, such as the heartbeat's.
        with self._app.app_context():
            engines = self._db.engines
        if self._bind_key not in engines:
            raise ConfigurationError(
                f"IDEMPOTENT_BIND_KEY: the app has no bind {self._bind_key!r} (it has {', '.join(map(repr, engines))})"
            )
        engine = engines[self._bind_key]
        levels = (
            engine.get_execution_options().get("isolation_level"),
            getattr(engine.dialect, "_on_connect_isolation_level", None),
        )
        if "AUTOCOMMIT" in levels:
            raise ConfigurationError(
                "the engine of durable routes has isolation_level='AUTOCOMMIT', so nothing could be committed as one: "
                "take that out of SQLALCHEMY_ENGINE_OPTIONS, or give it to single statements with execution_options()"
            )
        if engine.dialect.name == "sqlite" and engine.url.database in (None, "", ":memory:"):
            raise ConfigurationError(
                "a durable route needs a database that two connections share, and an SQLite database in memory is not: "
                "use a file, such as sqlite:///shop.db"
            )
        return engine

    def verify(self) -> None:
        """Check the engine and the session, outside of any request.

        :raises ConfigurationError: see :attr:`engine`; or the session commits in two phases.
        """
        _ = self.engine
        if self._db.session.session_factory.kw.get("twophase"):
            raise ConfigurationError(
                "durable='transaction' views can't share a session with twophase=True: its transactions begin on "
                "connections of their own. Take it out of SQLAlchemy(session_options=), or use durable='intent'"
            )

    def prepare(self) -> Transaction:
        """A transaction for this request. What the guards did is committed first: it must not hang on the view, and
        its connection goes back to the pool."""
        if self._db.session.registry.has():
            session = self._db.session()
            if session.in_transaction() or session.new or session.dirty or session.deleted:
                session.commit()
            if not isinstance(session, _Joined):
                # Made before the extension was: it would not join.
                self._db.session.remove()
        transaction = Transaction(self.engine)
        transaction.app, transaction.context = self._app, _context()
        _running.set(weakref.ref(transaction))
        transaction.watch(self._current)
        return transaction

    def _current(self) -> Session | None:
        """The app's session of now, if there is one. Behind the request there is none any more."""
        return self._db.session() if has_app_context() and self._db.session.registry.has() else None


class _Joined(Session):
    """Marks the session classes that join. See :func:`_join_class`."""


def _join_class(db: SQLAlchemy) -> None:
    """Give the session factory a class that joins; once, however many apps share the ``db``."""
    factory = db.session.session_factory
    if issubclass(factory.class_, _Joined):
        return
    base: Any = factory.class_

    class JoinedSession(base, _Joined):  # type: ignore[misc]
        """The app's session. In a request that shares a transaction it works in that transaction."""

        def get_bind(self, mapper: Any = None, *, clause: Any = None, bind: Any = None, **options: Any) -> Any:
            if bind is not None:  # many a session class of an app takes the first two alone
                options["bind"] = bind
            engine = super().get_bind(mapper=mapper, clause=clause, **options)
            transaction = _current_transaction()
            if transaction is None:
                return engine
            if engine is transaction.engine:
                return transaction.join(self)
            if self._flushing or getattr(clause, "is_dml", False):
                raise ConfigurationError(
                    f"a durable='transaction' view wrote to another engine ({getattr(engine, 'url', engine)!r}) "
                    "than the one that holds its key: both could not be committed as one. Write to one bind (see "
                    "IDEMPOTENT_BIND_KEY), or use durable='intent'"
                )
            return engine

    factory.class_ = JoinedSession
    factory.configure(join_transaction_mode="create_savepoint")


def _current_transaction() -> Transaction | None:
    call: Call | None = request.environ.get(ENVIRON_KEY) if has_request_context() else None
    if call is None:
        return _outer_transaction()
    if call.claim is None:
        return None
    transaction = call.claim.backing
    if not isinstance(transaction, Transaction) or not transaction.is_open:
        return None
    # A thread with a copy of the request would share the connection at the same time.
    return transaction if transaction.context is _context() else None


@contextlib.contextmanager
def request_bounds() -> Iterator[None]:
    """Around a request: behind it the transaction of its view is not seen any more, but that of a view around it."""
    outer = _running.get()
    try:
        yield
    finally:
        _running.set(outer)


def _outer_transaction() -> Transaction | None:
    """That of the view which runs around a context without a protected call: one that a view pushed for `url_for`, or a
    request that it sends to its own app. The session there is the view's own."""
    found = _running.get()
    transaction = found() if found is not None else None
    if transaction is None or not transaction.is_open or not has_app_context():
        return None
    return transaction if transaction.app is current_app._get_current_object() else None  # type: ignore[attr-defined]


def _context() -> object:
    """What tells this request apart from a copy of it. Tasks and threads of an async view are in the same one."""
    return request_ctx._get_current_object()  # type: ignore[attr-defined]
