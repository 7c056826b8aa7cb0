"""``current_idempotency``: what the running work may know and do about its own claim."""

from __future__ import annotations

import json

from ..call import Call, current_call
from ..errors import NotProtected

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

    def renew(self) -> None:
        """Prolong the lease to a full one from now, as the heartbeat does.

        Where the store can't be asked, the lease that was granted still counts.

        :raises LeaseLost: another request holds the key by now; stop.
        """
        call = _held()
        call.engine.renew(call)


def _held() -> Call:
    call = current_call()
    if call is None or call.claim is None or not call.entered:
        raise NotProtected(
            "current_idempotency is only there inside a protected view: mark the view with @idempotent, and send a key"
        )
    return call


current_idempotency = CurrentIdempotency()
