"""E. What the client gets the second time is what it got the first time, minus what must not be repeated.

F45: ``tests/web/test_fidelity.py::test_status_body_and_type``.
F49: ``test_falsy_bodies``, ``test_what_flask_makes_json_of`` and ``test_no_content``, there.
F51: ``test_what_is_kept_and_what_is_not`` and ``test_the_session_of_the_moment``, there.
F55: ``tests/web/frameworks/test_compress.py``.
F56: ``test_orders`` in ``tests/web/frameworks/test_smorest.py``, ``test_apiflask.py`` and ``test_restx.py``.
F58: ``tests/web/test_fidelity.py::test_the_original_not_the_state_of_today``.
"""

import contextlib
import http.client
import json
import urllib.parse
from email.utils import parsedate_to_datetime

import pytest
from flask import Response, stream_with_context

from flask_idempotent import idempotent, signals
from tests.harness import GunicornApp
from tests.web import kit
from tests.web.kit import keyed

CHUNKS = [f"chunk {number:03}\n".encode() * 20 for number in range(100)]


@pytest.mark.parametrize("kind", ["generator", "stream with context", "list", "bound"])
def test_a_stream_of_a_hundred_chunks(make_app, effects, kind):
    """F48: all of it, twice; or, over the bound, all of it and then an explicit answer. Never an empty 200."""
    app = make_app(MAX_BODY=1000, INLINE_BODY=1000) if kind == "bound" else make_app()
    sent = []

    def chunks():
        for chunk in CHUNKS:
            sent.append(len(chunk))
            yield chunk

    @app.post("/report")
    @idempotent
    def report():
        effects.add()
        make = {"list": list, "stream with context": stream_with_context}.get(kind, iter)
        return Response(make(chunks()), 201, content_type="text/csv")

    client, headers = app.test_client(), keyed()
    first = client.post("/report", headers=headers)
    assert (first.status_code, first.get_data()) == (201, b"".join(CHUNKS))
    assert len(sent) == 100
    second = client.post("/report", headers=headers)
    if kind == "bound":
        problem = kit.assert_problem(second, "response-unavailable", more={"original_status"})
        assert problem["original_status"] == 201
    else:
        kit.assert_replay(first, second)
        assert second.get_data() == b"".join(CHUNKS)
    assert (len(sent), effects.runs) == (100, 1)


@pytest.mark.parametrize("answer", [("", 204), ("made", 200), ("[]", 200), ("", 303)], ids=["204", "200", "[]", "303"])
def test_every_replay_is_told_of_once(make_app, effects, answer):
    """F50: an empty answer is no missing answer. What a receiver raises goes no further."""
    app = make_app()
    app.add_url_rule("/x", "x", idempotent(scope="x.make")(kit.answering(effects, answer)), methods=["POST"])
    told = []

    def note(sender, **arguments):
        told.append((sender, arguments))
        raise LookupError("a receiver's own bug")

    client, headers = app.test_client(), keyed()
    with signals.replayed.connected_to(note, app):
        first = client.post("/x", headers=headers)
        assert told == []
        for times in (1, 2, 3):
            kit.assert_replay(first, client.post("/x", headers=headers))
            assert len(told) == times
    sender, arguments = told[0]
    assert sender is app
    assert (arguments["scope"], arguments["state"], arguments["attempt"]) == ("x.make", "succeeded", 1)
    assert 0 < len(arguments["digest"]) < 64
    assert effects.runs == 1


SOURCE = """
import json, os
from flask import Flask, Response
from flask_idempotent import Idempotent, idempotent

app = Flask(__name__)
app.config.update(json.loads(os.environ["SETTINGS"]))
Idempotent(app)
runs = []

@app.post("/x")
@idempotent
def view():
    runs.append(1)
    hop = {"Connection": "close", "Keep-Alive": "timeout=1", "Trailer": "X-Sum", "Upgrade": "h2c", "TE": "trailers"}
    moment = {"Content-Length": "9", "Date": "Thu, 01 Jan 1970 00:00:00 GMT", "X-Run": len(runs)}
    return Response("made whole", 201, {**hop, **moment})
"""


def test_framing_is_of_the_moment(redis_url, store):
    """F52: over one HTTP/1.1 connection that stays open: the length is right, the date is today's, nothing hangs."""
    env = {"SETTINGS": json.dumps({"IDEMPOTENT_REDIS_URL": redis_url})}
    with GunicornApp(SOURCE, workers=1, threads=2, env=env) as server:
        headers = keyed()
        host = urllib.parse.urlsplit(server.url).netloc
        with contextlib.closing(http.client.HTTPConnection(host, timeout=kit.WAIT_S)) as connection:
            connection.request("POST", "/x", headers=headers)
            first = connection.getresponse()
            first.read()
        with contextlib.closing(http.client.HTTPConnection(host, timeout=kit.WAIT_S)) as connection:
            sockets = set()
            for _ in range(3):
                connection.request("POST", "/x", headers=headers)
                replay = connection.getresponse()
                sockets.add(connection.sock)
                assert (replay.status, replay.read(), replay.headers["X-Run"]) == (201, b"made whole", "1")
                assert replay.headers.get_all("Content-Length") == ["10"]
                assert [
                    name for name in ("Trailer", "Upgrade", "TE", "Transfer-Encoding") if name in replay.headers
                ] == []
                (date,) = replay.headers.get_all("Date")
                assert parsedate_to_datetime(date).year > 2000
            assert len(sockets) == 1
    record = kit.the_record(store)
    assert b"1970" not in record["headers"]
    assert b"trailers" not in record["headers"]
