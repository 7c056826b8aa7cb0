"""What one claim of a durable route holds besides its record: changed by the stores while the claim is held."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..records import Claim

__all__ = ["Backing", "Lease", "backing", "lease"]


class Backing:
    """What every durable claim has."""

    def __init__(self) -> None:
        #: Whether the claim is also held in front, in Redis.
        self.fronted = False


class Lease(Backing):
    """A committed row that is leased to this process. The database's lease is the one that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.attempt = 0
        self._ends = 0.0

    def holds_from(self, started: float, lease_ms: int) -> None:
        """The lease was granted or prolonged by a statement that was sent at ``started`` (monotonic seconds)."""
        self._ends = max(self._ends, started + lease_ms / 1000)

    @property
    def is_over(self) -> bool:
        """Whether the lease may have lapsed: counted from before the last statement that prolonged it was sent."""
        return time.monotonic() >= self._ends


def backing(claim: Claim) -> Backing:
    """The backing of a durable claim."""
    assert isinstance(claim.backing, Backing)
    return claim.backing


def lease(claim: Claim) -> Lease:
    """The lease of a claim on an ``intent`` route."""
    assert isinstance(claim.backing, Lease)
    return claim.backing
