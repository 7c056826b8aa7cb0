"""Flask-Login, Flask-JWT-Extended and Flask-HTTPAuth: never a replay before the guard, whatever kind of view it guards.

Each guard on a plain view, and the extension before and after it: ``tests/web/test_guards.py``.
"""

import base64
from dataclasses import dataclass
from typing import Any

import pytest
from flask import request
from flask.views import MethodView
from flask_httpauth import HTTPBasicAuth, HTTPTokenAuth, MultiAuth
from flask_jwt_extended import (
    JWTManager,
    create_access_token,
    current_user,
    get_jwt,
    jwt_required,
    set_access_cookies,
    verify_jwt_in_request,
)
from flask_login import LoginManager, UserMixin, fresh_login_required, login_required, login_user, logout_user

from flask_idempotent import Idempotent, idempotent
from flask_idempotent.errors import ConfigurationError
from flask_idempotent.loaders import httpauth_user, jwt_identity
from tests.web import kit
from tests.web.kit import keyed


@dataclass
class Door:
    """A guard, and what a user's requests carry. ``closed`` refuses a user who was let in before."""

    guard: Any
    sign_in: Any
    closed: list[str]


def flask_login(app, idem) -> Door:
    app.secret_key = "secret"
    closed: list[str] = []

    class User(UserMixin):
        def __init__(self, name):
            self.id = name

    LoginManager(app).user_loader(lambda name: None if name in closed else User(name))

    @app.post("/login/<name>")
    def login(name):
        login_user(User(name))
        return ""

    def sign_in(name):
        client = app.test_client()
        client.post(f"/login/{name}")
        return client, {}

    return Door(login_required, sign_in, closed)


def jwt(app, idem) -> Door:
    app.config["JWT_SECRET_KEY"] = "a secret of more than thirty-two bytes"
    closed: list[str] = []
    JWTManager(app).token_in_blocklist_loader(lambda header, payload: payload["sub"] in closed)
    idem.principal_loader(jwt_identity)

    def sign_in(name):
        with app.app_context():
            return app.test_client(), {"Authorization": f"Bearer {create_access_token(identity=name)}"}

    return Door(jwt_required(), sign_in, closed)


def basic(app, idem) -> Door:
    auth, closed = HTTPBasicAuth(), []
    auth.verify_password(lambda name, word: name if word == "word" and name not in closed else None)
    idem.principal_loader(httpauth_user(auth))

    def sign_in(name):
        return app.test_client(), {"Authorization": "Basic " + base64.b64encode(f"{name}:word".encode()).decode()}

    return Door(auth.login_required, sign_in, closed)


def token(app, idem) -> Door:
    auth, closed = HTTPTokenAuth(), []
    auth.verify_token(lambda given: given if given and given not in closed else None)
    idem.principal_loader(httpauth_user(auth))
    return Door(auth.login_required, lambda name: (app.test_client(), {"Authorization": f"Bearer {name}"}), closed)


def multi(app, idem) -> Door:
    tokens, closed = HTTPTokenAuth(), []
    tokens.verify_token(lambda given: given if given and given not in closed else None)
    auth = MultiAuth(HTTPBasicAuth(), tokens)
    idem.principal_loader(httpauth_user(auth))
    return Door(auth.login_required, lambda name: (app.test_client(), {"Authorization": f"Bearer {name}"}), closed)


DOORS = [flask_login, jwt, basic, token, multi]


def async_view(app, door, effects, gate):
    @app.post("/orders")
    @door.guard
    @idempotent
    async def orders():
        effects.add()
        return "made", 201


def class_guarded(app, door, effects, gate):
    class Orders(MethodView):
        decorators = (door.guard,)

        @idempotent
        def post(self):
            effects.add()
            return "made", 201

    app.add_url_rule("/orders", view_func=Orders.as_view("orders"))


def class_decorated(app, door, effects, gate):
    class Orders(MethodView):
        decorators = (idempotent, door.guard)  # the first is the innermost

        def post(self):
            effects.add()
            return "made", 201

    app.add_url_rule("/orders", view_func=Orders.as_view("orders"))


def method_guarded(app, door, effects, gate):
    class Orders(MethodView):
        @door.guard
        @idempotent
        def post(self):
            effects.add()
            return "made", 201

    app.add_url_rule("/orders", view_func=Orders.as_view("orders"))


@pytest.mark.parametrize("kind", [async_view, class_guarded, class_decorated, method_guarded])
@pytest.mark.parametrize("make", DOORS)
def test_a_replay_is_never_given_before_the_guard(redis_url, store, effects, make, kind):
    idem, app = Idempotent(), kit.bare_app(redis_url)
    door = make(app, idem)
    idem.init_app(app)
    kind(app, door, effects, None)
    headers = keyed()
    (ann, of_ann), (bob, of_bob) = door.sign_in("ann"), door.sign_in("bob")

    assert app.test_client().post("/orders", headers=headers).status_code == 401
    assert kit.our_keys(store) == []
    first = ann.post("/orders", headers={**headers, **of_ann})
    assert (first.status_code, first.get_data()) == (201, b"made")
    kit.assert_replay(first, ann.post("/orders", headers={**headers, **of_ann}))
    kit.assert_problem(bob.post("/orders", headers={**headers, **of_bob}), "not-found")
    door.closed.append("ann")
    for client, given in ((app.test_client(), {}), (ann, of_ann)):
        refused = client.post("/orders", headers={**headers, **given})
        assert refused.status_code == 401
        assert b"made" not in refused.get_data()
        kit.assert_not_kept(refused)
    door.closed.clear()
    kit.assert_replay(first, ann.post("/orders", headers={**headers, **of_ann}))
    assert effects.runs == 1


def below(app, door, effects):
    app.post("/orders", endpoint="orders")(idempotent(door.guard(kit.answering(effects, ("made", 201)))))


def below_others(app, door, effects):
    import functools

    def plain(view):
        return functools.wraps(view)(lambda *args, **kwargs: view(*args, **kwargs))

    app.post("/orders", endpoint="orders")(idempotent(plain(door.guard(plain(kit.answering(effects, "made"))))))


def below_an_async_view(app, door, effects):
    @app.post("/orders")
    @idempotent
    @door.guard
    async def orders():
        effects.add()
        return "made"


def below_on_a_method(app, door, effects):
    class Orders(MethodView):
        @idempotent
        @door.guard
        def post(self):
            effects.add()
            return "made"

    app.add_url_rule("/orders", view_func=Orders.as_view("orders"))


def inside_a_class(app, door, effects):
    class Orders(MethodView):
        decorators = (idempotent,)

        @door.guard
        def post(self):
            effects.add()
            return "made"

    app.add_url_rule("/orders", view_func=Orders.as_view("orders"))


def first_of_a_class(app, door, effects):
    class Orders(MethodView):
        decorators = (door.guard, idempotent)  # the first is the innermost

        def post(self):
            effects.add()
            return "made"

    app.add_url_rule("/orders", view_func=Orders.as_view("orders"))


@pytest.mark.parametrize(
    "wrong", [below, below_others, below_an_async_view, below_on_a_method, inside_a_class, first_of_a_class]
)
@pytest.mark.parametrize("make", DOORS)
def test_a_guard_below_the_mark_stops_the_app(redis_url, store, effects, make, wrong):
    """F36"""
    idem, app = Idempotent(), kit.bare_app(redis_url)
    door = make(app, idem)
    idem.init_app(app)
    wrong(app, door, effects)
    for _ in range(2):
        with pytest.raises(
            ConfigurationError, match=r"@idempotent stands above a decorator of flask_(login|jwt_ext|httpauth)"
        ):
            app.test_client().post("/orders", headers=keyed())
    assert effects.runs == 0
    assert kit.our_keys(store) == []


def test_a_fresh_login(redis_url, effects):
    """A guard that wants more than the session has refuses a replay too."""
    app = kit.bare_app(redis_url)
    door = flask_login(app, Idempotent(app))
    app.post("/orders", endpoint="orders")(fresh_login_required(idempotent(kit.answering(effects, "made"))))
    (client, _), headers = door.sign_in("ann"), keyed()
    first = client.post("/orders", headers=headers)
    with client.session_transaction() as session:
        session["_fresh"] = False
    refused = client.post("/orders", headers=headers)
    assert refused.status_code == 401
    kit.assert_not_kept(refused)
    with client.session_transaction() as session:
        session["_fresh"] = True
    kit.assert_replay(first, client.post("/orders", headers=headers))
    assert effects.runs == 1


def test_a_view_that_logs_out(redis_url, effects):
    """The session that it ends belongs to that one answer, and the retry comes from nobody: 401, no second run."""
    app = kit.bare_app(redis_url)
    door = flask_login(app, Idempotent(app))

    @app.post("/leave")
    @login_required
    @idempotent
    def leave():
        effects.add()
        logout_user()
        return "bye"

    (client, _), headers = door.sign_in("ann"), keyed()
    first = client.post("/leave", headers=headers)
    kit.assert_kept(first)
    assert client.post("/leave", headers=headers).status_code == 401
    client.post("/login/ann")
    replay = client.post("/leave", headers=headers)
    assert (replay.get_data(), replay.headers.getlist(kit.REPLAYED)) == (b"bye", ["true"])
    with client.session_transaction() as session:
        assert "_user_id" in session, "a replay of the answer is no second logout"
    assert effects.runs == 1


def test_a_login_is_not_replayed(redis_url, effects):
    """A protected view that logs in: its cookie is for who asked first, and never kept."""
    app = kit.bare_app(redis_url)
    flask_login(app, Idempotent(app))

    @app.post("/enter")
    @idempotent
    def enter():
        effects.add()
        app.view_functions["login"]("ann")
        return "welcome"

    headers, answers = keyed(), []
    for _ in range(2):
        answers.append(app.test_client().post("/enter", headers=headers))
    assert answers[0].headers.getlist("Set-Cookie")
    assert answers[1].headers.getlist(kit.REPLAYED) == ["true"]
    assert not answers[1].headers.getlist("Set-Cookie")
    assert effects.runs == 1


def test_an_optional_jwt(redis_url, effects):
    """The same key with and without a token is of two callers."""
    app = kit.bare_app(redis_url)
    idem = Idempotent(app)
    door = jwt(app, idem)
    app.post("/orders", endpoint="orders")(jwt_required(optional=True)(idempotent(kit.answering(effects, "made"))))
    (client, of_ann), headers = door.sign_in("ann"), keyed()
    first = client.post("/orders", headers={**headers, **of_ann})
    kit.assert_problem(client.post("/orders", headers=headers), "not-found")
    kit.assert_replay(first, client.post("/orders", headers={**headers, **of_ann}))
    assert effects.runs == 1


def test_jwt_in_a_cookie(redis_url, effects):
    """With its CSRF check: a retry without the token of the form is refused by the guard, replay or not."""
    app = kit.bare_app(redis_url, config={"JWT_TOKEN_LOCATION": ["cookies"], "JWT_COOKIE_SECURE": False})
    idem = Idempotent(app)
    jwt(app, idem)
    app.post("/orders", endpoint="orders")(jwt_required()(idempotent(kit.answering(effects, "made"))))

    @app.post("/login")
    def login():
        response = app.make_response("")
        set_access_cookies(response, create_access_token(identity="ann"))
        return response

    client, headers = app.test_client(), keyed()
    client.post("/login")
    csrf = {"X-CSRF-TOKEN": client.get_cookie("csrf_access_token").value}
    first = client.post("/orders", headers={**headers, **csrf})
    kit.assert_kept(first)
    assert client.post("/orders", headers=headers).status_code == 401
    kit.assert_replay(first, client.post("/orders", headers={**headers, **csrf}))
    assert effects.runs == 1


def test_a_jwt_that_a_hook_verifies(redis_url, store, effects):
    """A declared protection with guards in hooks."""
    app = kit.bare_app(redis_url)
    idem = Idempotent(app)
    door = jwt(app, idem)
    app.before_request(lambda: verify_jwt_in_request() and None)
    app.post("/orders", endpoint="orders")(lambda: {"run": effects.add(), "of": get_jwt()["sub"]})
    idem.protect("orders")
    (client, of_ann), headers = door.sign_in("ann"), keyed()
    assert client.post("/orders", headers=headers).status_code == 401
    assert kit.our_keys(store) == []
    first = client.post("/orders", headers={**headers, **of_ann})
    assert first.get_json() == {"run": 1, "of": "ann"}
    assert client.post("/orders", headers=headers).status_code == 401
    kit.assert_problem(client.post("/orders", headers={**headers, **door.sign_in("bob")[1]}), "not-found")
    kit.assert_replay(first, client.post("/orders", headers={**headers, **of_ann}))
    assert effects.runs == 1


def test_a_user_that_the_token_is_looked_up_for(redis_url, effects):
    """``current_user`` of Flask-JWT-Extended is there in the view, and a deleted user gets no replay."""
    app = kit.bare_app(redis_url)
    idem = Idempotent(app)
    users = {"ann": "Ann"}
    app.config["JWT_SECRET_KEY"] = "a secret of more than thirty-two bytes"
    JWTManager(app).user_lookup_loader(lambda header, payload: users.get(payload["sub"]))
    idem.principal_loader(jwt_identity)

    @app.post("/orders")
    @jwt_required()
    @idempotent
    def orders():
        effects.add()
        return {"user": str(current_user), "path": request.path}

    with app.app_context():
        headers = {**keyed(), "Authorization": f"Bearer {create_access_token(identity='ann')}"}
    client = app.test_client()
    first = client.post("/orders", headers=headers)
    assert first.get_json() == {"user": "Ann", "path": "/orders"}
    kit.assert_replay(first, client.post("/orders", headers=headers))
    users.clear()
    refused = client.post("/orders", headers=headers)
    assert refused.status_code == 401
    kit.assert_not_kept(refused)
    assert effects.runs == 1


def test_roles(redis_url, effects):
    """A user who lost the role: 403 of the guard, no replay."""
    app, auth, roles = kit.bare_app(redis_url), HTTPBasicAuth(), {"ann": ["admin"]}
    auth.verify_password(lambda name, word: name)
    auth.get_user_roles(lambda user: roles.get(user, []))
    Idempotent(app).principal_loader(httpauth_user(auth))
    app.post("/orders", endpoint="orders")(
        auth.login_required(role="admin")(idempotent(kit.answering(effects, "made")))
    )
    headers = {**keyed(), "Authorization": "Basic " + base64.b64encode(b"ann:x").decode()}
    client = app.test_client()
    first = client.post("/orders", headers=headers)
    roles.clear()
    refused = client.post("/orders", headers=headers)
    assert refused.status_code == 403
    kit.assert_not_kept(refused)
    roles["ann"] = ["admin"]
    kit.assert_replay(first, client.post("/orders", headers=headers))
    assert effects.runs == 1
