"""APIFlask: input, output, its errors and its auth, and marks above and below them."""

import apiflask
import pytest
from apiflask import APIFlask, HTTPTokenAuth
from apiflask.fields import Integer, Raw, String
from apiflask.validators import Length
from apiflask.views import MethodView

from flask_idempotent import Idempotent, idempotent
from flask_idempotent.loaders import httpauth_user
from tests.web import kit
from tests.web.kit import keyed

from .suite import Work, assert_contract, configs


class OrderIn(apiflask.Schema):
    item = String(required=True, validate=Length(min=3))


class OrderOut(apiflask.Schema):
    id = Integer()
    item = String()


class Envelope(apiflask.Schema):
    data = Raw()
    code = Integer()
    message = String()


def bare_app(redis_url, config) -> APIFlask:
    app = APIFlask("shop")
    app.config.update(IDEMPOTENT_REDIS_URL=redis_url, **config)
    return app


def marked(app, view, place):
    decorators = [app.input(OrderIn), app.output(OrderOut, status_code=201)]
    for decorator in reversed([idempotent, *decorators] if place == "above" else [*decorators, idempotent]):
        view = decorator(view)
    return view


def function(app, work, place):
    def create(json_data):
        return work(json_data["item"])

    app.post("/orders")(marked(app, create, place))


def async_function(app, work, place):
    async def create(json_data):
        return work(json_data["item"])

    app.post("/orders")(marked(app, create, place))


def method_view(app, work, place):
    def post(self, json_data):
        return work(json_data["item"])

    view = type("Orders", (MethodView,), {"post": marked(app, post, place)})
    app.add_url_rule("/orders", view_func=view.as_view("orders"))


kinds = pytest.mark.parametrize("kind", [function, async_function, method_view])


@configs
@pytest.mark.parametrize("place", ["above", "below"])
@kinds
def test_orders(redis_url, crowd, config, kind, place):
    """F56, F102"""
    app, work = bare_app(redis_url, config), Work()
    Idempotent(app)
    kind(app, work, place)
    assert_contract(app, work, crowd)


def test_an_envelope(redis_url, crowd):
    """``BASE_RESPONSE_SCHEMA`` makes an envelope of what the view returns: one, not two."""
    app, work = bare_app(redis_url, {"BASE_RESPONSE_SCHEMA": Envelope}), Work()
    Idempotent(app)

    @app.post("/orders")
    @app.input(OrderIn)
    @app.output(OrderOut, status_code=201)
    @idempotent
    def create(json_data):
        return {"data": work(json_data["item"]), "code": 201, "message": "made"}

    assert_contract(app, work, crowd, wrap=lambda order: {"data": order, "code": 201, "message": "made"})


@kinds
def test_a_refused_body_leaves_nothing(redis_url, store, kind):
    app, work = bare_app(redis_url, {}), Work()
    Idempotent(app)
    kind(app, work, "below")
    client, headers = app.test_client(), keyed()
    for body in ({"item": "x"}, {}):
        refused = client.post("/orders", json=body, headers=headers)
        assert refused.status_code == 422
        assert "json" in refused.get_json()["detail"]
        kit.assert_not_kept(refused)
    assert kit.our_keys(store) == []
    first = client.post("/orders", json={"item": "book"}, headers=headers)
    kit.assert_replay(first, client.post("/orders", json={"item": "book"}, headers=headers))
    assert work.effects.runs == 1


@configs
def test_its_abort_in_the_view(redis_url, effects, config):
    app = bare_app(redis_url, config)
    Idempotent(app)

    @app.post("/pay/<int:status>")
    @app.output(OrderOut)
    @idempotent
    def pay(status):
        effects.add()
        apiflask.abort(status, "declined", extra_data={"balance": 3}, headers={"X-Own": "1"})

    client = app.test_client()
    for status, runs in ((410, 1), (409, 2)):
        effects.lines.clear()
        headers = keyed()
        first, second = (client.post(f"/pay/{status}", headers=headers) for _ in range(2))
        assert first.status_code == second.status_code == status
        assert first.headers["X-Own"] == second.headers["X-Own"] == "1"
        assert (first.get_json()["message"], first.get_json()["balance"]) == ("declined", 3)
        assert effects.runs == runs
        if runs == 1:
            kit.assert_replay(first, second)


def test_its_token_auth(redis_url, effects):
    """A replay is for nobody who doesn't pass ``auth_required``."""
    app, auth = bare_app(redis_url, {}), HTTPTokenAuth()
    auth.verify_token(lambda token: token.removeprefix("of-") or None)
    idem = Idempotent(app)
    idem.principal_loader(httpauth_user(auth))

    @app.post("/orders")
    @app.auth_required(auth)
    @idempotent
    def create():
        effects.add()
        return {"secret": 1}, 201

    client, headers = app.test_client(), keyed()
    ann, bob = ({"Authorization": f"Bearer of-{name}"} for name in ("ann", "bob"))
    first = client.post("/orders", headers={**headers, **ann})
    assert client.post("/orders", headers=headers).status_code == 401
    kit.assert_problem(client.post("/orders", headers={**headers, **bob}), "not-found")
    kit.assert_replay(first, client.post("/orders", headers={**headers, **ann}))
    assert effects.runs == 1


def test_the_api_description_is_still_made(redis_url):
    app, work = bare_app(redis_url, {}), Work()
    Idempotent(app)
    function(app, work, "below")
    operation = app.test_client().get("/openapi.json").get_json()["paths"]["/orders"]["post"]
    assert "201" in operation["responses"]
    assert "requestBody" in operation
