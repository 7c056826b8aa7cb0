"""The tables: lock and state, answers, saga steps. Times are milliseconds since the epoch, by the database's clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Date,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    String,
    Table,
    text,
)
from sqlalchemy.dialects import mysql
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from ..records import FORMAT, State

__all__ = ["Tables", "add_tables", "now_ms"]

#: Defaults are SQL text: Alembic takes a plain empty string for no default, and would find a difference for ever.
EMPTY = text("''")
#: A table of an engine without transactions would keep the key of work that was rolled back.
OPTIONS: dict[str, Any] = {"mysql_engine": "InnoDB", "mariadb_engine": "InnoDB"}
PARTITIONED: dict[str, Any] = {**OPTIONS, "postgresql_partition_by": "RANGE (expires_day)"}


class now_ms(FunctionElement[int]):
    """The database's own clock in UTC, in milliseconds: neither frozen in a transaction nor moved by a time zone."""

    type = BigInteger()
    inherit_cache = True


@compiles(now_ms, "postgresql")
def _postgresql_now(element: now_ms, compiler: Any, **_: Any) -> str:
    return "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000 AS BIGINT)"


@compiles(now_ms, "mysql")
@compiles(now_ms, "mariadb")
def _mysql_now(element: now_ms, compiler: Any, **_: Any) -> str:
    # NOW() would follow the session's time zone. The quotient is a signed integer only when cast.
    return "CAST(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) DIV 1000 AS SIGNED)"


@compiles(now_ms, "sqlite")
def _sqlite_now(element: now_ms, compiler: Any, **_: Any) -> str:
    return "CAST(ROUND((julianday('now') - 2440587.5) * 86400000) AS INTEGER)"


def _name(length: int) -> String:
    """Text that is compared byte by byte, whatever the database's collation."""
    return String(length).with_variant(
        mysql.VARCHAR(length, charset="utf8mb4", collation="utf8mb4_bin"), "mysql", "mariadb"
    )


def _digest(length: int = 64) -> String:
    return String(length).with_variant(
        mysql.VARCHAR(length, charset="ascii", collation="ascii_bin"), "mysql", "mariadb"
    )


def _bytes() -> LargeBinary:
    return LargeBinary().with_variant(mysql.LONGBLOB(), "mysql", "mariadb")


def _number() -> BigInteger:
    return BigInteger()


@dataclass(frozen=True, slots=True)
class Tables:
    """The three tables, in one metadata."""

    keys: Table
    responses: Table
    steps: Table


def add_tables(metadata: MetaData, *, partitioned: bool = False) -> Tables:
    """Add the tables to a metadata, as an app that keeps its own does it; Alembic then sees them.

    Called twice for one metadata it gives the same tables.

    :param partitioned: answers are in partitions by the day on which they expire, which is then part of their key. The
        partitions themselves are made apart; ``flask idempotent ddl --partitioned`` prints the first ones.
    """
    schema = f"{metadata.schema}." if metadata.schema else ""
    names = [f"{schema}idempotency_{name}" for name in ("keys", "responses", "steps")]
    if names[0] in metadata.tables:
        return Tables(*(metadata.tables[name] for name in names))
    states = ", ".join(f"'{state.value}'" for state in State)
    keys = Table(
        "idempotency_keys",
        metadata,
        *_identity(),
        Column("format", SmallInteger, nullable=False, server_default=text(FORMAT)),
        Column("principal", _digest(), nullable=False, server_default=EMPTY),
        Column("binding", _digest(), nullable=False, server_default=EMPTY),
        Column("recipe", _digest(32), nullable=False),
        Column("request_hash", _digest(), nullable=False),
        Column("status", _digest(16), nullable=False),
        Column("lock_version", _number(), nullable=False),
        Column("claim_token", _digest(32), nullable=False),
        Column("locked_until", _number()),
        Column("attempt", Integer, nullable=False, server_default=text("1")),
        Column("settle_token", _digest(32), nullable=False, server_default=EMPTY),
        Column("settle_tries", Integer, nullable=False, server_default=text("0")),
        Column("unknown_since", _number()),
        Column("response_code", SmallInteger),
        Column("context", _bytes()),
        Column("reason", _name(255), nullable=False, server_default=EMPTY),
        Column("created_at", _number(), nullable=False),
        Column("completed_at", _number()),
        Column("expires_at", _number()),
        Column("expires_day", Date),
        Column("tombstone_until", _number()),
        CheckConstraint(f"status IN ({states})", name="idempotency_keys_status"),
        Index("idempotency_keys_expires_at", "expires_at"),
        Index("idempotency_keys_open", "status", "locked_until"),
        **OPTIONS,
    )
    responses = Table(
        "idempotency_responses",
        metadata,
        *_identity(),
        Column("expires_day", Date, nullable=False, primary_key=partitioned),
        Column("lock_version", _number(), nullable=False),
        Column("headers", _bytes(), nullable=False),
        Column("body", _bytes(), nullable=False),
        Column("kind", _digest(16), nullable=False),
        Column("cipher", _digest(16), nullable=False, server_default=EMPTY),
        **(PARTITIONED if partitioned else OPTIONS),
    )
    steps = Table(
        "idempotency_steps",
        metadata,
        *_identity(),
        Column("step", _name(64), primary_key=True),
        Column("item", Integer, primary_key=True, autoincrement=False, server_default=text("0")),
        Column("status", _digest(16), nullable=False),
        Column("attempt", Integer, nullable=False, server_default=text("1")),
        Column("result", _bytes()),
        Column("cipher", _digest(16), nullable=False, server_default=EMPTY),
        Column("reason", _name(255), nullable=False, server_default=EMPTY),
        Column("began_at", _number(), nullable=False),
        Column("done_at", _number()),
        CheckConstraint(
            "status IN ('begun', 'done', 'failed', 'undoing', 'undone', 'undo_failed')", name="idempotency_steps_status"
        ),
        **OPTIONS,
    )
    return Tables(keys, responses, steps)


def _identity() -> list[Column[Any]]:
    return [
        Column("tenant_id", _name(255), primary_key=True, server_default=EMPTY),
        Column("endpoint", _name(255), primary_key=True),
        Column("key_digest", _digest(), primary_key=True),
    ]
