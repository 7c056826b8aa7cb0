"""Views of every kind, under and above decorators of every kind. What is in ``test_apps.py`` is not here again."""

import asyncio
import functools
import inspect
import logging

import pytest
from flask import Blueprint, Flask, abort, current_app, g, make_response, request
from flask.views import MethodView, View
from werkzeug.exceptions import HTTPException
from werkzeug.routing import Rule

from flask_idempotent import Idempotent, current_idempotency, idempotent
from flask_idempotent.errors import ConfigurationError, IdempotencyError, NotProtected

from . import kit
from .kit import keyed

CONFIGS = {
    "production": {},
    "testing": {"TESTING": True},
    "debug": {"DEBUG": True},
    "propagating": {"PROPAGATE_EXCEPTIONS": True},
    "trapping": {"TRAP_HTTP_EXCEPTIONS": True},
}


@pytest.fixture(params=CONFIGS)
def app(request, make_app) -> Flask:
    return make_app(config=CONFIGS[request.param])


@pytest.fixture
def one_app(make_app) -> Flask:
    return make_app()


def assert_contract(app, path="/orders"):
    """First, replay, and each refusal that needs no second request at the same time. Gives the first answer."""
    client, headers = app.test_client(), keyed()
    first = client.post(path, json={"a": 1}, headers=headers)
    kit.assert_kept(first)
    for _ in range(2):
        kit.assert_replay(first, client.post(path, json={"a": 1}, headers=headers))
    kit.assert_problem(client.post(path, json={"a": 2}, headers=headers), "mismatch")
    kit.assert_problem(client.post(path, json={"a": 1}), "missing-key")
    kit.assert_problem(client.post(path, json={"a": 1}, headers=keyed("a,b")), "invalid-key")
    return first


# Async views


def test_an_async_view_that_gathers(app, effects):
    """F102: the work of one view on one event loop, on a thread that isn't the request's."""

    async def part(name):
        await asyncio.sleep(0.001)
        effects.add(name)
        return {name: current_idempotency.attempt, "path": request.path, "scope": current_idempotency.scope}

    @app.post("/orders")
    @idempotent(scope="orders.create")
    async def orders():
        parts = await asyncio.gather(part("a"), part("b"), part("c"))
        return {"parts": parts}, 201

    first = assert_contract(app)
    assert first.get_json()["parts"] == [{name: 1, "path": "/orders", "scope": "orders.create"} for name in "abc"]
    assert sorted(effects.lines) == ["a", "b", "c"]


def test_an_async_view_under_an_async_decorator(app, effects):
    """F102: an outer decorator that awaits the view, and works with its value."""

    def timed(view):
        @functools.wraps(view)
        async def inner(*args, **kwargs):
            await asyncio.sleep(0)
            value, status = await view(*args, **kwargs)
            await asyncio.sleep(0)
            return {**value, "timed": True}, status

        return inner

    @app.post("/orders")
    @timed
    @timed
    @idempotent
    async def orders():
        return {"run": effects.add()}, 201

    assert assert_contract(app).get_json() == {"run": 1, "timed": True}
    assert effects.runs == 1


def test_an_async_view_under_a_sync_decorator(app, effects):
    """As Flask's docs have it: ``ensure_sync`` around the view."""

    def logged(view):
        @functools.wraps(view)
        def inner(*args, **kwargs):
            return current_app.ensure_sync(view)(*args, **kwargs)

        return inner

    @app.post("/orders")
    @logged
    @idempotent
    async def orders():
        return {"run": effects.add()}, 201

    assert_contract(app)
    assert effects.runs == 1


def test_an_async_decorator_under_the_mark(one_app, effects):
    def retried(view):
        @functools.wraps(view)
        async def inner(*args, **kwargs):
            return await view(*args, **kwargs)

        return inner

    @one_app.post("/orders")
    @idempotent
    @retried
    async def orders():
        return {"run": effects.add()}, 201

    assert_contract(one_app)
    assert effects.runs == 1


def test_async_methods_of_a_class(app, effects):
    class Orders(MethodView):
        @idempotent
        async def post(self):
            await asyncio.sleep(0)
            return {"run": effects.add()}, 201

    app.add_url_rule("/orders", view_func=Orders.as_view("orders"))
    assert_contract(app)
    assert effects.runs == 1


def test_an_async_view_that_raises(app, effects, store):
    @app.post("/orders")
    @idempotent
    async def orders():
        if effects.add() == 1:
            raise ValueError("secret")
        return "second", 201

    client, headers = app.test_client(), keyed()
    try:
        assert client.post("/orders", headers=headers).status_code == 500
    except ValueError:
        assert app.testing or app.debug or app.config["PROPAGATE_EXCEPTIONS"]
    assert kit.the_record(store)["state"] == b"released"
    second = client.post("/orders", headers=headers)
    kit.assert_replay(second, client.post("/orders", headers=headers))
    assert effects.runs == 2


def test_a_mark_keeps_what_a_view_is():
    """Name, docs, signature, and whether it is async, for whoever asks."""

    @idempotent(scope="x")
    async def view(order_id: int) -> str:
        """Docs."""
        return str(order_id)

    @idempotent
    def plain(order_id: int) -> str:
        return str(order_id)

    assert inspect.iscoroutinefunction(view)
    assert not inspect.iscoroutinefunction(plain)
    assert (view.__name__, view.__doc__) == ("view", "Docs.")
    assert str(inspect.signature(view)) == str(inspect.signature(plain)) == "(order_id: int) -> str"


# Class-based views


def as_first_decorator(effects, outer):
    class Orders(MethodView):
        decorators = (idempotent, outer)

        def post(self):
            return {"run": effects.add()}, 201

    return Orders.as_view("orders")


def on_the_method(effects, outer):
    class Orders(MethodView):
        decorators = (outer,)
        init_every_request = False

        @idempotent
        def post(self):
            return {"run": effects.add()}, 201

    return Orders.as_view("orders")


def on_the_view(effects, outer):
    class Orders(MethodView):
        def __init__(self, number):
            self.number = number

        def post(self):
            assert self.number == 7
            return {"run": effects.add()}, 201

    return outer(idempotent(Orders.as_view("orders", 7)))


def on_the_dispatcher(effects, outer):
    class Orders(View):
        methods = ("GET", "POST")

        @idempotent
        def dispatch_request(self):
            return {"run": effects.add()}, 201

    return outer(Orders.as_view("orders"))


def on_an_inherited_method(effects, outer):
    class Base(MethodView):
        @idempotent
        def post(self):
            return {"run": effects.add()}, 201

    class Orders(Base):
        def get(self):
            return "list"

    return outer(Orders.as_view("orders"))


@pytest.mark.parametrize(
    "kind", [as_first_decorator, on_the_method, on_the_view, on_the_dispatcher, on_an_inherited_method]
)
def test_a_class(app, effects, kind, caplog):
    seen = []

    def outer(view):
        @functools.wraps(view)
        def inner(*args, **kwargs):
            seen.append(request.method)
            return view(*args, **kwargs)

        return inner

    app.add_url_rule("/orders", view_func=kind(effects, outer))
    assert_contract(app)
    assert effects.runs == 1
    assert seen.count("POST") == 5, "the malformed key is refused ahead of all decorators, the others below them"
    assert "another decorator" not in caplog.text


def test_a_mark_on_a_method_is_nearer_than_that_on_its_class(one_app, effects):
    """Each call has one mark: the nearest."""
    scopes = []

    class Orders(MethodView):
        decorators = (idempotent(scope="class"),)

        @idempotent(scope="method", required=False)
        def post(self):
            scopes.append(current_idempotency.scope)
            return {"run": effects.add()}, 201

        def patch(self):
            scopes.append(current_idempotency.scope)
            return {"run": effects.add()}

    one_app.add_url_rule("/orders", view_func=Orders.as_view("orders"))
    client, headers = one_app.test_client(), keyed()
    for send in (client.post, client.patch):
        kit.assert_replay(send("/orders", headers=headers), send("/orders", headers=headers))
    assert scopes == ["method", "class"]
    kit.assert_problem(client.patch("/orders"), "missing-key")
    one_app.testing = True
    with pytest.raises(NotProtected):  # it ran, as it may without a key
        client.post("/orders")


# Nested blueprints


def test_one_blueprint_under_several_names(one_app, effects):
    """F103: a mark in a nested blueprint, registered twice and once more in another: separate endpoints."""
    shop, v1, v2 = Blueprint("shop", __name__), Blueprint("v1", __name__), Blueprint("v2", __name__)
    shop.post("/orders")(idempotent(kit.answering(effects, ("made", 201))))
    v1.register_blueprint(shop)
    v2.register_blueprint(shop)
    v2.register_blueprint(shop, name="again", url_prefix="/again")
    one_app.register_blueprint(v1, url_prefix="/v1")
    one_app.register_blueprint(v2, url_prefix="/v2")
    headers = keyed()
    for runs, path in enumerate(("/v1/orders", "/v2/orders", "/v2/again/orders"), start=1):
        client = one_app.test_client()
        kit.assert_replay(client.post(path, headers=headers), client.post(path, headers=headers))
        assert effects.runs == runs


# Decorators above that do something with the value, or with what is raised


def unpacks(view):
    def inner(*args, **kwargs):
        body, status = view(*args, **kwargs)
        return {"data": body}, status

    return inner


def unpacks_a_dict(view):
    def inner(*args, **kwargs):
        return {**view(*args, **kwargs)[0], "more": 1}, 201

    return inner


def makes_a_response(view):
    def inner(*args, **kwargs):
        response = make_response(view(*args, **kwargs))
        response.headers["X-Outer"] = "1"
        return response

    return inner


def swallows(view):
    def inner(*args, **kwargs):
        try:
            return view(*args, **kwargs)
        except Exception:
            return {"error": "sorry"}, 200

    return inner


def swallows_http(view):
    def inner(*args, **kwargs):
        try:
            return view(*args, **kwargs)
        except HTTPException as error:
            return {"error": error.name}, error.code or 500

    return inner


def swallows_to_500(view):
    def inner(*args, **kwargs):
        try:
            return view(*args, **kwargs)
        except Exception:
            return "sorry", 500

    return inner


def raises_another(view):
    def inner(*args, **kwargs):
        try:
            return view(*args, **kwargs)
        except Exception:
            abort(500)

    return inner


def raises_its_own(view):
    def inner(*args, **kwargs):
        try:
            return view(*args, **kwargs)
        except Exception as error:
            raise LookupError from error

    return inner


def finally_works(view):
    def inner(*args, **kwargs):
        g.depth = g.get("depth", 0) + 1
        try:
            return view(*args, **kwargs)
        finally:
            g.depth -= 1

    return inner


def checks_the_value(view):
    def inner(*args, **kwargs):
        value = view(*args, **kwargs)
        assert isinstance(value, tuple), "this decorator knows its own views only"
        return value

    return inner


def wrapped(decorator, careless):
    """With ``functools.wraps``, or without."""

    def apply(view):
        inner = decorator(view)
        if careless:
            inner.__name__ = view.__name__
            return inner
        return functools.wraps(view)(inner)

    return apply


ABOVE = [
    unpacks, unpacks_a_dict, makes_a_response, swallows, swallows_http, swallows_to_500, raises_another,
    finally_works, checks_the_value,
]  # fmt: skip


@pytest.mark.parametrize("careless", [False, True], ids=["wraps", "careless"])
@pytest.mark.parametrize("decorator", ABOVE)
def test_a_decorator_above(app, effects, decorator, careless):
    """Replays and refusals reach the client, whatever stands in between."""

    @app.post("/orders")
    @wrapped(decorator, careless)
    @idempotent
    def orders():
        return {"run": effects.add()}, 201

    assert_contract(app)
    assert effects.runs == 1


def test_a_decorator_that_raises_an_error_of_its_own(one_app, effects):
    """In production: elsewhere Flask hands that error to the server, and there is no answer to put ours in place of."""
    one_app.post("/orders", endpoint="orders")(raises_its_own(idempotent(kit.answering(effects, ("made", 201)))))
    assert_contract(one_app)
    assert effects.runs == 1


@pytest.mark.parametrize("decorator", ABOVE)
def test_a_refusal_while_the_first_runs(one_app, effects, crowd, decorator):
    gate = crowd.gate()

    @one_app.post("/orders")
    @wrapped(decorator, False)
    @idempotent
    def orders():
        effects.add()
        gate.hold()
        return {"run": 1}, 201

    headers = keyed()
    running = crowd.start(one_app.test_client().post, "/orders", headers=headers)
    gate.wait_inside()
    kit.assert_problem(one_app.test_client().post("/orders", headers=headers), "in-progress")
    gate.open()
    kit.assert_kept(running.result(kit.WAIT_S))
    assert effects.runs == 1


@pytest.mark.parametrize("decorator", [swallows, swallows_http, swallows_to_500, raises_another, finally_works])
def test_the_apps_own_style_of_a_refusal_that_was_swallowed(app, effects, decorator):
    """Its handler for our errors is asked exactly once, whoever caught the error before."""
    asked = []

    @app.errorhandler(IdempotencyError)
    def styled(error):
        asked.append(error.problem)
        return {"styled": error.problem}, 460

    @app.post("/orders")
    @wrapped(decorator, False)
    @idempotent
    def orders():
        return {"run": effects.add()}, 201

    client, headers = app.test_client(), keyed()
    kit.assert_kept(client.post("/orders", headers=headers))
    for code, json, more in (
        ("mismatch", {"a": 1}, headers),
        ("missing-key", {}, {}),
        ("invalid-key", {}, keyed("a,b")),
    ):
        answer = client.post("/orders", json=json, headers=more)
        assert (answer.status_code, answer.get_json()) == (460, {"styled": code})
    assert asked == ["mismatch", "missing-key", "invalid-key"]
    assert effects.runs == 1


@pytest.mark.parametrize("status", [401, 403, 429])
def test_a_guard_that_decides_late_still_decides(one_app, effects, status):
    """A decorator that looks at the caller after the view, and refuses: not even then a replay gets past it."""
    refuse = []

    def guard(view):
        @functools.wraps(view)
        def inner():
            try:
                value = view()
            except HTTPException as error:
                value = error.get_response()
            return ("who are you?", status) if refuse else value

        return inner

    one_app.post("/orders", endpoint="orders")(guard(idempotent(kit.answering(effects, ("made", 201)))))
    client, headers = one_app.test_client(), keyed()
    first = client.post("/orders", headers=headers)
    refuse.append(True)
    refused = client.post("/orders", headers=headers)
    assert (refused.status_code, refused.get_data()) == (status, b"who are you?")
    refuse.clear()
    kit.assert_replay(first, client.post("/orders", headers=headers))
    assert effects.runs == 1


# What Flask traps


@pytest.mark.parametrize("trap", ["TRAP_HTTP_EXCEPTIONS", "TRAP_BAD_REQUEST_ERRORS"])
@pytest.mark.parametrize("propagate", [False, True])
def test_trapped_exceptions(make_app, effects, crowd, trap, propagate):
    app = make_app(config={trap: True, "PROPAGATE_EXCEPTIONS": propagate})
    gate = crowd.gate()
    kit.add_orders(app, effects)
    kit.add_orders(app, effects, "/slow", gate=gate)
    assert_contract(app)
    headers = keyed()
    running = crowd.start(app.test_client().post, "/slow", headers=headers)
    gate.wait_inside()
    kit.assert_problem(app.test_client().post("/slow", headers=headers), "in-progress")
    gate.open()
    kit.assert_kept(running.result(kit.WAIT_S))
    assert effects.runs == 2


def test_a_trapped_exception_of_the_view(make_app, effects, store):
    """Flask lets the view's own abort through; what is given back is free."""
    app = make_app(config={"TRAP_HTTP_EXCEPTIONS": True, "PROPAGATE_EXCEPTIONS": True})

    @app.post("/orders")
    @idempotent
    def orders():
        if effects.add() == 1:
            abort(503)
        return "second", 201

    client, headers = app.test_client(), keyed()
    with pytest.raises(HTTPException):
        client.post("/orders", headers=headers)
    assert kit.the_record(store)["state"] == b"released"
    second = client.post("/orders", headers=headers)
    kit.assert_replay(second, client.post("/orders", headers=headers))


# Views that call views


def test_views_in_a_row(one_app, effects):
    """Two, three deep, async and not: one key, one record, one run; an unprotected caller protects nothing."""

    @idempotent(scope="inner")
    def inner():
        effects.add("inner")
        return {"scope": current_idempotency.scope}

    @idempotent(scope="middle")
    async def middle():
        effects.add("middle")
        return inner()

    @one_app.post("/orders")
    @idempotent(scope="outer")
    def outer():
        effects.add("outer")
        return current_app.ensure_sync(middle)(), 201

    one_app.post("/inner", endpoint="inner")(inner)
    one_app.post("/bare", endpoint="bare")(lambda: inner())
    client, headers = one_app.test_client(), keyed()
    first = client.post("/orders", headers=headers)
    assert first.get_json() == {"scope": "outer"}
    kit.assert_replay(first, client.post("/orders", headers=headers))
    assert effects.lines == ["outer", "middle", "inner"]
    # A bare view that calls a protected one: the protection opens late, and is there all the same.
    bare = client.post("/bare", headers=headers)
    kit.assert_replay(bare, client.post("/bare", headers=headers))
    kit.assert_problem(client.post("/bare"), "missing-key")
    assert effects.runs == 4


def test_an_inner_refusal_is_part_of_the_outer_run(one_app, effects):
    @idempotent
    def inner():
        abort(410)

    @one_app.post("/orders")
    @idempotent
    def outer():
        effects.add()
        try:
            return inner()
        except HTTPException:
            return "inner is gone", 201

    client, headers = one_app.test_client(), keyed()
    first = client.post("/orders", headers=headers)
    assert first.status_code == 201
    kit.assert_replay(first, client.post("/orders", headers=headers))
    assert effects.runs == 1


# Views that come late


def test_a_view_that_is_swapped(one_app, effects):
    """The cache of marks holds as long as the view function is the same one."""
    kit.add_orders(one_app, effects)
    client, headers = one_app.test_client(), keyed()
    first = client.post("/orders", headers=headers)
    kit.assert_replay(first, client.post("/orders", headers=headers))

    one_app.view_functions["orders"] = lambda: ("bare", 200)
    for _ in range(2):
        bare = client.post("/orders", headers=headers)
        assert bare.get_data() == b"bare"
        kit.assert_not_kept(bare)

    one_app.view_functions["orders"] = idempotent(required=False)(kit.answering(effects, ("new", 201)))
    assert client.post("/orders").headers[kit.STATUS] == "unprotected"
    # The record outlives its view: the key has been used.
    kit.assert_replay(first, client.post("/orders", headers=headers))
    new = keyed()
    kit.assert_replay(client.post("/orders", headers=new), client.post("/orders", headers=new))
    assert effects.runs == 3


def test_a_route_that_is_added_at_run_time(one_app, effects):
    """``add_url_rule`` refuses that after the first request; the map itself does not."""
    client = one_app.test_client()
    assert client.post("/late").status_code == 404
    one_app.url_map.add(Rule("/late", endpoint="late", methods=["POST"]))
    one_app.view_functions["late"] = idempotent(kit.answering(effects, ("late", 201)))
    headers = keyed()
    kit.assert_replay(client.post("/late", headers=headers), client.post("/late", headers=headers))
    kit.assert_problem(client.post("/late"), "missing-key")
    kit.assert_problem(client.post("/late", headers=keyed("a,b")), "invalid-key")
    assert effects.runs == 1


def test_a_tool_that_wraps_all_views(one_app, effects):
    """As profilers and tracers do, with ``wraps`` and without, after the first request."""
    kit.add_orders(one_app, effects)
    client, headers = one_app.test_client(), keyed()
    first = client.post("/orders", headers=headers)
    for careless in (False, True):
        view = one_app.view_functions["orders"]
        one_app.view_functions["orders"] = wrapped(finally_works, careless)(view)
        kit.assert_replay(first, client.post("/orders", headers=headers))
        kit.assert_problem(client.post("/orders"), "missing-key")
    assert effects.runs == 1


# The order of decorators


def test_above_an_unknown_decorator_is_warned_of(one_app, effects, caplog):
    @one_app.post("/orders")
    @idempotent
    @wrapped(finally_works, False)
    def orders():
        return {"run": effects.add()}, 201

    with caplog.at_level(logging.WARNING, "flask_idempotent"):
        assert_contract(one_app)
    (record,) = [record for record in caplog.records if "another decorator" in record.message]
    assert "directly on the view, below every guard" in record.message
    assert record.levelno == logging.WARNING
    assert effects.runs == 1


def test_the_right_order_is_not_warned_of(one_app, effects, caplog):
    @one_app.post("/orders")
    @wrapped(finally_works, False)
    @wrapped(makes_a_response, False)
    @idempotent
    def orders():
        return {"run": effects.add()}, 201

    class Items(MethodView):
        decorators = (idempotent, wrapped(finally_works, False))

        @wrapped(finally_works, False)  # a method that the mark has nothing to do with
        def get(self):
            return "items"

        def post(self):
            return "item"

    one_app.add_url_rule("/items", view_func=Items.as_view("items"))
    with caplog.at_level(logging.WARNING, "flask_idempotent"):
        assert_contract(one_app)
    assert "another decorator" not in caplog.text


def test_above_its_route_in_a_factory(redis_url, effects):
    """The bare function would serve the route: told at the first call, whatever that one asks for."""
    app = Flask("shop")
    app.config["IDEMPOTENT_REDIS_URL"] = redis_url
    shop = Blueprint("shop", __name__)

    @idempotent
    @shop.post("/orders")
    def orders():
        effects.add()
        return "made"

    app.register_blueprint(shop)
    idem = Idempotent(app)
    with pytest.raises(
        ConfigurationError, match=r"'shop\.orders' is not protected: @idempotent stands above its route"
    ):
        idem.verify(app)
    with pytest.raises(ConfigurationError):
        app.test_client().get("/nowhere")
    assert effects.runs == 0
