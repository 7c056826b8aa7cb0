"""What the database does with the rows of a saga: only for whoever holds the key, all or none, and twice like once."""

import dataclasses
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import pytest
import sqlalchemy as sa

from flask_idempotent.errors import StoreUnavailable
from flask_idempotent.records import Claim, Fingerprint, Scope, Step, StepStatus, Verdict
from flask_idempotent.stores.backing import Lease
from flask_idempotent.stores.intent import IntentStore
from flask_idempotent.stores.models import add_tables
from tests.web import kit

SCOPE = Scope(None, "orders", "d" * 64)
DONE, BEGUN, UNDOING = StepStatus.DONE, StepStatus.BEGUN, StepStatus.UNDOING


def claim_of(token: str, **changes: Any) -> Claim:
    return Claim(
        **{
            "scope": SCOPE,
            "token": token,
            "fingerprints": [Fingerprint("r", "f")],
            "principal": "",
            "binding": "",
            "lease_ms": 100_000,
            "skew_ms": 0,
            "max_processing_ms": 100_000,
            "ttl_ms": 100_000,
            "backing": Lease(),
            **changes,
        }
    )


class Rows:
    def __init__(self, url: str) -> None:
        self.engine = sa.create_engine(url, pool_size=3)
        metadata = sa.MetaData()
        tables = add_tables(metadata)
        metadata.create_all(self.engine)
        self.keys, self.table = tables.keys, tables.steps
        self.store = IntentStore(lambda: self.engine, tables)

    def claimed(self, token: str = "first", **changes: Any) -> Claim:
        claim = claim_of(token, **changes)
        assert self.store.claim(claim).verdict is Verdict.CLAIMED
        return claim

    def kept(self) -> "set[Step]":
        return {dataclasses.replace(step, age_ms=0) for step in self.store.steps(SCOPE)}

    def change(self, **values: Any) -> None:
        with self.engine.begin() as connection:
            connection.execute(sa.update(self.keys).values(**values))


@pytest.fixture
def rows(database_url: str) -> Iterator[Rows]:
    rows = Rows(database_url)
    yield rows
    rows.engine.dispose()


def test_what_is_kept_is_read(rows: Rows):
    claim = rows.claimed()
    assert rows.store.steps(SCOPE) == []
    steps = {
        Step("saga:checkout", result=bytes(range(256))),
        Step("step:ship", 0, DONE, 2, b"{}", "TimeoutError"),
        Step("step:ship", 1, DONE, 1, b"{}", "ü" * 255),
    }
    assert rows.store.keep_steps(claim, list(steps), begun=False)
    assert rows.kept() == steps
    assert {step.age_ms < 60_000 for step in rows.store.steps(SCOPE)} == {True}


def test_sent_twice(rows: Rows):
    """As after a reply that was lost."""
    claim = rows.claimed()
    for step in (Step("step:a"), Step("step:a", 0, DONE, 1, b"{}")):
        assert [rows.store.keep_steps(claim, [step], begun=step.status is BEGUN) for _ in range(2)] == [True, True]
        assert rows.kept() == {step}


@pytest.mark.parametrize("status", ["indeterminate", "succeeded", "failed", "released"])
def test_only_while_it_is_in_progress(rows: Rows, status: str):
    claim = rows.claimed()
    rows.store.keep_steps(claim, [Step("step:a")], begun=True)
    rows.change(status=status)
    assert rows.store.keep_steps(claim, [Step("step:a", 0, DONE), Step("step:b")], begun=False) is False
    assert rows.kept() == {Step("step:a")}


def test_only_by_whoever_holds_it(rows: Rows):
    first = rows.claimed()
    rows.store.keep_steps(first, [Step("step:a")], begun=True)
    rows.change(locked_until=0)
    second = claim_of("second")
    orphan = rows.store.claim(second).record
    assert orphan is not None
    assert rows.store.keep_steps(first, [Step("step:a", 0, DONE)], begun=False) is False
    assert rows.store.keep_steps(second, [Step("step:a", 0, DONE)], begun=False) is False  # it only looks yet
    assert rows.store.settle_retry(second, orphan) is not None
    assert rows.store.keep_steps(first, [Step("step:a", 0, UNDOING)], begun=True) is False
    assert rows.store.keep_steps(second, [Step("step:a", 0, DONE)], begun=False) is True
    assert rows.kept() == {Step("step:a", 0, DONE)}


def test_all_or_none(rows: Rows):
    """The failure of a step, and that the saga turns back."""
    claim = rows.claimed()
    assert rows.store.keep_steps(claim, [Step("saga:x"), Step("step:a")], begun=True)
    wrong = Step("step:b", status="no such status")  # type: ignore[arg-type]
    with pytest.raises((StoreUnavailable, AttributeError)):
        rows.store.keep_steps(claim, [Step("saga:x", 0, UNDOING), wrong], begun=False)
    assert rows.kept() == {Step("saga:x"), Step("step:a")}


def test_its_age_counts_from_its_first_use(rows: Rows):
    claim = rows.claimed()
    rows.store.keep_steps(claim, [Step("step:a")], begun=True)
    with rows.engine.begin() as connection:
        connection.execute(sa.update(rows.table).values(began_at=rows.table.c.began_at - 50_000))
    rows.store.keep_steps(claim, [Step("step:a", 0, BEGUN, 2)], begun=False)
    rows.store.keep_steps(claim, [Step("step:a", 0, DONE, 2)], begun=False)
    assert 50_000 <= rows.store.steps(SCOPE)[0].age_ms < 60_000
    rows.store.keep_steps(claim, [Step("step:a", 0, UNDOING)], begun=True)
    assert rows.store.steps(SCOPE)[0].age_ms < 10_000


def test_nobody_takes_it_over_between_the_look_and_the_write(rows: Rows):
    """The key's row is held until the step's is committed: a takeover comes before or after, never in between."""
    first = rows.claimed(lease_ms=1)
    second = claim_of("second")
    taken: list[Any] = []
    with kit.Crowd() as crowd:
        pending: list[Any] = []

        def take(_: Any, __: Any, statement: str, *___: Any) -> None:
            if "idempotency_steps" in statement and not pending:
                pending.append(crowd.start(lambda: taken.append(rows.store.claim(second).verdict)))
                with pytest.raises(futures.TimeoutError):
                    pending[0].result(0.4)

        sa.event.listen(rows.engine, "before_cursor_execute", take)
        assert rows.store.keep_steps(first, [Step("step:a")], begun=True) is True
        assert taken == []
        pending[0].result(kit.WAIT_S)
    assert taken == [Verdict.SETTLE]
    assert rows.store.keep_steps(first, [Step("step:b")], begun=True) is False


def test_they_go_with_their_record(rows: Rows):
    """An expired key begins anew, with no step of its former life; and another key has its own."""
    claim = rows.claimed()
    rows.store.keep_steps(claim, [Step("step:a", 0, DONE)], begun=False)
    other = claim_of("other", scope=Scope(None, "orders", "e" * 64))
    rows.store.claim(other)
    rows.store.keep_steps(other, [Step("step:a")], begun=True)
    rows.change(status="succeeded", expires_at=1)
    rows.claimed("second")
    assert rows.store.steps(SCOPE) == []
    assert len(rows.store.steps(other.scope)) == 1
