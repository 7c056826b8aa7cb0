"""Plays the situations, one after the other, against a running shop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import httpx

from ..ledger import Ledger
from .clients import Clients
from .report import Report, judge
from .situations import Situation

__all__ = ["play"]


def play(url: str, ledger: Ledger, situations: Sequence[Situation], on_client: Callable[[Situation], None]) -> Report:
    """Run the storm and judge it.

    :param url: of the shop.
    :param ledger: the shop's own, which tells what really ran.
    :param on_client: called each time when one of a situation's clients is through.
    """
    # A connection for each request, as from clients that don't know each other: any server process may get it.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    lines = []
    with httpx.Client(base_url=url, limits=limits, trust_env=False) as http:
        for situation in situations:
            clients = Clients(http, partial(on_client, situation))
            situation.play(clients)
            lines.append(judge(situation, clients.tally, ledger.runs()))
    return Report(lines)
