"""Flask-Compress: what is kept is what the view said; each client gets the coding that it asked for. F55"""

import gzip

import pytest
from flask import Flask, Response
from flask_compress import Compress

from flask_idempotent import Idempotent, idempotent
from tests.web import kit
from tests.web.kit import keyed

TEXT = "order " * 500
GZIP, PLAIN = {"Accept-Encoding": "gzip"}, {"Accept-Encoding": "identity"}


def text():
    return Response(TEXT, 201, content_type="text/html; charset=utf-8")


def with_etag():
    response = text()
    response.set_etag("v1")
    return response


def stream():
    return Response((TEXT[at : at + 100] for at in range(0, len(TEXT), 100)), 201, content_type="text/html")


def gone():
    return Response(TEXT, 410, content_type="text/html")


def build(redis_url, effects, place, answer) -> Flask:
    app = kit.bare_app(redis_url)
    compress = Compress()
    view = idempotent(counted(effects, answer))
    if place == "before":
        compress.init_app(app)
    Idempotent(app)
    if place == "after":
        compress.init_app(app)
    if place == "decorator":
        app.config["COMPRESS_REGISTER"] = False
        compress.init_app(app)
        view = compress.compressed()(view)
    app.post("/orders", endpoint="orders")(view)
    return app


def counted(effects, answer):
    def view():
        effects.add()
        return answer()

    return view


def assert_whole(response, accepts, etag):
    coded = response.headers.getlist("Content-Encoding")
    assert coded == (["gzip"] if accepts is GZIP and response.status_code < 300 else [])
    data = response.get_data()
    assert (gzip.decompress(data) if coded else data).decode() == TEXT
    assert response.headers.getlist("Content-Length") == [str(len(data))]
    tag = response.get_etag()[0]
    assert (tag or "").split(":")[0] == ("v1" if etag else "")
    assert bool(coded) is ((tag or "").endswith("gzip")) or not etag
    assert sum("accept-encoding" in value.lower() for value in response.headers.getlist("Vary")) <= 1


@pytest.mark.parametrize("order", [(GZIP, PLAIN, GZIP), (PLAIN, GZIP, PLAIN)], ids=["gzip first", "identity first"])
@pytest.mark.parametrize("answer", [text, with_etag, stream, gone])
@pytest.mark.parametrize("place", ["before", "after", "decorator"])
def test_each_client_gets_its_coding(redis_url, store, effects, place, answer, order):
    client, headers = build(redis_url, effects, place, answer).test_client(), keyed()
    answers = [client.post("/orders", headers={**headers, **accepts}) for accepts in order]
    for response, accepts in zip(answers, order, strict=True):
        assert response.status_code == (410 if answer is gone else 201)
        assert_whole(response, accepts, etag=answer is with_etag)
    assert [kit.REPLAYED in response.headers for response in answers] == [False, True, True]
    assert kit.the_record(store)["body"] == TEXT.encode()
    assert effects.runs == 1


def test_what_a_view_compressed_itself_stays_so(redis_url, effects):
    packed = gzip.compress(TEXT.encode(), mtime=0)

    def answer():
        return Response(packed, 201, {"Content-Encoding": "gzip"}, content_type="text/html")

    client, headers = build(redis_url, effects, "after", answer).test_client(), {**keyed(), **GZIP}
    first = client.post("/orders", headers=headers)
    assert first.get_data() == packed
    kit.assert_replay(first, client.post("/orders", headers=headers))


@pytest.mark.parametrize("place", ["before", "after", "decorator"])
def test_our_own_answers(redis_url, effects, place):
    client = build(redis_url, effects, place, text).test_client()
    kit.assert_problem(client.post("/orders", headers=GZIP), "missing-key")
