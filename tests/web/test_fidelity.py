"""A replay is the first answer: status, headers and bytes, but for what belongs to one connection, moment or client."""

import json
import time
from email.utils import parsedate_to_datetime

import pytest
from flask import Flask, Response, abort, jsonify, make_response, request, session

from flask_idempotent import idempotent

from . import kit
from .kit import keyed


def twice(app: Flask, view, **kwargs):
    """The first answer and its replay."""
    app.add_url_rule("/x", "x", idempotent(view), methods=["POST"])
    headers = keyed()
    return [app.test_client().post("/x", headers=headers, **kwargs) for _ in range(2)]


def counted(effects, make):
    def view():
        effects.add()
        return make()

    return view


STATUSES = [200, 201, 202, 204, 303, 402, 406, 418]
WAYS = {
    "tuple": lambda status: ('{"a":1}', status, {"Content-Type": "application/json", "X-Own": "1"}),
    "dict": lambda status: ({"a": 1}, status),
    "Response": lambda status: Response('{"a":1}', status, content_type="application/vnd.shop+json"),
    "make_response": lambda status: make_response(jsonify(a=1), status),
    "abort": lambda status: abort(Response('{"a":1}', status, {"X-Own": "1"})),
    "status text": lambda status: Response("a", f"{status} Very Own Reason"),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("status", STATUSES)
def test_status_body_and_type(make_app, effects, store, status, way):
    """F45"""
    first, second = twice(make_app(), counted(effects, lambda: way(status)))
    assert first.status_code == status
    kit.assert_kept(first)
    kit.assert_replay(first, second)
    assert second.content_type == first.content_type
    assert effects.runs == 1
    assert kit.the_record(store)["state"] == (b"failed" if status >= 400 else b"succeeded")


FALSY = {
    "0": ("0", "application/json"),
    "false": ("false", "application/json"),
    "null": ("null", "application/json"),
    "[]": ("[]\n", "application/json"),
    "{}": ("{}", "application/json"),
    '""': ('""', "application/json"),
    "None": ("None", "text/plain"),
    "zero bytes": ("\0\0", "application/octet-stream"),
    "nothing": ("", "text/html"),
    "a space": (" ", "text/plain; charset=latin-1"),
}


@pytest.mark.parametrize(("body", "content_type"), FALSY.values(), ids=FALSY)
def test_falsy_bodies(make_app, effects, body, content_type):
    """F49"""
    first, second = twice(make_app(), counted(effects, lambda: Response(body, 200, content_type=content_type)))
    assert first.get_data(as_text=True) == body
    kit.assert_replay(first, second)
    assert second.headers.getlist("Content-Length") == [str(len(body))]
    assert second.headers.getlist("Content-Type") == [content_type]
    assert effects.runs == 1


@pytest.mark.parametrize("value", [[], {}, {"a": None}, [0], {"": ""}, {"ä": "\U0001f4b8"}])
def test_what_flask_makes_json_of(make_app, effects, value):
    first, second = twice(make_app(), counted(effects, lambda: value))
    assert json.loads(second.get_data()) == value
    kit.assert_replay(first, second)
    assert effects.runs == 1


def test_no_content(make_app, effects):
    """F49: a 204 has no body, no type and no length, the second time too."""
    first, second = twice(make_app(), counted(effects, lambda: ("", 204)))
    kit.assert_replay(first, second)
    assert second.get_data() == b""
    assert "Content-Length" not in second.headers
    assert effects.runs == 1


def test_repeated_headers_in_order(make_app, effects):
    pairs = [
        ("Link", "<a>; rel=x"),
        ("X-One", "1"),
        ("Link", "<b>; rel=y"),
        ("X-One", "2"),
        ("x-one", "3"),
        ("ETag", '"v1"'),
    ]

    def make():
        response = Response("ok")
        for name, value in pairs:
            response.headers.add(name, value)
        return response

    first, second = twice(make_app(), counted(effects, make))
    kit.assert_replay(first, second)
    ours = {name.lower() for name, _ in pairs}
    assert [(name, value) for name, value in second.headers if name.lower() in ours] == pairs


KEPT = {
    "Location": "/orders/1",
    "ETag": '"v1"',
    "Cache-Control": "no-store",
    "Content-Language": "de",
    "X-RateLimit-Remaining": "3",
    "Retry-After": "7",
    "Content-Disposition": "attachment; filename*=UTF-8''%E2%82%AC.json",
    "Last-Modified": "Mon, 30 Nov 2026 10:00:00 GMT",
}
NOT_KEPT = {
    "Set-Cookie": "session=abc",
    "WWW-Authenticate": 'Basic realm="shop"',
    "Date": "Mon, 30 Nov 2026 10:00:00 GMT",
    "Server": "secret/1.0",
    "Connection": "close",
    "Keep-Alive": "timeout=5",
    "Transfer-Encoding": "chunked",
    "Trailer": "X-Checksum",
    "Upgrade": "h2c",
    "Proxy-Authenticate": "Basic",
    "Access-Control-Allow-Origin": "https://shop.example",
    "Access-Control-Allow-Credentials": "true",
    "Access-Control-Expose-Headers": "X-Own",
    "X-Request-Id": "7",
    "Traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
}


def test_what_is_kept_and_what_is_not(make_app, effects, store):
    """F51, F52, F58"""
    first, second = twice(make_app(), counted(effects, lambda: ("ok", 201, {**KEPT, **NOT_KEPT})))
    for name, value in KEPT.items():
        assert second.headers.getlist(name) == [value]
    for name, value in NOT_KEPT.items():
        assert name in first.headers
        assert value not in second.headers.getlist(name)
        assert value.encode() not in kit.everything(store) or value in KEPT.values()
    assert effects.runs == 1


@pytest.mark.parametrize(
    ("vary", "kept"),
    [
        ("Origin", []),
        ("Accept, Origin", ["Accept"]),
        ("origin, Accept-Encoding", ["Accept-Encoding"]),
        ("Accept", ["Accept"]),
        ("X-Origin", ["X-Origin"]),
    ],
)
def test_vary_without_origin(make_app, effects, vary, kept):
    _, second = twice(make_app(), counted(effects, lambda: ("ok", 200, {"Vary": vary})))
    assert second.headers.getlist("Vary") == kept


def test_a_wrong_length_is_not_repeated(make_app, effects):
    """F52"""
    _, second = twice(make_app(), counted(effects, lambda: ("four", 200, {"Content-Length": "5"})))
    assert second.get_data() == b"four"
    assert second.headers.getlist("Content-Length") == ["4"]


def test_the_session_of_the_moment(make_app, effects, store):
    """F51: no cookie of the first answer comes back, and the session of the request at hand still works."""
    app = make_app(config={"SECRET_KEY": "secret"})

    @app.before_request
    def count():
        session["visits"] = session.get("visits", 0) + 1

    @app.post("/x")
    @idempotent
    def view():
        effects.add()
        response = make_response("ok")
        response.set_cookie("csrf", "token-of-the-first")
        response.set_cookie("other", "1")
        return response

    client, headers = app.test_client(), keyed()
    first, second = client.post("/x", headers=headers), client.post("/x", headers=headers)
    assert len(first.headers.getlist("Set-Cookie")) == 3
    (cookie,) = second.headers.getlist("Set-Cookie")
    assert cookie.startswith("session=")
    assert cookie not in first.headers.getlist("Set-Cookie")
    with client.session_transaction() as now:
        assert now["visits"] == 2
    assert b"token-of-the-first" not in kit.everything(store)
    assert effects.runs == 1


def test_the_original_not_the_state_of_today(make_app, effects):
    """F58"""
    app = make_app()
    people = {}

    @app.post("/people")
    @idempotent
    def create():
        effects.add()
        people[1] = request.json["name"]
        return {"name": people[1]}, 201, {"ETag": '"1"', "Location": "/people/1"}

    client, headers = app.test_client(), keyed()
    first = client.post("/people", json={"name": "John"}, headers=headers)
    people[1] = "Bob"
    second = client.post("/people", json={"name": "John"}, headers=headers)
    kit.assert_replay(first, second)
    assert second.get_json() == {"name": "John"}
    assert (second.headers["ETag"], second.headers["Location"]) == ('"1"', "/people/1")


def test_expires_is_the_same_on_every_replay(make_app, effects):
    first, second = twice(make_app(TTL=3600), counted(effects, lambda: "ok"))
    until = parsedate_to_datetime(first.headers[kit.EXPIRES]).timestamp()
    assert abs(until - time.time() - 3600) < 5
    assert second.headers[kit.EXPIRES] == first.headers[kit.EXPIRES]
