"""A shop whose orders are rows, seen from another connection."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import redis
import sqlalchemy as sa
from flask import request
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import event
from sqlalchemy.orm import Mapped, mapped_column
from werkzeug.test import TestResponse

from flask_idempotent import Idempotent, idempotent
from flask_idempotent.stores.durable import DurableStore
from flask_idempotent.stores.redis import RedisStore
from flask_idempotent.stores.sql import SqlStore
from tests.web import kit
from tests.web.kit import keyed, new_key

#: No answer may take longer.
BOUND_S = 6.0
#: One connection and no other: what isn't given back is missed by the next request.
ONE = {"pool_size": 1, "max_overflow": 0, "pool_timeout": 3}
MANY = {"pool_size": 5, "max_overflow": 10}


class Shop:
    """An app, its database, and what the world sees of both.

    :param db: a Flask-SQLAlchemy object that another shop has; ``add_models`` where this is its first.
    :param engine_options: of the app's engine; the default is a single connection.
    :param protect: ``False`` where the test calls `protect` itself.
    :param settings: ``IDEMPOTENT_`` keys without their prefix.
    """

    def __init__(
        self,
        database_url: str,
        redis_url: str,
        *,
        db: "SQLAlchemy | None" = None,
        idem: "Idempotent | None" = None,
        name: str = "shop",
        engine_options: "dict[str, Any] | None" = None,
        config: "dict[str, Any] | None" = None,
        protect: bool = True,
        add_models: bool = False,
        **settings: Any,
    ) -> None:
        self.url = database_url
        self.db = db or SQLAlchemy()
        self.runs = 0
        self.gate: kit.Gate | None = None
        #: Called by the view after its work was flushed.
        self.in_view: Callable[[], None] | None = None
        self.outside = sa.create_engine(database_url, pool_size=1)
        self.redis = redis.Redis.from_url(redis_url)
        self.app = kit.bare_app(redis_url, name, config=config, RATE_LIMIT=None, **{**kit.SHORT, **settings})
        options = dict(ONE if engine_options is None else engine_options)
        self.app.config.setdefault("SQLALCHEMY_DATABASE_URI", database_url)
        self.app.config.setdefault("SQLALCHEMY_ENGINE_OPTIONS", options)
        self.db.init_app(self.app)
        self.idem = idem or Idempotent()
        self.idem.principal_loader(lambda: request.headers.get("X-User"))
        self.alone = options.get("pool_size") == 1
        if db is None or add_models:
            _add_models(self.db)
        self.Order: Any = self.db.Order  # type: ignore[attr-defined]
        self.Coupon: Any = self.db.Coupon  # type: ignore[attr-defined]
        if protect:
            self.protect()

    def protect(self) -> None:
        self.idem.init_app(self.app, db=self.db)
        with self.app.app_context():
            self.db.create_all()

    # -- the views ---------------------------------------------------------------------------------------------------

    def view(self, view: "Callable[..., Any] | None" = None, *, rule: str = "/orders", **keywords: Any) -> Any:
        """Register a view, protected in one transaction."""
        if view is None:
            return lambda view: self.view(view, rule=rule, **keywords)
        marked = idempotent(**{"durable": "transaction", **keywords})(view)
        return self.app.post(rule, endpoint=rule.strip("/"))(marked)

    def take_orders(self, **keywords: Any) -> None:
        """``POST /orders``: one order in the database, and the number of the run as the answer."""

        @self.view(**keywords)
        def take_order() -> Any:
            return self.work()

    def work(self) -> Any:
        self.runs += 1
        number = self.runs
        self.order(f"{(request.get_json(silent=True) or {}).get('item', 'a')}")
        self.db.session.flush()
        if self.gate is not None:
            self.gate.hold()
        if self.in_view is not None:
            self.in_view()
        self.db.session.commit()
        return {"run": number}, 201

    def order(self, item: str) -> None:
        self.db.session.add(self.Order(item=item))

    # -- requests ----------------------------------------------------------------------------------------------------

    def post(
        self, key: "str | None" = None, body: Any = None, *, path: str = "/orders", user: str = "ann", **headers: str
    ) -> TestResponse:
        """One request, answered within the bound. With one connection, it is back in its pool."""
        began = time.monotonic()
        try:
            return self.app.test_client().post(
                path, json={"item": "a"} if body is None else body, headers=keyed(key, X_User=user, **headers)
            )
        finally:
            assert time.monotonic() - began < BOUND_S
            if self.alone:
                assert self.checked_out() == 0

    def elsewhere(self, call: Callable[[], Any]) -> Any:
        """What a call gives in another thread, as another worker's request while this one runs."""
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(call).result(kit.WAIT_S)

    def poster(self, **options: Any) -> Callable[[], TestResponse]:
        """The same request again and again."""
        key = new_key()
        return lambda: self.post(key, **options)

    @property
    def engine(self) -> sa.Engine:
        with self.app.app_context():
            return self.db.engines[self.app.config.get("IDEMPOTENT_BIND_KEY")]

    def checked_out(self) -> int:
        return self.engine.pool.checkedout()  # type: ignore[attr-defined, no-any-return]

    @property
    def store(self) -> DurableStore:
        engine = self.app.extensions["idempotent"].engines["transaction"]
        assert isinstance(engine.store, DurableStore)
        return engine.store

    @property
    def front(self) -> RedisStore:
        return self.store.front

    @property
    def back(self) -> SqlStore:
        return self.store.back

    # -- what the world sees -----------------------------------------------------------------------------------------

    def ask(self, statement: str, **parameters: Any) -> list[Any]:
        """The rows of a query, or nothing of a change, on a connection of its own."""
        with self.outside.begin() as connection:
            result = connection.execute(sa.text(statement), parameters)
            return list(result) if result.returns_rows else []

    def orders(self) -> list[str]:
        return [item for (item,) in self.ask("SELECT item FROM orders ORDER BY item")]

    def states(self) -> list[str]:
        """The states of the keys' rows."""
        return [status for (status,) in self.ask("SELECT status FROM idempotency_keys ORDER BY created_at")]

    def row(self) -> Any:
        (row,) = self.ask("SELECT * FROM idempotency_keys")
        return row

    def answers(self) -> int:
        return int(self.ask("SELECT COUNT(*) FROM idempotency_responses")[0][0])

    def records(self) -> list[dict[str, bytes]]:
        return kit.records(self.redis)

    def assert_done(self, *items: str, state: str = "succeeded") -> None:
        """The effect is there, and so are the key and its answer."""
        assert (self.orders(), self.states(), self.answers()) == (sorted(items), [state], 1)

    def assert_nothing(self) -> None:
        """Neither effect nor key nor answer, and nothing in Redis that binds the key."""
        assert (self.orders(), self.states(), self.answers()) == ([], [], 0)
        assert self.records() == []

    def assert_replays(self, first: TestResponse, post: Callable[[], TestResponse]) -> None:
        """From Redis without any SQL, from the database once Redis forgot it, and from Redis again. Nothing is done."""
        before = self.runs, self.orders()
        with self.statements() as statements:
            kit.assert_replay(first, post())
        assert statements == []
        self.redis.flushdb()
        with self.statements() as statements:
            kit.assert_replay(first, post())
        assert statements
        with self.statements() as statements:
            kit.assert_replay(first, post())
        assert statements == []
        assert (self.runs, self.orders()) == before

    @contextmanager
    def statements(self) -> Iterator[list[str]]:
        """The statements that the app sends meanwhile."""
        found: list[str] = []

        def note(_: object, __: object, statement: str, *___: object) -> None:
            found.append(statement)

        engine = self.engine
        event.listen(engine, "before_cursor_execute", note)
        try:
            yield found
        finally:
            event.remove(engine, "before_cursor_execute", note)

    @contextmanager
    def at_commit(self, act: Callable[[], None]) -> Iterator[None]:
        """Act right before the app's next COMMIT; where that raises, the commit fails."""
        armed = [True]

        def commits(_: object) -> None:
            if armed:
                armed.clear()
                act()

        engine = self.engine
        event.listen(engine, "commit", commits)
        try:
            yield
        finally:
            event.remove(engine, "commit", commits)
        assert not armed

    @contextmanager
    def sql_away(self) -> Iterator[None]:
        """New connections are refused, and the old ones are closed."""
        engine = self.engine

        def refuse(dialect: Any, *_: object) -> None:
            raise dialect.loaded_dbapi.OperationalError("the database is away")

        event.listen(engine, "do_connect", refuse)
        engine.dispose()
        try:
            yield
        finally:
            event.remove(engine, "do_connect", refuse)

    # -- the end -----------------------------------------------------------------------------------------------------

    def __enter__(self) -> "Shop":
        return self

    def __exit__(self, kind: "type[BaseException] | None", error: object, traceback: "TracebackType | None") -> None:
        if self.gate is not None:
            self.gate.open()
        try:
            with self.app.app_context():
                engines = list(self.db.engines.values())
            if kind is None:
                assert [engine.pool.checkedout() for engine in engines if hasattr(engine.pool, "checkedout")] == [
                    0 for engine in engines if hasattr(engine.pool, "checkedout")
                ]
            for engine in engines:
                engine.dispose()
        finally:
            self.outside.dispose()
            self.redis.close()


def _add_models(db: SQLAlchemy) -> None:
    class Order(db.Model):  # type: ignore[name-defined, misc]
        __tablename__ = "orders"
        id: Mapped[int] = mapped_column(primary_key=True)
        item: Mapped[str] = mapped_column(sa.String(50))

    class Coupon(db.Model):  # type: ignore[name-defined, misc]
        __tablename__ = "coupons"
        code: Mapped[str] = mapped_column(sa.String(50), primary_key=True)
        used: Mapped[int] = mapped_column(default=0)

    db.Order, db.Coupon = Order, Coupon  # type: ignore[attr-defined]


def empty_tables(url: str) -> None:
    """Delete every row of every table."""
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    with engine.begin() as connection:
        for table in sa.inspect(connection).get_table_names():
            connection.execute(sa.text(f"DELETE FROM {table}"))
    engine.dispose()
