"""What the routes accept. A request that doesn't fit is answered with 400, and so is its repeat."""

from __future__ import annotations

from marshmallow import EXCLUDE, Schema, fields, validate

__all__ = ["Charge", "Email", "Event", "Order"]

_some_text = validate.Length(min=1, max=100)


class Order(Schema):
    """``reference`` is what the customer calls this order."""

    reference = fields.String(required=True, validate=_some_text)
    item = fields.String(required=True, validate=_some_text)
    quantity = fields.Integer(required=True, strict=True, validate=validate.Range(min=1, max=100))


class Charge(Schema):
    """``reference`` is the order that is paid; ``amount`` counts cents."""

    reference = fields.String(required=True, validate=_some_text)
    amount = fields.Integer(required=True, strict=True, validate=validate.Range(min=1))
    currency = fields.String(required=True, validate=validate.OneOf(["EUR", "USD"]))


class Email(Schema):
    """``reference`` is what the message is about."""

    reference = fields.String(required=True, validate=_some_text)
    to = fields.Email(required=True)
    subject = fields.String(required=True, validate=_some_text)


class Event(Schema):
    """The provider's event. It may carry more than the shop needs."""

    class Meta:
        unknown = EXCLUDE

    id = fields.String(required=True, validate=_some_text)
    type = fields.String(required=True, validate=_some_text)
