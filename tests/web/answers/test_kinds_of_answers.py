"""Whatever a view can answer with, the repeat is told the same: status, body and the headers that are kept."""

import gc
import io
import random
from pathlib import Path

import pytest
from flask import Response, abort, redirect, request, send_file, send_from_directory, stream_with_context

from flask_idempotent import idempotent

from .. import kit
from .pairs import needs_proc, open_files, serve, twice

BINARY = random.Random(7).randbytes(1024 * 1024)


def linked():
    response = Response("ok")
    response.headers.add("Link", "</a>; rel=next")
    response.headers.add("X-Between", "1")
    response.headers.add("Link", "</b>; rel=last")
    return response


def unsized():
    def chunks():
        yield "one "
        yield "two "
        yield "three"

    return chunks()


ANSWERS = {
    "1 MiB of random bytes": lambda: Response(BINARY, 201, content_type="application/octet-stream"),
    "1 MiB in pieces": lambda: Response([BINARY[:7], BINARY[7:500_000], BINARY[500_000:]]),
    "204": lambda: ("", 204),
    "204 with a type": lambda: ("", 204, {"Content-Type": "text/html", "X-Done": "yes"}),
    "204 from a stream": lambda: Response(iter(()), 204),
    "303": lambda: redirect("/orders/1?from=form#end", 303),
    "303, relative and not ASCII": lambda: Response("", 303, {"Location": "orders/grün"}),
    "two links": linked,
    "headers in latin-1": lambda: (
        "ok",
        200,
        {"X-Name": "Grün", "Content-Disposition": 'attachment; filename="ä.txt"'},
    ),
    "headers that are empty": lambda: ("ok", 200, {"X-Nothing": "", "X-Blank": " "}),
    "a generator": unsized,
    "a generator with a length": lambda: Response(unsized(), 200, {"Content-Length": "13"}),
    "a stream with the request": lambda: Response(stream_with_context(request.path for _ in range(3))),
    "a BytesIO": lambda: send_file(io.BytesIO(b"\0\1\2" * 1000), mimetype="application/pdf", download_name="o.pdf"),
    "0": lambda: Response("0", content_type="application/json"),
    "null": lambda: Response("null", content_type="application/json"),
    "an error of the view": lambda: abort(410),
    "an error with a body": lambda: abort(422, "amount: not a number"),
    "a status of its own": lambda: Response("ok", "299 Very Own"),
    "an encoding": lambda: Response(b"\x1f\x8b", headers={"Content-Encoding": "gzip"}),
    "cookies beside the rest": lambda: ("ok", 200, [("X-A", "1"), ("Set-Cookie", "a=b"), ("X-A", "2")]),
}


@pytest.mark.parametrize("make", ANSWERS.values(), ids=ANSWERS)
def test_the_first_is_the_second(make_app, effects, make):
    """F45, F48, F49, F107"""
    first, second = twice(make_app(MAX_BODY=2**20), effects, make)
    kit.assert_kept(first)
    second.headers.extend((name, value) for name, value in first.headers if name == "Set-Cookie")
    assert first.headers.getlist("Set-Cookie") == second.headers.getlist("Set-Cookie")
    for answer in (first, second):
        answer.headers.remove("Set-Cookie")
    kit.assert_replay(first, second)
    assert second.headers.get("Location") == first.headers.get("Location")


def test_the_bytes_are_the_views(make_app, effects):
    """Equal is not enough: both are what the view made."""
    _, second = twice(make_app(), effects, ANSWERS["1 MiB of random bytes"])
    assert second.get_data() == BINARY
    assert second.headers["Content-Length"] == str(len(BINARY))


def test_a_header_that_is_not_ascii_on_both(make_app, effects):
    first, second = twice(make_app(), effects, ANSWERS["headers in latin-1"])
    assert first.headers["X-Name"] == second.headers["X-Name"] == "Grün"


def test_an_answer_of_a_handler(make_app, effects):
    """F93"""

    class Declined(Exception):
        pass

    app = make_app()
    app.register_error_handler(Declined, lambda error: ({"declined": "card"}, 402, {"X-Reason": "card"}))

    def fail():
        raise Declined

    first, second = twice(app, effects, fail)
    assert first.get_json() == {"declined": "card"}
    kit.assert_replay(first, second)


@pytest.fixture
def picture(tmp_path):
    path = tmp_path / "receipt.png"
    path.write_bytes(BINARY[:300_000])
    return path


FILES = {
    "a path": lambda path: send_file(path),
    "a path, as a download": lambda path: send_file(path, as_attachment=True, download_name="Grün.png"),
    "a path without etag": lambda path: send_file(path, etag=False, conditional=False, max_age=60),
    "from a directory": lambda path: send_from_directory(path.parent, path.name),
    "an open file": lambda path: send_file(path.open("rb"), mimetype="image/png"),
    "an open file as the body": lambda path: Response(path.open("rb"), direct_passthrough=True),
}


@needs_proc
@pytest.mark.parametrize("bound", [2**20, 100_000], ids=["kept", "too large"])
@pytest.mark.parametrize("make", FILES.values(), ids=FILES)
def test_a_file(make_app, effects, picture, make, bound):
    """F107: no error of a passed-through body, the same bytes again, every handle closed."""
    send = serve(make_app(MAX_BODY=bound, INLINE_BODY=1000), effects, lambda: make(picture))
    with send() as first:
        assert first.get_data() == BINARY[:300_000]
        kit.assert_kept(first)
    gc.collect()
    assert open_files(picture) == 0
    picture.write_bytes(b"another picture")
    second = send()
    if bound > 300_000:
        kit.assert_replay(first, second)
    else:
        assert kit.assert_problem(second, "response-unavailable", more={"original_status"})["original_status"] == 200
    assert open_files(picture) == 0
    assert effects.runs == 1


def test_a_file_that_is_not_there(make_app, effects):
    """``send_from_directory`` aborts with 404, an answer like any other."""
    first, second = twice(make_app(), effects, lambda: send_from_directory(Path(__file__).parent, "nothing"))
    assert first.status_code == 404
    kit.assert_replay(first, second)


# What isn't protected


def test_head_and_options_are_untouched(make_app, effects, store):
    """F105: neither needs a key, neither claims one, and both are what they are without us."""
    app, bare = make_app(), make_app("bare")

    def make():
        def view():
            effects.add()
            return "body", 200, {"X-Own": "1"}

        return view

    for each, mark in ((app, idempotent), (bare, lambda view: view)):
        each.add_url_rule("/x", "x", mark(make()), methods=["GET", "POST"])
        each.add_url_rule("/y", "y", mark(make()), methods=["POST", "OPTIONS"], provide_automatic_options=False)
        each.add_url_rule("/z", "z", mark(make()), methods=["POST", "HEAD"])
    for headers in ({}, kit.keyed()):
        for method, path in [("HEAD", "/x"), ("OPTIONS", "/x"), ("GET", "/x"), ("OPTIONS", "/y"), ("HEAD", "/z")]:
            ours, theirs = (each.test_client().open(path, method=method, headers=headers) for each in (app, bare))
            assert (ours.status, ours.get_data()) == (theirs.status, theirs.get_data())
            assert sorted(ours.headers) == sorted(theirs.headers)
    assert kit.our_keys(store) == []
    assert effects.runs == 16
    assert app.test_client().post("/x").status_code == 400
    assert effects.runs == 16
