"""What is kept and what is given back, where the route or the view says so."""

import pytest
from flask import make_response

from flask_idempotent import NothingHappened, idempotent

from . import kit
from .kit import keyed


def serve(app, effects, *answers, **keywords):
    app.add_url_rule("/x", "x", idempotent(**keywords)(kit.answering(effects, *answers)), methods=["POST"])
    client, headers = app.test_client(), keyed()
    return lambda: client.post("/x", headers=headers)


def test_a_set_of_statuses(make_app, effects):
    post = serve(make_app(), effects, ("no", 422), ("no", 404), ("ok", 200), ("ok", 201), outcome={201, 503})
    statuses = [post().status_code for _ in range(5)]
    assert statuses == [422, 404, 200, 201, 201]
    assert effects.runs == 4


def test_a_set_can_keep_a_5xx(make_app, effects, store):
    post = serve(make_app(), effects, ("down", 503), outcome={503})
    kit.assert_replay(post(), post())
    assert kit.the_record(store)["state"] == b"failed"
    assert effects.runs == 1


def test_a_callable(make_app, effects):
    def outcome(response):
        return "release" if response.headers.get("X-Retry") else "store"

    post = serve(make_app(), effects, ("soft", 200, {"X-Retry": "1"}), ("hard", 500), outcome=outcome)
    kit.assert_not_kept(post())
    hard = post()
    kit.assert_kept(hard)
    kit.assert_replay(hard, post())
    assert effects.runs == 2


@pytest.mark.parametrize("said", [None, True, "STORE", 1])
def test_a_callable_that_says_nothing_of_use(make_app, effects, said, caplog):
    """The table by status decides, and the log has it."""
    post = serve(make_app(), effects, ("busy", 503), ("ok", 200), outcome=lambda response: said)
    assert [post().status_code for _ in range(3)] == [503, 200, 200]
    assert effects.runs == 2
    assert "outcome callable" in caplog.text


def test_a_callable_that_raises(make_app, effects, caplog):
    post = serve(make_app(), effects, ("ok", 200), outcome=lambda response: 1 / 0)
    kit.assert_replay(post(), post())
    assert effects.runs == 1
    assert "outcome callable" in caplog.text


def test_nothing_happened(make_app, effects, store):
    app = make_app()

    @app.post("/x")
    @idempotent
    def view():
        if effects.add() == 1:
            raise NothingHappened(make_response("sold out", 200))
        return "done"

    client, headers = app.test_client(), keyed()
    first = client.post("/x", headers=headers)
    assert (first.get_data(as_text=True), first.status_code) == ("sold out", 200)
    kit.assert_not_kept(first)
    assert kit.the_record(store)["state"] == b"released"
    second = client.post("/x", headers=headers)
    assert second.get_data(as_text=True) == "done"
    kit.assert_replay(second, client.post("/x", headers=headers))
    assert effects.runs == 2


def test_too_large_to_keep(make_app, effects):
    """4.5: the first client gets all; a repeat hears that it is done, and where to look."""
    app = make_app(MAX_BODY=1000, INLINE_BODY=1000)
    answers = {
        "fits": ("x" * 1000, 201),
        "large": ("x" * 1001, 201, {"Location": "/large/1"}),
        "mute": ("x" * 2000, 402),
    }
    client = app.test_client()
    for name, answer in answers.items():
        app.add_url_rule(f"/{name}", name, idempotent(kit.answering(effects, answer)), methods=["POST"])
    headers = keyed()
    kit.assert_replay(client.post("/fits", headers=headers), client.post("/fits", headers=headers))
    for name, more in (("large", {"location": "/large/1", "original_status": 201}), ("mute", {"original_status": 402})):
        first = client.post(f"/{name}", headers=headers)
        assert first.get_data(as_text=True) == answers[name][0]
        kit.assert_kept(first)
        second = client.post(f"/{name}", headers=headers)
        problem = kit.assert_problem(second, "response-unavailable", more=more)
        assert {name: problem[name] for name in more} == more
        assert second.headers[kit.EXPIRES] == first.headers[kit.EXPIRES]
    assert effects.runs == 3
