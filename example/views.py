"""The routes that can't be undone: an order, a charge, an e-mail, and a webhook."""

from __future__ import annotations

from flask import Blueprint, Request, request
from flask.typing import ResponseReturnValue

from flask_idempotent import idempotent

from . import effects
from .auth import auth
from .schemas import Charge, Email, Event, Order

shop = Blueprint("shop", __name__)


@shop.post("/orders")
@auth.login_required
@idempotent(scope="orders.create")
def create_order() -> ResponseReturnValue:
    """A customer clicks twice; one order is placed, and both clicks get its number."""
    order = Order().load(request.get_json())
    number = effects.place_order(order["reference"], order["item"], order["quantity"])
    return {"order": number, **order}, 201


# Play money: the key lives in Redis alone here, and a Redis that loses its data would charge the card again.
@shop.post("/charges")
@auth.login_required
@idempotent(scope="charges.create", fields=["reference", "amount", "currency"])
def create_charge() -> ResponseReturnValue:
    """A client gives up waiting and sends it again; the card is charged once. Another amount is another charge: 422."""
    charge = Charge().load(request.get_json())
    number = effects.charge_card(charge["reference"], charge["amount"], charge["currency"])
    return {"charge": number, **charge}, 201


@shop.post("/emails")
@auth.login_required
@idempotent(scope="emails.send")
def send_email() -> ResponseReturnValue:
    """One e-mail goes out, however often it is asked for."""
    email = Email().load(request.get_json())
    number = effects.send_email(email["reference"], email["to"], email["subject"])
    return {"email": number, **email}, 202


def event_id(incoming: Request) -> str:
    """What the provider calls this event: it is the same in every delivery."""
    return str(Event().load(incoming.get_json())["id"])


# The body is not compared: a delivery may say that it is the third one, and is the same event all the same. New events
# are not limited: they all come from one caller. In a real shop a check of the provider's signature stands above this.
@shop.post("/webhooks/provider")
@idempotent(scope="webhooks.provider", key=event_id, fields=False, rate_limit=None)
def receive_event() -> ResponseReturnValue:
    """The provider delivers an event until it gets a 2xx, and now and then once more; it is booked once."""
    event = Event().load(request.get_json())
    number = effects.book_payment(event["id"], event["type"])
    return {"payment": number, "event": event["id"]}
