"""Fixtures of the tests of sagas."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.durable.fixtures import database_url
from tests.intent.conftest import _provider, provider
from tests.provider import ProviderClient
from tests.web.fixtures import *  # noqa: F403

from .kit import Checkout

__all__ = ["_provider", "database_url", "provider"]


@pytest.fixture
def make_checkout(redis_url: str, provider: ProviderClient) -> Iterator[Callable[..., Checkout]]:
    """`Checkout` on the test's Redis; every one is checked and closed at the end."""
    with ExitStack() as stack:

        def make(database_url: str, *, route: "dict[str, Any] | None" = None, **options: Any) -> Checkout:
            made = Checkout(database_url, **{"redis_url": redis_url, "provider": provider, **options})
            checkout = stack.enter_context(made)
            checkout.take_orders(**(route or {}))
            return checkout

        yield make


@pytest.fixture
def checkout(make_checkout: Callable[..., Checkout], database_url: str) -> Checkout:
    """A checkout, once for each kind of database."""
    return make_checkout(database_url)


@pytest.fixture
def quick(make_checkout: Callable[..., Checkout], sqlite_url: str) -> Checkout:
    """The same on SQLite alone, where the database makes no difference."""
    return make_checkout(sqlite_url)
