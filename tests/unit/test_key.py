"""How a key is spelled, how strong it must be, and what a `key=` callable may give."""

import enum
import re
import time
import uuid

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flask_idempotent.errors import ConfigurationError, InvalidKey, MissingKey
from flask_idempotent.request.key import MAX_LENGTH, check_derived, check_strength, parse_header

PRINTABLE = "".join(map(chr, range(0x20, 0x7F)))
IN_QUOTES = PRINTABLE.replace(",", "")
BARE = re.sub(r'[ ",\\]', "", PRINTABLE)


def quote(key: str) -> str:
    return '"' + key.replace("\\", "\\\\").replace('"', '\\"') + '"'


@given(st.text(BARE, min_size=1, max_size=MAX_LENGTH))
@example(BARE)
@example("a" * MAX_LENGTH)
def test_bare_and_quoted_spell_the_same_key(key: str) -> None:
    """F41, F44."""
    assert parse_header(key) == parse_header(quote(key)) == key


@given(st.text(IN_QUOTES, min_size=1, max_size=MAX_LENGTH))
@example(IN_QUOTES)
@example('"' * MAX_LENGTH)
@example("\\" * MAX_LENGTH)
@example(" ")
def test_every_quoted_key_is_read_as_it_was_written(key: str) -> None:
    """F41."""
    assert parse_header(quote(key)) == key


@given(st.text(BARE, min_size=1, max_size=20), st.text(" \t", max_size=5), st.text(" \t", max_size=5))
def test_space_around_a_key_does_not_count(key: str, before: str, after: str) -> None:
    """F44."""
    assert parse_header(before + key + after) == key
    assert parse_header(before + quote(key) + after) == key


def test_case_counts() -> None:
    """F44."""
    assert parse_header("abc") != parse_header("ABC")


@pytest.mark.parametrize("absent", [None, [], ()])
def test_an_absent_header_is_no_key(absent: list[str] | None) -> None:
    assert parse_header(absent) is None


def test_one_header_field_in_a_list_is_that_key() -> None:
    assert parse_header(["abc"]) == "abc"


@pytest.mark.parametrize(
    "value",
    [
        "",
        " ",
        "\t",
        '""',
        '" ',
        '"',
        "a,b",
        '"a", "b"',
        '"a,b"',  # so that "a and b", joined by a server, are no key
        ",",
        '"abc";x=1',
        '"abc"; x',
        'a"b',
        '"a"b"',
        "a\\b",
        "a b",
        "a\tb",
        '"a\tb"',
        r'"a\b"',
        '"abc\\"',
        "abc\n",
        '"abc"\n',
        "a\x00b",
        "\x7f",
        "caf\xe9",
        '"caf\xe9"',
        "ключ",
        "\ud800",
        "a" * (MAX_LENGTH + 1),
        '"' + "a" * (MAX_LENGTH + 1) + '"',
        quote('"' * (MAX_LENGTH + 1)),
        "a" * 5000,
    ],
)
def test_anything_else_is_refused(value: str) -> None:
    """F41, F44."""
    with pytest.raises(InvalidKey):
        parse_header(value)


def test_two_header_fields_are_refused() -> None:
    """F44."""
    with pytest.raises(InvalidKey):
        parse_header(["abc", "abc"])


@given(st.text(max_size=300))
def test_a_value_gives_a_key_or_is_refused(value: str) -> None:
    """F41: never anything between, and what is accepted is accepted again in its quoted form."""
    try:
        key = parse_header(value)
    except InvalidKey:
        return
    assert key is not None
    assert 1 <= len(key) <= MAX_LENGTH
    assert parse_header(quote(key)) == key


@pytest.mark.parametrize("fill", ["a", '"', "\\", '\\"', " ", ",", "\xe9"])
def test_a_megabyte_is_refused_cheaply(fill: str) -> None:
    """F41: 400 before anything else is done with it."""
    huge = '"' + fill * (1024 * 1024 // len(fill))
    started = time.perf_counter()
    with pytest.raises(InvalidKey):
        parse_header(huge)
    assert time.perf_counter() - started < 0.1


@pytest.mark.parametrize("value", ['secret-"key', "secret-key,b", '"secret-key', "secret-key\xe9", "secret-key" * 30])
def test_no_refusal_shows_the_key(value: str) -> None:
    with pytest.raises(InvalidKey) as caught:
        parse_header(value)
    assert "secret-key" not in caught.value.detail
    assert "secret-key" not in str(caught.value)


@pytest.mark.parametrize(
    "key",
    [
        str(uuid.uuid1()),
        str(uuid.uuid4()),
        str(uuid.uuid4()).upper(),
        "01890a5d-ac96-774b-bcce-b302099a8057",  # version 7
        "00000000-0000-0000-0000-000000000001",
        "01ARZ3NDEKTSV4RRFFQ69G5FAV",
        "01arz3ndektsv4rrffq69g5fav",
        "7ZZZZZZZZZZZZZZZZZZZZZZZZZ",
        uuid.uuid4().hex,  # 32 hexadecimal digits are 128 bits
        uuid.uuid4().urn,
        "0123456789" * 4,
        "0123456789abcdef" * 2,
        "k3v9" + "abcdefghijklmnopqrstu",  # 25 of 36
        "aB3" + "abcdefghijklmnopqrs",  # 22 of 62
        "aB_" + "abcdefghijklmnopqrs",  # 22 of 64
        "a!b@c#d$e%f^g&h*i(j)",  # 20 of 94
    ],
)
def test_strong_keys_pass(key: str) -> None:
    check_strength(key, 128)


@pytest.mark.parametrize(
    "key",
    [
        "00000000-0000-0000-0000-000000000000",
        "ffffffff-ffff-ffff-ffff-ffffffffffff",
        "FFFFFFFF-FFFF-FFFF-FFFF-FFFFFFFFFFFF",
        "0" * 26,
        "01ARZ3NDEKTSV4RRFFQ69G5",
        "8ZZZZZZZZZZZZZZZZZZZZZZZZZ",  # beyond a ULID
        "1",
        "order-42",
        "2024-05-01",
        "0123456789" * 3 + "01234567",  # 38 digits: 126 bits
        "0123456789abcdef" + "0123456789abcde",  # 31 hexadecimal digits: 124 bits
        "abcdefghijklmnopqrstuvwx",  # 24 of 36
        "aB3" + "abcdefghijklmnopqr",  # 21 of 62
        "aB_" + "abcdefghijklmnopqr",  # 21 of 64
        "a!b@c#d$e%f^g&h*i(j",  # 19 of 94
        "abcdefg" * 30,  # 7 distinct characters
        "a" * 255,
    ],
)
def test_weak_keys_are_refused(key: str) -> None:
    with pytest.raises(InvalidKey) as caught:
        check_strength(key, 128)
    if len(key) > 3:
        assert key not in caught.value.detail


def test_eight_distinct_characters_are_enough() -> None:
    check_strength("abcdefgh" * 30, 128)


def test_strength_is_measured_against_the_setting() -> None:
    check_strength("abcdefghij", 51)  # 10 of 36: 51.7 bits
    with pytest.raises(InvalidKey):
        check_strength("abcdefghij", 52)
    check_strength(str(uuid.uuid4()), 500)  # by form


def test_zero_bits_turn_the_check_off() -> None:
    check_strength("1", 0)
    check_strength("00000000-0000-0000-0000-000000000000", 0)


class Kind(str, enum.Enum):
    EVENT = "evt_1"


class Number(enum.IntEnum):
    SEVEN = 7


SOME_UUID = uuid.UUID("12345678-1234-5678-1234-567812345678")


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ("evt_1", "evt_1"),
        ("schlüssel, mit allem \x00\n", "schlüssel, mit allem \x00\n"),
        ("x" * 255, "x" * 255),
        (Kind.EVENT, "evt_1"),
        (7, "7"),
        (-7, "-7"),
        (0, "0"),
        (Number.SEVEN, "7"),
        (10**254, "1" + "0" * 254),
        (SOME_UUID, str(SOME_UUID)),
    ],
)
def test_what_a_callable_may_give(value: object, key: str) -> None:
    derived = check_derived(value)
    assert derived == key
    assert type(derived) is str


def test_none_is_a_missing_key() -> None:
    """F42."""
    with pytest.raises(MissingKey):
        check_derived(None)


@pytest.mark.parametrize("value", ["", "x" * 256, 10**255, -(10**254), pytest.param(10**100_000, id="huge")])
def test_empty_and_long_derived_keys_are_refused(value: object) -> None:
    """F42."""
    with pytest.raises(InvalidKey):
        check_derived(value)


class Model:
    def __repr__(self) -> str:
        return "Model(secret)"


@pytest.mark.parametrize("value", [True, False, 1.5, b"evt_1", ["a"], ("a",), {"a": 1}, Model(), object()])
def test_other_types_are_an_error_without_their_value(value: object) -> None:
    """F39."""
    with pytest.raises(ConfigurationError, match=type(value).__name__) as caught:
        check_derived(value)
    assert repr(value) not in str(caught.value)
