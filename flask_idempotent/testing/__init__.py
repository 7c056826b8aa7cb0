"""Help for the tests of an app that uses the extension."""

from .embedded import EmbeddedRedis
from .faulty import FaultyStore

__all__ = ["EmbeddedRedis", "FaultyStore"]
