"""Fixtures of the tests of routes whose effect is outside."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.durable.fixtures import database_url
from tests.provider import ProviderClient, provider_process
from tests.web.fixtures import *  # noqa: F403

from .kit import Till

__all__ = ["database_url"]


@pytest.fixture(scope="session")
def _provider() -> Iterator[ProviderClient]:
    with provider_process() as client:
        yield client


@pytest.fixture
def provider(_provider: ProviderClient) -> ProviderClient:
    """The provider's process, with empty books."""
    _provider.reset()
    return _provider


@pytest.fixture
def make_till(redis_url: str, provider: ProviderClient) -> Iterator[Callable[..., Till]]:
    """`Till` on the test's Redis; every one is checked and closed at the end."""
    with ExitStack() as stack:

        def make(database_url: str, **options: Any) -> Till:
            return stack.enter_context(Till(database_url, **{"redis_url": redis_url, "provider": provider, **options}))

        yield make


@pytest.fixture
def till(make_till: Callable[..., Till], database_url: str) -> Till:
    """A till that takes charges, once for each kind of database."""
    till = make_till(database_url)
    till.take_charges()
    return till


@pytest.fixture
def quick(make_till: Callable[..., Till], sqlite_url: str) -> Till:
    """The same on SQLite alone, where the database makes no difference."""
    till = make_till(sqlite_url)
    till.take_charges()
    return till
