"""What a route's owner knows and the code can't tell: reasons and paths in words."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Notes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Notes:
    """Sentences about one protected route, for its design document and for the lint. Nothing here changes a request.

    :param executes: what one run does, in the words of the business.
    :param duplicate_impact: what a second run would cost, and whom.
    :param retry_sources: who repeats the request: people, clients, balancers, queues.
    :param lease_reason: why the lease is as long as it is.
    :param ttl_reason: why a key is remembered as long as it is.
    :param recovery_path: what is done about a run that crashed half-way.
    """

    executes: str | None = None
    duplicate_impact: str | None = None
    retry_sources: str | None = None
    lease_reason: str | None = None
    ttl_reason: str | None = None
    recovery_path: str | None = None
