"""``flask idempotent ddl``: the tables as SQL that runs as it is printed. Needs neither an app nor a database."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterator, Sequence

import click
from sqlalchemy import MetaData
from sqlalchemy.engine import make_url
from sqlalchemy.schema import CreateIndex, CreateTable, ExecutableDDLElement

from ..settings import Settings
from ..stores.models import add_tables

__all__ = ["ddl"]

DAY = datetime.timedelta(days=1)
#: Days after today on which an answer can be completed without a further partition.
AHEAD = 8

#: dialect -> its name in prose, and the command that runs a file.
DIALECTS = {
    "postgresql": ("PostgreSQL", "psql --single-transaction --set ON_ERROR_STOP=1 --file FILE DATABASE"),
    "mysql": ("MySQL 8", "mysql DATABASE < FILE"),
    "mariadb": ("MariaDB", "mariadb DATABASE < FILE"),
    "sqlite": ("SQLite", "sqlite3 -bail DATABASE < FILE"),
}


@click.command()
@click.option("--dialect", type=click.Choice(list(DIALECTS)), required=True, help="The database that runs them.")
@click.option("--partitioned", is_flag=True, help="Keep answers in partitions, one for each day on which they expire.")
def ddl(dialect: str, partitioned: bool) -> None:
    """Print the CREATE statements of the tables for durable routes.

    Works without an app and without a database. An app with Flask-Migrate or Alembic doesn't need it, except for
    partitions: its next revision creates the tables.
    """
    if partitioned and dialect == "sqlite":
        raise click.UsageError("SQLite has no partitions: leave --partitioned out, or use another database.")
    days = _days(datetime.datetime.now(datetime.timezone.utc).date()) if partitioned else []
    for line in _header(dialect, days):
        click.echo(f"-- {line}".rstrip())
    for statement in _statements(dialect, days):
        click.echo(f"\n{statement};")


def _days(today: datetime.date) -> list[datetime.date]:
    """The days on which answers expire that are completed up to ``AHEAD`` days from now and live for the usual time."""
    last = AHEAD + math.ceil(Settings().ttl / DAY)
    return [today + number * DAY for number in range(last + 1)]


def _header(dialect: str, days: Sequence[datetime.date]) -> Iterator[str]:
    """Comments, before the first statement and free of semicolons and lone quotes, so that simple splitters cope."""
    name, command = DIALECTS[dialect]
    yield f"Tables for durable routes of flask-idempotent-redis, on {name}."
    yield f"Apply once, before the app starts:  {command}"
    yield "An app with Flask-Migrate or Alembic that has run its migrations has these tables."
    yield ""
    yield "*_at, *_until, unknown_since: milliseconds since 1970-01-01 UTC, by the clock of the database."
    yield "expires_day: the day of expires_at, in UTC."
    if days:
        yield ""
        yield from _about_partitions(dialect, days)


def _about_partitions(dialect: str, days: Sequence[datetime.date]) -> Iterator[str]:
    ttl = Settings().ttl
    yield f"idempotency_responses has a partition for each day on which answers expire: {days[0]} to {days[-1]},"
    yield f"which lasts for {AHEAD} days with the default IDEMPOTENT_TTL of {ttl // datetime.timedelta(hours=1)} hours."
    yield "An answer without a partition is not committed, and its work is rolled back: make them ahead, for as many"
    yield "days as the longest ttl of a route, and a week more. There is no default partition on purpose: its rows"
    yield "could not be dropped by day. The next one is:"
    following = days[-1] + DAY
    if dialect == "postgresql":
        yield f"    {_create_partition(following)}"
        yield "Drop one when its day is over, and try again later where the lock is not given:"
        yield "    SET lock_timeout = '1s'"
        yield f"    DROP TABLE {_partition_name(days[0])}"
    else:
        yield f"    ALTER TABLE idempotency_responses ADD PARTITION ({_partition_definition(following)})"
        yield "Drop one when its day is over, and try again later where the lock is not given:"
        yield "    SET lock_wait_timeout = 1"
        yield f"    ALTER TABLE idempotency_responses DROP PARTITION {_partition_key(days[0])}"


def _statements(dialect: str, days: Sequence[datetime.date]) -> Iterator[str]:
    """The statements without their semicolons. With no days there are no partitions."""
    tables = add_tables(MetaData(), partitioned=bool(days))
    if days and dialect != "postgresql":
        # A table and its first partitions are one statement there.
        definitions = ",\n ".join(_partition_definition(day) for day in days)
        tables.responses.kwargs[f"{dialect}_partition_by"] = f"RANGE COLUMNS (expires_day) (\n {definitions}\n)"
    for table in (tables.keys, tables.responses, tables.steps):
        yield _compiled(CreateTable(table), dialect)
        for index in sorted(table.indexes, key=lambda index: str(index.name)):
            yield _compiled(CreateIndex(index), dialect)
        if table is tables.responses and dialect == "postgresql":
            yield from map(_create_partition, days)


def _compiled(element: ExecutableDDLElement, dialect: str) -> str:
    text = str(element.compile(dialect=make_url(f"{dialect}://").get_dialect()()))
    return "\n".join(line.rstrip() for line in text.replace("\t", "    ").strip().splitlines())


def _partition_key(day: datetime.date) -> str:
    return f"p{day:%Y%m%d}"


def _partition_name(day: datetime.date) -> str:
    return f"idempotency_responses_{_partition_key(day)}"


def _partition_definition(day: datetime.date) -> str:
    return f"PARTITION {_partition_key(day)} VALUES LESS THAN ('{day + DAY}')"


def _create_partition(day: datetime.date) -> str:
    return (
        f"CREATE TABLE {_partition_name(day)} PARTITION OF idempotency_responses "
        f"FOR VALUES FROM ('{day}') TO ('{day + DAY}')"
    )
