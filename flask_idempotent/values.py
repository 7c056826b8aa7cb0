"""What settings and keywords share: their words, the parsers of values, and how a value is shown in a message.

Each parser returns what is meant, or raises ``ValueError`` with "must be ..." and the fix.
"""

from __future__ import annotations

import difflib
import math
import re
import reprlib
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Literal, TypeVar

from .records import RateLimit

__all__ = [
    "Durable",
    "Mode",
    "OnStoreError",
    "near",
    "one_of",
    "parse_choice",
    "parse_duration",
    "parse_rate",
    "plain",
    "seconds",
    "show",
    "to_ms",
]

Mode = Literal["enforce", "log", "off"]
Durable = Literal[False, "transaction", "intent"]
OnStoreError = Literal["closed", "open"]

Parsed = TypeVar("Parsed")

#: 10 years. More is a slip of units, and would not fit a script's numbers.
_LONGEST = timedelta(days=3650)
_MILLISECOND = timedelta(milliseconds=1)
_WINDOWS_MS = {"second": 1_000, "minute": 60_000, "hour": 3_600_000, "day": 86_400_000}


def parse_duration(value: object, *, zero: bool = False) -> timedelta:
    """Seconds or a ``timedelta`` as a ``timedelta``; at least 1 ms, or ``zero``."""
    length: timedelta | None = None
    if isinstance(value, timedelta):
        length = value
    elif isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        try:
            length = timedelta(seconds=value)
        except OverflowError:
            length = timedelta.max if value > 0 else timedelta.min
    if length is None:
        raise ValueError(f"must be a duration, not {show(value)}. Write seconds such as 30, or timedelta(seconds=30).")
    if length < timedelta(0):
        raise ValueError(f"must not be negative, it is {show(value)}. Write seconds such as 30, or a timedelta.")
    if length < _MILLISECOND and not (zero and length == timedelta(0)):
        least = "0 or at least 1 ms" if zero else "more than 0, at least 1 ms"
        raise ValueError(f"must be {least}, it is {show(value)}. Leave it out for the default.")
    if length > _LONGEST:
        raise ValueError("must be at most 10 years. Write seconds (not milliseconds), or a timedelta.")
    return length


def parse_choice(value: object, choices: tuple[Parsed, ...]) -> Parsed:
    """The one of ``choices`` that equals ``value``. ``False`` isn't ``0``."""
    for choice in choices:
        if value is choice or (type(choice) is not bool and value == choice):
            return choice
    allowed = ", ".join(repr(choice) for choice in choices)
    hint = near(value, (choice for choice in choices if isinstance(choice, str)))
    raise ValueError(f"must be one of {allowed}, not {show(value)}.{hint}")


def one_of(*choices: object) -> Callable[[object], object]:
    """A parser that takes one of ``choices``."""
    return lambda value: parse_choice(value, choices)


def parse_rate(value: object) -> RateLimit | None:
    """``"100/minute"`` as 100 new keys in 60,000 ms; ``None`` for no limit."""
    if value is None:
        return None
    match = re.fullmatch(r"([0-9]{1,9})/(second|minute|hour|day)", value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(
            f"must be 'N/second', 'N/minute', 'N/hour' or 'N/day', not {show(value)}. "
            "Write '100/minute', or None for no limit."
        )
    if int(match[1]) == 0:
        raise ValueError(f"must let at least one new key pass, it is {show(value)}. Write None for no limit.")
    return RateLimit(int(match[1]), _WINDOWS_MS[match[2]])


def to_ms(length: timedelta) -> int:
    """Whole milliseconds, rounded up, so that nothing but 0 becomes 0."""
    return -(-length // _MILLISECOND)


def plain(length: timedelta) -> str:
    """Seconds as one would type them: ``30``, ``0.5``."""
    return f"{length.total_seconds():f}".rstrip("0").rstrip(".")


def seconds(length: timedelta) -> str:
    """Seconds with their unit, for a sentence."""
    return plain(length) + " s"


def show(value: object) -> str:
    """A wrong value as far as it helps: plain ones shortened, of others only the type. Never call it on a secret."""
    if value is None or isinstance(value, (str, int, float, timedelta)):
        return reprlib.repr(value)
    return f"a {type(value).__name__}"


def near(name: object, known: Iterable[str], prefix: str = "") -> str:
    """`` Did you mean 'x'?``, or nothing. ``prefix`` is put before the name that is found."""
    close = difflib.get_close_matches(name, list(known), n=1) if isinstance(name, str) else []
    return f" Did you mean {prefix + close[0]!r}?" if close else ""
