"""flask-smorest: arguments, responses, ETags, and marks above and below them."""

import marshmallow as ma
import pytest
from flask import Flask
from flask.views import MethodView
from flask_smorest import Api, Blueprint, abort

from flask_idempotent import Idempotent, idempotent
from tests.web import kit
from tests.web.kit import keyed

from .suite import Work, assert_contract, configs

SETTINGS = {"API_TITLE": "Shop", "API_VERSION": "1", "OPENAPI_VERSION": "3.0.3"}


class OrderIn(ma.Schema):
    item = ma.fields.String(required=True, validate=ma.validate.Length(min=3))


class OrderOut(ma.Schema):
    id = ma.fields.Integer()
    item = ma.fields.String()


def function(blueprint, work, place, etag):
    decorators = [blueprint.arguments(OrderIn), blueprint.response(201, OrderOut)]
    if etag:
        decorators.insert(0, blueprint.etag)

    def create(data):
        return work(data["item"])

    blueprint.route("/orders", methods=["POST"])(marked(create, decorators, place))


def method_view(blueprint, work, place, etag):
    decorators = [blueprint.arguments(OrderIn), blueprint.response(201, OrderOut)]
    if etag:
        decorators.insert(0, blueprint.etag)

    def post(self, data):
        return work(data["item"])

    view = type("Orders", (MethodView,), {"post": marked(post, decorators, place)})
    blueprint.route("/orders")(view)


def marked(view, decorators, place):
    for decorator in reversed([idempotent, *decorators] if place == "above" else [*decorators, idempotent]):
        view = decorator(view)
    return view


def build(redis_url, config, work, *, kind=function, place="below", etag=False, when="after") -> Flask:
    app = kit.bare_app(redis_url, config={**SETTINGS, **config})
    if when == "before":
        Idempotent(app)
    api = Api(app)
    if when == "after":
        Idempotent(app)
    blueprint = Blueprint("shop", __name__)
    kind(blueprint, work, place, etag)
    api.register_blueprint(blueprint)
    return app


@configs
@pytest.mark.parametrize("etag", [False, True], ids=["", "etag"])
@pytest.mark.parametrize("place", ["above", "below"])
@pytest.mark.parametrize("kind", [function, method_view])
def test_orders(redis_url, crowd, config, kind, place, etag):
    """F56, F102: the schema is applied once, and our own answers pass its handler for ``HTTPException`` untouched."""
    work = Work()
    app = build(redis_url, config, work, kind=kind, place=place, etag=etag)
    first = assert_contract(app, work, crowd)
    assert bool(first.get_etag()[0]) is etag


@pytest.mark.parametrize("when", ["before", "after"])
def test_before_and_after(redis_url, crowd, when):
    work = Work()
    assert_contract(build(redis_url, {}, work, when=when), work, crowd)


@pytest.mark.parametrize("kind", [function, method_view])
def test_a_refused_body_leaves_nothing(redis_url, store, kind):
    """The schema's 422 comes before the view: the key is free for the corrected request."""
    work = Work()
    client, headers = build(redis_url, {}, work, kind=kind).test_client(), keyed()
    for body in ({"item": "x"}, {}, {"item": "book", "more": 1}):
        refused = client.post("/orders", json=body, headers=headers)
        assert (refused.status_code, refused.get_json()["code"]) == (422, 422)
        assert "errors" in refused.get_json()
        kit.assert_not_kept(refused)
    assert kit.our_keys(store) == []
    first = client.post("/orders", json={"item": "book"}, headers=headers)
    kit.assert_replay(first, client.post("/orders", json={"item": "book"}, headers=headers))
    # Where the schema would refuse it, it decides first.
    assert client.post("/orders", json={"item": "x"}, headers=headers).get_json()["code"] == 422
    assert work.effects.runs == 1


def test_above_the_schema_its_refusal_is_an_answer_of_the_view(redis_url, store):
    """Above, the mark stands around the schema too: its 422 is kept, as if the view itself had said so."""
    work = Work()
    client, headers = build(redis_url, {}, work, place="above").test_client(), keyed()
    first = client.post("/orders", json={"item": "x"}, headers=headers)
    assert first.status_code == 422
    kit.assert_replay(first, client.post("/orders", json={"item": "x"}, headers=headers))
    assert kit.the_record(store)["state"] == b"failed"
    assert work.effects.runs == 0


@configs
def test_its_abort_in_the_view(redis_url, effects, config):
    """410 is kept and 409 is not; both have smorest's own body."""
    app = kit.bare_app(redis_url, config={**SETTINGS, **config})
    Idempotent(app)
    api, blueprint = Api(app), Blueprint("shop", __name__)

    @blueprint.route("/pay/<int:status>", methods=["POST"])
    @blueprint.response(201, OrderOut)
    @idempotent
    def pay(status):
        effects.add(status)
        abort(status, message="declined")

    api.register_blueprint(blueprint)
    client = app.test_client()
    for status, runs in ((410, 1), (409, 2)):
        effects.lines.clear()
        headers = keyed()
        first, second = (client.post(f"/pay/{status}", headers=headers) for _ in range(2))
        assert first.status_code == second.status_code == status
        assert first.get_json() == second.get_json()
        assert (first.get_json()["code"], first.get_json()["message"]) == (status, "declined")
        assert effects.runs == runs
        if runs == 1:
            kit.assert_replay(first, second)
        else:
            kit.assert_not_kept(second)


def test_an_etag_that_has_moved_on(redis_url, effects):
    """A retried PATCH carries the ETag of before: told the first answer, not 412. A stale one is refused."""
    app = kit.bare_app(redis_url, config=SETTINGS)
    Idempotent(app)
    api, blueprint = Api(app), Blueprint("shop", __name__)
    item = {"id": 1, "item": "John"}

    @blueprint.route("/items/1")
    class Item(MethodView):
        @blueprint.etag
        @blueprint.response(200, OrderOut)
        def get(self):
            return item

        @blueprint.etag
        @blueprint.arguments(OrderIn)
        @blueprint.response(200, OrderOut)
        @idempotent
        def patch(self, data):
            blueprint.check_etag(item, OrderOut)
            effects.add()
            item["item"] = data["item"]
            return item

    api.register_blueprint(blueprint)
    client, headers = app.test_client(), keyed()
    old = client.get("/items/1").headers["ETag"]
    no_condition = client.patch("/items/1", json={"item": "Bob"}, headers=headers)
    assert no_condition.status_code == 428
    kit.assert_not_kept(no_condition)
    first = client.patch("/items/1", json={"item": "Bob"}, headers={**headers, "If-Match": old})
    assert (first.status_code, first.get_json()) == (200, {"id": 1, "item": "Bob"})
    assert first.headers["ETag"] == client.get("/items/1").headers["ETag"] != old
    item["item"] = "Carl"
    kit.assert_replay(first, client.patch("/items/1", json={"item": "Bob"}, headers={**headers, "If-Match": old}))
    stale = client.patch("/items/1", json={"item": "Dora"}, headers={**keyed(), "If-Match": old})
    assert stale.status_code == 412
    assert effects.runs == 1
