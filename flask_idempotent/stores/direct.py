"""Statements sent to the driver as they are: compiled once for a dialect, without the work that a general one needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy.engine import Connection, CursorResult, Dialect
from sqlalchemy.sql.expression import Executable

__all__ = ["Direct"]


class Direct:
    """One statement in the driver's own words. Its values go to the driver as they are: text, numbers, bytes, dates.

    :param prefix: what stands in front of it, such as MariaDB's ``SET STATEMENT ... FOR``.
    :param schemas: SQLAlchemy's ``schema_translate_map``: other schemas for the tables.
    """

    def __init__(
        self, statement: Executable, dialect: Dialect, *, prefix: str = "", schemas: Mapping[Any, Any] | None = None
    ) -> None:
        compiled: Any = statement.compile(  # type: ignore[attr-defined]
            dialect=dialect, schema_translate_map=schemas, render_schema_translate=bool(schemas)
        )
        self._text = f"{prefix}{compiled}"
        self._order: tuple[str, ...] | None = tuple(compiled.positiontup) if compiled.positional else None
        self._fixed: dict[str, Any] = {name: value for name, value in compiled.params.items() if value is not None}
        self._names = frozenset(compiled.params)

    def execute(self, connection: Connection, parameters: Mapping[str, Any]) -> CursorResult[Any]:
        """Send it with these values; names that it doesn't know are left out."""
        values = {**self._fixed, **{name: value for name, value in parameters.items() if name in self._names}}
        if self._order is not None:
            return connection.exec_driver_sql(self._text, tuple(values[name] for name in self._order))
        return connection.exec_driver_sql(self._text, values)
