"""The situations in which one request arrives more than once. Each is a function, and a line in the table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ..auth import CUSTOMERS
from .clients import Clients, at_once

__all__ = ["SITUATIONS", "Situation"]


@dataclass(frozen=True, slots=True)
class Situation:
    """One situation. ``clients`` is how many of them ``play`` lets act, for the progress bar."""

    name: str
    title: str
    clients: int
    play: Callable[[Clients], None]


def double_click(clients: Clients) -> None:
    """Every customer clicks twice on "Order", four orders in a row; the two requests leave at the same moment."""
    for _ in range(4):
        orders = [clients.want("/orders", {"item": "tea", "quantity": 2}, user=user) for user in CUSTOMERS * 2]
        at_once(partial(clients.send, order) for order in orders for _ in range(2))


def retry_after_timeout(clients: Clients) -> None:
    """A charge takes 0.9 s; the client gives up after 0.3 s and sends it again, until it has the answer."""
    charges = [clients.want("/charges", {"amount": 4900, "currency": "EUR"}, user=user) for user in CUSTOMERS * 2]
    at_once(partial(clients.send, charge, patience=0.3) for charge in charges)


def webhook_again(clients: Clients) -> None:
    """The provider delivers an event three times at once, and twice more when it was long booked."""
    events = [clients.event("/webhooks/provider", "payment.succeeded") for _ in range(6)]
    at_once(partial(clients.send, event, more={"delivery": 1 + n}) for event in events for n in range(3))
    for delivery in (4, 5):
        at_once(partial(clients.send, event, more={"delivery": delivery}) for event in events)


SITUATIONS = (
    Situation("double-click", "A double-click", 48, double_click),
    Situation("client-retry", "A client's retry after a time-out", 6, retry_after_timeout),
    Situation("webhook", "A webhook sent again", 30, webhook_again),
)
