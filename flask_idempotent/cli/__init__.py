"""``flask idempotent``: the group, found by Flask through the entry point ``flask.commands``."""

from __future__ import annotations

import click

from .ddl import ddl

__all__ = ["idempotent"]


@click.group()
def idempotent() -> None:
    """Idempotency keys: their tables."""


idempotent.add_command(ddl)
