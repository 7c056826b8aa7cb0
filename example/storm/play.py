"""Plays the situations, one after the other, against a running shop."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import httpx

from ..ledger import Ledger
from .clients import Clients
from .display import Display
from .report import Report, judge
from .situations import SITUATIONS, Situation

__all__ = ["play"]


def play(url: str, ledger: Ledger, display: Display, situations: Sequence[Situation] = SITUATIONS) -> Report:
    """Run the storm and judge it.

    :param url: of the shop.
    :param ledger: the shop's own, which tells what really ran.
    """
    # A connection for each request, as from clients that don't know each other: any server process may get it.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    lines = []
    with httpx.Client(base_url=url, limits=limits, trust_env=False) as http, display.progress(situations) as advance:
        for situation in situations:
            clients = Clients(http, partial(advance, situation))
            situation.play(clients)
            lines.append(judge(situation, clients.tally, ledger.runs()))
    return Report(lines)
