"""One text for equal values: canonical JSON of request bodies and of Python values."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import ipaddress
import json
import math
import sys
import uuid
from collections.abc import Mapping
from decimal import Decimal
from itertools import accumulate
from typing import Any, NoReturn

__all__ = ["MAX_DEPTH", "NotCanonical", "canonical_json", "dump", "dump_value", "load"]

#: Arrays and objects may be nested this deep. Fixed, because what the stack allows differs from call to call.
MAX_DEPTH = 200

_DELETE_BUT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_STEP = tuple({ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}.get(byte, 0) for byte in range(256))

#: Python up to 3.10.6 turns a number of a million digits into an int, which takes minutes.
_MAX_DIGITS = 4300
_INT_IS_BOUNDED = hasattr(sys, "get_int_max_str_digits")


class NotCanonical(ValueError):
    """The text is no JSON, or has no canonical form; compare its bytes."""


def canonical_json(data: bytes) -> bytes | None:
    """The canonical form of a JSON text, or ``None`` where it must be compared by its bytes.

    Members sorted by name (of equal names the last counts, as for ``request.get_json``), no white space, escapes
    normalised, numbers by value (``1``, ``1.0`` and ``1e0`` are the same, ``1`` and ``"1"`` are not). Lists keep their
    order. ``None`` for what isn't UTF-8, isn't JSON, has NaN or Infinity, is nested deeper than ``MAX_DEPTH``, or has a
    number with a fraction that a double can't tell from another one.
    """
    try:
        return dump(load(data))
    except (NotCanonical, RecursionError):
        return None


def load(data: bytes) -> object:
    """Parse a JSON text so that equal numbers become equal values.

    :raises NotCanonical: see :func:`canonical_json`.
    """
    if _too_deep(data):
        raise NotCanonical("nested too deep")
    decoder = json.JSONDecoder(
        parse_float=_Numbers().__getitem__,
        parse_int=None if _INT_IS_BOUNDED else _bounded_int,
        parse_constant=_refuse,
    )
    try:
        value: object = decoder.decode(data.decode())
    except (ValueError, RecursionError) as error:
        raise NotCanonical("no JSON") from error
    return value


def dump(value: object) -> bytes:
    """Canonical JSON of a value from :func:`load`, or made of the same types."""
    return _PLAIN.encode(value).encode("ascii")


def dump_value(value: object) -> bytes:
    """Canonical JSON of a Python value: what JSON knows, and dates, times, ``Decimal``, ``UUID``, enums, addresses,
    bytes, sets and dataclasses. Numbers count by their value here too.

    :raises TypeError: anything else, whose text would differ from process to process; names the type, not the value.
    """
    try:
        text = _VALUES.encode(value).encode("ascii")
    except RecursionError:
        raise TypeError("a value that is nested too deep") from None
    except ValueError:
        raise TypeError("a value that contains itself") from None
    return canonical_json(text) or text  # NaN is fine here: it has one text


class _Numbers(dict[str, "float | int"]):
    """Texts of numbers with a point or an exponent, to their values. A dict, so that repeats cost no Python call."""

    def __missing__(self, text: str) -> float | int:
        number = float(text)
        if not math.isfinite(number):
            raise NotCanonical("beyond a double")
        value: float | int = number
        if number.is_integer() or repr(number) != text:
            try:
                exact = Decimal(text)
            except decimal.DecimalException as error:
                raise NotCanonical("beyond a decimal") from error
            whole = int(exact)  # at most 309 digits: the double is finite
            if exact == whole:
                value = whole
            elif exact != Decimal(repr(number)):
                raise NotCanonical("finer than a double")
        self[text] = value
        return value


def _bounded_int(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise NotCanonical("too many digits")
    return int(text)


def _refuse(constant: str) -> NoReturn:
    raise NotCanonical("no JSON number")


def _too_deep(data: bytes) -> bool:
    """Whether a JSON text is nested deeper than ``MAX_DEPTH``. For what isn't JSON the answer doesn't matter."""
    if data.count(b"[") + data.count(b"{") <= MAX_DEPTH:
        return False
    # Without escapes every quote begins or ends a string, so every second piece lies outside of strings.
    pieces = data.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
    brackets = b"".join(pieces[::2]).translate(None, _DELETE_BUT_BRACKETS)
    return max(accumulate(map(_STEP.__getitem__, brackets)), default=0) > MAX_DEPTH


def _describe(value: object) -> object:
    """What stands for a value that JSON doesn't know. Tagged, so that it is not its text."""
    if isinstance(value, Decimal):
        return ["decimal", _decimal_text(value)]
    for kind in (datetime.datetime, datetime.date, datetime.time):  # a datetime is a date too
        if isinstance(value, kind):
            return [kind.__name__, value.isoformat()]
    if isinstance(value, datetime.timedelta):
        return ["timedelta", value.days, value.seconds, value.microseconds]
    if isinstance(value, uuid.UUID):
        return ["uuid", str(value)]
    if isinstance(value, enum.Enum):
        return ["enum", type(value).__qualname__, value.name]
    if isinstance(value, (bytes, bytearray, memoryview)):
        return ["bytes", bytes(value).hex()]
    if isinstance(value, (set, frozenset)):
        return ["set", *sorted(_VALUES.encode(member) for member in value)]
    if isinstance(value, (ipaddress.IPv4Address, ipaddress.IPv6Address, ipaddress.IPv4Network, ipaddress.IPv6Network)):
        return ["address", str(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return ["dataclass", type(value).__qualname__, fields]
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a value of type {type(value).__name__}")


def _decimal_text(value: Decimal) -> str:
    """``1.50`` and ``1.5`` are the same. Not ``normalize()`` by the current context, which rounds."""
    if not value.is_finite():
        return str(value)
    digits = max(1, len(value.as_tuple().digits))
    context = decimal.Context(prec=digits, Emin=decimal.MIN_EMIN, Emax=decimal.MAX_EMAX)
    return str(value.normalize(context) if value else Decimal(0))


_OPTIONS: dict[str, Any] = {"sort_keys": True, "separators": (",", ":"), "ensure_ascii": True}
_PLAIN = json.JSONEncoder(**_OPTIONS, check_circular=False)
_VALUES = json.JSONEncoder(**_OPTIONS, default=_describe)
