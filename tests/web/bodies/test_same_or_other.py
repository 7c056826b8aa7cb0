"""What makes a repeat, and what makes another request: one changed field, file or byte is 422, a new boundary isn't."""

import pytest

from flask_idempotent import idempotent

from .. import kit
from .samples import ORDER, Sample, multipart

FORM = "application/x-www-form-urlencoded"
LARGE = [*ORDER, ("scan", bytes(range(256)) * 5000, "scan.tif", "image/tiff")]


def changed(parts, number, *part):
    return [part if place == number else each for place, each in enumerate(parts)]


PICTURE = ORDER[3][1]


def flipped(parts, number):
    """One bit of one file."""
    name, value, *file = parts[number]
    middle = len(value) // 2
    return changed(parts, number, name, value[:middle] + bytes([value[middle] ^ 1]) + value[middle + 1 :], *file)


SAME = {
    "JSON, spaced and sorted": (
        Sample(b'{"a":1,"b":2}', "application/json"),
        Sample(b'{ "b":2, "a":1.0 }', "application/json"),
    ),
    "JSON, its charset named": (Sample(b"[1]", "application/json"), Sample(b"[1]", "application/json; charset=utf-8")),
    "form, sorted by name": (Sample(b"a=1&b=2", FORM), Sample(b"b=2&a=1", FORM)),
    "form, escaped otherwise": (Sample(b"a=b+c", FORM), Sample(b"%61=b%20c", FORM)),
    "form, a fresh token": (Sample(b"a=1&csrf_token=x", FORM), Sample(b"csrf_token=y&a=1", FORM)),
    "multipart, a new boundary": (multipart(ORDER), multipart(ORDER, "another-frontier")),
    "multipart, a fresh token": (
        multipart([*ORDER, ("csrf_token", "x")]),
        multipart([("csrf_token", "y"), *ORDER], "another-frontier"),
    ),
    "large multipart, a new boundary": (multipart(LARGE), multipart(LARGE, "another-frontier")),
    "empty": (Sample(b"", None), Sample(b"", None)),
}
OTHER = {
    "JSON, a value": (Sample(b'{"a":1}', "application/json"), Sample(b'{"a":2}', "application/json")),
    "JSON, missing and null": (Sample(b"{}", "application/json"), Sample(b'{"a":null}', "application/json")),
    "malformed JSON, a byte": (Sample(b'{"a":1', "application/json"), Sample(b'{"a":2', "application/json")),
    "JSON and text": (Sample(b"[ 1]", "application/json"), Sample(b"[ 1]", "text/plain")),
    "form, a value": (Sample(b"a=1", FORM), Sample(b"a=2", FORM)),
    "form, one value more": (Sample(b"a=1", FORM), Sample(b"a=1&a=1", FORM)),
    "form, order of equal names": (Sample(b"a=1&a=2", FORM), Sample(b"a=2&a=1", FORM)),
    "form, a field without value": (Sample(b"a=1", FORM), Sample(b"a=1&b=", FORM)),
    "form that isn't UTF-8, a byte": (Sample(b"a=\xfc", FORM), Sample(b"a=\xfd", FORM)),
    "multipart, a field": (multipart(ORDER), multipart(changed(ORDER, 0, "item", "coffee"))),
    "multipart, a field's name": (multipart(ORDER), multipart(changed(ORDER, 0, "object", "tea"))),
    "multipart, a bit of a file": (multipart(ORDER), multipart(flipped(ORDER, 3))),
    "multipart, a file's name": (
        multipart(ORDER),
        multipart(changed(ORDER, 3, "picture", PICTURE, "b.png", "image/png")),
    ),
    "multipart, a file's type": (
        multipart(ORDER),
        multipart(changed(ORDER, 3, "picture", PICTURE, "a.png", "image/gif")),
    ),
    "multipart, a file for a field": (
        multipart(ORDER),
        multipart(changed(ORDER, 0, "item", "tea", "tea.txt", "text/plain")),
    ),
    "multipart, a file less": (multipart(ORDER), multipart(ORDER[:3])),
    "multipart without boundary, a byte": (
        multipart(ORDER)._replace(content_type="multipart/form-data"),
        multipart(changed(ORDER, 0, "item", "Tea"))._replace(content_type="multipart/form-data"),
    ),
    "large multipart, a bit of a file": (multipart(LARGE), multipart(flipped(LARGE, 4))),
    "large multipart, a field": (multipart(LARGE), multipart(changed(LARGE, 0, "item", "coffee"))),
    "large multipart without boundary, a byte": (
        multipart(LARGE)._replace(content_type="multipart/form-data"),
        multipart(changed(LARGE, 0, "item", "Tea"))._replace(content_type="multipart/form-data"),
    ),
    "binary, a byte more": (Sample(b"\0", "application/octet-stream"), Sample(b"\0\0", "application/octet-stream")),
    "empty and not": (Sample(b"", None), Sample(b"x", None)),
}


def both(app, effects, first, second):
    app.add_url_rule("/x", "x", idempotent(kit.answering(effects, ("made", 201))), methods=["POST"])
    client, headers = app.test_client(), kit.keyed()
    return [client.post("/x", data=data, content_type=kind, headers=headers) for data, kind in (first, second)]


@pytest.mark.parametrize(("first", "second"), SAME.values(), ids=SAME)
def test_the_same(make_app, effects, first, second):
    answers = both(make_app(), effects, first, second)
    assert answers[0].status_code == 201
    kit.assert_replay(*answers)
    assert effects.runs == 1


@pytest.mark.parametrize(("first", "second"), OTHER.values(), ids=OTHER)
@pytest.mark.parametrize("way", ["there", "back"])
def test_another(make_app, effects, first, second, way):
    answers = both(make_app(), effects, *((first, second) if way == "there" else (second, first)))
    assert answers[0].status_code == 201
    kit.assert_problem(answers[1], "mismatch")
    assert effects.runs == 1


def test_the_key_of_a_form(make_app, effects):
    """1.5: the hidden field is the key, also of a large upload, and counts for nothing else."""
    app = make_app()
    app.add_url_rule("/x", "x", idempotent(kit.answering(effects, ("made", 201))), methods=["POST"])
    client = app.test_client()
    for number, parts in enumerate((ORDER, LARGE), 1):
        hidden = ("idempotency_key", kit.new_key())
        sends = [multipart([hidden, *parts]), multipart([*parts, hidden], "another-frontier")]
        first, second = (client.post("/x", data=data, content_type=kind) for data, kind in sends)
        kit.assert_replay(first, second)
        data, kind = multipart([hidden, *changed(parts, 0, "item", "coffee")])
        kit.assert_problem(client.post("/x", data=data, content_type=kind), "mismatch")
        assert effects.runs == number
