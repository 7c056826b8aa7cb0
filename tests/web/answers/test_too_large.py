"""4.5: what is too large to keep reaches the first client whole; the repeat hears that it is done, and where."""

from email.utils import parsedate_to_datetime

import pytest
from flask import Response

from .. import kit
from .pairs import Source, serve

LARGE = b"0123456789abcdef" * 100_000

BODIES = {
    "bytes": lambda: LARGE,
    "a list": lambda: [LARGE[:1000], LARGE[1000:]],
    "a stream": lambda: (LARGE[start : start + 10_000] for start in range(0, len(LARGE), 10_000)),
    "a stream in one": lambda: iter([LARGE]),
}


def memory(store):
    """Bytes that our keys take, by the server's own count."""
    return sum(store.memory_usage(key, samples=0) for key in kit.our_keys(store))


@pytest.mark.parametrize("how", ["full", "hash"])
@pytest.mark.parametrize("make", BODIES.values(), ids=BODIES)
def test_more_than_is_kept(make_app, effects, store, make, how):
    send = serve(
        make_app(), effects, lambda: Response(make(), 201, {"Location": "/reports/1", "X-Own": "1"}), store=how
    )
    used = store.info("memory")["used_memory"]
    first = send()
    assert (first.status_code, first.get_data()) == (201, LARGE)
    left = kit.assert_kept(first)
    assert abs(left - 48 * 3600) < 5
    assert memory(store) < 10 * 1024
    assert len(kit.everything(store)) < 2000
    assert store.info("memory")["used_memory"] - used < 200_000  # the client's buffers too
    for _ in range(2):
        second = send()
        problem = kit.assert_problem(second, "response-unavailable", more={"original_status", "location"})
        assert (problem["original_status"], problem["location"]) == (201, "/reports/1")
        assert second.headers[kit.EXPIRES] == first.headers[kit.EXPIRES]
        assert parsedate_to_datetime(second.headers[kit.EXPIRES])
    assert effects.runs == 1
    assert kit.the_record(store)["state"] == b"succeeded"
    kit.assert_all_end(store)


@pytest.mark.parametrize("length", [2**20 - 1, 2**20, 2**20 + 1])
@pytest.mark.parametrize("kind", ["sequence", "stream"])
def test_the_edge(make_app, effects, length, kind):
    """1 MiB is kept, a byte more isn't."""
    body = b"x" * length
    send = serve(make_app(), effects, lambda: Response(body if kind == "sequence" else iter([body[:9], body[9:]])))
    first, second = send(), send()
    assert first.get_data() == body
    if length <= 2**20:
        kit.assert_replay(first, second)
    else:
        kit.assert_problem(second, "response-unavailable", more={"original_status"})
    assert effects.runs == 1


def test_a_large_error(make_app, effects, store):
    send = serve(make_app(MAX_BODY=100, INLINE_BODY=100), effects, lambda: ("x" * 101, 422))
    assert send().status_code == 422
    assert kit.assert_problem(send(), "response-unavailable", more={"original_status"})["original_status"] == 422
    assert kit.the_record(store)["state"] == b"failed"
    assert effects.runs == 1


def test_no_more_is_read_ahead_than_the_bound(make_app, effects):
    """A long stream starts when the bound is met, not when it ends."""
    source = Source(chunks=1000, size=100)
    app = make_app(MAX_BODY=500, INLINE_BODY=500)
    read = []

    @app.after_request
    def look(response):
        read.append(source.sent)
        return response

    assert serve(app, effects, lambda: Response(source))().get_data() == source.whole
    assert read == [6]


def test_another_request_is_still_another(make_app, effects):
    app = make_app(MAX_BODY=10, INLINE_BODY=10)
    send = serve(app, effects, lambda: "x" * 11)
    send()
    key = kit.new_key()
    assert app.test_client().post("/x", json=1, headers=kit.keyed(key)).status_code == 200
    kit.assert_problem(app.test_client().post("/x", json=2, headers=kit.keyed(key)), "mismatch")
    assert effects.runs == 2
