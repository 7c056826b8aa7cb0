"""``store=``: a reference from which the answer is made again, or nothing but a digest."""

import asyncio
import hashlib
import json

import pytest
from flask import Response, abort, request, send_file

from flask_idempotent import current_idempotency, idempotent
from flask_idempotent.errors import ConfigurationError

from .. import kit
from .pairs import serve


def refer(value, answer):
    def view():
        current_idempotency.reference(value)
        return answer

    return view


def headers_of_ours(answer):
    return answer.headers.getlist(kit.REPLAYED), bool(answer.headers.get(kit.EXPIRES))


REFERENCES = [7, 0, "order-7", "", ["a", 1], {"id": 7, "of": None}, False, "\u20ac"]


@pytest.mark.parametrize("reference", REFERENCES, ids=repr)
@pytest.mark.parametrize("view", ["sync view", "async view"])
def test_made_again(make_app, effects, store, reference, view):
    """The answer isn't in the store; ``rebuild`` gets what the view named, with the request at hand."""
    asked = []

    def rebuild(reference):
        asked.append((reference, request.headers["X-User"]))
        return {"again": reference}, 299, {"X-Made": "again"}

    def create():
        effects.add()
        current_idempotency.reference(reference)
        return {"first": "secret"}, 201

    async def create_async():
        await asyncio.sleep(0)
        return create()

    app = make_app()
    protect = idempotent(store="reference", rebuild=rebuild)
    app.add_url_rule("/x", "x", protect(create if view == "sync view" else create_async), methods=["POST"])
    key = kit.new_key()
    first = app.test_client().post("/x", headers=kit.keyed(key, X_User="ann"))
    assert (first.status_code, first.get_json()) == (201, {"first": "secret"})
    kit.assert_kept(first)
    assert b"secret" not in kit.everything(store)
    for name in ("bob", "cid"):
        second = app.test_client().post("/x", headers=kit.keyed(key, X_User=name))
        assert (second.status_code, second.get_json()) == (201, {"again": reference})
        assert second.headers["X-Made"] == "again"
        assert headers_of_ours(second) == (["true"], True)
        assert second.headers[kit.EXPIRES] == first.headers[kit.EXPIRES]
        assert asked.pop() == (reference, name)
    assert asked == []
    assert effects.runs == 1


BODIES = {
    "text": lambda path: "x" * 100_000,
    "a list": lambda path: Response(["x" * 50_000, "x" * 50_000]),
    "a generator": lambda path: Response("x" * 10_000 for _ in range(10)),
    "a file": send_file,
    "an open file": lambda path: Response(path.open("rb"), direct_passthrough=True),
}


@pytest.mark.parametrize("traps", [False, True], ids=["", "TRAP_HTTP_EXCEPTIONS"])
@pytest.mark.parametrize("rebuild", BODIES.values(), ids=BODIES)
def test_every_body_is_made_again_whole(make_app, effects, tmp_path, rebuild, traps):
    path = tmp_path / "report.txt"
    path.write_text("x" * 100_000)
    app = make_app(config={"TRAP_HTTP_EXCEPTIONS": traps})
    send = serve(
        app, effects, refer(str(path), ("made", 201)), store="reference", rebuild=lambda reference: rebuild(path)
    )
    assert send().get_data(as_text=True) == "made"
    with send() as second:
        assert second.status_code == 201
        assert second.get_data(as_text=True) == "x" * 100_000
    assert headers_of_ours(second) == (["true"], True)
    assert effects.runs == 1


def test_what_is_made_again_is_closed_once(make_app, effects):
    closed = []

    def rebuild(reference):
        response = Response(iter(["a", "b"]))
        response.call_on_close(lambda: closed.append(1))
        return response

    send = serve(make_app(), effects, refer(1, "made"), store="reference", rebuild=rebuild)
    send()
    with send() as second:
        assert second.get_data(as_text=True) == "ab"
        assert closed == []
    assert closed == [1]


def test_the_location_is_the_reference(make_app, effects, caplog):
    """Where the view names nothing, ``Location`` is kept."""
    asked = []

    def rebuild(reference):
        asked.append(reference)
        return "again", 200, {"Location": reference}

    send = serve(
        make_app(), effects, lambda: ("made", 201, {"location": "/orders/7"}), store="reference", rebuild=rebuild
    )
    send()
    second = send()
    assert (second.status_code, second.get_data(as_text=True)) == (201, "again")
    assert second.headers.getlist("Location") == ["/orders/7"]
    assert asked == ["/orders/7"]
    assert effects.runs == 1
    assert "no reference" not in caplog.text


def test_no_reference_at_all(make_app, effects, store, caplog):
    """Said in the log when it happens, and to the one who repeats; ``rebuild`` isn't asked with nothing."""
    send = serve(make_app(), effects, lambda: ("secret", 202), store="reference", rebuild=lambda reference: 1 / 0)
    first = send()
    assert (first.status_code, first.get_data(as_text=True)) == (202, "secret")
    assert "no reference and no Location" in caplog.text
    for _ in range(2):
        problem = kit.assert_problem(send(), "response-unavailable", more={"original_status"})
        assert problem["original_status"] == 202
    assert effects.runs == 1
    assert b"secret" not in kit.everything(store)


def raises(reference):
    raise LookupError("secret")


FAILURES = {
    "raises": raises,
    "aborts": lambda reference: abort(404),
    "answers nothing": lambda reference: None,
    "answers what is no answer": lambda reference: object(),
}


@pytest.mark.parametrize("location", [None, "/orders/7"])
@pytest.mark.parametrize("rebuild", FAILURES.values(), ids=FAILURES)
def test_a_rebuild_that_fails(make_app, effects, rebuild, location, caplog):
    """Done, and it can't be shown: never a second run, never a 500. The log has the class, not what it said."""
    answer = ("made", 201, {"Location": location} if location else {})
    send = serve(make_app(), effects, refer("secret", answer), store="reference", rebuild=rebuild)
    first = send()
    more = {"original_status": 201, **({"location": location} if location else {})}
    for _ in range(2):
        second = send()
        problem = kit.assert_problem(second, "response-unavailable", more=more)
        assert {name: problem[name] for name in more} == more
        assert second.headers[kit.EXPIRES] == first.headers[kit.EXPIRES]
    assert effects.runs == 1
    assert "could not be made again" in caplog.text
    assert "secret" not in caplog.text


def test_a_rebuild_that_fails_once(make_app, effects):
    failures = [LookupError()]

    def rebuild(reference):
        if failures:
            raise failures.pop()
        return "again"

    send = serve(make_app(), effects, refer(1, "made"), store="reference", rebuild=rebuild)
    send()
    kit.assert_problem(send(), "response-unavailable", more={"original_status"})
    assert send().get_data(as_text=True) == "again"
    assert effects.runs == 1


@pytest.mark.parametrize("value", [object(), {1, 2}, b"bytes", float], ids=repr)
def test_a_reference_that_is_no_json(make_app, effects, store, value):
    """The view is told at once; it raised, so the key is free."""
    send = serve(make_app(), effects, refer(value, "made"), store="reference", rebuild=lambda reference: "again")
    assert send().status_code == 500
    assert kit.the_record(store)["state"] == b"released"


def test_a_large_answer_with_a_reference(make_app, effects, store):
    """What was too large to keep can be made again all the same."""
    send = serve(
        make_app(MAX_BODY=100, INLINE_BODY=100),
        effects,
        refer(7, "x" * 1000),
        store="reference",
        rebuild=lambda reference: "y" * 1000,
    )
    assert send().get_data(as_text=True) == "x" * 1000
    assert send().get_data(as_text=True) == "y" * 1000
    assert effects.runs == 1


def test_an_error_with_a_reference(make_app, effects):
    """A 4xx is kept by its reference too."""
    send = serve(make_app(), effects, refer(7, ("declined", 402)), store="reference", rebuild=lambda reference: "again")
    assert send().status_code == 402
    assert (second := send()).status_code == 402
    assert second.get_data(as_text=True) == "again"
    assert effects.runs == 1


def test_an_async_rebuild_is_refused_at_the_start():
    async def rebuild(reference):
        return "again"

    with pytest.raises(ConfigurationError, match="rebuild= must not be a coroutine function"):
        idempotent(store="reference", rebuild=rebuild)


# store="hash"


@pytest.mark.parametrize("location", [None, "/orders/7"])
@pytest.mark.parametrize("body", [b"secret", b"", bytes(range(256)) * 100])
def test_a_digest(make_app, effects, store, body, location):
    headers = {"Location": location} if location else {}
    send = serve(make_app(), effects, lambda: Response(body, 201, headers), store="hash")
    first = send()
    assert (first.status_code, first.get_data()) == (201, body)
    kit.assert_kept(first)
    held = kit.everything(store)
    assert hashlib.sha256(body).hexdigest().encode() in held
    assert not body or body not in held
    more = {"original_status": 201, **({"location": location} if location else {})}
    for _ in range(2):
        second = send()
        problem = kit.assert_problem(second, "response-unavailable", more=more)
        assert {name: problem[name] for name in more} == more
        assert second.headers[kit.EXPIRES] == first.headers[kit.EXPIRES]
    assert effects.runs == 1


def test_no_digest_of_what_was_not_read(make_app, effects, store):
    """A body beyond the bound has no digest, rather than that of nothing."""
    send = serve(make_app(MAX_BODY=100, INLINE_BODY=100), effects, lambda: "x" * 101, store="hash")
    assert send().status_code == 200
    kit.assert_problem(send(), "response-unavailable", more={"original_status"})
    assert hashlib.sha256().hexdigest().encode() not in kit.everything(store)
    assert effects.runs == 1


def test_a_digest_of_a_stream(make_app, effects, store):
    send = serve(make_app(), effects, lambda: Response(iter(["a", "b"])), store="hash")
    assert send().get_data() == b"ab"
    assert hashlib.sha256(b"ab").hexdigest().encode() in kit.everything(store)
    assert json.loads(send().get_data())["original_status"] == 200
    assert effects.runs == 1
