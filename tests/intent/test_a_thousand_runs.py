"""A thousand seeded histories of one key each: crashes, errors, late calls, a lagging search, a forgetful provider.

The provider is a ledger in this process with a clock of its own, which passes together with the records'; so the runs
are quick. No history ends with a second charge, and none is stuck where a charge is to be seen.
"""

import random

import pytest

from flask_idempotent import NothingHappened, Provider, current_idempotency
from tests.provider import Ledger, LocalClient

from .kit import Till, die, new_key

RUNS = 1_000
LEASE, SKEW, LAG, WINDOW = 10.0, 1.0, 40.0, 1_000.0
#: How long a call may be on its way to the provider after its process is gone, counted from the end of the lease.
FLIGHT = LEASE + SKEW


class Card:
    """The provider, as one history meets it: a call may arrive late."""

    def __init__(self, ledger: Ledger) -> None:
        self.local = LocalClient(ledger)
        self.late: list[tuple[float, str]] = []

    def send_late(self, key: str, seconds: float) -> None:
        self.late.append((self.local.ledger.now() + seconds, key))

    def find(self, key: str):
        return self.local.find(key)

    def advance(self, seconds: float) -> None:
        ledger = self.local.ledger
        end = ledger.now() + seconds
        for at, key in sorted(self.late):
            if at <= end:
                ledger.advance(max(at - ledger.now(), 0))
                self.local.charge(key=key)
        self.late = [(at, key) for at, key in self.late if at > end]
        ledger.advance(end - ledger.now())


class Fate:
    """What happens in the next attempt, drawn for each."""

    KINDS = (
        *("dies before", "dies after", "dies with the call on its way", "502 before", "502 after"),
        *("502 with the call on its way", "raises after", "nothing happened", "answers", "answers"),
    )

    def __init__(self, draw: random.Random, card: Card) -> None:
        self.draw = draw
        self.card = card

    def act(self, till: Till) -> object:
        till.runs += 1
        kind = self.draw.choice(self.KINDS)
        if kind == "nothing happened":
            raise NothingHappened(till.app.make_response(("nothing", 503)))
        if kind == "dies before":
            die()
            return "", 500
        key = current_idempotency.provider_key()
        till.keys.append(key)
        if kind == "502 before":
            return "bad gateway", 502
        if "on its way" in kind:
            self.card.send_late(key, self.draw.uniform(0, FLIGHT))
        else:
            charge = self.card.local.charge(key=key)
        if kind == "answers":
            return {"charge": charge["id"]}, 201
        if kind == "raises after":
            raise ValueError("seeded")
        if kind.startswith("dies"):
            die()
        return "", 502


def test_no_second_charge_in_a_thousand_runs(make_till, sqlite_url, caplog):
    """V4 to V7."""
    caplog.set_level("CRITICAL")
    bank = Provider("bank", window=WINDOW, max_length=64, search_delay=LAG)
    ledger = Ledger(window=WINDOW, search_delay=LAG, clock=lambda: 0.0)
    till = make_till(
        sqlite_url, LEASE=LEASE, SKEW=SKEW, SETTLE_AFTER=None, TTL=86_400, provider=LocalClient(ledger), HEARTBEAT=False
    )
    till.take_charges(provider=bank)
    seen = {"settled": 0, "ran again": 0, "for a human": 0, "released": 0}
    for seed in range(RUNS):
        draw = random.Random(seed)
        ledger.reset()
        till.forget_all()
        card = till.provider = Card(ledger)
        fate = Fate(draw, card)
        till.take = lambda fate=fate: fate.act(till)
        till.keys.clear()
        key, told, runs = new_key(), None, till.runs
        for _ in range(draw.randint(2, 7)):
            answer = till.pay(key)
            if answer.status_code == 201:
                told = answer.get_json()
                break
            till.pass_time(draw.choice((0.5, 3, 12, 30, 55, 120, 400, 1_200)))
            if draw.random() < 0.1:
                till.redis.flushdb()
        till.pass_time(5_000)  # all that was on its way has arrived, and a human's hour is over
        charges = card.local.entries()
        assert len(charges) <= 1, f"seed {seed}: {len(charges)} charges"
        assert len(set(till.keys)) <= 1
        row = till.row()
        if charges:
            # Whatever happened before: where a charge is to be seen, the client gets to know it.
            answer = till.pay(key)
            seen["settled"] += told is None
            assert (answer.status_code, answer.get_json()) == (201, {"charge": charges[0]["id"]}), f"seed {seed}"
            assert told in (None, answer.get_json())
        else:
            assert told is None
            seen["for a human"] += row.reason.startswith("for a human")
        seen["ran again"] += till.runs - runs > 1
        seen["released"] += row.status == "released"
    # The histories went where they were to go.
    assert all(count >= 3 for count in seen.values()), seen


@pytest.mark.parametrize("seed", range(3))
def test_the_double_deduplicates_as_the_process_does(seed):
    """Else the runs would prove nothing."""
    draw = random.Random(seed)
    ledger = Ledger(window=10, search_delay=2, clock=lambda: 0.0)
    card = Card(ledger)
    card.send_late("k", 5)
    card.advance(4)
    assert card.local.entries() == []
    card.local.charge(key="k")
    card.advance(draw.uniform(1, 1.9))
    assert (len(card.local.entries()), card.find("k")) == (1, None)
    card.advance(20)
    assert card.find("k") is not None
    card.local.charge(key="k")
    assert len(card.local.entries()) == 2
