"""The idempotency key: how a header spells it, how strong it is, and what a ``key=`` callable may give."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from ..errors import ConfigurationError, InvalidKey, MissingKey
from .scope import plain_text

__all__ = ["MAX_LENGTH", "check_derived", "check_strength", "parse_header"]

#: The most characters of a key; quotes and escapes of the header don't count.
MAX_LENGTH = 255

#: A quoted key whose every character is escaped, with its quotes. Nothing longer can be a key.
_MAX_SPELLING = 2 * MAX_LENGTH + 2

#: Printable ASCII but space, quote, comma and backslash.
_BARE = re.compile(r"[!#-+\--\[\]-~]+")

#: An RFC 9651 string (section 3.3.3), without commas: two joined header fields must never read as one key.
_QUOTED = re.compile(r'"((?:[ !#-+\--\[\]-~]|\\["\\])*)"')
_ESCAPE = re.compile(r"\\(.)")
_NOT_PRINTABLE = re.compile(r"[^ -~]")

_UUID = re.compile(r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}")
_ULID = re.compile(r"[0-7][0-9A-HJKMNP-TV-Za-hjkmnp-tv-z]{25}")

#: Constants of the two forms (RFC 9562, sections 5.9 and 5.10): well formed, and known to everybody.
_CONSTANT = re.compile(r"[0-]+|[fF-]+")

#: Alphabets, the smallest first, with the bits that one random character of each is worth.
_ALPHABETS = (
    (re.compile(r"[0-9]+"), math.log2(10)),
    (re.compile(r"[0-9a-fA-F]+"), math.log2(16)),
    (re.compile(r"[0-9a-z]+|[0-9A-Z]+"), math.log2(36)),
    (re.compile(r"[0-9a-zA-Z]+"), math.log2(62)),
    (re.compile(r"[0-9a-zA-Z_-]+"), math.log2(64)),
)
_PRINTABLE_BITS = math.log2(94)
_MIN_DISTINCT = 8


def parse_header(values: Sequence[str] | str | None) -> str | None:
    """Read the key from the values of its header.

    A quoted RFC 9651 string (as in draft-ietf-httpapi-idempotency-key-header, section 2.1) and the bare text spell
    the same key. Spaces and tabs around it don't count, case does. Inside quotes everything counts. A comma is refused
    everywhere, in quotes too: servers join repeated header fields with commas, and ``"a`` joined with ``b"`` must not
    become a key.

    :param values: what the header holds: one string, all fields of that name, or ``None``. WSGI decodes header bytes
        as Latin-1; anything beyond ASCII is refused.
    :returns: the key without quotes and escapes, 1 to 255 characters of printable ASCII; ``None`` without a header.
    :raises InvalidKey: more than one field, a comma, an empty or too long value, a character that isn't printable
        ASCII, parameters, or quotes, backslashes and spaces where they can't be.
    """
    if values is None:
        return None
    if not isinstance(values, str):
        if not values:
            return None
        if len(values) > 1:
            raise InvalidKey("Send the idempotency key once: the header came more than once.")
        values = values[0]
    value = values.strip(" \t")
    if len(value) > _MAX_SPELLING:
        raise _too_long()
    if _BARE.fullmatch(value):
        key = value
    else:
        quoted = _QUOTED.fullmatch(value)
        if quoted is None:
            raise InvalidKey(_why(value))
        key = quoted[1]
        if "\\" in key:
            key = _ESCAPE.sub(r"\1", key)
        if not key:
            raise InvalidKey("The idempotency key is empty. Send 1 to 255 printable ASCII characters, such as a UUID.")
    if len(key) > MAX_LENGTH:
        raise _too_long()
    return key


def check_strength(key: str, min_bits: float) -> None:
    """Refuse a client's key that could be guessed.

    UUIDs (hyphenated, any version) and ULIDs pass by form, whatever ``min_bits`` says, except the nil and the max
    value. Any other key must have ``min_bits`` as its length times the bits of its alphabet (digits 10, hexadecimal 16,
    one case and digits 36, letters and digits 62, with ``-`` and ``_`` 64, else 94), and at least 8 distinct
    characters. That measures the room that a random key of this shape has; it can't tell that a key is random.

    :param min_bits: ``IDEMPOTENT_MIN_KEY_BITS``; 0 turns the check off.
    :raises InvalidKey: the key is too weak.
    """
    if min_bits <= 0:
        return
    if (_UUID.fullmatch(key) or _ULID.fullmatch(key)) and not _CONSTANT.fullmatch(key):
        return
    bits = next((bits for alphabet, bits in _ALPHABETS if alphabet.fullmatch(key)), _PRINTABLE_BITS)
    if len(key) * bits < min_bits or len(set(key)) < _MIN_DISTINCT:
        raise InvalidKey("The idempotency key could be guessed. Send a random UUID.")


def check_derived(value: object) -> str:
    """Check what a ``key=`` callable gave.

    Such keys come from the app, not from the client, so any characters are fine and strength isn't asked for. ``1``
    and ``"1"`` are the same key; so are a UUID and its text.

    :returns: the key, 1 to 255 characters.
    :raises MissingKey: ``None``: there is no key to be had from this request.
    :raises InvalidKey: an empty or too long key.
    :raises ConfigurationError: anything but ``str``, ``int`` or ``UUID``: its text would not be stable.
    """
    if value is None:
        raise MissingKey("No idempotency key can be derived from this request.")
    if isinstance(value, int) and value.bit_length() > 4 * MAX_LENGTH:
        raise _too_long()  # before it becomes text, which Python refuses for huge numbers
    key = plain_text(value)
    if key is None:
        raise ConfigurationError(
            f"key= must return a str, an int or a UUID, not {type(value).__name__}. "
            "Return an identifier that is the same in every process."
        )
    if not key:
        raise InvalidKey("The idempotency key that is derived from this request is empty.")
    if len(key) > MAX_LENGTH:
        raise _too_long()
    return key


def _too_long() -> InvalidKey:
    return InvalidKey(f"The idempotency key is too long. Send at most {MAX_LENGTH} characters, such as a UUID.")


def _why(value: str) -> str:
    """The sentence for a value that is neither a bare nor a quoted key; shows nothing of the value."""
    if not value:
        return "The idempotency key is empty. Send 1 to 255 printable ASCII characters, such as a UUID."
    if _NOT_PRINTABLE.search(value):
        return "The idempotency key has a character that is not printable ASCII. Send a UUID."
    if "," in value:
        return "The idempotency key has a comma, as two joined headers have. Send one key, without commas."
    if value[0] == '"':
        return "The idempotency key is not a quoted string without parameters. Quote and escape it as RFC 9651 says."
    return "The idempotency key has a space, quote or backslash outside of quotes. Quote it as RFC 9651 says."
