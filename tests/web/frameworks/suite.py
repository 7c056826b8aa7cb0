"""What must hold of an order, whatever a framework makes of the view's value."""

from collections.abc import Callable
from typing import Any

import pytest
from werkzeug.test import TestResponse

from tests.web import kit
from tests.web.kit import keyed

#: Ways to run an app that change how errors travel.
CONFIGS = {
    "production": {},
    "testing": {"TESTING": True},
    "propagating": {"PROPAGATE_EXCEPTIONS": True},
    "trapping": {"TRAP_HTTP_EXCEPTIONS": True, "TRAP_BAD_REQUEST_ERRORS": True},
}
configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


class Work:
    """The work of a view: counted, held at a gate where one is set. ``internal`` is what no schema sends."""

    def __init__(self) -> None:
        self.effects = kit.Effects()
        self.gate: kit.Gate | None = None

    def __call__(self, item: str) -> dict[str, Any]:
        number = self.effects.add(item)
        if self.gate is not None:
            self.gate.hold()
        return {"id": number, "item": item, "internal": "never sent"}


def assert_contract(
    app: Any,
    work: Work,
    crowd: kit.Crowd,
    *,
    path: str = "/orders",
    method: str = "POST",
    status: int = 201,
    wrap: Callable[[Any], Any] = lambda order: order,
    headers: "dict[str, str] | None" = None,
) -> TestResponse:
    """The first answer and its replays, and each refusal, complete. Gives the first answer.

    :param wrap: the body as it is sent, from the order.
    """
    before = work.effects.runs

    def send(item: str, key: "str | None", **more: str) -> TestResponse:
        keys = {} if key is None else keyed(key)
        client = app.test_client()
        return client.open(path, method=method, json={"item": item}, headers={**(headers or {}), **keys, **more})

    key = kit.new_key()
    first = send("book", key)
    assert first.status_code == status, first.get_data(as_text=True)
    assert first.get_json() == wrap({"id": before + 1, "item": "book"})
    assert first.content_length == len(first.get_data())
    kit.assert_kept(first)
    for _ in range(2):
        replay = send("book", key)
        kit.assert_replay(first, replay)
        assert replay.content_type == first.content_type
    kit.assert_problem(send("lamp", key), "mismatch")
    kit.assert_problem(send("book", None), "missing-key")
    kit.assert_problem(send("book", "a,b"), "invalid-key")
    assert work.effects.lines[before:] == ["book"]

    slow = kit.new_key()
    work.gate = crowd.gate()
    running = crowd.start(send, "slow", slow)
    work.gate.wait_inside()
    kit.assert_problem(send("slow", slow), "in-progress")
    kit.assert_problem(send("fast", slow), "mismatch")
    work.gate.open()
    answer = running.result(kit.WAIT_S)
    work.gate = None
    kit.assert_kept(answer)
    kit.assert_replay(answer, send("slow", slow))
    assert work.effects.lines[before:] == ["book", "slow"]
    return first
