"""Fixtures of the tests that send requests."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import redis
from flask import Flask

from . import kit

__all__ = ["crowd", "effects", "make_app", "store"]


@pytest.fixture
def store(redis_url: str) -> Iterator[redis.Redis]:
    """A client of the server that the apps use."""
    with contextlib.closing(redis.Redis.from_url(redis_url)) as client:
        yield client


@pytest.fixture
def make_app(redis_url: str) -> Callable[..., Flask]:
    """`kit.make_app` on the test's server."""
    return partial(kit.make_app, redis_url)


@pytest.fixture
def effects() -> kit.Effects:
    return kit.Effects()


@pytest.fixture
def crowd() -> Iterator[kit.Crowd]:
    with kit.Crowd() as crowd:
        yield crowd
