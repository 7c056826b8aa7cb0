"""What really happened, asked where it happened: orders in the database, charges at the bank, the rest in the ledger.

None of the three knows an idempotency key of the shop's clients, so together they prove what ran.
"""

from __future__ import annotations

from collections import Counter

import httpx
from sqlalchemy import Engine, func, select

from .bank import Bank
from .ledger import Effect, Ledger
from .models import Order

__all__ = ["Books"]


class Books:
    """Reads all three on connections of its own, so of an order it sees what is committed.

    :param engine: of the shop's database.
    """

    def __init__(self, engine: Engine, bank: Bank, ledger: Ledger) -> None:
        self._engine = engine
        self._bank = bank
        self._ledger = ledger

    def runs(self) -> Counter[str]:
        """How often something happened for each reference."""
        with self._engine.connect() as connection:
            orders = connection.execute(select(Order.reference, func.count().label("runs")).group_by(Order.reference))
            runs = Counter({row.reference: row.runs for row in orders})
        return runs + Counter(entry["reference"] for entry in self._bank.ledger()) + self._ledger.runs()

    def effects(self) -> Counter[str]:
        """How many effects of each kind there are. No charges where the bank can't be asked."""
        with self._engine.connect() as connection:
            orders = connection.scalar(select(func.count()).select_from(Order)) or 0
        return Counter(order=orders, charge=len(self._charges())) + self._ledger.effects()

    def last(self, count: int) -> list[Effect]:
        """The newest effects, newest first."""
        with self._engine.connect() as connection:
            newest = connection.execute(select(Order.__table__).order_by(Order.number.desc()).limit(count))
            effects = [
                Effect(row.number, row.placed_at, "order", row.reference, f"{row.quantity} × {row.item}")
                for row in newest
            ]
        effects += [
            Effect(
                entry["number"],
                entry["at"],
                "charge",
                entry["reference"],
                f"{entry['amount'] / 100:.2f} {entry['currency']}",
            )
            for entry in self._charges()[-count:]
        ]
        effects += self._ledger.last_effects(count)
        return sorted(effects, key=lambda effect: effect.at, reverse=True)[:count]

    def _charges(self) -> list[dict[str, object]]:
        try:
            return self._bank.ledger()
        except httpx.TransportError:
            return []
