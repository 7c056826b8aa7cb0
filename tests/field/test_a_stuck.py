"""A. In-progress records that never clear.

F04: every exit that is an exception is in ``tests/web/test_exits.py``; here are the answers that go out late.
F07: ``tests/races/test_processes.py`` kills workers. F08: there too, for one process and for two. No part of F08 is
about a cache: there is none in the process.
F03: its SQL part belongs to the durable routes.
"""

import io
import time
from datetime import timedelta

import pytest
from flask import Response, send_file, stream_with_context

from flask_idempotent import idempotent
from flask_idempotent.errors import ConfigurationError
from tests.web import kit
from tests.web.kit import keyed


@pytest.mark.parametrize("name", ["LEASE", "MAX_PROCESSING", "TTL", "TOMBSTONE"])
@pytest.mark.parametrize("value", [0, 0.0, -1, timedelta(0), timedelta(seconds=-1), None, float("inf")])
def test_no_time_left_is_not_no_limit(make_app, name, value):
    """F02: zero is refused, and is never taken for a value that is missing."""
    with pytest.raises(ConfigurationError, match=f"IDEMPOTENT_{name}"):
        make_app(**{name: value})
    if name != "TOMBSTONE":
        with pytest.raises(ConfigurationError, match=name.lower()):
            idempotent(**{name.lower(): value if value is not None else 0})


@pytest.mark.parametrize(
    "smallest", [{"LEASE": 0.001, "SKEW": 0, "MAX_PROCESSING": 0.001, "TTL": 0.002}, {"SKEW": 0}, {}]
)
def test_every_key_has_an_end(make_app, effects, crowd, store, smallest):
    """F02: after any kind of request, and while one runs; a skew of nothing is a value too."""
    gate = crowd.gate()
    app = make_app(RATE_LIMIT="1000/minute", **smallest)
    kit.add_orders(app, effects)
    kit.add_orders(app, effects, "/slow", gate=gate)
    answers = {"/busy": ("busy", 503), "/declined": ("no", 402), "/large": ("x" * 2_000_000, 200)}
    for path, answer in answers.items():
        view = idempotent(kit.answering(effects, answer))
        app.add_url_rule(path, path, view, methods=["POST"])
    client = app.test_client()
    crowd.start(app.test_client().post, "/slow", headers=keyed())
    gate.wait_inside()
    for path in ("/orders", *answers):
        headers = keyed()
        for json in ({"a": 1}, {"a": 1}, {"a": 2}):
            client.post(path, json=json, headers=headers)
            kit.assert_all_end(store)


@pytest.mark.parametrize("lease", [1, 1.0, timedelta(seconds=1), timedelta(milliseconds=1000)])
def test_a_second_is_a_second(make_app, effects, crowd, store, lease):
    """F03: an abandoned claim is held for lease and skew by the server's clock, and not a thousand times as long."""
    gate = crowd.gate()
    app = kit.add_orders(make_app(LEASE=lease, SKEW=0.2, HEARTBEAT=False), effects, gate=gate)
    headers = keyed()
    crowd.start(app.test_client().post, "/orders", headers=headers)
    gate.wait_inside()
    record = kit.the_record(store)
    assert int(record["locked_until"]) - int(record["created_at"]) == 1000
    again = crowd.start(kit.until, lambda: app.test_client().post("/orders", headers=headers))
    gate.wait_inside()
    held = int(kit.the_record(store)["locked_until"]) - int(record["locked_until"])
    assert 1200 <= held < 3000
    gate.open()
    again.result()


def test_an_app_hosts_clock_does_not_count(make_app, effects, crowd, store, monkeypatch):
    """F03: a host that is two hours ahead takes nothing over, and its own claims are no longer or shorter."""
    gate = crowd.gate()
    app = kit.add_orders(make_app(), effects, gate=gate)
    headers = keyed()
    first = crowd.start(app.test_client().post, "/orders", headers=headers)
    gate.wait_inside()
    now = time.time
    for wrong in (7200, -7200):
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda wrong=wrong: now() + wrong)
            refused = app.test_client().post("/orders", headers=headers)
            assert (refused.status_code, refused.headers["Retry-After"]) == (409, "10")
    gate.open()
    kit.assert_kept(first.result())
    monkeypatch.setattr(time, "time", lambda: now() + 7200)
    other = keyed()
    kit.assert_kept_by_the_server(app.test_client().post("/orders", headers=other), store)
    assert effects.runs == 2


@pytest.mark.parametrize("kind", ["file", "bytes", "generator", "stream with context", "call on close"])
def test_answers_that_go_out_late(make_app, effects, tmp_path, kind):
    """F04: the retry is a replay with all of the bytes, or says that it is done; it never meets a running record."""
    path = tmp_path / "receipt.bin"
    path.write_bytes(b"receipt" * 10_000)
    closed = []

    def view():
        effects.add()
        if kind == "file":
            return send_file(path)
        if kind == "bytes":
            return send_file(io.BytesIO(path.read_bytes()), mimetype="application/pdf")
        chunks = (b"receipt" * 100 for _ in range(100))
        if kind == "call on close":
            response = Response("receipt" * 10_000)
            response.call_on_close(lambda: closed.append(True))
            return response
        return Response(stream_with_context(chunks) if kind == "stream with context" else chunks)

    app = make_app(**kit.SHORT)
    app.add_url_rule("/x", "x", idempotent(view), methods=["POST"])
    client, headers = app.test_client(), keyed()
    first = client.post("/x", headers=headers, buffered=True)
    assert first.get_data() == path.read_bytes()
    second = client.post("/x", headers=headers, buffered=True)
    assert (second.status_code, second.headers[kit.REPLAYED]) == (200, "true")
    assert second.get_data() == path.read_bytes()
    assert second.content_type == first.content_type
    assert effects.runs == 1
    assert closed == ([True] if kind == "call on close" else [])
