"""An order by a plain HTML form, for people: without JavaScript, and whoever double-clicks orders once."""

from __future__ import annotations

import uuid

from flask import Blueprint, abort, redirect, render_template, request, url_for
from flask.typing import ResponseReturnValue
from marshmallow import ValidationError
from sqlalchemy import select

from flask_idempotent import idempotent
from flask_idempotent.errors import IdempotencyError

from . import effects
from .models import Order, db
from .schemas import Order as OrderSchema

forms = Blueprint("forms", __name__)


# The key is in the form's hidden field. The second click waits for the first one's answer instead of being refused: a
# browser shows only what the last click got.
@forms.post("/orders/form")
@idempotent(scope="orders.form", durable="transaction", on_in_progress="wait")
def order_by_form() -> ResponseReturnValue:
    """Place the order, and lead to its confirmation: reloading that page sends nothing again."""
    wanted = {
        "reference": f"form-{uuid.uuid4().hex[:12]}",
        "item": request.form.get("item", ""),
        "quantity": request.form.get("quantity", type=int),
    }
    placed = effects.place_order(**OrderSchema().load(wanted))
    db.session.commit()
    return redirect(url_for(".confirmation", reference=placed.reference), 303)


@forms.get("/orders/<reference>")
def confirmation(reference: str) -> ResponseReturnValue:
    """The order that was placed."""
    order = db.session.scalar(select(Order).where(Order.reference == reference))
    if order is None:
        abort(404)
    return render_template(
        "message.html", title="Thank you", text=f"Your order number {order.number}: {order.quantity} × {order.item}"
    )


@forms.errorhandler(IdempotencyError)
def refused(error: IdempotencyError) -> ResponseReturnValue:
    """A person gets a page instead of a problem document; ``Retry-After`` stays."""
    headers = {"Retry-After": str(error.retry_after)} if error.retry_after else {}
    return render_template("message.html", title=error.title, text=error.detail), error.code, headers


@forms.errorhandler(ValidationError)
def invalid(error: ValidationError) -> ResponseReturnValue:
    return render_template("message.html", title="That is no order", text="Choose what and how many."), 400
