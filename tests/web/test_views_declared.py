"""Protection that is declared: of an endpoint, a blueprint, an app. F60, F103"""

import functools

import pytest
from flask import Blueprint, Flask, abort, g, request
from flask.views import MethodView, View
from flask_login import LoginManager, UserMixin, login_required

from flask_idempotent import Idempotent, current_idempotency, idempotent
from flask_idempotent.errors import ConfigurationError

from . import kit
from .kit import keyed


@pytest.fixture
def idem() -> Idempotent:
    return Idempotent()


@pytest.fixture
def app(redis_url, idem) -> Flask:
    return kit.make_app(redis_url, idem=idem)


def plain(view):
    @functools.wraps(view)
    def inner(*args, **kwargs):
        return view(*args, **kwargs)

    return inner


def assert_protected(app, path, *, method="POST"):
    client, headers = app.test_client(), keyed()
    first = client.open(path, method=method, headers=headers)
    kit.assert_kept(first)
    kit.assert_replay(first, client.open(path, method=method, headers=headers))
    kit.assert_problem(client.open(path, method=method, json={"a": 1}, headers=headers), "mismatch")
    kit.assert_problem(client.open(path, method=method), "missing-key")
    kit.assert_problem(client.open(path, method=method, headers=keyed("a,b")), "invalid-key")
    return first


def assert_bare(app, path, *, method="POST"):
    headers = keyed()
    for _ in range(2):
        kit.assert_not_kept(app.test_client().open(path, method=method, headers=headers))


# What can be declared, and when


def shop_of(effects) -> Blueprint:
    shop = Blueprint("shop", __name__)
    shop.post("/orders", endpoint="create")(kit.answering(effects, ("made", 201)))
    shop.get("/orders", endpoint="list")(lambda: "list")
    return shop


@pytest.mark.parametrize("when", ["before the routes", "after the routes", "before init_app"])
@pytest.mark.parametrize("what", ["endpoint", "blueprint", "blueprint's name", "app", "app's object"])
def test_what_and_when(redis_url, idem, effects, what, when):
    app, shop = kit.bare_app(redis_url), shop_of(effects)

    def protect():
        targets = {"endpoint": "shop.create", "blueprint": shop, "blueprint's name": "shop"}
        idem.protect(targets.get(what, app))

    if when == "before init_app":
        protect()
    idem.init_app(app)
    if when == "before the routes":
        protect()
    app.register_blueprint(shop)
    if when == "after the routes":
        protect()
    assert_protected(app, "/orders")
    assert effects.runs == 1
    assert app.test_client().get("/orders", headers=keyed()).get_data() == b"list"


def test_after_the_first_request(app, idem, effects):
    """Declared late, it holds from then on."""
    app.post("/orders", endpoint="orders")(kit.answering(effects, ("made", 201)))
    assert_bare(app, "/orders")
    idem.protect("orders")
    assert_protected(app, "/orders")
    assert effects.runs == 3


def test_only_what_is_declared(app, idem, effects):
    for name in ("a", "b"):
        blueprint = Blueprint(name, __name__)
        blueprint.post(f"/{name}", endpoint="create")(kit.answering(effects, ("made", 201)))
        app.register_blueprint(blueprint)
    idem.protect("a")
    assert_protected(app, "/a")
    assert_bare(app, "/b")
    assert effects.runs == 3


def test_one_extension_declares_for_each_app(redis_url, idem, effects):
    """A declaration of an app is for that one; a name is for every app that has it."""
    apps = []
    for name in ("one", "two"):
        app = kit.make_app(redis_url, idem=idem, KEY_PREFIX=name)
        app.post("/orders", endpoint="orders")(kit.answering(effects, ("made", 201)))
        apps.append(app)
    idem.protect(apps[0])
    assert_protected(apps[0], "/orders")
    assert_bare(apps[1], "/orders")
    idem.protect("orders")
    assert_protected(apps[1], "/orders")


def test_async_views(app, idem, effects):
    @app.post("/orders")
    async def orders():
        effects.add()
        return {"scope": current_idempotency.scope}, 201

    idem.protect("orders", scope="orders.create")
    assert assert_protected(app, "/orders").get_json() == {"scope": "orders.create"}
    assert effects.runs == 1


def test_a_declared_view_that_is_swapped(app, idem, effects):
    """Whatever stands at the endpoint is protected; the wrapper is put around it once."""
    idem.protect("orders")
    app.post("/orders", endpoint="orders")(kit.answering(effects, ("made", 201)))
    assert_protected(app, "/orders")
    once = app.view_functions["orders"]
    assert_protected(app, "/orders")
    assert app.view_functions["orders"] is once
    app.view_functions["orders"] = kit.answering(effects, ("other", 201))
    assert assert_protected(app, "/orders").get_data() == b"other"
    assert effects.runs == 3
    app.view_functions["orders"] = plain(kit.answering(effects, ("guarded", 201)))
    answer = app.test_client().post("/orders", headers=keyed())
    assert (answer.status_code, effects.runs) == (500, 3), "a decorated view is refused at run time too"


# Nearest wins


@pytest.mark.parametrize("order", [("parent", "child"), ("child", "parent")])
def test_nested_blueprints(app, idem, effects, order):
    """F103: parent, child and grandchild; the child's own declaration wins for it and for what is below."""
    parent, child, grandchild = (Blueprint(name, __name__) for name in ("parent", "child", "grandchild"))
    for blueprint in (parent, child, grandchild):
        blueprint.post(f"/{blueprint.name}", endpoint="create")(kit.answering(effects, ("made", 201)))
    child.register_blueprint(grandchild)
    parent.register_blueprint(child)
    app.register_blueprint(parent)
    app.register_blueprint(parent, name="again", url_prefix="/again")
    declarations = {
        "parent": lambda: idem.protect(parent, ttl=7 * 3600),
        "child": lambda: idem.protect(child, ttl=3 * 3600, required=False),
    }
    for name in order:
        declarations[name]()
    client = app.test_client()
    for prefix in ("", "/again"):
        headers = keyed()
        for name, hours in (("parent", 7), ("child", 3), ("grandchild", 3)):
            first = client.post(f"{prefix}/{name}", headers=headers)
            assert abs(kit.assert_kept(first) - hours * 3600) < 5
            kit.assert_replay(first, client.post(f"{prefix}/{name}", headers=headers))
        kit.assert_problem(client.post(f"{prefix}/parent"), "missing-key")
        for name in ("child", "grandchild"):
            assert client.post(f"{prefix}/{name}").headers[kit.STATUS] == "unprotected"
    assert effects.runs == 2 * (3 + 2)


def test_a_name_is_one_registration(app, idem, effects):
    """A blueprint registered twice: the object is both, a full name is one of them."""
    shop, api = shop_of(effects), Blueprint("api", __name__)
    api.register_blueprint(shop)
    app.register_blueprint(api, url_prefix="/one")
    app.register_blueprint(api, url_prefix="/two", name="two")
    idem.protect("two.shop")
    assert_bare(app, "/one/orders")
    assert_protected(app, "/two/orders")
    idem.protect(shop)
    assert_protected(app, "/one/orders")


def test_endpoint_blueprint_app(app, idem, effects):
    shop = Blueprint("shop", __name__)
    for name in ("a", "b", "c"):
        shop.post(f"/{name}", endpoint=name)(scope_of(effects))
    shop.post("/d", endpoint="d")(idempotent(scope="mark")(scope_of(effects)))
    app.post("/e", endpoint="e")(scope_of(effects))
    app.register_blueprint(shop)
    idem.protect("shop.a", scope="endpoint")
    idem.protect(shop, scope="blueprint")
    idem.protect(app, scope="app")
    idem.protect("shop.b", scope="first")
    idem.protect("shop.b", scope="last")
    told = {name: assert_protected(app, f"/{name}").get_data(as_text=True) for name in "abcde"}
    assert told == {"a": "endpoint", "b": "last", "c": "blueprint", "d": "mark", "e": "app"}
    assert effects.runs == 5


def scope_of(effects):
    def view():
        effects.add()
        return current_idempotency.scope, 201

    return view


def test_a_mark_on_one_method_of_a_class(app, idem, effects):
    """Nearest wins, method by method."""
    shop = Blueprint("shop", __name__)

    class Orders(MethodView):
        def get(self):
            return "list"

        @plain
        @idempotent(scope="mark", required=False)
        def post(self):
            return scope_of(effects)()

        def patch(self):
            return scope_of(effects)()

    shop.add_url_rule("/orders", view_func=Orders.as_view("orders"))
    app.register_blueprint(shop)
    idem.protect(shop, scope="declared", ttl=7 * 3600)
    told = assert_protected(app, "/orders", method="PATCH")
    assert told.get_data(as_text=True) == "declared"
    client, headers = app.test_client(), keyed()
    first = client.post("/orders", headers=headers)
    assert first.get_data(as_text=True) == "mark"
    assert kit.assert_kept(first) > 8 * 3600
    kit.assert_replay(first, client.post("/orders", headers=headers))
    assert client.get("/orders", headers=headers).get_data() == b"list"
    assert effects.runs == 2


def test_marks_on_all_methods_of_a_class(app, idem, effects):
    class Orders(MethodView):
        @plain
        @idempotent(scope="mark")
        def post(self):
            return scope_of(effects)()

    app.add_url_rule("/orders", view_func=Orders.as_view("orders"))
    idem.protect(app, scope="declared")
    assert assert_protected(app, "/orders").get_data(as_text=True) == "mark"


@pytest.mark.parametrize("kind", ["MethodView", "View", "marked View"])
def test_a_class(app, idem, effects, kind):
    class Orders(MethodView):
        @plain  # not a method that is protected
        def get(self):
            return "list"

        def post(self):
            return scope_of(effects)()

    class Bare(View):
        methods = ("POST",)

        def dispatch_request(self):
            return scope_of(effects)()

    class Marked(View):
        methods = ("POST",)

        @idempotent(scope="mark")
        def dispatch_request(self):
            return scope_of(effects)()

    view_class = {"MethodView": Orders, "View": Bare, "marked View": Marked}[kind]
    app.add_url_rule("/orders", view_func=view_class.as_view("orders"))
    idem.protect("orders", scope="declared")
    told = assert_protected(app, "/orders").get_data(as_text=True)
    assert told == ("mark" if kind == "marked View" else "declared")
    assert effects.runs == 1


# What is refused


def on_a_function(app, guard):
    app.post("/orders", endpoint="orders")(guard(lambda: "made"))


def on_a_class(app, guard):
    class Orders(MethodView):
        decorators = (guard,)

        def post(self):
            return "made"

    app.add_url_rule("/orders", view_func=Orders.as_view("orders"))


def on_a_method(app, guard):
    class Orders(MethodView):
        @guard
        def post(self):
            return "made"

    app.add_url_rule("/orders", view_func=Orders.as_view("orders"))


def on_a_dispatcher(app, guard):
    class Orders(View):
        methods = ("POST",)

        @guard
        def dispatch_request(self):
            return "made"

    app.add_url_rule("/orders", view_func=Orders.as_view("orders"))


def around_a_class(app, guard):
    class Orders(MethodView):
        def post(self):
            return "made"

    app.add_url_rule("/orders", view_func=guard(Orders.as_view("orders")))


decorated = pytest.mark.parametrize("add", [on_a_function, on_a_class, on_a_method, on_a_dispatcher, around_a_class])


@decorated
@pytest.mark.parametrize("guard", [plain, login_required])
@pytest.mark.parametrize("what", ["endpoint", "app"])
def test_a_decorated_view_is_refused(app, idem, store, add, guard, what):
    """It would stand outside of the decorators, and a replay would be given before a guard among them."""
    add(app, guard)
    idem.protect("orders" if what == "endpoint" else app)
    with pytest.raises(ConfigurationError, match="view 'orders' is decorated"):
        idem.verify(app)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="guards='hooks'"):
            app.test_client().post("/orders", headers=keyed())
    assert kit.our_keys(store) == []


@decorated
def test_unless_its_guards_are_hooks(app, idem, store, add):
    open_to = ["ann"]

    @app.before_request
    def guard():
        g.user = request.headers.get("X-User")
        if g.user not in open_to:
            abort(401)

    idem.principal_loader(lambda: g.user)
    add(app, plain)
    idem.protect("orders", guards="hooks")
    client, headers = app.test_client(), keyed()
    of_ann = {**headers, "X-User": "ann"}
    assert client.post("/orders", headers=headers).status_code == 401
    assert kit.our_keys(store) == []
    first = client.post("/orders", headers=of_ann)
    kit.assert_replay(first, client.post("/orders", headers=of_ann))
    open_to.append("bob")
    kit.assert_problem(client.post("/orders", headers={**headers, "X-User": "bob"}), "not-found")
    open_to.clear()
    refused = client.post("/orders", headers=of_ann)
    assert refused.status_code == 401
    assert b"made" not in refused.get_data()
    kit.assert_not_kept(refused)


@pytest.mark.parametrize("place", ["app", "blueprint", "parent"])
def test_a_hook_guard_comes_before_a_replay(app, idem, effects, place):
    """Guards in hooks of the app, of the blueprint and of its parent; F92."""
    closed = []

    def guard():
        if closed:
            abort(403)

    shop, parent = shop_of(effects), Blueprint("parent", __name__)
    {"app": app, "blueprint": shop, "parent": parent}[place].before_request(guard)
    parent.register_blueprint(shop)
    app.register_blueprint(parent)
    idem.protect(shop)
    client, headers = app.test_client(), keyed()
    first = client.post("/orders", headers=headers)
    closed.append(True)
    refused = client.post("/orders", headers=headers)
    assert refused.status_code == 403
    kit.assert_not_kept(refused)
    closed.clear()
    kit.assert_replay(first, client.post("/orders", headers=headers))
    assert effects.runs == 1


def test_flask_login_as_a_hook(redis_url, idem, effects):
    app = kit.bare_app(redis_url, config={"SECRET_KEY": "secret"})
    manager = LoginManager(app)
    idem.init_app(app)

    class User(UserMixin):
        id = "ann"

    manager.request_loader(lambda request: User() if request.headers.get("X-User") == "ann" else None)
    app.before_request(lambda: login_required(lambda: None)())
    app.post("/orders", endpoint="orders")(kit.answering(effects, ("made", 201)))
    idem.protect("orders")
    client, headers = app.test_client(), keyed()
    assert client.post("/orders", headers=headers).status_code == 401
    first = client.post("/orders", headers={**headers, "X-User": "ann"})
    assert client.post("/orders", headers=headers).status_code == 401
    kit.assert_replay(first, client.post("/orders", headers={**headers, "X-User": "ann"}))
    assert effects.runs == 1


@pytest.mark.parametrize("name", ["order", "shop.orders", "shops", ""])
def test_an_unknown_name_is_refused(app, idem, effects, name):
    """A slip of the pen would leave a view unprotected."""
    app.register_blueprint(shop_of(effects))
    idem.protect(name)
    with pytest.raises(ConfigurationError, match=r"this app has no such endpoint or blueprint"):
        idem.verify(app)
    with pytest.raises(ConfigurationError, match=f"protect\\({name!r}\\)"):
        app.test_client().post("/orders", headers=keyed())
    assert effects.runs == 0


def test_all_that_is_wrong_is_told_at_once(app, idem):
    on_a_function(app, plain)
    idem.protect("orders")
    idem.protect("no-such")
    with pytest.raises(ConfigurationError) as told:
        idem.verify(app)
    assert "'orders' is decorated" in str(told.value)
    assert "'no-such'" in str(told.value)


def test_wrong_calls(idem):
    for wrong in ({"guards": "decorators"}, {"guards": True}, {"guards": "hook"}):
        with pytest.raises(ConfigurationError, match="guards"):
            idem.protect("orders", **wrong)
    for target in (None, 7, lambda: None, MethodView):
        with pytest.raises(ConfigurationError, match="endpoint"):
            idem.protect(target)
    with pytest.raises(ConfigurationError, match="ttl"):
        idem.protect("orders", tll=3)


def test_a_declaration_without_the_extension(idem, effects):
    """Declared for an app that was never told of the extension: nothing is verified there, and ``verify`` says so."""
    app = Flask("bare")
    app.post("/orders", endpoint="orders")(kit.answering(effects, "made"))
    idem.protect(app)
    with pytest.raises(ConfigurationError, match="init_app"):
        idem.verify(app)
