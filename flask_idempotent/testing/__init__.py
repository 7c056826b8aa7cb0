"""Help for the tests of an app that uses the extension."""

from .embedded import EmbeddedRedis

__all__ = ["EmbeddedRedis"]
