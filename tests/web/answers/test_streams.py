"""Streams: read to the bound, given whole, closed once, and never kept by half. F48, F95, F96"""

import itertools

import pytest
from flask import Response, request, session, stream_with_context
from werkzeug.test import EnvironBuilder

from flask_idempotent import idempotent

from .. import kit
from .pairs import Source, serve, twice

SMALL = {"MAX_BODY": 500, "INLINE_BODY": 500}


def assert_done(answer, status=200, location=None):
    """Done, and the answer is not there."""
    more = {"original_status": status, **({"location": location} if location else {})}
    problem = kit.assert_problem(answer, "response-unavailable", more=more)
    assert {name: problem[name] for name in more} == more


def open_body(app, key):
    """What a server has in hand: the app's iterable, to be read and closed."""
    environ = EnvironBuilder("/x", method="POST", headers=kit.keyed(key)).get_environ()
    return app(environ, lambda status, headers, exc_info=None: None)


@pytest.mark.parametrize("settings", [{}, SMALL], ids=["kept", "too large"])
@pytest.mark.parametrize("chunks_read", [10, 2, 0], ids=["stays", "leaves at chunk 2", "leaves at once"])
def test_closed_once(make_app, effects, settings, chunks_read):
    """``close`` of the source and every ``call_on_close``: once, whether the client stays to the end or not."""
    source, closed, key = Source(), [], kit.new_key()
    app = make_app(**settings)

    @app.post("/x")
    @idempotent
    def view():
        effects.add()
        response = Response(source, 201)
        response.call_on_close(lambda: closed.append(1))
        response.call_on_close(lambda: closed.append(2))
        return response

    body = open_body(app, key)
    assert b"".join(itertools.islice(body, chunks_read)) == source.whole[: 100 * chunks_read]
    assert (source.closed, closed) == (0, [])
    body.close()
    assert source.closed == 1
    assert sorted(closed) == [1, 2]
    second = app.test_client().post("/x", headers=kit.keyed(key))
    if settings:
        assert_done(second, 201)
    else:
        assert (second.status_code, second.get_data()) == (201, source.whole)
        assert second.headers[kit.REPLAYED] == "true"
    assert effects.runs == 1
    assert (source.closed, sorted(closed)) == (1, [1, 2])


def test_a_sequence_is_closed_once(make_app, effects):
    closed = []

    def make():
        response = Response("whole")
        response.call_on_close(lambda: closed.append(1))
        return response

    first, second = twice(make_app(), effects, make)
    first.close()
    kit.assert_replay(first, second)
    second.close()
    assert closed == [1]


@pytest.mark.parametrize("breaks_at", [0, 3])
def test_a_stream_that_breaks_off_within_the_bound(make_app, effects, breaks_at):
    """F95: the client gets a 500, nothing of the half is kept, and the repeat hears that it is done, and where."""
    source, closed = Source(breaks_at=breaks_at), []

    def make():
        response = Response(source, 201, {"Location": "/orders/1"})
        response.call_on_close(lambda: closed.append(1))
        return response

    send = serve(make_app(), effects, make)
    first = send()
    assert first.status_code == 500
    assert source.whole[:100] not in first.get_data()
    kit.assert_not_kept(first)
    assert (source.closed, closed) == (1, [1])
    for _ in range(2):
        assert_done(send(), 201, "/orders/1")
    assert effects.runs == 1


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt()], ids=repr)
def test_a_stream_that_is_ended(make_app, effects, error):
    """A worker's time-out inside of the body: the source is closed all the same, and the work counts as done."""
    source = Source(breaks_at=2, error=error)
    send = serve(make_app(), effects, lambda: Response(source))
    with pytest.raises(type(error)):
        send()
    assert source.closed == 1
    assert_done(send())
    assert effects.runs == 1


def test_a_stream_that_breaks_off_beyond_the_bound(make_app, effects, store):
    """The first client sees it break, as without us. What the store holds says "done", not "this is all"."""
    source, key = Source(breaks_at=8), kit.new_key()
    app = make_app(**SMALL)

    @app.post("/x")
    @idempotent
    def view():
        effects.add()
        return Response(source, 201, {"Location": "/orders/1"})

    body, seen = open_body(app, key), []
    with pytest.raises(LookupError):
        seen.extend(body)
    body.close()
    assert b"".join(seen) == source.whole[:800]
    assert source.closed == 1
    assert_done(app.test_client().post("/x", headers=kit.keyed(key)), 201, "/orders/1")
    assert effects.runs == 1
    assert source.left[0] not in kit.everything(store)


def test_a_close_that_fails(make_app, effects):
    """The app's own bug at the end of an answer that broke off: still one 500, still "done"."""

    class Broken(Source):
        def close(self):
            super().close()
            raise OSError("can't close")

    source = Broken(breaks_at=2)
    send = serve(make_app(), effects, lambda: Response(source))
    assert send().status_code == 500
    assert source.closed == 1
    assert_done(send())
    assert effects.runs == 1


@pytest.mark.parametrize("settings", [{}, SMALL], ids=["kept", "too large"])
def test_a_stream_with_its_request(make_app, effects, settings):
    """F95: request and session are there in every chunk, before and behind the bound, and gone after it."""
    app = make_app(config={"SECRET_KEY": "secret"}, **settings)

    @app.post("/x")
    @idempotent
    def view():
        effects.add()
        session["name"] = "ann"

        @stream_with_context
        def chunks():
            for number in range(100):
                yield f"{number} {request.headers['X-Own']} {session['name']}\n"

        return Response(chunks())

    client, headers = app.test_client(), kit.keyed(X_Own="mine")
    expected = "".join(f"{number} mine ann\n" for number in range(100))
    with client.post("/x", headers=headers) as first:
        assert first.get_data(as_text=True) == expected
    second = client.post("/x", headers=headers)
    if settings:
        assert_done(second)
    else:
        assert (second.status_code, second.get_data(as_text=True)) == (200, expected)
        assert second.headers[kit.REPLAYED] == "true"
    assert effects.runs == 1
    assert not request


def test_a_stream_has_its_length(make_app, effects):
    """A body that was read whole can say how long it is; one that wasn't, says what the view said."""
    first, second = twice(make_app(), effects, lambda: Response(Source()))
    assert first.headers["Content-Length"] == second.headers["Content-Length"] == "1000"


def test_a_hundred_chunks(make_app, effects):
    """F48"""
    first, second = twice(make_app(), effects, lambda: Response(f"{number};" for number in range(100)))
    kit.assert_replay(first, second)
    assert second.get_data(as_text=True) == "".join(f"{number};" for number in range(100))


def test_a_stream_whose_lease_was_lost(make_app, effects, store):
    """Where the winner's answer takes its place, the loser's is closed too. F96"""
    source = Source()
    app = make_app(HEARTBEAT=False, **kit.SHORT)

    @app.post("/x")
    @idempotent
    def view():
        if effects.add() > 1:
            return "the winner's"
        winner = kit.until(lambda: app.test_client().post("/x", headers=headers))
        assert winner.get_data(as_text=True) == "the winner's"
        return Response(source)

    headers = kit.keyed()
    answer = app.test_client().post("/x", headers=headers)
    assert answer.get_data(as_text=True) == "the winner's"
    assert answer.headers[kit.REPLAYED] == "true"
    assert source.closed == 1
    assert effects.runs == 2
