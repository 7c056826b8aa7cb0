"""Signals for every decision. The sender is the app; a receiver that fails breaks no request."""

from __future__ import annotations

import logging

from blinker import NamedSignal, Namespace

__all__ = [
    "claimed",
    "completed",
    "emit",
    "lease_lost",
    "mismatched",
    "reclaimed",
    "refused",
    "released",
    "replayed",
]

log = logging.getLogger("flask_idempotent")

_signals = Namespace()

# All carry: scope (the endpoint's name), digest (a prefix, for correlation), state, attempt, reason.

#: A request may run: it was the first, or the one that tries again.
claimed = _signals.signal("idempotent-claimed")
#: A request took over from one whose lease had lapsed. Sent after ``claimed``.
reclaimed = _signals.signal("idempotent-reclaimed")
#: A repeat was answered with what is kept.
replayed = _signals.signal("idempotent-replayed")
#: A request was not run; ``reason`` is the problem's code.
refused = _signals.signal("idempotent-refused")
#: A key came with another request. Sent besides ``refused``.
mismatched = _signals.signal("idempotent-mismatched")
#: An answer was kept.
completed = _signals.signal("idempotent-completed")
#: A claim was given back; the same request may run again.
released = _signals.signal("idempotent-released")
#: A running request found that its claim is another's now.
lease_lost = _signals.signal("idempotent-lease-lost")


def emit(signal: NamedSignal, sender: object, **arguments: object) -> None:
    """Send a signal to each receiver; what a receiver raises is logged, and goes no further."""
    if not signal.receivers:
        return
    for receiver in signal.receivers_for(sender):
        try:
            receiver(sender, **arguments)
        except Exception:
            log.exception("a receiver of %s failed", signal.name)
