"""Plays the situations, one after the other, against a running shop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import httpx

from ..books import Books
from .clients import Clients
from .report import Report, judge
from .situations import Situation
from .stage import Stage

__all__ = ["play"]


def play(stage: Stage, books: Books, situations: Sequence[Situation], on_client: Callable[[Situation], None]) -> Report:
    """Run the storm and judge it.

    :param stage: the shop's two instances.
    :param books: what really ran.
    :param on_client: called each time when one of a situation's clients is through.
    """
    # A connection for each request, as from clients that don't know each other: any server process may get it.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    lines = []
    with ExitStack() as stack:
        instances = [
            stack.enter_context(httpx.Client(base_url=url, limits=limits, trust_env=False)) for url in stage.urls
        ]
        for situation in situations:
            clients = Clients(instances, partial(on_client, situation))
            situation.play(clients, stage)
            lines.append(judge(situation, clients.tally, books.runs()))
    return Report(lines)
