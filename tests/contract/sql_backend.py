"""What the suite needs to know of the stores over a database."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
import sqlalchemy as sa

from flask_idempotent.records import Claim, Scope
from flask_idempotent.stores.durable import DurableTransactionStore
from flask_idempotent.stores.models import Tables, add_tables
from flask_idempotent.stores.redis import RedisStore
from flask_idempotent.stores.sql import SqlStore
from flask_idempotent.stores.transaction import Transaction
from tests import servers

PREFIX = "suite"
#: The statements that MySQL gets, which MariaDB understands too.
MYSQL = "as mysql"


class SqlBackend:
    """The hooks of a suite over one of the databases. Its clock can't be moved, so the rows' times are, the other way;
    each claim comes with a transaction of its own, as each request does."""

    #: Of a life of an hour; a database on a busy machine takes its time.
    tolerance_ms = 10_000

    engine: sa.Engine
    tables: Tables

    @pytest.fixture(autouse=True, params=[*servers.DATABASES, MYSQL])
    def _database(self, request: pytest.FixtureRequest) -> Iterator[None]:
        url = request.getfixturevalue(servers.DATABASES["mariadb" if request.param == MYSQL else request.param])
        self.tables = add_tables(sa.MetaData())
        self.engine = sa.create_engine(url)
        self.tables.keys.metadata.create_all(self.engine)
        if request.param == MYSQL:
            self.engine.dialect.is_mariadb = False
        with self.engine.begin() as connection:
            for table in self.tables.keys.metadata.sorted_tables:
                connection.execute(table.delete())
        self._open: list[Transaction] = []
        yield
        for transaction in self._open:
            transaction.close()
        assert self.engine.pool.checkedout() == 0  # type: ignore[attr-defined]
        self.engine.dispose()

    def make_store(self) -> SqlStore:
        return SqlStore(lambda: self.engine, self.tables)

    def begin(self) -> Transaction:
        self._open.append(Transaction(self.engine))
        return self._open[-1]

    def claim(self, token: str = "t1", **changes: Any) -> Claim:
        return super().claim(token, **{"backing": self.begin(), **changes})  # type: ignore[misc, no-any-return]

    def advance(self, ms: int) -> None:
        self.move(lambda column: column - ms)

    def rewind(self, ms: int) -> None:
        self.move(lambda column: column + ms)

    def move(self, move: Callable[[Any], Any]) -> None:
        keys = self.tables.keys
        times = ("created_at", "completed_at", "expires_at", "tombstone_until", "locked_until", "lock_version")
        with self.engine.begin() as connection:
            connection.execute(sa.update(keys).values({name: move(keys.c[name]) for name in times}))
            connection.execute(
                sa.update(self.tables.responses).values(lock_version=move(self.tables.responses.c.lock_version))
            )

    def change(self, scope: Scope, **values: Any) -> None:
        keys = self.tables.keys
        with self.engine.begin() as connection:
            changed = connection.execute(sa.update(keys).where(keys.c.key_digest == scope.digest).values(values))
            assert changed.rowcount == 1

    def make_indeterminate(self, scope: Scope) -> None:
        self.change(scope, status="indeterminate")

    def make_unreadable(self, scope: Scope) -> None:
        self.change(scope, format=2)

    def raw(self, scope: Scope) -> object:
        found = []
        with self.engine.begin() as connection:
            for table in (self.tables.keys, self.tables.responses):
                found += connection.execute(sa.select(table).where(table.c.key_digest == scope.digest)).all()
        return found


class DurableBackend(SqlBackend):
    """The same with Redis in front, whose times are moved as well."""

    client: redis.Redis

    @pytest.fixture(autouse=True)
    def _front(self, redis_url: str) -> Iterator[None]:
        with redis.Redis.from_url(redis_url) as client:
            self.client = client
            yield

    def make_store(self) -> DurableTransactionStore:  # type: ignore[override]
        return DurableTransactionStore(
            RedisStore(self.client, prefix=PREFIX), super().make_store(), inline_body=64 * 1024
        )

    def advance(self, ms: int) -> None:
        super().advance(ms)
        for name in self.client.scan_iter(f"{PREFIX}:*:r:*"):
            for field in ("expires_at", "tombstone_until", "completed_at", "locked_until"):
                if self.client.hget(name, field) != b"0":
                    self.client.hincrby(name, field, -ms)

    def rewind(self, ms: int) -> None:
        self.advance(-ms)
