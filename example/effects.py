"""What can't be undone. Each effect takes the time that the real one would, and leaves a line in the ledger."""

from __future__ import annotations

import time

from flask import current_app

from .ledger import Ledger

__all__ = ["book_payment", "charge_card", "place_order", "send_email"]


def place_order(reference: str, item: str, quantity: int) -> int:
    """Reserve the goods. Returns the order's number."""
    time.sleep(0.3)
    return _ledger().append("order", reference, f"{quantity} × {item}")


def charge_card(reference: str, amount: int, currency: str) -> int:
    """Take the money; banks are slow. Returns the charge's number."""
    time.sleep(0.9)
    return _ledger().append("charge", reference, f"{amount / 100:.2f} {currency}")


def send_email(reference: str, to: str, subject: str) -> int:
    """Hand a message to the mail server. Returns the message's number."""
    time.sleep(0.2)
    return _ledger().append("email", reference, f"{subject}, to {to}")


def book_payment(reference: str, event: str) -> int:
    """Book what the provider reports. Returns the payment's number."""
    time.sleep(0.2)
    return _ledger().append("payment", reference, event)


def _ledger() -> Ledger:
    ledger: Ledger = current_app.extensions["ledger"]
    return ledger
