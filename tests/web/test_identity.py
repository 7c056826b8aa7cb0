"""Who calls, and for which tenant: loaders, their types, and what stands in for them."""

import base64
import uuid

import pytest
from flask import g, request

from flask_idempotent import Idempotent

from . import kit
from .kit import keyed


class User:
    """Like a model instance: its text holds an address."""

    id = 7


@pytest.fixture
def callers(redis_url, effects):
    """An app whose loaders say what ``callers.principal`` and ``callers.tenant`` are."""

    class Callers:
        principal: object = None
        tenant: object = None
        idem = Idempotent()
        app = kit.make_app(redis_url, idem=idem)

        def post(self, headers, **json):
            return self.app.test_client().post("/orders", json=json, headers=headers)

    callers = Callers()
    callers.idem.principal_loader(lambda: callers.principal)
    callers.idem.tenant_loader(lambda: callers.tenant)
    kit.add_orders(callers.app, effects)
    return callers


def test_tenants_have_unrelated_keys(callers, effects):
    headers = keyed()
    answers = {}
    for tenant in ("acme", "umbrella", None, 1):
        callers.tenant = tenant
        answers[tenant] = callers.post(headers, t=str(tenant))
        kit.assert_kept(answers[tenant])
    for tenant, answer in answers.items():
        callers.tenant = tenant
        kit.assert_replay(answer, callers.post(headers, t=str(tenant)))
    assert effects.runs == 4


@pytest.mark.parametrize("who", ["principal", "tenant"])
def test_a_number_and_its_text_are_the_same(callers, effects, who):
    identifier = uuid.uuid4()
    for one, other in ((1, "1"), (identifier, str(identifier))):
        headers = keyed()
        setattr(callers, who, one)
        first = callers.post(headers)
        setattr(callers, who, other)
        kit.assert_replay(first, callers.post(headers))
    assert effects.runs == 2


@pytest.mark.parametrize("who", ["principal", "tenant"])
@pytest.mark.parametrize("value", [User(), User, True, False, b"ann", 1.5, ["ann"], object(), ""])
def test_another_type_is_an_error_before_the_view_runs(callers, effects, store, who, value, caplog):
    """F39"""
    setattr(callers, who, value)
    assert callers.post(keyed()).status_code == 500
    assert effects.runs == 0
    assert kit.our_keys(store) == []
    assert "ConfigurationError" in caplog.text
    assert type(value).__name__ in caplog.text or "empty" in caplog.text


@pytest.mark.parametrize("who", ["principal", "tenant"])
def test_a_loader_that_raises_fails_closed(redis_url, effects, store, who):
    idem = Idempotent()
    app = kit.add_orders(kit.make_app(redis_url, idem=idem), effects)

    def loader():
        raise LookupError

    getattr(idem, f"{who}_loader")(loader)
    assert app.test_client().post("/orders", headers=keyed()).status_code == 500
    assert effects.runs == 0
    assert kit.our_keys(store) == []


def test_another_principal_gets_404(callers, effects):
    headers = keyed()
    callers.principal = "ann"
    first = callers.post(headers)
    for other in ("bob", None, "Ann", "ann ", 1):
        callers.principal = other
        kit.assert_problem(callers.post(headers), "not-found")
    callers.principal = "ann"
    kit.assert_replay(first, callers.post(headers))
    assert effects.runs == 1


def test_a_loader_may_be_told_late_and_reads_what_guards_found(redis_url, effects):
    idem = Idempotent()
    app = kit.add_orders(kit.make_app(redis_url, idem=idem), effects)
    app.before_request(lambda: setattr(g, "user", request.headers["X-User"]))
    idem.principal_loader(lambda: g.user)
    client, key = app.test_client(), kit.new_key()
    first = client.post("/orders", headers=keyed(key, X_User="ann"))
    kit.assert_problem(client.post("/orders", headers=keyed(key, X_User="bob")), "not-found")
    kit.assert_replay(first, client.post("/orders", headers=keyed(key, X_User="ann")))
    assert effects.runs == 1


def basic(user, password="x"):
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}


@pytest.mark.parametrize(
    ("ann", "ann_later", "bob"),
    [
        (basic("ann"), basic("ann", "changed"), basic("bob")),
        ({"X-API-Key": "key-of-ann"}, {"X-API-Key": "key-of-ann"}, {"X-API-Key": "key-of-bob"}),
        ({"Authorization": "Bearer a=b"}, {"Authorization": "Bearer a=b"}, {"Authorization": "Bearer a=c"}),
        ({"Authorization": "Bearer ann"}, {"Authorization": "bearer ann"}, {"Authorization": "Bearer bob"}),
    ],
)
def test_what_stands_in_for_a_loader(make_app, effects, store, ann, ann_later, bob):
    client, headers = kit.add_orders(make_app(), effects).test_client(), keyed()
    first = client.post("/orders", headers={**headers, **ann})
    kit.assert_replay(first, client.post("/orders", headers={**headers, **ann_later}))
    for other in (bob, {}):
        kit.assert_problem(client.post("/orders", headers={**headers, **other}), "not-found")
    assert effects.runs == 1
    for secret in (b"key-of", b"ann", b"a=b"):
        assert secret not in kit.everything(store)


def test_a_refreshed_bearer_token_is_another_caller_without_a_loader(make_app, effects, caplog):
    """Documented, and warned of at the start: an honest client with a new token gets 404 for its own key."""
    client, headers = kit.add_orders(make_app(), effects).test_client(), keyed()
    client.post("/orders", headers={**headers, "Authorization": "Bearer old"})
    assert "principal_loader" in caplog.text
    kit.assert_problem(client.post("/orders", headers={**headers, "Authorization": "Bearer new"}), "not-found")
    assert effects.runs == 1
