"""Flask-RESTX: its resources make answers of their own of all that is raised; ours and the kept ones come through."""

import warnings

import pytest
from flask import Flask, got_request_exception

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its own, of what it imports
    from flask_restx import Api, Namespace, Resource, abort, fields

from flask_idempotent import Idempotent, idempotent
from flask_idempotent.errors import IdempotencyError, InvalidKey, Mismatch
from tests.web import kit
from tests.web.kit import keyed

from .suite import Work, assert_contract, configs

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:flask_restx")


def add_orders(api, work, place="below", *, outer=None):
    namespace = Namespace("shop", path="/")
    order_in = namespace.model("OrderIn", {"item": fields.String(required=True, min_length=3)})
    order_out = namespace.model("OrderOut", {"id": fields.Integer, "item": fields.String})

    def post(self):
        return work(api.payload["item"]), 201

    decorators = [namespace.expect(order_in, validate=True), namespace.marshal_with(order_out, code=201)]
    for decorator in reversed([idempotent, *decorators] if place == "above" else [*decorators, idempotent]):
        post = decorator(post)
    namespace.route("/orders")(type("Orders", (Resource,), {"post": outer(post) if outer else post}))
    api.add_namespace(namespace)


def build(redis_url, config, work, place="below", *, when="after", **options) -> "tuple[Flask, Api]":
    app = kit.bare_app(redis_url, config=config)
    if when == "before":
        Idempotent(app)
    api = Api(app)
    if when == "after":
        Idempotent(app)
    add_orders(api, work, place, **options)
    return app, api


@configs
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("place", ["above", "below"])
def test_orders(redis_url, crowd, config, place, when):
    """F56"""
    work = Work()
    app, _ = build(redis_url, config, work, place, when=when)
    assert_contract(app, work, crowd)


def test_nothing_is_reported_as_an_error(redis_url, crowd):
    """Replays and refusals of a claim are no exceptions for whoever watches those."""
    work, told = Work(), []
    app, _ = build(redis_url, {}, work)

    def note(sender, exception):
        told.append(exception)

    got_request_exception.connect(note, app)
    assert_contract(app, work, crowd)
    # A malformed header is refused ahead of all hooks, where there is no resource yet that one could answer.
    assert [type(error) for error in told] in ([], [InvalidKey])


def test_a_refused_body_leaves_nothing(redis_url, store):
    work = Work()
    app, _ = build(redis_url, {}, work)
    client, headers = app.test_client(), keyed()
    for body in ({"item": "x"}, {}):
        refused = client.post("/orders", json=body, headers=headers)
        assert (refused.status_code, refused.get_json()["message"]) == (400, "Input payload validation failed")
        kit.assert_not_kept(refused)
    assert kit.our_keys(store) == []
    first = client.post("/orders", json={"item": "book"}, headers=headers)
    kit.assert_replay(first, client.post("/orders", json={"item": "book"}, headers=headers))
    assert work.effects.runs == 1


class Declined(Exception):
    pass


@configs
@pytest.mark.parametrize(("status", "runs"), [(402, 1), (503, 2)])
def test_an_error_handler_of_the_api(redis_url, effects, config, status, runs):
    """What ``api.errorhandler`` makes of an exception of the view is the view's answer; F93."""
    app = kit.make_app(redis_url, config=config)
    api = Api(app)

    @api.errorhandler(Declined)
    def declined(error):
        return {"reason": "declined"}, status

    @api.route("/pay")
    class Pay(Resource):
        @idempotent
        def post(self):
            effects.add()
            raise Declined

    client, headers = app.test_client(), keyed()
    first, second = (client.post("/pay", headers=headers) for _ in range(2))
    assert first.status_code == second.status_code == status
    assert first.get_json()["reason"] == "declined"
    assert effects.runs == runs
    if runs == 1:
        kit.assert_replay(first, second)


@configs
def test_its_abort_in_the_view(redis_url, effects, config):
    app = kit.make_app(redis_url, config=config)
    api = Api(app)

    @api.route("/pay/<int:status>")
    class Pay(Resource):
        @idempotent
        def post(self, status):
            effects.add()
            abort(status, "declined", balance=3)

    client = app.test_client()
    for status, runs in ((410, 1), (409, 2)):
        effects.lines.clear()
        headers = keyed()
        first, second = (client.post(f"/pay/{status}", headers=headers) for _ in range(2))
        assert first.status_code == second.status_code == status
        assert first.get_json() == {"message": "declined", "balance": 3}
        assert effects.runs == runs
        if runs == 1:
            kit.assert_replay(first, second)


@pytest.mark.parametrize("handled", ["Exception", "default"])
def test_its_handlers_for_something_else_do_not_restyle(redis_url, crowd, handled):
    work = Work()
    app, api = build(redis_url, {}, work)

    def foreign(error):
        return {"error": "foreign"}, 599

    (api.errorhandler if handled == "default" else api.errorhandler(Exception))(foreign)
    assert_contract(app, work, crowd)


@pytest.mark.parametrize("cls", [Mismatch, InvalidKey, IdempotencyError])
def test_the_apps_handler_for_one_of_ours_restyles(redis_url, cls):
    work = Work()
    app, _ = build(redis_url, {}, work)
    app.register_error_handler(cls, lambda error: ({"styled": error.problem}, 460))
    client, headers = app.test_client(), keyed()
    client.post("/orders", json={"item": "book"}, headers=headers)
    answers = {
        "mismatch": client.post("/orders", json={"item": "lamp"}, headers=headers),
        "invalid-key": client.post("/orders", json={"item": "lamp"}, headers=keyed("a,b")),
    }
    for code, answer in answers.items():
        if cls.problem in (code, IdempotencyError.problem):
            assert (answer.status_code, answer.get_json()) == (460, {"styled": code})
        else:
            kit.assert_problem(answer, code)
    assert work.effects.runs == 1


def test_guards_of_the_resource(redis_url, store, effects):
    """``method_decorators`` stand outside of a mark on the method."""
    app = kit.make_app(redis_url)
    api, closed = Api(app), []

    def guard(view):
        def inner(*args, **kwargs):
            if closed:
                abort(401)
            return view(*args, **kwargs)

        return inner

    @api.route("/orders")
    class Orders(Resource):
        method_decorators = (guard,)

        @idempotent
        def post(self):
            return {"run": effects.add()}, 201

    client, headers = app.test_client(), keyed()
    closed.append(True)
    kit.assert_not_kept(client.post("/orders", headers=headers))
    assert kit.our_keys(store) == []
    closed.clear()
    first = client.post("/orders", headers=headers)
    kit.assert_replay(first, client.post("/orders", headers=headers))
    closed.append(True)
    refused = client.post("/orders", headers=headers)
    assert (refused.status_code, "run" in refused.get_json()) == (401, False)
    kit.assert_not_kept(refused)
    assert effects.runs == 1


def test_a_declared_resource(redis_url, crowd):
    """Its views are wrapped by the package itself, so that a declaration has to say where its guards are."""
    app, work = kit.bare_app(redis_url), Work()
    idem = Idempotent(app)
    api = Api(app)

    @api.route("/orders", endpoint="orders")
    class Orders(Resource):
        def post(self):
            return {**work(api.payload["item"])}, 201

    idem.protect("orders", guards="hooks")
    assert_contract(app, work, crowd, wrap=lambda order: {**order, "internal": "never sent"})
