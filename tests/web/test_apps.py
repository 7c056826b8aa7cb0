"""Several apps in a process, blueprints, and one function behind several routes."""

import gc
import weakref

import pytest
from flask import Blueprint, Flask, request
from flask.views import MethodView

from flask_idempotent import Idempotent, current_idempotency, idempotent
from flask_idempotent.stores.connect import connect
from flask_idempotent.web import extension
from tests.harness import wait_until

from . import kit
from .kit import REPLAYED, keyed


def test_two_apps_with_settings_of_their_own(redis_url, store):
    """F38"""
    one, two = kit.Effects(), kit.Effects()
    shop = kit.add_orders(kit.make_app(redis_url, "shop", KEY_PREFIX="shop", MISMATCH_STATUS=409), one)
    blog = kit.add_orders(kit.make_app(redis_url, "blog", KEY_PREFIX="blog", REPLAY_HEADER="X-Again"), two)
    headers = keyed()
    first = [app.test_client().post("/orders", json={"a": 1}, headers=headers) for app in (shop, blog)]
    assert (one.runs, two.runs) == (1, 1)
    kit.assert_replay(first[0], shop.test_client().post("/orders", json={"a": 1}, headers=headers))
    again = blog.test_client().post("/orders", json={"a": 1}, headers=headers)
    assert (again.get_data(), again.headers["X-Again"]) == (first[1].get_data(), "true")
    assert REPLAYED not in again.headers
    changed = [app.test_client().post("/orders", json={"a": 2}, headers=headers) for app in (shop, blog)]
    kit.assert_problem(changed[0], "mismatch", status=409)
    kit.assert_problem(changed[1], "mismatch")
    assert (one.runs, two.runs) == (1, 1)
    assert len(kit.records(store, "shop")) == len(kit.records(store, "blog")) == 1
    assert {key.partition(b":")[0] for key in store.scan_iter()} == {b"shop", b"blog"}


def test_one_extension_for_two_apps(redis_url, effects):
    """One object, one decorated function, two apps: each has its own settings; the loader is shared."""
    idem = Idempotent()

    @idem.principal_loader
    def principal():
        return request.headers.get("X-User")

    view = idempotent(kit.answering(effects, ("ok", 201)))
    apps = [kit.make_app(redis_url, prefix, idem=idem, KEY_PREFIX=prefix) for prefix in ("a", "b")]
    headers = keyed(X_User="ann")
    for runs, app in enumerate(apps, start=1):
        app.add_url_rule("/orders", "orders", view, methods=["POST"])
        client = app.test_client()
        kit.assert_replay(client.post("/orders", headers=headers), client.post("/orders", headers=headers))
        kit.assert_problem(client.post("/orders", headers={**headers, "X-User": "bob"}), "not-found")
        assert effects.runs == runs


def test_apps_of_one_prefix_share_their_records(redis_url, effects):
    """Two processes of one app, as far as Redis can tell."""
    apps = [kit.add_orders(kit.make_app(redis_url, name), effects) for name in ("here", "there")]
    headers = keyed()
    first, second = (app.test_client().post("/orders", headers=headers) for app in apps)
    kit.assert_replay(first, second)
    assert effects.runs == 1


def test_a_client_of_ones_own(redis_url, effects, store):
    app = kit.add_orders(kit.make_app("redis://127.0.0.1:1", client=store), effects)
    headers = keyed()
    kit.assert_replay(*(app.test_client().post("/orders", headers=headers) for _ in range(2)))
    assert effects.runs == 1


def blueprints(effects) -> Blueprint:
    api, v1, orders = (Blueprint(name, __name__) for name in ("api", "v1", "orders"))
    orders.post("/<int:shop>")(idempotent(kit.answering(effects, ("ok", 201))))
    v1.register_blueprint(orders, url_prefix="/orders")
    api.register_blueprint(v1, url_prefix="/v1")
    return api


def test_an_app_that_goes_takes_its_connections(redis_url, effects, store, monkeypatch):
    """Not when the collector comes to them: it may take a socket first, and a suite that takes warnings for errors
    fails somewhere else."""
    made = []
    monkeypatch.setattr(extension, "connect", lambda url: made.append(connect(url)) or made[-1])
    app = kit.add_orders(kit.make_app(redis_url), effects)
    before = _connections(store)
    assert app.test_client().post("/orders", headers=keyed()).status_code == 201
    (own,) = _connections(store) - before
    gone = weakref.ref(app)
    del app
    gc.collect()
    assert gone() is None
    assert made
    wait_until(lambda: own not in _connections(store), "the end of the app's connection")


def _connections(store):
    return {each["id"] for each in store.client_list()}


def test_nested_blueprints(make_app, effects):
    """F103"""
    app: Flask = make_app()
    api = blueprints(effects)
    app.register_blueprint(api, url_prefix="/api")
    app.register_blueprint(api, url_prefix="/beta", name="beta")
    client, headers = app.test_client(), keyed()
    first = client.post("/api/v1/orders/1", headers=headers)
    kit.assert_replay(first, client.post("/api/v1/orders/1", headers=headers))
    kit.assert_problem(client.post("/api/v1/orders/2", headers=headers), "mismatch")
    # Registered again under another name it has other endpoints, so the same key is unrelated.
    kit.assert_kept(client.post("/beta/v1/orders/1", headers=headers))
    assert effects.runs == 2


def test_a_function_under_two_endpoints(make_app, effects, store):
    app: Flask = make_app()
    view = idempotent(kit.answering(effects, ("ok", 201)))
    for name in ("orders", "purchases"):
        app.add_url_rule(f"/{name}", name, view, methods=["POST"])
    client, headers = app.test_client(), keyed()
    for name in ("orders", "purchases"):
        kit.assert_replay(client.post(f"/{name}", headers=headers), client.post(f"/{name}", headers=headers))
    assert effects.runs == 2
    assert len(kit.records(store)) == 2


def test_a_shared_scope(make_app, effects, store):
    """An old and a new URL of one operation: the retry may come to either."""
    app: Flask = make_app()
    view = idempotent(scope="orders.create")(kit.answering(effects, ("ok", 201)))
    for name in ("orders", "purchases"):
        app.add_url_rule(f"/{name}", name, view, methods=["POST"])
    client, headers = app.test_client(), keyed()
    kit.assert_replay(client.post("/orders", headers=headers), client.post("/purchases", headers=headers))
    kit.assert_problem(client.post("/purchases", json={"a": 1}, headers=headers), "mismatch")
    assert effects.runs == 1
    assert len(kit.records(store)) == 1


def test_factory_made_views_do_not_collide(make_app):
    app: Flask = make_app()
    effects = {name: kit.Effects() for name in ("a", "b")}

    def view_for(name):
        def view():
            effects[name].add()
            return name, 201

        return idempotent(ttl={"a": 3600, "b": 7200}[name], max_processing=600)(view)

    for name in effects:
        app.add_url_rule(f"/{name}", name, view_for(name), methods=["POST"])
    client, headers = app.test_client(), keyed()
    for name in effects:
        first = client.post(f"/{name}", headers=headers)
        assert first.get_data(as_text=True) == name
        assert abs(kit.assert_kept(first) - {"a": 3600, "b": 7200}[name]) < 5
    assert [each.runs for each in effects.values()] == [1, 1]


def test_class_based_views(make_app, effects):
    app: Flask = make_app()
    seen = []

    class Orders(MethodView):
        def get(self):
            return "list"

        @idempotent(scope="orders.create")
        def post(self):
            effects.add("post")
            seen.append(current_idempotency.scope)
            return "made", 201

        @idempotent(scope="orders.change", required=False)
        def patch(self):
            effects.add("patch")
            return "changed"

    app.add_url_rule("/orders", view_func=Orders.as_view("orders"))
    client, headers = app.test_client(), keyed()
    kit.assert_replay(client.post("/orders", headers=headers), client.post("/orders", headers=headers))
    kit.assert_replay(client.patch("/orders", headers=headers), client.patch("/orders", headers=headers))
    assert client.patch("/orders").headers[kit.STATUS] == "unprotected"
    kit.assert_problem(client.post("/orders"), "missing-key")
    assert client.get("/orders", headers=headers).get_data(as_text=True) == "list"
    assert effects.lines == ["post", "patch", "patch"]
    assert seen == ["orders.create"]


def test_async_views(make_app, effects):
    """F102"""
    app: Flask = make_app()

    @app.post("/orders")
    @idempotent
    async def orders():
        effects.add()
        return {"attempt": current_idempotency.attempt}, 201

    client, headers = app.test_client(), keyed()
    first = client.post("/orders", headers=headers)
    assert first.get_json() == {"attempt": 1}
    kit.assert_replay(first, client.post("/orders", headers=headers))
    assert effects.runs == 1


def test_a_protected_view_calls_another(make_app, effects):
    """The inner one is part of the outer one's run."""
    app: Flask = make_app()

    @app.post("/inner")
    @idempotent
    def inner():
        effects.add("inner")
        return "inner"

    @app.post("/outer")
    @idempotent
    def outer():
        effects.add("outer")
        return "outer and " + inner()

    client, headers = app.test_client(), keyed()
    first = client.post("/outer", headers=headers)
    assert first.get_data(as_text=True) == "outer and inner"
    kit.assert_replay(first, client.post("/outer", headers=headers))
    kit.assert_kept(client.post("/inner", headers=headers))
    assert effects.lines == ["outer", "inner", "inner"]


def test_a_request_inside_a_request(make_app, effects):
    """A protected view that sends a protected request to its own app: two calls that don't mix."""
    app: Flask = make_app()
    kit.add_orders(app, effects)
    inner_headers = keyed()

    @app.post("/outer")
    @idempotent
    def outer():
        effects.add("outer")
        inner = app.test_client().post("/orders", json={"a": 1}, headers=inner_headers)
        return {"inner": inner.get_json(), "scope": current_idempotency.scope}

    client, headers = app.test_client(), keyed()
    first = client.post("/outer", headers=headers)
    assert first.get_json() == {"inner": {"id": 2}, "scope": "outer"}
    kit.assert_replay(first, client.post("/outer", headers=headers))
    assert client.post("/orders", json={"a": 1}, headers=inner_headers).get_json() == {"id": 2}
    assert effects.runs == 2


def test_a_careless_decorator_hides_the_mark_not_the_protection(make_app, effects):
    app: Flask = make_app()

    def careless(view):
        def inner(*args, **kwargs):
            return view(*args, **kwargs)

        inner.__name__ = "orders"
        return inner

    app.post("/orders")(careless(idempotent(kit.answering(effects, ("ok", 201)))))
    client, headers = app.test_client(), keyed()
    kit.assert_replay(client.post("/orders", headers=headers), client.post("/orders", headers=headers))
    kit.assert_problem(client.post("/orders"), "missing-key")
    kit.assert_problem(client.post("/orders", headers={kit.KEY: "a,b"}), "invalid-key")
    assert effects.runs == 1


@pytest.mark.parametrize("when", ["before", "after"])
def test_path_variables_that_a_preprocessor_takes_out_still_count(redis_url, effects, when):
    """The usual pattern for a language or tenant in the URL pops it from the view's arguments."""
    app = kit.bare_app(redis_url)

    def take(endpoint, values):
        values.pop("shop", None)

    if when == "before":
        app.url_value_preprocessor(take)
    Idempotent(app)
    if when == "after":
        app.url_value_preprocessor(take)
    kit.add_orders(app, effects, "/<shop>/orders")
    client, headers = app.test_client(), keyed()
    first = client.post("/one/orders", headers=headers)
    kit.assert_problem(client.post("/two/orders", headers=headers), "mismatch")
    kit.assert_replay(first, client.post("/one/orders", headers=headers))
    assert effects.runs == 1
