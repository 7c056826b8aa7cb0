"""What the running work knows of its own claim."""

import pytest

from flask_idempotent import current_idempotency, idempotent
from flask_idempotent.errors import LeaseLost, NotProtected

from . import kit
from .kit import keyed

NAMES = ("scope", "attempt", "is_retry", "fence")


def test_inside(make_app, effects):
    app = make_app()

    @app.post("/x")
    @idempotent(scope="orders.create")
    def view():
        effects.add({name: getattr(current_idempotency, name) for name in NAMES})
        current_idempotency.renew()
        return "done" if effects.runs == 3 else ("busy", 503)

    client, headers = app.test_client(), keyed()
    assert [client.post("/x", headers=headers).status_code for _ in range(4)] == [503, 503, 200, 200]
    assert [line["scope"] for line in effects.lines] == ["orders.create"] * 3
    assert [line["attempt"] for line in effects.lines] == [1, 2, 3]
    assert [line["is_retry"] for line in effects.lines] == [False, True, True]
    fences = [line["fence"] for line in effects.lines]
    assert fences == sorted(set(fences))


@pytest.mark.parametrize("name", NAMES)
def test_outside(make_app, effects, name):
    app = make_app()
    told = []

    def ask():
        with pytest.raises(NotProtected, match="@idempotent"):
            getattr(current_idempotency, name)
        told.append(True)

    app.before_request(ask)
    app.get("/plain")(lambda: ask() or "plain")
    kit.add_orders(app, effects)
    ask()
    with app.app_context():
        ask()
    client = app.test_client()
    assert client.get("/plain").status_code == 200
    assert client.post("/orders", headers=keyed()).status_code == 201
    assert len(told) == 5


@pytest.mark.parametrize("settings", [{}, {"MODE": "off"}])
def test_an_unprotected_run_has_no_claim(make_app, settings):
    app = make_app(**settings)
    told = []

    @app.post("/x")
    @idempotent(required=False)
    def view():
        with pytest.raises(NotProtected):
            current_idempotency.renew()
        told.append(True)
        return "done"

    app.test_client().post("/x")
    assert told == [True]


def test_renewing_keeps_the_key(make_app, effects, crowd):
    """Without a heartbeat, by hand: a duplicate is refused for much longer than the lease."""
    app = make_app(HEARTBEAT=False, LEASE=0.5, SKEW=0.1)
    gate = crowd.gate()
    stop = []

    @app.post("/x")
    @idempotent
    def view():
        effects.add()
        current_idempotency.renew()
        gate._inside.release()
        while not stop:
            current_idempotency.renew()
        return "done"

    headers = keyed()
    first = crowd.start(app.test_client().post, "/x", headers=headers)
    gate.wait_inside()
    try:
        kit.assert_problem_for(1.5, lambda: app.test_client().post("/x", headers=headers), "in-progress")
    finally:
        stop.append(True)
    kit.assert_replay(first.result(), app.test_client().post("/x", headers=headers))
    assert effects.runs == 1


def test_a_lost_lease_is_told(make_app, effects, crowd):
    app = make_app(HEARTBEAT=False, **kit.SHORT)
    gate = crowd.gate()
    told = []

    @app.post("/x")
    @idempotent
    def view():
        run = effects.add()
        if run == 1:
            gate.hold()
            for _ in range(2):
                with pytest.raises(LeaseLost):
                    current_idempotency.renew()
                told.append(True)
            current_idempotency.renew()
        return {"run": run}

    headers = keyed()
    late = crowd.start(app.test_client().post, "/x", headers=headers)
    gate.wait_inside()
    winner = kit.until(lambda: app.test_client().post("/x", headers=headers))
    assert winner.get_json() == {"run": 2}
    gate.open()
    # The view gave up; its client is told what the winner's client was told.
    kit.assert_replay(winner, late.result())
    assert told == [True, True]
    kit.assert_replay(winner, app.test_client().post("/x", headers=headers))
    assert effects.runs == 2
