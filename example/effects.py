"""What can't be undone, but for charges: the bank makes those. Each effect takes the time that the real one would."""

from __future__ import annotations

import time

from flask import current_app

from .ledger import Ledger
from .models import Order, db

__all__ = ["book_payment", "place_order", "send_email"]


def place_order(reference: str, item: str, quantity: int) -> Order:
    """Write an order into the shop's database; whoever calls it commits."""
    order = Order(reference=reference, item=item, quantity=quantity)
    db.session.add(order)
    db.session.flush()
    time.sleep(0.05)
    return order


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
