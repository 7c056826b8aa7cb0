"""A retry is no new question: what it says of caches and ranges turns a replay into nothing else. F107"""

import io

import pytest
from flask import Response, make_response, request, send_file
from werkzeug.http import http_date

from .. import kit
from .pairs import serve

WHOLE = bytes(range(200))


def file():
    return send_file(io.BytesIO(WHOLE), mimetype="image/png", etag="v1", last_modified=1_000_000_000)


def tagged():
    response = make_response(WHOLE)
    response.set_etag("v1")
    response.last_modified = 1_000_000_000
    response.accept_ranges = "bytes"
    return response


def conditional():
    return tagged().make_conditional(request, accept_ranges=True, complete_length=len(WHOLE))


ASKED = {
    "If-None-Match": {"If_None_Match": '"v1"'},
    "If-None-Match: *": {"If_None_Match": "*"},
    "If-Modified-Since": {"If_Modified_Since": http_date(1_900_000_000)},
    "If-Match": {"If_Match": '"v0"'},
    "Range": {"Range": "bytes=10-19"},
    "Range, If-Range": {"Range": "bytes=10-19", "If_Range": '"v1"'},
    "Range beyond the end": {"Range": "bytes=1000-2000"},
}


@pytest.mark.parametrize("methods", [{"POST"}, {"PUT"}], ids=str)
@pytest.mark.parametrize("make", [file, tagged, conditional])
@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_a_retry_that_asks_otherwise(make_app, effects, make, asked, methods):
    send = serve(make_app(), effects, make, methods=methods)
    (method,) = methods
    first = send(method)
    assert (first.status_code, first.get_data()) == (200, WHOLE)
    kit.assert_replay(first, send(method, **asked))
    kit.assert_replay(first, send(method))
    assert effects.runs == 1


@pytest.mark.parametrize(("asked", "status", "body"), [("If-None-Match", 304, b""), ("Range", 206, WHOLE[10:20])])
def test_a_view_that_answers_the_condition_itself(make_app, effects, asked, status, body):
    """What the first was told is the answer, a part or "not modified" too, and the replay is that."""

    def make():
        # Werkzeug looks at conditions of GET and HEAD alone.
        environ = {**request.environ, "REQUEST_METHOD": "GET"}
        return tagged().make_conditional(environ, accept_ranges=True, complete_length=len(WHOLE))

    send = serve(make_app(), effects, make)
    first = send(**ASKED[asked])
    assert (first.status_code, first.get_data()) == (status, body)
    for headers in (ASKED[asked], {}, {"Range": "bytes=0-1"}):
        kit.assert_replay(first, send(**headers))
    assert effects.runs == 1


def test_a_part_by_the_views_own_hand(make_app, effects):
    send = serve(make_app(), effects, lambda: Response(WHOLE[:5], 206, {"Content-Range": "bytes 0-4/200"}))
    first, second = send(), send()
    kit.assert_replay(first, second)
    assert second.headers["Content-Range"] == "bytes 0-4/200"


def test_a_hook_of_the_app_that_makes_all_conditional(make_app, effects):
    """The app's own hook applies to replays as to all answers; on a POST it changes nothing, as Werkzeug has it."""
    app = make_app()

    @app.after_request
    def condition(response):
        response.add_etag()
        return response.make_conditional(request, accept_ranges=True, complete_length=len(WHOLE))

    send = serve(app, effects, lambda: WHOLE)
    first = send()
    kit.assert_replay(first, send(If_None_Match=first.headers["ETag"], Range="bytes=0-1"))
    assert effects.runs == 1
