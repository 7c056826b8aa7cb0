"""Fixtures of the tests of durable routes."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from tests import servers

from .kit import Shop, empty_tables

__all__ = ["database_url", "make_shop", "shop"]


@pytest.fixture(params=servers.DATABASES)
def database_url(request: pytest.FixtureRequest) -> str:
    """SQLAlchemy URL of an empty database, once for each kind. Tables stay from test to test, since their making takes
    longer than a test."""
    url: str = request.getfixturevalue(servers.DATABASES[request.param])
    empty_tables(url)
    return url


@pytest.fixture
def make_shop(redis_url: str) -> Iterator[Callable[..., Shop]]:
    """`Shop` on the test's Redis; every shop is checked and closed at the end."""
    with ExitStack() as stack:

        def make(database_url: str, **options: Any) -> Shop:
            return stack.enter_context(Shop(database_url, **{"redis_url": redis_url, **options}))

        yield make


@pytest.fixture
def shop(make_shop: Callable[..., Shop], database_url: str) -> Shop:
    """A shop with one connection, once for each kind of database."""
    return partial(make_shop, database_url)()
