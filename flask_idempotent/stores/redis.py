"""Records in Redis or Valkey: one hash each, changed by one Lua script a step."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import TypeAlias, cast

from redis import Redis
from redis.cluster import RedisCluster
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisClusterException, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ..errors import StoreUnavailable, UnreadableRecord
from ..records import (
    FINISHED,
    FORMAT,
    Claim,
    ClaimReply,
    Completed,
    Completion,
    CompletionReply,
    Fingerprint,
    KeptResponse,
    Record,
    Scope,
    State,
    Verdict,
)
from .base import Released
from .breaker import Breaker
from .connect import RedisClient, disconnect

__all__ = ["RedisStore", "read_script"]

log = logging.getLogger("flask_idempotent")

Reply: TypeAlias = "bytes | int | list[Reply] | None"
Value: TypeAlias = "str | bytes | int"

#: Scripts that must go through on a full server: they end work that was done.
ALLOWED_OOM = frozenset({"renew", "complete", "release"})
SCRIPTS = ("claim", "renew", "complete", "release", "limit", "refund")
BUCKETS = 256
#: What redis-py raises when a server can't be asked, or refuses. A cluster without nodes has a base class of its own.
ERRORS = (RedisError, RedisClusterException)


@cache
def read_script(name: str) -> str:
    """The text of one of the ``.lua`` files."""
    return resources.files(__package__).joinpath("lua").joinpath(f"{name}.lua").read_text("utf-8")


class RedisStore:
    """The Store over one Redis or Valkey server, a Sentinel service or a cluster.

    :param client: gives bytes; its time-outs bound every call. Or what makes it, with the first call: a client of a
        cluster can't be made while the cluster is away.
    :param prefix: what every key starts with.
    :param sources: texts that replace those of the package's scripts, for tests.
    """

    def __init__(
        self,
        client: RedisClient | Callable[[], RedisCluster],
        *,
        prefix: str,
        sources: Mapping[str, str] | None = None,
    ) -> None:
        if isinstance(client, (Redis, RedisCluster)):
            self._made: RedisClient | None = client
        else:
            self._made, self._make = None, client
        self._cluster = not isinstance(client, Redis)
        self._prefix = prefix
        self._breaker = Breaker()
        texts = {name: read_script(name) for name in ("common", *SCRIPTS)} | dict(sources or {})
        self._scripts = {name: _Script(name, texts["common"] + "\n" + texts[name]) for name in SCRIPTS}

    def claim(self, claim: Claim) -> ClaimReply:
        if not self._breaker.allows():
            raise StoreUnavailable()
        record, index = self._keys(claim.scope.digest)
        rate = claim.rate
        keys: list[str] = [record, index]
        if rate is not None and not self._cluster:
            keys.append(self._counter(rate.bucket))
        arguments: list[Value] = [
            claim.scope.digest,
            claim.token,
            claim.principal,
            claim.binding,
            claim.lease_ms,
            claim.skew_ms,
            claim.max_processing_ms,
            rate.limit if rate else 0,
            rate.window_ms if rate else 0,
            *_pairs(claim.fingerprints),
        ]
        reply = cast("list[Reply]", self._run("claim", keys, arguments))
        word = _text(reply[0])
        if word == "claimed":
            how = _text(reply[1])
            if how == "new" and rate is not None and self._cluster:
                wait_ms = self._limit(claim)
                if wait_ms:
                    return ClaimReply(Verdict.LIMITED, wait_ms=wait_ms)
            return ClaimReply(
                Verdict.CLAIMED,
                fence=_number(reply[2]),
                attempt=_number(reply[3]),
                created_at=_number(reply[4]),
                reclaimed=how == "reclaimed",
                comparable=reply[5] == 1,
                counted=how == "new" and rate is not None,
            )
        if word == "replay":
            return ClaimReply(Verdict.REPLAY, comparable=reply[1] == 1, record=self._record(claim.scope, reply[2]))
        if word == "in_progress":
            return ClaimReply(
                Verdict.IN_PROGRESS, wait_ms=_number(reply[1]), comparable=reply[2] == 1, holder=_text(reply[3])
            )
        if word == "limited":
            return ClaimReply(Verdict.LIMITED, wait_ms=_number(reply[1]))
        if word == "unreadable":
            raise _unreadable(claim.scope, reply[1])
        if word in ("foreign", "mismatch"):
            return ClaimReply(Verdict(word), confirmed=reply[1] == 1, wait_ms=_number(reply[2]), holder=_text(reply[3]))
        return ClaimReply(Verdict(word))

    def renew(self, claims: Sequence[Claim]) -> Sequence[bool]:
        """Prolong leases."""
        if not claims:
            return []
        if not self._cluster:
            return self._renew(claims)
        # On a cluster the keys of one call share a slot, which is what a bucket is for.
        renewed: dict[str, bool] = {}
        buckets: dict[str, list[Claim]] = {}
        for claim in claims:
            buckets.setdefault(self._keys(claim.scope.digest)[1], []).append(claim)
        for group in buckets.values():
            renewed.update(zip((claim.token for claim in group), self._renew(group), strict=True))
        return [renewed[claim.token] for claim in claims]

    def complete(self, completion: Completion) -> CompletionReply:
        claim, response = completion.claim, completion.response
        arguments: list[Value] = [
            claim.scope.digest,
            claim.token,
            claim.principal,
            claim.binding,
            completion.state.value,
            response.status,
            response.headers,
            response.body,
            response.kind,
            response.cipher,
            completion.reason,
            int(completion.confirmed),
            claim.ttl_ms,
            claim.tombstone_ms,
            completion.expires_at,
            *_pairs(claim.fingerprints),
        ]
        reply = cast("list[Reply]", self._run("complete", self._keys(claim.scope.digest), arguments))
        word = _text(reply[0])
        if word == "stored":
            record = self._record(claim.scope, reply[2]) if len(reply) > 2 else None
            return CompletionReply(Completed.STORED, expires_at=_number(reply[1]), record=record)
        if word == "lost":
            winner = self._record(claim.scope, reply[2]) if len(reply) > 2 and reply[2] else None
            return CompletionReply(Completed.LOST, wait_ms=_number(reply[1]), record=winner)
        if word == "unreadable":
            raise _unreadable(claim.scope, reply[1])
        return CompletionReply(Completed.GONE)

    def release(self, claim: Claim, *, reason: str, forget: bool = False) -> Released:
        mode = "forget" if forget else "keep"
        arguments: list[Value] = [claim.scope.digest, claim.token, mode, reason, claim.ttl_ms]
        word = _text(self._run("release", self._keys(claim.scope.digest), arguments))
        if word == "unreadable":
            raise _unreadable(claim.scope, None)
        return Released(word)

    def refund(self, claim: Claim) -> None:
        """Take back the count of a key that turned out not to be new."""
        if claim.rate is not None:
            self._run("refund", [self._counter(claim.rate.bucket)], [])

    def read(self, scope: Scope) -> Record | None:
        try:
            fields = self._client.hgetall(self._keys(scope.digest)[0])
        except ERRORS as error:
            if "WRONGTYPE" in str(error):
                raise _unreadable(scope, None) from error
            raise self._away(error) from error
        if not fields:
            return None
        flat = cast("list[Reply]", [part for pair in fields.items() for part in pair])
        return self._record(scope, flat)

    def close(self) -> None:
        """Close the connections. A later call opens new ones."""
        if self._made is not None:
            disconnect(self._made)

    @property
    def _client(self) -> RedisClient:
        if self._made is None:
            self._made = self._make()
        return self._made

    def _keys(self, digest: str) -> tuple[str, str]:
        """The record's key and its index; they share a cluster slot, chosen by the digest."""
        bucket = f"{self._prefix}:{{b{int(digest[-2:], 16) % BUCKETS:03d}}}"
        return f"{bucket}:r:{digest}", f"{bucket}:inflight"

    def _counter(self, bucket: str) -> str:
        return f"{self._prefix}:rate:{bucket}"

    def _limit(self, claim: Claim) -> int:
        """Counts a new key on a cluster, where that is a call of its own; over the limit the claim is given back."""
        assert claim.rate is not None
        counter = self._counter(claim.rate.bucket)
        wait_ms = _number(self._run("limit", [counter], [claim.rate.limit, claim.rate.window_ms]))
        if wait_ms:
            self.release(claim, reason="rate-limited", forget=True)
        return wait_ms

    def _renew(self, claims: Sequence[Claim]) -> list[bool]:
        keys: list[str] = []
        arguments: list[Value] = []
        for claim in claims:
            keys.extend(self._keys(claim.scope.digest))
            life_ms = max(claim.lease_ms + claim.skew_ms, claim.max_processing_ms)
            arguments.extend([claim.scope.digest, claim.token, claim.lease_ms, life_ms])
        return [flag == 1 for flag in cast("list[Reply]", self._run("renew", keys, arguments))]

    def _run(self, name: str, keys: Sequence[str], arguments: Sequence[Value]) -> Reply:
        try:
            reply = self._scripts[name](self._client, keys, arguments)
        except ERRORS as error:
            raise self._away(error) from error
        self._breaker.succeeded()
        return reply

    def _away(self, error: RedisError | RedisClusterException) -> StoreUnavailable:
        is_away = isinstance(error, (RedisConnectionError, RedisTimeoutError, RedisClusterException))
        if is_away:
            self._breaker.failed()
        # The class only: a server's error text can repeat what was sent.
        hint = " (is it running, and where IDEMPOTENT_REDIS_URL says?)" if is_away else ""
        log.error("Redis did not do what was asked: %s%s", type(error).__name__, hint)
        return StoreUnavailable()

    def _record(self, scope: Scope, flat: Reply) -> Record:
        parts = cast("list[bytes]", flat)
        fields = {parts[i].decode(): parts[i + 1] for i in range(0, len(parts), 2)}
        if fields.get("format") != FORMAT.encode():
            raise _unreadable(scope, fields.get("format"))
        try:
            return _parse(scope.digest, fields)
        except (KeyError, ValueError) as error:
            raise _unreadable(scope, FORMAT.encode()) from error


class _Script:
    """One script on one client: sent by digest, loaded where it is forgotten, without flags where they are unknown."""

    def __init__(self, name: str, text: str) -> None:
        flagged = f"#!lua flags=allow-oom\n{text}" if name in ALLOWED_OOM else text
        self._plain = text
        self._use(flagged)

    def _use(self, text: str) -> None:
        self._text = text
        self._sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()

    def __call__(self, client: RedisClient, keys: Sequence[str], arguments: Sequence[Value]) -> Reply:
        try:
            return self._send(client, keys, arguments)
        except ResponseError as error:
            if self._text == self._plain or not _is_compile_error(error):
                raise
        self._use(self._plain)
        return self._send(client, keys, arguments)

    def _send(self, client: RedisClient, keys: Sequence[str], arguments: Sequence[Value]) -> Reply:
        try:
            return cast("Reply", client.evalsha(self._sha, len(keys), *keys, *arguments))
        except NoScriptError:
            return cast("Reply", client.eval(self._text, len(keys), *keys, *arguments))


def _is_compile_error(error: ResponseError) -> bool:
    """A server without script flags (Redis before 7, fakeredis) stumbles over the first line, before anything ran."""
    message = str(error).lower()
    return "compil" in message or "'#'" in message or "unexpected symbol" in message


def _parse(digest: str, fields: Mapping[str, bytes]) -> Record:
    state = State(fields["state"].decode())
    response = None
    if state in FINISHED:
        response = KeptResponse(
            status=int(fields["status"] or b"0"),
            headers=fields["headers"],
            body=fields["body"],
            kind=fields["kind"].decode(),
            cipher=fields["cipher"].decode(),
        )
    return Record(
        digest=digest,
        state=state,
        token=fields["token"].decode(),
        fence=int(fields["fence"]),
        attempt=int(fields["attempt"]),
        created_at=int(fields["created_at"]),
        locked_until=int(fields["locked_until"]),
        fingerprint=Fingerprint(fields["recipe"].decode(), fields["fingerprint"].decode()),
        principal=fields["principal"].decode(),
        binding=fields["binding"].decode(),
        completed_at=int(fields["completed_at"]),
        expires_at=int(fields["expires_at"]),
        tombstone_until=int(fields["tombstone_until"]),
        response=response,
        context=fields["context"],
        reason=fields["reason"].decode(),
        confirmed=fields["confirmed"] == b"1",
    )


def _unreadable(scope: Scope, found: Reply) -> UnreadableRecord:
    log.error(
        "record %s has the stored format %s, this version reads %s: finish the roll-out, or remove what is not ours",
        scope.digest[:12],
        _text(found) if found and isinstance(found, bytes) else "?",
        FORMAT,
    )
    return UnreadableRecord()


def _pairs(fingerprints: Sequence[Fingerprint]) -> list[Value]:
    return [part for fingerprint in fingerprints for part in (fingerprint.recipe, fingerprint.value)]


def _text(value: Reply) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _number(value: Reply) -> int:
    return int(cast("int", value))
