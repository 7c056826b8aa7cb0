"""How a saga is defined, and what a route may say beside it."""

import functools
from typing import Any

import pytest
from flask import Flask

from flask_idempotent import Idempotent, Provider, Saga, SagaFailed, Settlement, TransientStepError, idempotent
from flask_idempotent.errors import (
    CompensationFailed,
    ConfigurationError,
    IdempotencyError,
    Indeterminate,
    NotProtected,
)
from flask_idempotent.keywords import keywords_from
from flask_idempotent.policy import bind_policy
from flask_idempotent.sagas.steps import NoItems, SagaStep, Unit, units_of
from flask_idempotent.settings import Settings


def act(state: dict[str, Any], key: str) -> None:
    """A step."""


def act_for_item(state: dict[str, Any], key: str, item: Any) -> None:
    """A step that runs over a list."""


async def later(state: dict[str, Any], key: str) -> None:
    """None."""


def make() -> Saga:
    saga = Saga("checkout")
    saga.step(act)
    return saga


@pytest.mark.parametrize("name", ["", "a b", "ü", "a" * 51, None, 1, "a/b", "a:b"])
def test_a_name_that_cant_be_part_of_a_key(name: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"Saga\('checkout'\)"):
        Saga(name)


@pytest.mark.parametrize(
    ("function", "keywords", "told"),
    [
        (lambda state, key: None, {}, "needs a name"),
        (functools.partial(act), {}, "needs a name"),
        (later, {}, r"plain function of \(state, key\)"),
        (act_for_item, {}, r"plain function of \(state, key\)"),
        (act, {"over": "items"}, r"plain function of \(state, key, item\)"),
        (act, {"over": ""}, "over="),
        (act, {"over": 1}, "over="),
        (act, {"retries": -1}, "retries="),
        (act, {"retries": True}, "retries="),
        (act, {"retries": 1.5}, "retries="),
        (act, {"compensate": act_for_item}, "the compensation of step 'act'"),
        (act, {"compensate": later}, "the compensation of step 'act'"),
        (act, {"compensate": "release"}, "the compensation of step 'act'"),
    ],
)
def test_what_cant_be_a_step(function: Any, keywords: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        Saga("checkout").step(**keywords)(function)


def test_two_steps_of_one_name() -> None:
    with pytest.raises(ConfigurationError, match="is there already"):
        make().step(act)


def test_a_step_stays_a_function() -> None:
    saga = Saga("checkout")
    assert saga.step(act) is act
    assert saga.step(compensate=act_for_item, over="items")(act_for_item) is act_for_item


def test_nothing_is_called_outside_of_a_protected_view() -> None:
    with pytest.raises(NotProtected, match="the saga 'checkout'"):
        make().run({})
    app = Flask(__name__)
    with app.test_request_context(), pytest.raises(NotProtected):
        make().run({})


def test_units() -> None:
    step = SagaStep("ship", act_for_item, None, 0, "items")
    assert units_of(step, {"items": ["a", "b"]}) == [Unit(step, 0, "a"), Unit(step, 1, "b")]
    assert units_of(step, {"items": []}) == []
    for state in ({}, {"items": "ab"}, {"items": {"a": 1}}, {"items": None}):
        with pytest.raises(NoItems):
            units_of(step, state)


def test_how_it_ends() -> None:
    """Both are caught as `SagaFailed`; only one of them is said to have failed."""
    undone, left = SagaFailed("charge"), CompensationFailed("reserve")
    assert isinstance(left, SagaFailed)
    assert isinstance(undone, IdempotencyError)
    assert (undone.step, undone.status) == ("charge", "ROLLED_BACK")
    assert (left.step, left.status) == ("reserve", "COMPENSATION_FAILED")
    assert (undone.code, undone.problem) == (409, "saga-rolled-back")
    assert (left.code, left.problem) == (409, "indeterminate")
    assert (undone.retryable, undone.retry_after) == (False, None)
    assert (left.retryable, left.retry_after, left.detail) == (True, 10, Indeterminate().detail)
    assert not issubclass(TransientStepError, IdempotencyError)


# -- on a route --------------------------------------------------------------------------------------------------------


def bound(**keywords: Any) -> Any:
    return bind_policy(keywords_from(**keywords), Settings(), where="view 'orders'")


@pytest.mark.parametrize("recovery", [None, "retry"])
@pytest.mark.parametrize("provider", [None, "stripe", Provider.none("rail")])
def test_its_recovery_is_to_resume(recovery: Any, provider: Any) -> None:
    saga = make()
    policy = bound(durable="intent", saga=saga, recovery=recovery, provider=provider)
    assert policy.saga is saga
    assert policy.recovery == recovery


@pytest.mark.parametrize(
    ("keywords", "told"),
    [
        ({"durable": "intent", "recovery": "reconcile"}, "recovery='reconcile' excludes saga="),
        ({"durable": "intent", "recovery": "manual"}, "recovery='manual' excludes saga="),
        ({"durable": "intent", "recovery": "abandon"}, "recovery='abandon' excludes saga="),
        ({"durable": "intent", "reconcile": lambda orphan: Settlement.pending()}, "reconcile= excludes saga="),
        ({"durable": "transaction"}, "saga= excludes durable='transaction'"),
        ({"durable": False}, "saga= needs durable='intent'"),
    ],
)
def test_what_a_saga_excludes(keywords: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        bound(saga=make(), **keywords)
    [line] = str(caught.value).splitlines()
    assert line.startswith(f"view 'orders': {told}")


@pytest.mark.parametrize("value", [object(), Saga, "checkout", act])
def test_what_is_no_saga(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="saga= must be a Saga"):
        keywords_from(saga=value)


def test_a_reconciler_beside_it_is_refused_at_start(tmp_path: Any) -> None:
    from flask_sqlalchemy import SQLAlchemy

    app = Flask(__name__)
    app.config["SQLALCHEMY_DATABASE_URI"] = f"sqlite:///{tmp_path / 'test.sqlite'}"
    db = SQLAlchemy(app)
    idem = Idempotent(app, db=db)

    @idempotent(durable="intent", saga=make())
    def order() -> str:
        return ""

    app.post("/orders")(order)
    idem.verify(app)
    order.reconciler(lambda orphan: Settlement.pending())
    with pytest.raises(ConfigurationError, match="has a reconciler and saga="):
        idem.verify(app)
