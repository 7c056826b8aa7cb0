"""Every store keeps the rules, on every server."""

from tests.contract.redis_backend import RedisBackend
from tests.contract.store_suite import RateLimitSuite


class TestRedisStore(RedisBackend, RateLimitSuite):
    """On fakeredis, Valkey and Redis."""
