"""B. Claim races, lock ownership and lease renewal.

F09: ``tests/races/test_stampede.py``. F11, F12, F14, F15, F19: ``tests/races/test_leases.py``. F13 on gevent, and F21:
``tests/races/test_processes.py``; here is F13 for async views. F20, waiting duplicates:
``tests/web/test_views_waiting.py``.
"""

import asyncio
import threading

from flask_idempotent import current_idempotency, idempotent
from tests.web import kit
from tests.web.kit import keyed


def test_async_views_at_once(make_app, store):
    """F13: twenty different keys and two equal pairs inside async views at once; each completes its own record."""
    app = make_app(RATE_LIMIT=None)
    count = 20
    all_inside = threading.Barrier(count + 1)
    effects = {f"job {number}": kit.Effects() for number in range(count)}

    @app.post("/work/<name>")
    @idempotent
    async def work(name):
        before = current_idempotency.fence
        effects[name].add()
        await asyncio.get_running_loop().run_in_executor(None, all_inside.wait, kit.WAIT_S)
        await asyncio.sleep(0)
        assert current_idempotency.fence == before
        return {"name": name, "fence": before}

    keys = {name: keyed() for name in effects}

    def post(name):
        return app.test_client().post(f"/work/{name}", headers=keys[name])

    with kit.Crowd(count) as crowd:
        running = {name: crowd.start(post, name) for name in keys}
        while sum(each.runs for each in effects.values()) < count:
            threading.Event().wait(0.01)
        kit.assert_problem(post("job 0"), "in-progress")
        kit.assert_problem(post("job 19"), "in-progress")
        tokens = {record["token"] for record in kit.records(store)}
        all_inside.wait(kit.WAIT_S)
        for name, future in running.items():
            first = future.result(kit.WAIT_S)
            assert first.get_json()["name"] == name
            kit.assert_replay(first, post(name))
            assert effects[name].runs == 1
    assert {record["token"] for record in kit.records(store)} == tokens
    assert {record["state"] for record in kit.records(store)} == {b"succeeded"}
