"""Fixtures of the tests with a browser."""

import contextlib
from collections.abc import Callable, Iterator

import pytest
from flask import Flask

from . import person

__all__ = ["_chromium", "_chromium_without_javascript", "serve", "somebody", "without_javascript"]


@pytest.fixture(scope="session")
def _chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[person.Chrome]:
    with person.chromium(tmp_path_factory.mktemp("chromium")) as driver:
        yield driver


@pytest.fixture(scope="session")
def _chromium_without_javascript(tmp_path_factory: pytest.TempPathFactory) -> Iterator[person.Chrome]:
    with person.chromium(tmp_path_factory.mktemp("chromium"), javascript=False) as driver:
        yield driver


@pytest.fixture
def somebody(_chromium: person.Chrome) -> Iterator[person.Person]:
    """A person in front of an empty window."""
    with person.in_a_new_window(_chromium) as somebody:
        yield somebody


@pytest.fixture
def without_javascript(_chromium_without_javascript: person.Chrome) -> Iterator[person.Person]:
    """A person whose browser runs no script."""
    with person.in_a_new_window(_chromium_without_javascript) as somebody:
        yield somebody


@pytest.fixture
def serve() -> Iterator[Callable[[Flask], person.Site]]:
    """Serve an app on this host, from threads of this process, until the test ends."""
    with contextlib.ExitStack() as stack:
        yield lambda app: stack.enter_context(person.Site(app))
