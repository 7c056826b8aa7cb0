"""Where a run takes place: a Redis, a database, a provider of its own, and wires to them that can be cut."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
import sqlalchemy as sa

from flask_idempotent.testing import EmbeddedRedis
from tests import servers
from tests.harness import Proxy
from tests.provider import ProviderClient, provider_process

from .plan import Timing
from .worker import create_tables

__all__ = ["DATABASES", "Site", "site"]

DATABASES = tuple(servers.DATABASES)

#: How a COMMIT looks on the wire.
COMMITS = {"postgresql": b"COMMIT\0", "mysql": b"\3COMMIT"}


@dataclass
class Site:
    """What the workers work with. ``redis_wire`` and ``sql_wire`` are between them and the servers; SQLite has no wire.

    ``redis``, ``engine`` and ``provider`` are ways past the wires.
    """

    database: str
    server: EmbeddedRedis
    redis: redis.Redis
    redis_wire: Proxy
    engine: sa.Engine
    sql_wire: Proxy | None
    provider: ProviderClient
    config: Mapping[str, Any]
    locks: list[sqlite3.Connection] = field(default_factory=list)

    def restart_redis(self) -> None:
        """Kill the server; another comes, and knows nothing."""
        os.kill(self.server.pid, signal.SIGKILL)
        self.server.restart()

    def make_room(self) -> None:
        """Redis has memory again."""
        self.redis.config_set("maxmemory", 0)

    def drop_connections(self) -> None:
        """The database ends every session but its own."""
        name = self.engine.dialect.name
        with self.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            if name == "postgresql":
                connection.exec_driver_sql(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                    " WHERE datname = current_database() AND pid <> pg_backend_pid()"
                )
                return
            found = connection.exec_driver_sql(
                "SELECT id FROM information_schema.processlist WHERE db = database() AND id <> connection_id()"
            )
            for number in found.scalars().all():
                with contextlib.suppress(sa.exc.SQLAlchemyError):  # it may have ended by itself
                    connection.exec_driver_sql(f"KILL {number:d}")

    def lock_file(self) -> Callable[[], None]:
        """Nobody else may write to SQLite's file, until what comes back is called."""
        connection = sqlite3.connect(
            str(self.engine.url.database), timeout=1, isolation_level=None, check_same_thread=False
        )
        with contextlib.suppress(sqlite3.OperationalError):  # a writer has it all the time
            connection.execute("BEGIN IMMEDIATE")
        self.locks.append(connection)
        return connection.close

    def on_the_wire(self, what: str) -> bytes:
        """How requests of a kind look on the way to the database; nothing for all of them."""
        if what == "commit":
            return COMMITS[self.engine.dialect.name]
        return b"idempotency_responses" if what else b""

    def heal(self) -> None:
        """All wires are whole, and the provider has no more bad days."""
        self.redis_wire.heal()
        self.make_room()
        while self.locks:
            self.locks.pop().close()
        if self.sql_wire is not None:
            self.sql_wire.heal()
        self.provider.control(faults=[])

    def empty(self) -> None:
        """Nothing is known of what was."""
        with self.engine.begin() as connection:
            for table in sa.inspect(connection).get_table_names():
                connection.exec_driver_sql(f"DELETE FROM {table}")
        self.redis.flushdb()
        self.provider.reset()


@contextlib.contextmanager
def site(database: str, timing: Timing, settings: Mapping[str, Any] | None = None) -> Iterator[Site]:
    """Start it, and end all of it with the block.

    :param settings: of the workers' extension, besides the timing.
    """
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="crash-")))
        url = stack.enter_context(_database(database, directory))
        # One session, which is there however many others are.
        engine = sa.create_engine(url, pool_size=1, max_overflow=0, pool_pre_ping=True)
        stack.callback(engine.dispose)
        server = stack.enter_context(EmbeddedRedis())
        redis_wire = stack.enter_context(Proxy(server.url))
        sql_wire = None if database == "sqlite" else stack.enter_context(Proxy(url))
        provider = stack.enter_context(provider_process())
        config: dict[str, Any] = {
            "redis_url": redis_wire.url,
            "database_url": sql_wire.url if sql_wire is not None else url,
            "provider_url": provider.url,
            "LEASE": timing.lease,
            "SKEW": timing.skew,
            "SETTLE_AFTER": timing.settle_after,
            "RECONCILE_TRIES": 1000,
            "engine_options": {
                "pool_size": 4,
                "max_overflow": 6,
                "pool_timeout": 3,
                "connect_args": {"timeout": 2} if database == "sqlite" else {},
            },
            **(settings or {}),
        }
        create_tables({**config, "database_url": url, "redis_url": server.url})
        client = stack.enter_context(redis.Redis.from_url(server.url))
        yield Site(database, server, client, redis_wire, engine, sql_wire, provider, config)


@contextlib.contextmanager
def _database(name: str, directory: Path) -> Iterator[str]:
    if name == "postgresql":
        with servers.postgres(directory) as url:
            yield url
    elif name == "mariadb":
        with servers.mariadb() as url:
            yield url
    else:
        yield f"sqlite:///{directory / 'crash.sqlite'}"
