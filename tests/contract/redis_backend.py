"""What the suites need to know of the Redis store."""

from types import MappingProxyType

import pytest
import redis

from flask_idempotent.records import Scope
from flask_idempotent.stores.redis import RedisStore
from tests.contract.lua_tools import ScriptedClock, Sources
from tests.contract.store_suite import make_scope

PREFIX = "suite"


def record_key(scope: Scope, prefix: str = PREFIX) -> str:
    """Written down here once more, since the layout is a promise to servers that hold records already."""
    return f"{prefix}:{{b{int(scope.digest, 16) % 256:03d}}}:r:{scope.digest}"


def index_key(scope: Scope, prefix: str = PREFIX) -> str:
    return f"{prefix}:{{b{int(scope.digest, 16) % 256:03d}}}:inflight"


class RedisBackend:
    """The hooks of a suite, over the test's client and a clock that the test moves."""

    client: redis.Redis
    clock: ScriptedClock
    make_clock: type[ScriptedClock] = ScriptedClock
    #: Texts instead of the package's scripts.
    sources: Sources = MappingProxyType({})

    @pytest.fixture(autouse=True)
    def _server(self, redis_client: redis.Redis) -> None:
        self.use(redis_client)

    def use(self, client: redis.Redis) -> None:
        self.client = client
        self.clock = self.make_clock(client)

    def make_store(self) -> RedisStore:
        return RedisStore(self.client, prefix=PREFIX, sources=self.clock.sources(self.sources))

    def advance(self, ms: int) -> None:
        self.clock.advance(ms)

    def rewind(self, ms: int) -> None:
        self.clock.advance(-ms)

    def make_indeterminate(self, scope: Scope) -> None:
        self.client.hset(record_key(scope), mapping={"state": "indeterminate", "locked_until": "0"})

    def make_unreadable(self, scope: Scope) -> None:
        self.client.hset(record_key(scope), "format", "2")

    def raw(self, scope: Scope) -> object:
        return self.client.hgetall(record_key(scope))

    def life(self, key: str | Scope = "") -> int:
        """Milliseconds until the server drops a key (of a record, or by name); -1: never; -2: it isn't there."""
        name = record_key(key) if isinstance(key, Scope) else key or record_key(make_scope())
        return int(self.client.pttl(name))
