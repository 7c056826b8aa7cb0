"""The same intent has the same fingerprint, another intent another one, and the view finds the body untouched."""

import dataclasses
import datetime
import decimal
import enum
import functools
import hashlib
import hmac
import io
import json
import math
import os
import random
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import flask
import marshmallow
import pytest
from flask.testing import EnvironBuilder
from hypothesis import assume, given
from hypothesis import strategies as st
from marshmallow import fields as ma
from werkzeug.datastructures import FileStorage
from werkzeug.exceptions import RequestEntityTooLarge
from werkzeug.routing import BaseConverter

from flask_idempotent.errors import ConfigurationError
from flask_idempotent.request.canonical import MAX_DEPTH, canonical_json, dump_value
from flask_idempotent.request.fingerprint import Fields, Fingerprinter

JSON = "application/json"
FORM = "application/x-www-form-urlencoded"


class Opaque:
    """What a converter may make of a path variable."""

    def __init__(self, text: str) -> None:
        self.text = text


class OpaqueConverter(BaseConverter):
    def to_python(self, value: str) -> Opaque:
        return Opaque(value)


def make_app() -> flask.Flask:
    app = flask.Flask(__name__)
    app.testing = True
    app.url_map.converters["opaque"] = OpaqueConverter
    for rule in ("/", "/v1/orders/<int:id>", "/v2/orders/<int:id>", "/named/<name>", "/opaque/<opaque:thing>"):
        app.add_url_rule(rule, rule, methods=["POST", "PATCH", "PUT"])
    return app


APP = make_app()


def environ_of(
    data: bytes, content_type: str | None, *, method: str = "POST", chunked: bool = False
) -> dict[str, object]:
    """A request as a server hands it over; `chunked` without a length, the server ending the stream."""
    environ = EnvironBuilder(APP, "/", method=method).get_environ()
    environ["wsgi.input"] = io.BytesIO(data)
    if chunked:
        environ["wsgi.input_terminated"] = True
        environ.pop("CONTENT_LENGTH", None)
    else:
        environ["CONTENT_LENGTH"] = str(len(data))
    if content_type is not None:
        environ["CONTENT_TYPE"] = content_type
    return environ


def value_of(
    data: bytes | str | dict[str, object] | None = None,
    content_type: str | None = None,
    *,
    fields: Fields = None,
    path: str = "/",
    method: str = "POST",
    scope: str = "orders",
    app: flask.Flask = APP,
    headers: dict[str, str] | None = None,
    **keywords: object,
) -> str:
    fingerprinter = Fingerprinter(fields, **keywords)  # type: ignore[arg-type]
    with app.test_request_context(path, method=method, data=data, content_type=content_type, headers=headers):
        return fingerprinter.compute(flask.request, endpoint_scope=scope)[0].value


def json_value(document: str | bytes, **keywords: object) -> str:
    return value_of(document, JSON, **keywords)  # type: ignore[arg-type]


# -- what always counts, and what never does --


def test_method_scope_path_variables_and_query_count() -> None:
    """F30: also with fields=False, but for the query."""
    variants: list[dict[str, object]] = [
        {},
        {"method": "PATCH"},
        {"scope": "applications"},
        {"path": "/v1/orders/1"},
        {"path": "/v1/orders/2"},
        {"path": "/named/1"},
        {"path": "/named/2"},
        {"path": "/?a=1"},
        {"path": "/?a=2"},
        {"path": "/?a="},
        {"path": "/?b=1"},
        {"path": "/?a=1&a=2"},
        {"path": "/?a=2&a=1"},
    ]
    values = [value_of(b"x", **variant) for variant in variants]  # type: ignore[arg-type]
    assert len(set(values)) == len(values)
    without = [value_of(b"x", fields=False, **variant) for variant in variants]  # type: ignore[arg-type]
    assert len(set(without)) == 7
    assert len({without[0], *without[7:]}) == 1


def test_the_rest_of_the_path_and_headers_do_not_count() -> None:
    assert value_of(b"x", path="/v1/orders/1") == value_of(b"x", path="/v2/orders/1")
    headers = {"X-Request-Id": "1", "Authorization": "Bearer t", "traceparent": "00-1-2-01", "Idempotency-Key": "k"}
    assert value_of(b"x", headers=headers) == value_of(b"x")


def test_the_order_of_query_names_does_not_count() -> None:
    assert value_of(path="/?a=1&b=2&a=3") == value_of(path="/?b=2&a=1&a=3")
    assert value_of(path="/?a=%41") == value_of(path="/?a=A")


def test_a_query_that_is_not_utf8_is_compared_by_its_bytes() -> None:
    """F101."""
    values = []
    for query in (b"a=\xff", b"a=\xfe"):
        with APP.test_request_context("/", method="POST", environ_overrides={"QUERY_STRING": query.decode("latin-1")}):
            values.append(Fingerprinter().compute(flask.request, endpoint_scope="s")[0].value)
    assert values[0] != values[1]


def test_a_path_variable_without_stable_text_counts_by_the_path() -> None:
    """F39."""
    assert value_of(path="/opaque/a") == value_of(path="/opaque/a")
    assert value_of(path="/opaque/a") != value_of(path="/opaque/b")


def test_path_variables_that_a_hook_took_out_can_be_handed_in() -> None:
    fingerprinter = Fingerprinter()
    with APP.test_request_context("/v1/orders/1", method="POST"):
        whole = fingerprinter.compute(flask.request, endpoint_scope="s")
        assert flask.request.view_args is not None
        taken = dict(flask.request.view_args)
        flask.request.view_args.clear()
        assert fingerprinter.compute(flask.request, endpoint_scope="s") != whole
        assert fingerprinter.compute(flask.request, endpoint_scope="s", path_variables=taken) == whole


def test_parts_can_not_be_shifted_into_each_other() -> None:
    assert value_of(b"x", scope="ab") != value_of(b"bx", scope="a")
    assert value_of(b'[["a","1"]]', path="/") != value_of(path="/?a=1")
    assert value_of(b'{"a":1}', JSON) != value_of(b'{"a":1}', "text/plain")
    assert value_of(b'[[["a","1"]],[]]', JSON) != value_of(b"a=1", FORM)
    assert value_of(b'[[["a","1"]],[]]', "text/plain") != value_of(b"a=1", FORM)
    assert value_of(b"", JSON) != value_of(b"", JSON, fields=False)


# -- JSON --

DOCUMENT = '{"a":1,"b":{"c":[1,2,"x"],"d":null},"e":"\\u00e9/\\ud83d\\ude00"}'


@pytest.mark.parametrize(
    "other",
    [
        '{"e":"\\u00e9/\\ud83d\\ude00","b":{"d":null,"c":[1,2,"x"]},"a":1}',
        '\n{ "a" : 1 ,\t"b": {"c": [1, 2, "x"], "d": null}, "e": "\\u00e9/\\ud83d\\ude00"}\r\n',
        '{"a":1,"b":{"c":[1,2,"\\u0078"],"d":null},"e":"é\\/😀"}',
        '{"\\u0061":1.0,"b":{"c":[1e0,20e-1,"x"],"d":null},"e":"é/😀"}',
        '{"a":2,"a":1,"b":{"c":[1,2,"x"],"d":null},"e":"é/😀"}',  # the last of two equal names, as request.get_json
    ],
)
def test_json_counts_by_its_value(other: str) -> None:
    """F23."""
    assert json_value(other) == json_value(DOCUMENT)
    assert json_value(other.encode(), headers={"X": "1"}) == value_of(DOCUMENT, "application/problem+json; x=1")


@pytest.mark.parametrize(
    "other",
    [
        DOCUMENT.replace('"a":1', '"a":2'),
        DOCUMENT.replace('"a":1', '"a":"1"'),
        DOCUMENT.replace('"a":1', '"a":true'),
        DOCUMENT.replace('"a":1', '"a":[1]'),
        DOCUMENT.replace('"a":1', '"a":1.0000001'),
        DOCUMENT.replace("1,2", "2,1"),
        DOCUMENT.replace('"d":null', '"D":null'),
        DOCUMENT.replace(',"d":null', ""),
        DOCUMENT.replace('"x"', '"X"'),
        DOCUMENT.replace('"x"', '"x "'),
        f"[{DOCUMENT}]",
    ],
)
def test_another_value_is_another_intent(other: str) -> None:
    """F23: the answer for re-ordered lists, and for 1 and "1", is "another one"."""
    json.loads(other)
    assert json_value(other) != json_value(DOCUMENT)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1", "1.0"),
        ("1", "1e0"),
        ("100", "1E+2"),
        ("0", "-0"),
        ("0", "-0.0"),
        ("0", "0e308"),
        ("0.1", "0.10"),
        ("0.1", "1e-1"),
        ("1.5", "15e-1"),
        ("10.00", "10"),
        ("1e300", "1" + "0" * 300),
        ("9007199254740993", "9007199254740993.0"),
        ("12345678901234567890", "12345678901234567890.00"),
        ("1", "1." + "0" * 1000),
    ],
)
def test_numbers_count_by_their_value(one: str, other: str) -> None:
    """F23."""
    assert canonical_json(one.encode()) == canonical_json(other.encode()) is not None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("9007199254740993", "9007199254740992"),
        ("9007199254740993.0", "9007199254740992.0"),
        ("0.1", "0.10000000000000001"),
        ("0.1234567890123456789", "0.1234567890123456788"),
        ("1e400", "1e401"),
        ("1e-400", "0"),
        ("1e-400", "1e-401"),
        ("NaN", "Infinity"),
        ("1" * 5000, "1" * 4999 + "2"),
    ],
)
def test_numbers_that_a_double_can_not_tell_apart_differ(one: str, other: str) -> None:
    assert json_value(one) != json_value(other)
    assert json_value(one) == json_value(one)


@pytest.mark.parametrize(
    "text",
    [
        "0.1234567890123456789",
        "1e400",
        "1e-400",
        "NaN",
        "-Infinity",
        '{"a":1,}',
        "",
        "{",
        "nul",
        "'a'",
        '{"a":1} x',
        "\ufeff{}",
        "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1),
        '{"a":' * (MAX_DEPTH + 1) + "1" + "}" * (MAX_DEPTH + 1),
        "[" * 100_000,
    ],
)
def test_what_has_no_canonical_form_is_compared_by_its_bytes(text: str) -> None:
    """F101."""
    assert canonical_json(text.encode()) is None
    assert json_value(text) == value_of(text, "text/plain") == value_of(text, fields="raw")
    assert json_value(text) != json_value(text + " ")


@pytest.mark.parametrize("data", ['{"é":1}'.encode("latin-1"), '{"é":1}'.encode("utf-16"), b'"\xed\xa0\x80"', b"\xff"])
def test_json_that_is_not_utf8_is_compared_by_its_bytes(data: bytes) -> None:
    """F101."""
    assert canonical_json(data) is None
    assert value_of(data, JSON) == value_of(data, "application/json; charset=latin-1") == value_of(data)


def test_a_lone_surrogate_is_a_value() -> None:
    assert canonical_json(b'"\\uD800"') == canonical_json(b'"\\ud800"') != canonical_json(b'"\\ud801"')


def test_the_depth_is_counted_outside_of_strings() -> None:
    deepest = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert canonical_json(deepest.encode()) == deepest.encode()
    strings = '["' + "[{" * 1000 + '","\\"' + "[" * 1000 + '","\\\\",{"' + "{" * 1000 + '":1}]'
    assert canonical_json(strings.encode()) is not None
    wide = json.dumps([[{}]] * 1000)
    assert canonical_json(wide.encode()) is not None


def test_the_depth_does_not_depend_on_the_stack() -> None:
    texts = [b"[" * depth + b"]" * depth for depth in (MAX_DEPTH, MAX_DEPTH + 1)]

    def deeper(frames: int) -> list[bytes | None]:
        return deeper(frames - 1) if frames else [canonical_json(text) for text in texts]

    assert deeper(0) == deeper(200) == [texts[0], None]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=4), children, max_size=4),
    max_leaves=12,
)


def shuffled(value: object, seed: random.Random) -> object:
    if isinstance(value, dict):
        items = [(name, shuffled(member, seed)) for name, member in value.items()]
        seed.shuffle(items)
        return dict(items)
    return [shuffled(member, seed) for member in value] if isinstance(value, list) else value


def same(one: object, other: object) -> bool:
    """Equality of JSON values: 1 is 1.0, but True is no 1."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, float | int) and isinstance(other, float | int) and float in (type(one), type(other)):
        return float(one) == float(other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@given(VALUES, st.randoms(use_true_random=False), st.sampled_from([None, 0, 3, "\t"]), st.booleans())
def test_json_survives_another_serializer(
    value: object, seed: random.Random, indent: int | str | None, ascii_only: bool
) -> None:
    """F23."""
    plain = json.dumps(value).encode()
    other = json.dumps(shuffled(value, seed), indent=indent, ensure_ascii=ascii_only)
    canonical = canonical_json(plain)
    assert canonical is not None
    assert canonical_json(other.encode("utf-8")) == canonical
    assert canonical_json(canonical) == canonical
    assert same(json.loads(canonical), value)


@given(VALUES, VALUES)
def test_json_of_another_value_differs(one: object, other: object) -> None:
    assume(not same(one, other))
    assert canonical_json(json.dumps(one).encode()) != canonical_json(json.dumps(other).encode())


@given(st.decimals(allow_nan=False, allow_infinity=False, places=4, min_value=-(10**9), max_value=10**9))
def test_amounts_are_told_apart_by_their_value(amount: decimal.Decimal) -> None:
    texts = [f"{amount:f}", f"{amount:e}", f"{amount:f}" + "00"]
    assert len({canonical_json(text.encode()) for text in texts}) == 1
    changed = canonical_json(f"{amount + decimal.Decimal('0.0001'):f}".encode())
    assert canonical_json(texts[0].encode()) != changed


@pytest.mark.parametrize(
    "document",
    [
        {"items": [{"sku": f"sku-{n}", "quantity": n, "price": n / 100, "tags": ["a", "b"]} for n in range(14_000)]},
        {"blob": "x" * 1_000_000},
        {"quotes": '"' * 500_000},
        {"backslashes": "\\" * 500_000},
        [[]] * 300_000,
    ],
    ids=["items", "blob", "quotes", "backslashes", "brackets"],
)
def test_a_megabyte_of_json_costs_what_json_costs(document: object) -> None:
    data = json.dumps(document).encode()
    assert len(data) > 900_000
    # What nobody can do without, and 40 passes over the bytes: a slow path in Python would cost hundreds.
    floor = best(lambda: (json.dumps(json.loads(data), sort_keys=True), [data.count(b"?") for _ in range(40)]))
    assert best(lambda: canonical_json(data)) < 6 * floor


@pytest.mark.parametrize(
    "data", [b'["' + b'\\"' * 500_000, b"1" * 1_000_000, b"1." + b"1" * 1_000_000, b"[" * 1_000_000, b'"' * 1_000_000]
)
def test_a_megabyte_of_nonsense_is_turned_down_fast(data: bytes) -> None:
    assert canonical_json(data) is None
    document = json.dumps(["x" * 1_000_000, *range(20_000)]).encode()
    assert best(lambda: canonical_json(data)) < 40 * best(lambda: json.dumps(json.loads(document)))


def best(work: Callable[[], object]) -> float:
    """The shortest of a few runs, in seconds of this process."""
    times = []
    for _ in range(5):
        started = time.process_time()
        work()
        times.append(time.process_time() - started)
    return min(times)


# -- forms --


def test_form_fields_count_by_name_and_value() -> None:
    one = value_of("a=1&b=2&a=3", FORM)
    assert value_of("b=2&a=1&a=3", FORM + "; charset=utf-8") == one
    assert value_of("b=%32&a=%31&%61=3", FORM) == one
    others = ["a=3&b=2&a=1", "a=1&b=2", "a=1&b=2&a=3&c=", "a=1&b=2&a=4", "a=1&b=2&a=3 ", ""]
    values = {value_of(other, FORM) for other in others}
    assert len(values) == len(others)
    assert one not in values


def test_the_key_and_csrf_tokens_of_a_form_do_not_count() -> None:
    assert value_of("a=1&idempotency_key=k1&csrf_token=t1", FORM) == value_of("a=1&csrf_token=t2", FORM)
    assert value_of("a=1&key=1", FORM, form_field="key") == value_of("a=1&key=2", FORM, form_field="key")
    assert value_of("a=1&x=1", FORM, form_ignore=["x"]) == value_of("a=1&x=2", FORM, form_ignore=["x"])
    assert value_of("a=1&x=1", FORM) != value_of("a=1&x=2", FORM)


def test_a_form_that_is_not_utf8_is_compared_by_its_bytes() -> None:
    """F101: Flask reads an empty form."""
    assert value_of(b"a=\xff", FORM) != value_of(b"a=\xfe", FORM)
    assert value_of(b"a=\xff", FORM) == value_of(b"a=\xff", FORM)


def multipart(
    boundary: str = "one",
    *,
    name: str = "up",
    filename: str = "a.txt",
    kind: str = "text/plain",
    content: bytes = b"data",
    fields: dict[str, str] | None = None,
    file_first: bool = False,
) -> tuple[bytes, str]:
    parts = [
        f'Content-Disposition: form-data; name="{field}"\r\n\r\n{text}'.encode()
        for field, text in (fields if fields is not None else {"a": "1"}).items()
    ]
    disposition = (
        f'Content-Disposition: form-data; name="{name}"; filename="{filename}"\r\nContent-Type: {kind}\r\n\r\n'
    )
    parts.insert(0 if file_first else len(parts), disposition.encode() + content)
    body = b"".join(b"--" + boundary.encode() + b"\r\n" + part + b"\r\n" for part in parts)
    return body + f"--{boundary}--\r\n".encode(), f"multipart/form-data; boundary={boundary}"


LARGE = b"0123456789abcdef" * (2 * 1024 * 1024 // 16)


@pytest.mark.parametrize("content", [b"data", LARGE], ids=["small", "large"])
def test_multipart_counts_by_its_parts(content: bytes) -> None:
    """F99: a new boundary is no new intent."""
    one = value_of(*multipart(content=content))
    assert value_of(*multipart("another-boundary", content=content)) == one
    assert value_of(*multipart(content=content, file_first=True)) == one
    assert value_of(*multipart(content=content, fields={"a": "1", "csrf_token": "t"})) == one
    others = [
        multipart(content=content + b"x"),
        multipart(content=content[:-1] + b"x"),
        multipart(content=content, filename="b.txt"),
        multipart(content=content, name="other"),
        multipart(content=content, kind="text/csv"),
        multipart(content=content, fields={"a": "2"}),
        multipart(content=content, fields={}),
    ]
    values = {value_of(*other) for other in others}
    assert len(values) == len(others)
    assert one not in values


def test_multipart_of_unknown_length_is_the_same_intent() -> None:
    body, content_type = multipart()
    assert wire_value(body, content_type, chunked=True) == value_of(body, content_type)


def wire_value(data: bytes, content_type: str | None, fields: Fields = None, *, chunked: bool = False) -> str:
    with APP.request_context(environ_of(data, content_type, chunked=chunked)):
        assert (flask.request.content_length is None) == chunked
        return Fingerprinter(fields).compute(flask.request, endpoint_scope="orders")[0].value


@pytest.mark.parametrize(("data", "kind"), [(b'{"a": 1}', JSON), (b"a=1", FORM), (b"x" * 100_000, "text/csv")])
def test_chunked_bodies_count_like_others(data: bytes, kind: str) -> None:
    assert wire_value(data, kind, chunked=True) == value_of(data, kind)
    assert wire_value(data + b" ", kind, "raw", chunked=True) != value_of(data, kind, fields="raw")


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"nonsense", "multipart/form-data; boundary=b"),
        (b"nonsense", "multipart/form-data"),
        (b"nonsense", "multipart/form-data; boundary=\xe9"),
        (multipart()[0][:60], "multipart/form-data; boundary=one"),
        (b"nonsense", "application/json"),
        (b"a;b", "text/csv"),
        (b"nonsense", None),
        (b"nonsense", "; ="),
        (b"", JSON),
        (b"", FORM),
        (b"", "multipart/form-data; boundary=b"),
    ],
)
@pytest.mark.parametrize("fields", [None, ["a"], "raw"], ids=str)
def test_no_body_is_refused_here(data: bytes, kind: str | None, fields: Fields) -> None:
    """F101: the view decides."""
    assert wire_value(data, kind, fields) == wire_value(data, kind, fields)
    assert wire_value(data, kind, fields) != wire_value(data + b"!", kind, fields)


# -- fields= --


def test_names_narrow_the_body() -> None:
    """F29."""
    one = json_value('{"amount":1,"note":"x"}', fields=["amount"])
    assert json_value('{"note":"y","amount":1.0}', fields=["amount"]) == one
    assert json_value('{"amount":2,"note":"x"}', fields=["amount"]) != one
    assert json_value('{"amount":1,"note":"x"}', fields=["amount"], path="/?a=1") != one


def test_missing_differs_from_null() -> None:
    documents = ["{}", '{"a":null}', '{"a":false}', '{"a":""}', '{"a":[]}', '{"a":{}}', '{"a":0}']
    assert len({json_value(document, fields=["a"]) for document in documents}) == len(documents)


def test_chosen_values_can_not_be_shifted_into_each_other() -> None:
    fields = ["a", "b"]
    documents = [
        '{"a":"x","b":"y"}',
        '{"a":"xy","b":""}',
        '{"a":"y","b":"x"}',
        '{"a":"x"}',
        '{"b":"x"}',
        '{"a":["x","y"]}',
    ]
    assert len({json_value(document, fields=fields) for document in documents}) == len(documents)


@pytest.mark.parametrize(
    ("pointer", "same_as", "other_than"),
    [
        ("/a/b", '{"a":{"b":1,"x":2}}', '{"a":{"b":2}}'),
        ("/a/0", '{"a":[1,2]}', '{"a":[2,1]}'),
        ("/a/01", '{"a":[3,4]}', '{"a":{"01":1}}'),
        ("/a/-", '{"a":[3]}', '{"a":{"-":1}}'),
        ("/a/1", '{"a":[1]}', '{"a":[1,2]}'),
        ("/a~1b", '{"a/b":1,"x":1}', '{"a/b":2}'),
        ("/a~0b", '{"a~b":1,"x":1}', '{"a~b":2}'),
        ("/~01", '{"~1":1,"x":1}', '{"~1":2}'),
        ("/", '{"":1,"x":1}', '{"":2}'),
    ],
)
def test_json_pointers(pointer: str, same_as: str, other_than: str) -> None:
    """RFC 6901; what leads nowhere is missing."""
    bases = {"/a/b": '{"a":{"b":1}}', "/a/0": '{"a":[1]}', "/a~1b": '{"a/b":1}', "/a~0b": '{"a~b":1}'}
    bases |= {"/a/01": "{}", "/a/-": "{}", "/a/1": "{}", "/~01": '{"~1":1}', "/": '{"":1}'}
    one = json_value(bases[pointer], fields=[pointer])
    assert json_value(same_as, fields=[pointer]) == one
    assert json_value(other_than, fields=[pointer]) != one


def test_names_choose_form_fields() -> None:
    """F29."""
    one = value_of("amount=1&note=x", FORM, fields=["amount"])
    assert value_of("note=y&amount=1", FORM, fields=["amount"]) == one
    assert value_of("note=y&amount=1", FORM, fields=["/amount"]) == one
    for other in ("amount=2", "note=x", "amount=1&amount=1", "amount="):
        assert value_of(other, FORM, fields=["amount"]) != one


def test_names_choose_uploaded_files() -> None:
    one = value_of(*multipart(), fields=["up"])
    assert value_of(*multipart("two", fields={"a": "2"}), fields=["up"]) == one
    assert value_of(*multipart(content=b"DATA"), fields=["up"]) != one


@pytest.mark.parametrize("document", ["[1]", '"a"', "1", "null", "{", "{'a':1}"])
def test_without_an_object_or_a_form_all_of_the_body_counts(document: str) -> None:
    assert json_value(document, fields=["a"]) == json_value(document, fields=["a"])
    assert json_value(document, fields=["a"]) != json_value(document + "1", fields=["a"])
    assert json_value(document, fields=["a"]) != json_value("{}", fields=["a"])
    assert value_of("a,b", "text/csv", fields=["a"]) != value_of("a,c", "text/csv", fields=["a"])


def test_false_leaves_body_and_query_out_and_reads_nothing() -> None:
    """F29."""
    assert json_value('{"a":1}', fields=False) == value_of("b=2", FORM, fields=False, path="/?q=1")

    environ = environ_of(b"abc", None)
    stream = environ["wsgi.input"]
    assert isinstance(stream, io.BytesIO)
    with APP.request_context(environ):
        Fingerprinter(False).compute(flask.request, endpoint_scope="s")
        assert (environ["wsgi.input"], stream.tell()) == (stream, 0)
        Fingerprinter().compute(flask.request, endpoint_scope="s")
        assert stream.tell() == 3


def test_raw_compares_bytes_whatever_they_are() -> None:
    assert json_value('{"a":1}', fields="raw") != json_value('{"a": 1}', fields="raw")
    assert json_value('{"a":1}', fields="raw") == value_of('{"a":1}', "text/plain", fields="raw")
    assert value_of(*multipart("x"), fields="raw") != value_of(*multipart("y"), fields="raw")


class ChargeSchema(marshmallow.Schema):
    class Meta:
        unknown = marshmallow.EXCLUDE

    amount = ma.Decimal(required=True)
    currency = ma.String(load_default="EUR")
    day = ma.Date()
    order = ma.UUID()


@pytest.mark.parametrize("schema", [ChargeSchema, ChargeSchema()], ids=["class", "instance"])
def test_a_schema_normalizes(schema: Fields) -> None:
    """F29."""
    one = json_value('{"amount":"1.50","day":"2024-05-01"}', fields=schema)
    assert json_value('{"day":"2024-05-01","currency":"EUR","amount":1.5,"x":1}', fields=schema) == one
    assert value_of("amount=1.50&day=2024-05-01&csrf_token=t", FORM, fields=schema) != one  # a form is no JSON
    for other in ('{"amount":"1.51","day":"2024-05-01"}', '{"amount":"1.50","day":"2024-05-02"}', '{"amount":"1.50"}'):
        assert json_value(other, fields=schema) != one


def test_a_schema_gets_a_form_as_a_flat_dict() -> None:
    class Strict(marshmallow.Schema):
        a = ma.Integer(required=True)

    one = value_of("a=1&csrf_token=x", FORM, fields=Strict)
    assert value_of("csrf_token=y&a=01", FORM, fields=Strict) == one
    assert value_of("a=2", FORM, fields=Strict) != one
    uploads = [value_of(*multipart(boundary, content=content), fields=Strict) for boundary, content in
               [("x", b"1"), ("y", b"1"), ("y", b"2")]]  # fmt: skip
    assert uploads[0] == uploads[1] != uploads[2]


def test_what_a_schema_does_not_take_counts_as_a_whole() -> None:
    one = json_value('{"amount":"much","x":1}', fields=ChargeSchema)
    assert json_value('{"x":1, "amount":"much"}', fields=ChargeSchema) == one
    assert json_value('{"amount":"much","x":2}', fields=ChargeSchema) != one
    assert json_value("[1]", fields=ChargeSchema) != json_value("[2]", fields=ChargeSchema)
    assert json_value("[1", fields=ChargeSchema) != json_value("[2", fields=ChargeSchema)
    assert value_of("a", "text/csv", fields=ChargeSchema) != value_of("b", "text/csv", fields=ChargeSchema)


def test_a_schema_that_changes_its_input_still_tells_bodies_apart() -> None:
    class Emptying(marshmallow.Schema):
        @marshmallow.pre_load
        def empty(self, data: dict[str, object], **keywords: object) -> dict[str, object]:
            data.clear()
            raise marshmallow.ValidationError("no")

    assert json_value('{"a":1}', fields=Emptying) != json_value('{"a":2}', fields=Emptying)


def test_a_schema_that_loads_models_is_an_error() -> None:
    """F39."""

    class ModelSchema(marshmallow.Schema):
        name = ma.String()

        @marshmallow.post_load
        def make(self, data: dict[str, str], **keywords: object) -> Opaque:
            return Opaque(data["name"])

    with pytest.raises(ConfigurationError, match=r"ModelSchema.*Opaque") as caught:
        json_value('{"name":"secret"}', fields=ModelSchema)
    assert "secret" not in str(caught.value)


def amount_of(request: flask.Request) -> object:
    return [request.get_json()["amount"], request.args.get("a")]


def test_a_callable_decides() -> None:
    """F29."""
    one = json_value('{"amount":1,"note":"x"}', fields=amount_of)
    assert json_value('{"amount":1.0,"note":"y"}', fields=amount_of) == one
    assert json_value('{"amount":2,"note":"x"}', fields=amount_of) != one


@pytest.mark.parametrize("result", [object(), {"a": Opaque("secret")}, {1, object()}, {"a": 1, 2: 3}, 1j], ids=repr)
def test_a_callable_with_a_result_that_is_no_json_is_an_error(result: object) -> None:
    """F39."""

    def choose(request: flask.Request) -> object:
        return result

    with pytest.raises(ConfigurationError, match="choose") as caught:
        value_of(b"x", fields=choose)
    assert "secret" not in str(caught.value)
    assert " at 0x" not in str(caught.value)


def test_a_callable_with_an_endless_result_is_an_error() -> None:
    endless: list[object] = []
    endless.append(endless)
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    results = [endless, deep]
    for _ in range(2):
        with pytest.raises(ConfigurationError):
            value_of(b"x", fields=lambda request: results.pop())
    assert not results
    while deep:  # or the interpreter would do it in one recursion
        deep = deep.pop()  # type: ignore[assignment]


def test_an_exception_of_a_callable_is_its_own() -> None:
    def choose(request: flask.Request) -> object:
        raise TypeError("mine")

    with pytest.raises(TypeError, match="mine"):
        value_of(b"x", fields=choose)


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass
class Point:
    x: int
    y: object


def test_python_values_that_differ_have_other_texts() -> None:
    values: list[object] = [
        None, True, 1, "1", 1.5, decimal.Decimal("1.5"), decimal.Decimal("1.25"), decimal.Decimal("NaN"), math.nan,
        datetime.date(2024, 5, 1), datetime.date(2024, 5, 2), datetime.datetime(2024, 5, 1),
        datetime.datetime(2024, 5, 1, tzinfo=datetime.timezone.utc), datetime.time(1), datetime.timedelta(1),
        datetime.timedelta(0, 1), uuid.UUID(int=1), str(uuid.UUID(int=1)), Colour.RED, Colour.BLUE, b"a", "a", b"b",
        {1}, [1], {"a": 1}, Point(1, 2), Point(1, None), decimal.Decimal("1" * 40), decimal.Decimal("1" * 39 + "2"),
    ]  # fmt: skip
    assert len({dump_value(value) for value in values}) == len(values)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (decimal.Decimal("1.50"), decimal.Decimal("1.5")),
        (decimal.Decimal("-0"), decimal.Decimal("0.00")),
        (decimal.Decimal("1E+2"), decimal.Decimal("100")),
        ({"a", "b", "c"}, {"c", "a", "b"}),
        (frozenset([1]), {1}),
        ({"a": 1, "b": 2.0}, {"b": 2, "a": 1}),
        ((1, 2), [1, 2]),
        (bytearray(b"a"), b"a"),
    ],
)
def test_python_values_that_are_equal_have_one_text(one: object, other: object) -> None:
    assert dump_value(one) == dump_value(other)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("amount", "list"),
        ([], "empty"),
        ([""], "empty"),
        ([1], "string"),
        (["/a~2"], "RFC 6901"),
        (["/a~"], "RFC 6901"),
        (True, "bool"),
        (1, "int"),
        (b"raw", "string"),
        ({"a": 1}, "dict"),
    ],
)
def test_other_fields_are_an_error(fields: object, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Fingerprinter(fields)  # type: ignore[arg-type]


# -- recipes and keys --


def recipe(fields: Fields = None, **keywords: object) -> str:
    return Fingerprinter(fields, **keywords).recipe_ids[0]  # type: ignore[arg-type]


def other_callable(request: flask.Request) -> object:
    return 1


class Callable1:
    def __call__(self, request: flask.Request) -> object:
        return 1


def test_other_ways_to_compare_are_other_recipes() -> None:
    class Longer(ChargeSchema):
        more = ma.String()

    recipes = [
        recipe(),
        recipe(False),
        recipe("raw"),
        recipe(["raw"]),
        recipe(["a"]),
        recipe(["a", "b"]),
        recipe(["/a/b"]),
        recipe(["a/b"]),
        recipe(ChargeSchema),
        recipe(ChargeSchema(only=["amount"])),
        recipe(ChargeSchema(exclude=["amount"])),
        recipe(ChargeSchema(unknown=marshmallow.RAISE)),
        recipe(ChargeSchema(partial=True)),
        recipe(ChargeSchema(partial=["amount"])),
        recipe(ChargeSchema(many=True)),
        recipe(Longer),
        recipe(amount_of),
        recipe(other_callable),
        recipe(Callable1()),
        recipe(form_field="key"),
        recipe(form_ignore=["other"]),
        recipe(hmac_keys=[b"k1"]),
        recipe(hmac_keys=[b"k2"]),
    ]
    assert len(set(recipes)) == len(recipes)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (["a", "b"], ["b", "a"]),
        (["a"], ("a", "a")),
        ({"a", "b"}, ["a", "b"]),
        (["a"], ["/a"]),
        (["a/b~"], ["/a~1b~0"]),
        (ChargeSchema, ChargeSchema()),
        (ChargeSchema(only=["amount", "day"]), ChargeSchema(only=["day", "amount"])),
        (amount_of, amount_of),
        (amount_of, functools.partial(amount_of)),
        (Callable1(), Callable1()),
    ],
)
def test_the_same_comparison_is_the_same_recipe(one: Fields, other: Fields) -> None:
    assert recipe(one) == recipe(other)
    assert len(recipe(one)) == 16


def test_the_order_of_names_does_not_count() -> None:
    document = '{"a":1,"b":2}'
    assert json_value(document, fields=["a", "b"]) == json_value(document, fields=["b", "/a"])


def test_every_fingerprint_key_gives_a_fingerprint_newest_first() -> None:
    plain = Fingerprinter()
    keyed = Fingerprinter(hmac_keys=[b"new", b"old"])
    rotated = Fingerprinter(hmac_keys=[b"old"])
    with APP.test_request_context("/", method="POST", data=b"x"):
        (bare,) = plain.compute(flask.request, endpoint_scope="s")
        new, old = keyed.compute(flask.request, endpoint_scope="s")
        assert rotated.compute(flask.request, endpoint_scope="s") == (old,)
    assert (new.recipe, old.recipe) == keyed.recipe_ids
    assert new.value == hmac.new(b"new", bytes.fromhex(bare.value), hashlib.sha256).hexdigest()
    assert len({bare.value, new.value, old.value}) == len({bare.recipe, new.recipe, old.recipe}) == 3
    assert all(len(fingerprint.value) == 64 for fingerprint in (bare, new, old))


SCRIPT = """
import flask, marshmallow
from flask_idempotent.request.fingerprint import Fingerprinter

class S(marshmallow.Schema):
    a = marshmallow.fields.Integer()
    b = marshmallow.fields.Raw()
    c = marshmallow.fields.Raw()

def choose(request):
    return {"set": {"x", "y", "z"}, "args": set(request.args)}

app = flask.Flask("app")
app.add_url_rule("/<x>/<y>", "e", methods=["POST"])
for fields in (None, False, "raw", {"a", "b", "c"}, S, S(only={"a", "b"}), S(exclude={"a", "b"}), choose):
    for keys in ((), (b"k1", b"k2")):
        body = '{"a": 1, "b": {"x": 1.5, "y": [1, 2]}, "c": null}'
        with app.test_request_context("/1/2?q=1&r=2&q=0", method="POST", data=body, content_type="application/json"):
            print(Fingerprinter(fields, hmac_keys=keys).compute(flask.request, endpoint_scope="s"))
"""


def test_fingerprints_are_equal_in_every_process() -> None:
    """F23."""
    root = Path(__file__).parents[2]

    def run(seed: str) -> str:
        environ = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)}
        done = subprocess.run([sys.executable, "-c", SCRIPT], env=environ, capture_output=True, text=True, check=True)
        return done.stdout

    outputs = [run(seed) for seed in ("1", "2", "3")]
    assert outputs[0].count("Fingerprint(") == 24
    assert outputs[0] == outputs[1] == outputs[2]


def test_the_value_is_part_of_the_stored_format() -> None:
    """A change here needs another version of the algorithm, or honest retries are refused after an upgrade."""
    parts = [b"POST", b"orders", b'{"id":7}', b'[["a","1"]]', b"json", b'{"x":1}']
    layout = b"flask-idempotent/fingerprint/1\0" + b"".join(b"%d:%s" % (len(part), part) for part in parts)
    value = json_value('{"x": 1.0}', path="/v1/orders/7?a=1")
    assert value == hashlib.sha256(layout).hexdigest()


# -- the body afterwards --

BIG = 5 * 1024 * 1024


def chunks(request: flask.Request) -> bytes:
    return b"".join(iter(lambda: request.stream.read(65536), b""))


READERS: dict[str, Callable[[flask.Request], bytes]] = {
    "stream": chunks,
    "get_data": lambda request: request.get_data(),
    "get_data(cache=False)": lambda request: request.get_data(cache=False),
    "wsgi.input": lambda request: request.environ["wsgi.input"].read(),
    "input_stream": lambda request: request.input_stream.read(),
    "twice": lambda request: request.get_data() and request.get_data(),
    "get_json": lambda request: (request.get_json(silent=True), request.get_data())[1],
}
BODIES = {
    "json": (b'{"a": 1}', JSON),
    "broken": (b'{"a": ', JSON),
    "binary": (os.urandom(BIG), "application/octet-stream"),
    "untyped": (b"a=1", None),
    "form": (b"a=1&b=2", FORM),
    "multipart": multipart(),
}
NARROWINGS: dict[str, Fields] = {
    "whole": None,
    "names": ["a"],
    "schema": ChargeSchema,
    "raw": "raw",
    "callable": lambda request: len(request.get_data()),
    "json callable": lambda request: request.get_json(silent=True),
    "lazy callable": lambda request: 1,
    "none": False,
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("body", "narrowing", "chunked"),
    [
        (body, narrowing, chunked)
        for body in BODIES
        for narrowing in NARROWINGS
        for chunked in (False, True)
        # Multipart of unknown length is parsed, never kept in memory.
        if not (chunked and body == "multipart" and narrowing in ("whole", "names", "schema"))
    ],
)
def test_the_view_reads_the_whole_body(body: str, narrowing: str, chunked: bool, reader: str) -> None:
    """F99."""
    data, content_type = BODIES[body]
    with APP.request_context(environ_of(data, content_type, chunked=chunked)):
        Fingerprinter(NARROWINGS[narrowing]).compute(flask.request, endpoint_scope="s")
        assert READERS[reader](flask.request) == data


@pytest.mark.parametrize("narrowing", ["whole", "names", "raw", "schema", "lazy callable", "none"])
@pytest.mark.parametrize("size", [10, BIG], ids=["small", "large"])
def test_the_view_reads_forms_and_files(narrowing: str, size: int) -> None:
    """F99."""
    content = os.urandom(size)
    data, content_type = multipart(content=content)
    with APP.test_request_context("/", method="POST", data=data, content_type=content_type):
        Fingerprinter(NARROWINGS[narrowing]).compute(flask.request, endpoint_scope="s")
        assert flask.request.form.to_dict(flat=False) == {"a": ["1"]}
        assert flask.request.files["up"].filename == "a.txt"
        assert flask.request.files["up"].read() == content
    with APP.test_request_context("/", method="POST", data=b"a=1&a=2", content_type=FORM):
        Fingerprinter(NARROWINGS[narrowing]).compute(flask.request, endpoint_scope="s")
        assert flask.request.form.getlist("a") == ["1", "2"]
        assert flask.request.values["a"] == "1"
        assert flask.request.data == b""  # as without us


@pytest.mark.parametrize("method", ["get_data", "form", "get_json"])
@pytest.mark.parametrize("body", BODIES)
def test_a_guard_may_have_read_the_body(body: str, method: str) -> None:
    """A CSRF check parses the form, a signature check reads the bytes: the fingerprint stays the same."""
    data, content_type = BODIES[body]
    whole = value_of(data, content_type)
    with APP.test_request_context("/", method="POST", data=data, content_type=content_type):
        if method == "form":
            _ = flask.request.form
        elif method == "get_json":
            flask.request.get_json(silent=True)
        else:
            flask.request.get_data()
        assert Fingerprinter().compute(flask.request, endpoint_scope="orders")[0].value == whole
        if body in ("form", "multipart"):
            assert flask.request.form["a"] == "1"
        else:
            assert flask.request.stream.read() == data


@pytest.mark.parametrize("fields", [None, ["a"], "raw", ChargeSchema], ids=str)
def test_a_body_that_is_gone_is_an_error(fields: Fields) -> None:
    """All bodies would look the same."""
    with APP.test_request_context("/", method="POST", data=b'{"a":1}', content_type=JSON):
        flask.request.stream.read()
        with pytest.raises(ConfigurationError, match="consumed"):
            Fingerprinter(fields).compute(flask.request, endpoint_scope="s")
        Fingerprinter(False).compute(flask.request, endpoint_scope="s")


@pytest.mark.parametrize("chunked", [False, True])
def test_the_bytes_of_a_form_that_was_parsed_are_an_error(chunked: bool) -> None:
    with APP.request_context(environ_of(b"a=1", FORM, chunked=chunked)):
        assert flask.request.form["a"] == "1"
        with pytest.raises(ConfigurationError, match="consumed"):
            Fingerprinter("raw").compute(flask.request, endpoint_scope="s")


def test_input_without_length_or_end_is_left_alone() -> None:
    """Flask reads nothing of it, and what the server put there stays."""
    environ = environ_of(b"abc", None)
    del environ["CONTENT_LENGTH"]
    with APP.request_context(environ):
        Fingerprinter().compute(flask.request, endpoint_scope="s")
        assert flask.request.input_stream.read() == b"abc"


def test_a_file_that_was_read_halfway_is_hashed_and_rewound() -> None:
    data, content_type = multipart(content=LARGE)
    whole = value_of(data, content_type)
    with APP.test_request_context("/", method="POST", data=data, content_type=content_type):
        upload: FileStorage = flask.request.files["up"]
        upload.read(1000)
        assert Fingerprinter().compute(flask.request, endpoint_scope="orders")[0].value == whole
        assert upload.read() == LARGE


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("fields", [None, ["a"], "raw"], ids=str)
def test_the_limit_of_the_app_is_the_apps_own_error(body: str, fields: Fields) -> None:
    app = make_app()
    data, content_type = BODIES[body]
    app.config["MAX_CONTENT_LENGTH"] = len(data) - 1
    with pytest.raises(RequestEntityTooLarge):
        value_of(data, content_type, app=app, fields=fields)
    app.config["MAX_CONTENT_LENGTH"] = len(data)
    assert value_of(data, content_type, app=app, fields=fields) == value_of(data, content_type, fields=fields)


def test_limits_of_forms_are_left_to_the_view() -> None:
    """Flask's limits for fields and parts don't make a refusal of ours where the view wouldn't parse the form."""

    class Limited(flask.Request):
        max_form_memory_size = 1
        max_form_parts = 1

    app = make_app()
    app.request_class = Limited
    data, content_type = multipart(fields={"a": "123"})
    with app.test_request_context("/", method="POST", data=data, content_type=content_type):
        Fingerprinter().compute(flask.request, endpoint_scope="s")
        with pytest.raises(RequestEntityTooLarge):
            _ = flask.request.form


@pytest.mark.skipif(vars(flask.Request)["max_content_length"].fset is None, reason="Flask 3.1 and newer")
def test_a_limit_that_the_view_sets_still_holds() -> None:
    with APP.request_context(environ_of(b"x" * 100, None)):
        Fingerprinter().compute(flask.request, endpoint_scope="s")
        flask.request.max_content_length = 10
        with pytest.raises(RequestEntityTooLarge):
            flask.request.get_data()
