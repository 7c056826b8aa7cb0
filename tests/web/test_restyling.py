"""Handlers of the app restyle our answers, whenever they are registered; handlers for something else don't."""

import pytest
from flask import Blueprint, Flask
from werkzeug.exceptions import Conflict, HTTPException, NotFound, UnprocessableEntity

from flask_idempotent import Idempotent, idempotent
from flask_idempotent.errors import IdempotencyError, InvalidKey, KeyNotFound, Mismatch, MissingKey

from . import kit
from .kit import keyed


def styled(error):
    return {"error": type(error).__name__, "code": error.problem, "after": error.retry_after}, 460


def foreign(error):
    return {"error": "foreign"}, 599


def build(redis_url, effects, when, register, **settings) -> Flask:
    app = kit.bare_app(redis_url, **settings)
    if when == "before":
        register(app)
    idem = Idempotent(app)
    idem.principal_loader(kit.user_header)
    kit.add_orders(app, effects)
    if when == "after":
        register(app)
    return app


def mismatch(app):
    client, headers = app.test_client(), keyed()
    assert client.post("/orders", json={"a": 1}, headers=headers).status_code == 201
    return client.post("/orders", json={"a": 2}, headers=headers)


when = pytest.mark.parametrize("when", ["before", "after"])


@when
@pytest.mark.parametrize("status", [422, 409])
@pytest.mark.parametrize("cls", [Mismatch, IdempotencyError])
def test_a_handler_for_one_class_or_all(redis_url, effects, when, cls, status):
    app = build(redis_url, effects, when, lambda app: app.register_error_handler(cls, styled), MISMATCH_STATUS=status)
    answer = mismatch(app)
    assert answer.status_code == 460
    assert answer.get_json() == {"error": "Mismatch", "code": "mismatch", "after": None}
    missing = app.test_client().post("/orders")
    if cls is IdempotencyError:
        assert missing.get_json()["code"] == "missing-key"
    else:
        kit.assert_problem(missing, "missing-key")


@when
@pytest.mark.parametrize("cls", [Mismatch, IdempotencyError])
def test_a_handler_of_the_blueprint(redis_url, effects, when, cls):
    app = kit.bare_app(redis_url)
    shop = Blueprint("shop", __name__)
    inner = Blueprint("inner", __name__)
    for blueprint in (shop, inner):
        blueprint.post("/" + blueprint.name)(idempotent(kit.answering(effects, ("ok", 201))))
    shop.register_error_handler(cls, styled)
    shop.register_blueprint(inner, url_prefix="/in")
    if when == "after":
        Idempotent(app)
    app.register_blueprint(shop)
    if when == "before":
        Idempotent(app)
    kit.add_orders(app, effects)
    client = app.test_client()
    for path in ("/shop", "/in/inner"):
        headers = keyed()
        client.post(path, json={"a": 1}, headers=headers)
        assert client.post(path, json={"a": 2}, headers=headers).status_code == 460
    kit.assert_problem(mismatch(app), "mismatch")


@when
@pytest.mark.parametrize(
    "what", [HTTPException, Exception, UnprocessableEntity, NotFound, Conflict, 404, 409, 422, 400]
)
def test_a_handler_for_something_else_does_not_restyle(redis_url, effects, when, what):
    app = build(redis_url, effects, when, lambda app: app.register_error_handler(what, foreign))
    kit.assert_problem(mismatch(app), "mismatch")
    kit.assert_problem(app.test_client().post("/orders"), "missing-key")
    kit.assert_problem(app.test_client().post("/orders", headers=keyed("a,b")), "invalid-key")


@pytest.mark.parametrize("what", [HTTPException, Exception, 404])
def test_a_blueprints_handler_for_something_else_does_not_restyle(redis_url, effects, what):
    app = kit.make_app(redis_url)
    shop = Blueprint("shop", __name__)
    shop.post("/shop")(idempotent(kit.answering(effects, ("ok", 201))))
    shop.register_error_handler(what, foreign)
    app.register_blueprint(shop)
    kit.assert_problem(app.test_client().post("/shop"), "missing-key")


def test_the_404_of_the_app_is_not_ours(redis_url, effects):
    """The app's own 404 stays restyled by the app, and our 404 is not told apart by it."""
    app = build(redis_url, effects, "after", lambda app: app.register_error_handler(404, foreign))
    client, key = app.test_client(), kit.new_key()
    client.post("/orders", headers=keyed(key, X_User="ann"))
    kit.assert_problem(client.post("/orders", headers=keyed(key, X_User="bob")), "not-found")
    assert client.get("/nowhere").status_code == 599


@when
@pytest.mark.parametrize("cls", [MissingKey, InvalidKey, KeyNotFound])
def test_a_handler_sees_the_error(redis_url, effects, when, cls):
    seen = []

    def handler(error):
        seen.append(error)
        return "styled", 460

    app = build(redis_url, effects, when, lambda app: app.register_error_handler(cls, handler))
    client, key = app.test_client(), kit.new_key()
    client.post("/orders", headers=keyed(key, X_User="ann"))
    answers = [client.post("/orders", headers=h) for h in (None, keyed("a,b"), keyed(key, X_User="bob"))]
    assert [answer.status_code for answer in answers].count(460) == 1
    assert [type(error) for error in seen] == [cls]


def test_an_async_handler(redis_url, effects):
    async def handler(error):
        return "styled", 460

    app = build(redis_url, effects, "before", lambda app: app.register_error_handler(IdempotencyError, handler))
    assert mismatch(app).status_code == 460


def test_trapped_http_exceptions_change_nothing(redis_url, effects):
    app = kit.make_app(redis_url, config={"TRAP_HTTP_EXCEPTIONS": True})
    kit.add_orders(app, effects)
    kit.assert_problem(mismatch(app), "mismatch")
    client, headers = app.test_client(), keyed()
    kit.assert_replay(client.post("/orders", headers=headers), client.post("/orders", headers=headers))
