"""Hundreds of sagas, each with its own misfortunes: killed, told to wait, refused, in any call and again and again.

Whatever comes, and in whatever order: at the end all of it is there once, or nothing is left.
"""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from flask_idempotent import TransientStepError
from tests.provider.ledger import Ledger

from .kit import STEPS, UNDO, Checkout, Killed, decline, kill, new_key


class Books:
    """The provider, in this process."""

    def __init__(self) -> None:
        self.ledger = Ledger()

    def act(self, operation: str, *, key: str, **parameters: Any) -> dict[str, Any]:
        return self.ledger.act(operation, key, parameters).as_dict()

    def advance(self, seconds: float) -> None:
        self.ledger.advance(seconds)

    def entries(self) -> list[dict[str, Any]]:
        return [entry.as_dict() for entry in self.ledger.entries]


def wait() -> None:
    raise TransientStepError


MISFORTUNES: "list[tuple[Callable[[], Any], int]]" = [(lambda: None, 14), (kill, 3), (wait, 2), (decline, 3)]


@pytest.mark.parametrize("seed", range(6))
def test_at_the_end_all_or_nothing(make_checkout, sqlite_url, seed):
    chance = random.Random(seed)
    books = Books()
    retries = chance.choice([0, 1, 2])
    over = chance.choice([(), ("charge",), ("reserve", "ship")])
    checkout: Checkout = make_checkout(sqlite_url, provider=books, retries=retries, over=over)
    checkout.items = ["a", "b"]
    acts, weights = zip(*MISFORTUNES, strict=True)
    ends: Counter[str] = Counter()
    for _ in range(25):
        books.ledger.reset()
        checkout.forget_all()
        # What undoes is not refused here: that is for a human.
        for name in (*STEPS, *UNDO.values()):
            for when in ("before", "after"):
                kinds = acts if name in STEPS else acts[:3]
                by_weight = weights[: len(kinds)]

                def misfortune(kinds: Any = kinds, by_weight: Any = by_weight) -> None:
                    chance.choices(kinds, by_weight)[0]()

                checkout.hooks[f"{when} {name}"] = misfortune
        key = new_key()
        for _ in range(60):
            try:
                answer = checkout.order(key)
            except Killed:
                pass
            else:
                if "Retry-After" not in answer.headers:
                    break
            checkout.pass_time(40)
        else:
            raise AssertionError("it came to no end")
        ends[checkout.row().status] += 1
        assert_whole(checkout, answer.status_code)
    assert set(ends) == {"succeeded", "failed"}


def assert_whole(checkout: Checkout, status: int) -> None:
    found = Counter((entry["what"], entry.get("item")) for entry in checkout.provider.entries())
    assert set(found.values()) <= {1}, "something was done twice"
    done = {(what, item) for what, item in found if what in STEPS}
    undone = {(what, item) for what, item in found if what not in STEPS}
    order = [entry["what"] in STEPS for entry in checkout.provider.entries()]
    assert order == sorted(order, reverse=True), "something went forward after it went back"
    if status == 201:
        per_step = Counter(what for what, _ in done)
        assert per_step == {name: 2 if checkout.saga._steps[name].over else 1 for name in STEPS}
        assert not undone
    else:
        assert status == 409
        assert {(UNDO[what], item) for what, item in done} <= undone
