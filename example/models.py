"""The shop's own table. The extension's three tables join it in the same database."""

from __future__ import annotations

import time

from flask import Flask
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import String, event
from sqlalchemy.orm import Mapped, mapped_column

__all__ = ["Order", "db", "engine_options", "prepare"]

db = SQLAlchemy()


class Order(db.Model):  # type: ignore[name-defined, misc]
    """An order that was placed. ``reference`` is what the customer calls it; nothing makes it unique but the key."""

    __tablename__ = "example_orders"

    number: Mapped[int] = mapped_column(primary_key=True)
    reference: Mapped[str] = mapped_column(String(100), index=True)
    item: Mapped[str] = mapped_column(String(100))
    quantity: Mapped[int]
    placed_at: Mapped[float] = mapped_column(default=time.time)


def engine_options(url: str) -> dict[str, object]:
    """A pool with a connection for each thread of a worker, and bounded waits."""
    pool: dict[str, object] = {"pool_size": 8, "max_overflow": 8, "pool_timeout": 5}
    if url.startswith("sqlite"):
        return {**pool, "connect_args": {"timeout": 10}}
    return {**pool, "pool_pre_ping": True}


def prepare(app: Flask) -> None:
    """Make the tables where they are missing. A real app has migrations for that."""
    with app.app_context():
        if db.engine.dialect.name == "sqlite":
            event.listen(db.engine, "connect", _let_readers_go_on)
        db.create_all()


def _let_readers_go_on(connection: object, record: object) -> None:
    """SQLite has one writer; with a write-ahead log at least nobody else waits for it."""
    cursor = connection.cursor()  # type: ignore[attr-defined]
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.close()
