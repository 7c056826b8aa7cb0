"""From a URL to a Redis client whose every wait is bounded."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeAlias
from urllib.parse import unquote, urlsplit

import redis
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff
from redis.cluster import RedisCluster
from redis.retry import Retry
from redis.sentinel import Sentinel

from ..errors import ConfigurationError

__all__ = ["RedisClient", "connect", "disconnect", "require_bytes"]

RedisClient: TypeAlias = "redis.Redis | RedisCluster"

#: Seconds until a connection, and then a reply, is given up.
CONNECT_TIMEOUT_S = 1.0
REPLY_TIMEOUT_S = 1.0
#: Further tries of one call. Every script may be sent twice, so a lost reply is simply asked for again.
RETRIES = 1
#: Connections of a process; one more is refused at once. Each running call uses one for the time of its script.
MAX_CONNECTIONS = 1000


def connect(url: str) -> RedisClient | Callable[[], RedisCluster]:
    """The client for ``IDEMPOTENT_REDIS_URL``, or what makes it.

    Nothing is sent yet, but for ``embedded://``, which starts its server.

    One call takes at most ``(RETRIES + 1) * (CONNECT_TIMEOUT_S + REPLY_TIMEOUT_S)`` seconds and a short pause; through
    Sentinel, each try may first ask every sentinel where the server is, which takes at most as long for each.

    :raises ConfigurationError: for a URL of no known form or with ``decode_responses``, or an embedded server that
        can't be started.
    """
    client = _connect(url)
    require_bytes(client)
    return client


def _connect(url: str) -> RedisClient | Callable[[], RedisCluster]:
    scheme = urlsplit(url).scheme
    if scheme == "embedded":
        from .embedded import shared_embedded_url

        try:
            return redis.Redis.from_url(shared_embedded_url(), **_bounds())
        except RuntimeError as error:
            raise ConfigurationError(f"IDEMPOTENT_REDIS_URL: {error}") from error
    if scheme in ("redis", "rediss", "unix"):
        return redis.Redis.from_url(url, **_bounds())
    if scheme == "redis+sentinel":
        return _sentinel(url)
    if scheme == "redis+cluster":
        parts = urlsplit(url)
        return functools.partial(
            RedisCluster,
            host=parts.hostname or "localhost",
            port=parts.port or 6379,
            username=_plain(parts.username),
            password=_plain(parts.password),
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            socket_timeout=REPLY_TIMEOUT_S,
            retry=_retry(),
        )
    raise ConfigurationError(
        "IDEMPOTENT_REDIS_URL: use redis://, rediss://, unix://, redis+sentinel://, redis+cluster:// or embedded://"
    )


def require_bytes(client: object) -> None:
    """Refuse a client that would decode what it reads: bodies are bytes.

    :raises ConfigurationError: when the client has ``decode_responses=True``.
    """
    decodes = getattr(getattr(client, "get_encoder", lambda: None)(), "decode_responses", False)
    if decodes:
        raise ConfigurationError(
            "the Redis client has decode_responses=True, but stored bodies are bytes: "
            "give init_app() a client, or IDEMPOTENT_REDIS_URL a text, of its own without decode_responses"
        )


def disconnect(client: RedisClient) -> None:
    """Close every connection of a client, those to its sentinels too."""
    client.close()
    asked: Sentinel | None = getattr(getattr(client, "connection_pool", None), "sentinel_manager", None)
    for sentinel in asked.sentinels if asked is not None else ():
        sentinel.close()


def _bounds() -> dict[str, object]:
    return {
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "socket_timeout": REPLY_TIMEOUT_S,
        "health_check_interval": 0,
        "max_connections": MAX_CONNECTIONS,
        "retry": _retry(),
        "decode_responses": False,
    }


def _retry() -> Retry:
    return Retry(ExponentialWithJitterBackoff(base=0.02, cap=0.1), RETRIES)


def _plain(part: str | None) -> str | None:
    return None if part is None else unquote(part)


def _sentinel(url: str) -> RedisClient:
    """``redis+sentinel://[user:password@]host:port,host:port/service[/db]``; the password is the data server's."""
    rest = url.split("://", 1)[1]
    login, _, rest = rest.rpartition("@")
    hosts, _, path = rest.partition("/")
    service, _, database = path.partition("/")
    addresses = []
    for host in hosts.split(","):
        name, _, port = host.rpartition(":")
        if not port.isdigit():
            name, port = host, "26379"
        addresses.append((name, int(port)))
    if not service or not hosts or (database and not database.isdigit()):
        raise ConfigurationError("IDEMPOTENT_REDIS_URL: write redis+sentinel://host:port,host:port/service[/db]")
    user, _, password = login.rpartition(":")
    sentinel = Sentinel(  # type: ignore[no-untyped-call]
        addresses,
        sentinel_kwargs={
            "socket_connect_timeout": CONNECT_TIMEOUT_S,
            "socket_timeout": REPLY_TIMEOUT_S,
            "retry": Retry(NoBackoff(), 0),  # the other sentinels are the further tries
        },
        username=_plain(user) or None,
        password=_plain(password) or None,
        db=int(database or 0),
        **_bounds(),
    )
    client: redis.Redis = sentinel.master_for(service)  # type: ignore[no-untyped-call]
    return client
