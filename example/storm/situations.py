"""The situations in which one request arrives more than once. Each is a function, and a line in the table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ..auth import CUSTOMERS
from .clients import Clients, at_once
from .stage import Stage

__all__ = ["LATER", "SITUATIONS", "Situation"]

#: Situations that this version has no answer to yet: its jobs come later.
LATER = ("a queue's redelivery", "a cron job that overlaps itself")

_TEA = {"item": "tea", "quantity": 2}
_PRICE = {"amount": 4900, "currency": "EUR"}


@dataclass(frozen=True, slots=True)
class Situation:
    """One situation. ``clients`` is how many of them ``play`` lets act, for the progress bar."""

    name: str
    title: str
    clients: int
    play: Callable[[Clients, Stage], None]


def double_click(clients: Clients, stage: Stage) -> None:
    """Every customer clicks twice on "Order", four orders in a row; the two requests leave at the same moment."""
    for _ in range(4):
        orders = [clients.want("/orders", _TEA, user=user) for user in CUSTOMERS * 2]
        at_once(partial(clients.send, order) for order in orders for _ in range(2))


def retry_after_timeout(clients: Clients, stage: Stage) -> None:
    """A charge takes 0.9 s; the client gives up after 0.3 s and sends it again, until it has the answer."""
    charges = [clients.want("/charges", _PRICE, user=user) for user in CUSTOMERS * 2]
    at_once(partial(clients.send, charge, patience=0.3) for charge in charges)


def second_instance(clients: Clients, stage: Stage) -> None:
    """A balancer sends each order to both instances at once, and twice more to both when it was long placed. Redis
    forgets all that it knew, once while orders are being placed and once when they are."""

    def both(orders: list, *others: Callable[[], None]) -> None:
        at_once([*(partial(clients.send, order, via=[at]) for order in orders for at in (0, 1)), *others])

    first = [clients.want("/orders", _TEA, user=user) for user in CUSTOMERS * 2]
    both(first)
    second = [clients.want("/orders", _TEA, user=user) for user in CUSTOMERS]
    both(second, stage.forget)
    both([*first, *second])
    stage.forget()
    both([*first, *second])


def webhook_again(clients: Clients, stage: Stage) -> None:
    """The provider delivers an event three times at once, and twice more when it was long booked."""
    events = [clients.event("/webhooks/provider", "payment.succeeded") for _ in range(6)]
    at_once(partial(clients.send, event, more={"delivery": 1 + n}) for event in events for n in range(3))
    for delivery in (4, 5):
        at_once(partial(clients.send, event, more={"delivery": delivery}) for event in events)


def partition(clients: Clients, stage: Stage) -> None:
    """The second instance charges, and its answer is lost: for three charges the bank hangs up after it moved the
    money, for three the instance is killed while it waits for the bank. The clients ask again at the first instance."""
    charges = [clients.want("/charges", _PRICE, user=user) for user in CUSTOMERS * 2]
    for charge, fault in zip(charges, ["drop", "silence"] * 3, strict=True):
        stage.bank.fail_after(charge.reference, fault)
    kill = partial(stage.kill_second_after, [charge.reference for charge in charges])
    at_once([*(partial(clients.send, charge, via=[1, 0]) for charge in charges), kill])


#: The last one leaves the second instance dead.
SITUATIONS = (
    Situation("double-click", "A double-click", 48, double_click),
    Situation("client-retry", "A client's retry after a time-out", 6, retry_after_timeout),
    Situation("second-instance", "A balancer's replay to a second instance", 54, second_instance),
    Situation("webhook", "A webhook sent again", 30, webhook_again),
    Situation("partition", "A network partition between two instances", 6, partition),
)
