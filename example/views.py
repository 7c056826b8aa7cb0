"""The routes that can't be undone: an order, a charge, an e-mail and a webhook, each protected as its work needs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flask import Blueprint, Request, current_app, jsonify, request
from flask.typing import ResponseReturnValue

from flask_idempotent import NothingHappened, Settlement, current_idempotency, idempotent
from flask_idempotent.settling import Orphan

from . import bank, effects
from .auth import auth
from .models import db
from .schemas import Charge, Email, Event, Order

shop = Blueprint("shop", __name__)


# The work is in the shop's own database: order, key and answer are committed together, or not at all.
@shop.post("/orders")
@auth.login_required
@idempotent(scope="orders.create", durable="transaction")
def create_order() -> ResponseReturnValue:
    """A customer clicks twice; one order is placed, and both clicks get its number."""
    order = Order().load(request.get_json())
    placed = effects.place_order(**order)
    db.session.commit()
    return {"order": placed.number, **order}, 201


# The work is at the bank, and nothing can roll it back: the key is committed first, goes out with the charge, and a
# charge without an answer is looked up. Lease and pause are short, so that the demo's crashes are settled in seconds.
@shop.post("/charges")
@auth.login_required
@idempotent(
    scope="charges.create",
    fields=["reference", "amount", "currency"],
    durable="intent",
    recovery="reconcile",
    provider=bank.PROVIDER,
    lease=2,
    settle_after=2,
)
def create_charge() -> ResponseReturnValue:
    """A client gives up waiting and sends it again; the card is charged once. Another amount is another charge: 422."""
    charge = Charge().load(request.get_json())
    try:
        made = _bank().charge(current_idempotency.provider_key(), charge)
    except bank.NotSent:
        sorry = jsonify(error="The bank can't be reached. Nothing was charged.")
        sorry.status_code, sorry.headers["Retry-After"] = 503, "5"
        raise NothingHappened(sorry) from None
    except bank.NoAnswer:
        return {"error": "The bank didn't answer. Ask again with the same key."}, 504
    return charged(made)


@create_charge.reconciler
def settle_charge(orphan: Orphan) -> Settlement:
    """What became of a charge without an answer. The answer is the one that the view would have given."""
    made = _bank().find(orphan.provider_key())
    return Settlement.completed(*charged(made)) if made else Settlement.retry()


def charged(made: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """The answer for a charge that was made."""
    return {"charge": made["number"], **{name: made[name] for name in ("reference", "amount", "currency")}}, 201


# Redis alone remembers. It may forget, and one e-mail more is no disaster.
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


def _bank() -> bank.Bank:
    client: bank.Bank = current_app.extensions["bank"]
    return client
