"""Writes what became of every protected request into the ledger, told by the extension's signals."""

from __future__ import annotations

from flask import Flask

from flask_idempotent import signals

from .ledger import Ledger

__all__ = ["watch"]


def watch(app: Flask, ledger: Ledger) -> None:
    """Count the requests of an app: those that ran, those that were replayed, those that were refused."""

    def ran(sender: Flask, *, scope: str, reason: str, **_: object) -> None:
        ledger.note(scope, "ran", reason)

    def replayed(sender: Flask, *, scope: str, reason: str, **_: object) -> None:
        ledger.note(scope, "replayed", reason)

    def refused(sender: Flask, *, scope: str, reason: str, **_: object) -> None:
        ledger.note(scope, "refused", reason)

    signals.claimed.connect(ran, sender=app, weak=False)
    signals.replayed.connect(replayed, sender=app, weak=False)
    signals.refused.connect(refused, sender=app, weak=False)
