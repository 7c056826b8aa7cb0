"""``current_idempotency``: what the running work may know and do about its own claim."""

from __future__ import annotations

import json

from flask import current_app

from ..call import Call, held_call
from ..errors import ConfigurationError
from ..providers.base import Provider
from ..settling import IntentEngine
from .intent import key_name, provider_of
from .protection import Protection
from .views import EXTENSION

__all__ = ["CurrentIdempotency", "current_idempotency"]


class CurrentIdempotency:
    """The protected call that runs now. Every attribute raises ``NotProtected`` outside of one."""

    __slots__ = ()

    @property
    def scope(self) -> str:
        """The stable name of the operation."""
        return _held().endpoint

    @property
    def attempt(self) -> int:
        """1 for the first run of this key."""
        return _held().attempt

    @property
    def is_retry(self) -> bool:
        """Whether an earlier attempt was given back, or lapsed."""
        return _held().attempt > 1

    @property
    def fence(self) -> int:
        """Rises with every claim of the key: whoever accepts writes can refuse a smaller one than the last
        (https://martin.kleppmann.com/2016/02/08/how-to-do-distributed-locking.html). Best effort on routes that are
        not durable: a failover may turn the server's clock back."""
        return _held().fence

    def reference(self, value: object) -> None:
        """With ``store="reference"``: what is kept instead of the answer, and given to ``rebuild`` for a repeat.

        :param value: a JSON value that finds the result again, such as its number. Where the view names none, the
            answer's ``Location`` is kept.
        :raises TypeError: it is not a JSON value.
        """
        json.dumps(value)
        _held().reference = value

    @property
    def context(self) -> dict[str, object]:
        """What the work noted with ``remember()``, in this attempt or an earlier one."""
        return dict(_held().context)

    def remember(self, **noted: object) -> None:
        """Note something for whoever settles this attempt, before going on: it is committed at once, and encrypted
        where keys are set. On ``durable="intent"`` routes.

        :param noted: JSON values.
        :raises LeaseLost: another request holds the key by now, or may: stop.
        :raises StoreUnavailable: it could not be noted.
        """
        call = _held()
        _intent(call, "remember()").remember(call, json.loads(json.dumps(noted)))

    def provider_key(self, provider: Provider | str | None = None, step: int = 0, operation: str | None = None) -> str:
        """The key to send to a provider: the same in every attempt, and never the client's own.

        :param provider: where it isn't the route's.
        :param step: tells several calls of one request apart.
        :param operation: what the call does, such as ``"order-42"``: then the key is that of the operation in this
            tenant, and a web request and a webhook for it share it.
        :raises LeaseLost: another request holds the key by now, or may: don't call.
        :raises Indeterminate: the provider may have forgotten the first sending; sending again could act twice.
        :raises StoreUnavailable: it could not be noted that the key goes out; don't call.
        """
        call = _held()
        protection: Protection = current_app.extensions[EXTENSION]
        named = provider_of(call, protection.settings, provider)
        key = call.derive_key(named, step, operation)
        if call.policy.durable != "intent":
            return key
        return _intent(call, "provider_key()").hand_out(call, named, key, key_name(key))

    def renew(self) -> None:
        """Prolong the lease to a full one from now, as the heartbeat does.

        Where the store can't be asked, the lease that was granted still counts.

        :raises LeaseLost: another request holds the key by now; stop.
        """
        call = _held()
        call.engine.renew(call)


def _intent(call: Call, what: str) -> IntentEngine:
    if not isinstance(call.engine, IntentEngine):
        raise ConfigurationError(f"{what} is for durable='intent' routes, and {call.endpoint} is none")
    return call.engine


def _held() -> Call:
    return held_call("current_idempotency")


current_idempotency = CurrentIdempotency()
