"""The shop's page, and the numbers that it shows."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import TypedDict

from flask import Blueprint, current_app, render_template
from flask.typing import ResponseReturnValue

from .auth import CUSTOMERS, PASSWORD
from .books import Books
from .ledger import Ledger

page = Blueprint("page", __name__)

#: The rows of the table: the scopes of the operation, its name, and the kind of effect that it has.
OPERATIONS = (
    (("orders.create", "orders.form"), "Orders", "order"),
    (("charges.create",), "Charges", "charge"),
    (("emails.send",), "E-mails", "email"),
    (("webhooks.provider",), "Webhooks", "payment"),
)

#: What the form offers.
ITEMS = ("tea", "coffee", "cocoa")


class Row(TypedDict):
    """One line of the table."""

    name: str
    sent: int
    ran: int
    replayed: int
    refused: int
    reasons: dict[str, int]


@page.get("/")
def index() -> ResponseReturnValue:
    """The page: a form and buttons to try, and what became of every request so far."""
    html = render_template("index.html", customers=CUSTOMERS, password=PASSWORD, items=ITEMS, activity=_activity())
    return html, {"Cache-Control": "no-store"}  # whoever comes back to the form gets a new key


@page.get("/activity")
def activity() -> ResponseReturnValue:
    """The numbers alone, for the page's script."""
    return _activity()


def _activity() -> dict[str, object]:
    ledger: Ledger = current_app.extensions["ledger"]
    books: Books = current_app.extensions["books"]
    outcomes, effects = ledger.outcomes(), books.effects()
    rows = []
    for scopes, name, kind in OPERATIONS:
        mine: Counter[tuple[str, str]] = Counter()
        for (scope, outcome, reason), count in outcomes.items():
            if scope in scopes:
                mine[outcome, reason] += count
        refused = {reason: count for (outcome, reason), count in mine.items() if outcome == "refused"}
        rows.append(
            Row(
                name=name,
                sent=sum(mine.values()),
                ran=effects[kind],
                replayed=sum(count for (outcome, _), count in mine.items() if outcome == "replayed"),
                refused=sum(refused.values()),
                reasons=refused,
            )
        )
    return {
        "rows": rows,
        "total": {
            "sent": sum(row["sent"] for row in rows),
            "ran": sum(row["ran"] for row in rows),
            "replayed": sum(row["replayed"] for row in rows),
            "refused": sum(row["refused"] for row in rows),
        },
        "effects": [asdict(effect) for effect in books.last(8)],
        "requests": [asdict(entry) for entry in ledger.last_requests(12)],
    }
