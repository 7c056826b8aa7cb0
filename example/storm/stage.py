"""What the situations act upon: two instances of the shop, and the means to disturb them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from ..bank import Bank

__all__ = ["Stage"]


@dataclass(frozen=True, slots=True)
class Stage:
    """Two instances over the same database and the same Redis, and the bank that both use.

    ``forget`` empties Redis of all that is the shop's; ``kill_second`` ends the second instance at once.
    """

    urls: tuple[str, str]
    bank: Bank
    forget: Callable[[], None]
    kill_second: Callable[[], None]

    def kill_second_after(self, references: Collection[str], *, seconds: float = 20.0) -> None:
        """Kill the second instance when the bank has made the charges of these references, or never will."""
        deadline = time.monotonic() + seconds
        while not set(references) <= {entry["reference"] for entry in self.bank.ledger()}:
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        time.sleep(0.3)  # those that the bank hung up on are noted as unknown meanwhile; the others are in the air
        self.kill_second()
