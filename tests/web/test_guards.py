"""Guards decide first: what they refuse leaves nothing, and a replay is only for who would have reached the view."""

import base64
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from flask import Blueprint, Flask, abort, g, request
from flask_httpauth import HTTPBasicAuth, HTTPTokenAuth
from flask_jwt_extended import JWTManager, create_access_token, jwt_required
from flask_login import LoginManager, UserMixin, login_required, login_user
from flask_login import current_user as login_current_user

from flask_idempotent import Idempotent, idempotent
from flask_idempotent.loaders import httpauth_user, jwt_identity

from . import kit
from .kit import keyed

# A guard that aborts


def hook_of_the_app(app, shop, refuse):
    app.before_request(refuse)
    return lambda view: view


def hook_of_the_blueprint(app, shop, refuse):
    shop.before_request(refuse)
    return lambda view: view


def decorator(app, shop, refuse):
    def guard(view):
        @functools.wraps(view)
        def inner(*args, **kwargs):
            answer = refuse()
            return view(*args, **kwargs) if answer is None else answer

        return inner

    return guard


@pytest.mark.parametrize("answers", ["aborts", "returns"])
@pytest.mark.parametrize("status", [401, 403, 422, 429])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("place", [hook_of_the_app, hook_of_the_blueprint, decorator])
def test_a_refusal_leaves_nothing(redis_url, store, effects, place, when, status, answers):
    """F92"""
    app = kit.bare_app(redis_url)
    shop = Blueprint("shop", __name__)
    closed = True

    def refuse():
        if closed and answers == "aborts":
            abort(status)
        return ("no", status) if closed else None

    if when == "after":
        Idempotent(app)
    guard = place(app, shop, refuse)
    if when == "before":
        Idempotent(app)
    shop.post("/orders")(guard(idempotent(kit.answering(effects, ("made", 201)))))
    app.register_blueprint(shop)

    client, headers = app.test_client(), keyed()
    for _ in range(2):
        refused = client.post("/orders", headers=headers)
        assert refused.status_code == status
        kit.assert_not_kept(refused)
    assert kit.our_keys(store) == []
    closed = False
    first = client.post("/orders", headers=headers)
    kit.assert_kept(first)
    kit.assert_replay(first, client.post("/orders", headers=headers))
    assert effects.runs == 1
    closed = True
    refused = client.post("/orders", headers=headers)
    assert refused.status_code == status
    assert b"made" not in refused.get_data()
    kit.assert_not_kept(refused)


def test_an_answer_of_an_earlier_hook_is_not_kept(make_app, effects, store):
    """A maintenance page with a kept status is no answer of the view."""
    app = kit.add_orders(make_app(), effects)
    app.before_request(lambda: "maintenance")
    client, headers = app.test_client(), keyed()
    for _ in range(2):
        answer = client.post("/orders", headers=headers)
        assert (answer.status_code, answer.get_data()) == (200, b"maintenance")
        kit.assert_not_kept(answer)
    assert kit.our_keys(store) == []


# Guards that know who calls


@dataclass
class Guarded:
    """An app behind a guard. ``sign_in`` gives what a user's requests carry: a client and headers."""

    app: Flask
    effects: kit.Effects
    sign_in: Callable[[str], tuple[Any, dict[str, str]]]

    def post(self, user: "str | None", key: str):
        client, headers = self.sign_in(user) if user else (self.app.test_client(), {})
        return client.post("/orders", headers={**keyed(key), **headers})


def flask_login(app, idem):
    app.secret_key = "secret"

    class User(UserMixin):
        def __init__(self, name):
            self.id = name

    @app.post("/login/<name>")
    def login(name):
        login_user(User(name))
        return ""

    def sign_in(user):
        client = app.test_client()
        client.post(f"/login/{user}")
        return client, {}

    def ready():
        LoginManager(app).user_loader(User)

    return login_required, sign_in, ready


def jwt_extended(app, idem, loader=jwt_identity):
    app.config["JWT_SECRET_KEY"] = "a secret of more than thirty-two bytes"
    if loader is not None:
        idem.principal_loader(loader)

    def sign_in(user):
        with app.app_context():  # a fresh token each time
            return app.test_client(), {"Authorization": f"Bearer {create_access_token(identity=user)}"}

    return jwt_required(), sign_in, lambda: JWTManager(app)


def jwt_without_a_loader(app, idem):
    """The token's digest stands for the caller: right as long as the token isn't refreshed."""
    guard, sign_in, ready = jwt_extended(app, idem, loader=None)
    return guard, functools.cache(sign_in), ready


def basic_headers(user):
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:word".encode()).decode()}


def guard_by(check):
    def guard(view):
        @functools.wraps(view)
        def inner(*args, **kwargs):
            g.user = check()
            return view(*args, **kwargs) if g.user else (f"who are you, {request.remote_addr}?", 401)

        return inner

    return guard


def basic_in_a_decorator(app, idem):
    def check():
        given = request.authorization
        return given.username if given and given.password == "word" else None

    return guard_by(check), lambda user: (app.test_client(), basic_headers(user)), lambda: None


def bearer_in_a_decorator(app, idem):
    def check():
        return request.headers.get("Authorization", "").removeprefix("Bearer token-of-")

    return guard_by(check), lambda user: (app.test_client(), {"Authorization": f"Bearer token-of-{user}"}), lambda: None


def identity_of_a_decorator_alone(app, idem):
    """F36: no header that we know, and nothing there before the guard of the view has run."""
    idem.principal_loader(lambda: g.user)
    guard = guard_by(lambda: request.headers.get("X-Signed-User"))
    return guard, lambda user: (app.test_client(), {"X-Signed-User": user}), lambda: None


def httpauth_basic(app, idem, named=True):
    auth = HTTPBasicAuth()
    auth.verify_password(lambda user, password: user if password == "word" else None)
    if named:
        idem.principal_loader(httpauth_user(auth))
    return auth.login_required, lambda user: (app.test_client(), basic_headers(user)), lambda: None


def httpauth_basic_without_a_loader(app, idem):
    return httpauth_basic(app, idem, named=False)


def httpauth_token(app, idem):
    auth = HTTPTokenAuth()
    auth.verify_token(lambda token: token.partition("-")[0] or None)
    idem.principal_loader(httpauth_user(auth))
    tokens = iter(range(100))  # every request brings a refreshed token

    def sign_in(user):
        return app.test_client(), {"Authorization": f"Bearer {user}-{next(tokens)}"}

    return auth.login_required, sign_in, lambda: None


GUARDS = [
    flask_login,
    jwt_extended,
    jwt_without_a_loader,
    basic_in_a_decorator,
    bearer_in_a_decorator,
    identity_of_a_decorator_alone,
    httpauth_basic,
    httpauth_basic_without_a_loader,
    httpauth_token,
]


@pytest.fixture(
    params=[(guard, when) for guard in GUARDS for when in ("before", "after")], ids=lambda p: f"{p[0].__name__}-{p[1]}"
)
def guarded(request, redis_url, effects):
    """F36: each guard, with the extension registered before and after it."""
    make, when = request.param
    idem = Idempotent()
    app = kit.bare_app(redis_url)
    guard, sign_in, ready = make(app, idem)
    if when == "before":
        idem.init_app(app)
    ready()
    if when == "after":
        idem.init_app(app)
    app.post("/orders", endpoint="orders")(guard(idempotent(kit.answering(effects, ("made", 201)))))
    return Guarded(app, effects, sign_in)


def test_nobody_gets_a_replay_of_somebodys_answer(guarded, store):
    key = kit.new_key()
    refused = guarded.post(None, key)
    assert refused.status_code == 401
    assert kit.our_keys(store) == []
    first = guarded.post("ann", key)
    assert (first.status_code, first.get_data()) == (201, b"made")
    kit.assert_kept(first)
    for _ in range(2):
        refused = guarded.post(None, key)
        assert refused.status_code == 401
        assert b"made" not in refused.get_data()
        kit.assert_not_kept(refused)
    kit.assert_replay(first, guarded.post("ann", key))
    assert guarded.effects.runs == 1


def test_two_users_with_one_key(guarded):
    """F36"""
    key = kit.new_key()
    first = guarded.post("ann", key)
    kit.assert_problem(guarded.post("bob", key), "not-found")
    kit.assert_replay(first, guarded.post("ann", key))
    kit.assert_kept(guarded.post("bob", kit.new_key()))
    assert guarded.effects.runs == 2


def test_a_refreshed_jwt_with_a_loader_is_the_same_caller(redis_url, effects):
    idem, app = Idempotent(), kit.bare_app(redis_url)
    guard, sign_in, ready = jwt_extended(app, idem)
    idem.init_app(app)
    ready()
    app.post("/orders", endpoint="orders")(guard(idempotent(kit.answering(effects, ("made", 201)))))
    old, new = sign_in("ann")[1], sign_in("ann")[1]
    assert old != new
    client, key = app.test_client(), kit.new_key()
    first = client.post("/orders", headers={**keyed(key), **old})
    kit.assert_replay(first, client.post("/orders", headers={**keyed(key), **new}))
    assert effects.runs == 1


def test_a_guard_below_the_mark_fails_closed_for_others(redis_url, effects):
    """Documented wrong: a guard inside. A replay comes before it, so the caller must be known without it."""
    idem, app = Idempotent(), kit.bare_app(redis_url)
    guard, sign_in, _ = basic_in_a_decorator(app, idem)
    idem.init_app(app)
    app.post("/orders", endpoint="orders")(idempotent(guard(kit.answering(effects, ("made", 201)))))
    guarded, key = Guarded(app, effects, sign_in), kit.new_key()
    first = guarded.post("ann", key)
    kit.assert_kept(first)
    for other in ("bob", None):
        kit.assert_problem(guarded.post(other, key), "not-found")
    kit.assert_replay(first, guarded.post("ann", key))
    assert effects.runs == 1


def test_a_user_who_is_logged_out_is_another_caller(redis_url, effects):
    """Optional sign-in, no guard at all: the record of a user is not for the anonymous, and the other way round."""
    idem, app = Idempotent(), kit.bare_app(redis_url)
    _, sign_in, ready = flask_login(app, idem)
    ready()
    idem.init_app(app)

    @app.post("/orders")
    @idempotent
    def orders():
        effects.add()
        return {"user": getattr(login_current_user, "id", None)}

    guarded = Guarded(app, effects, sign_in)
    of_ann, of_nobody = kit.new_key(), kit.new_key()
    first = guarded.post("ann", of_ann)
    assert first.get_json() == {"user": "ann"}
    kit.assert_problem(guarded.post(None, of_ann), "not-found")
    anonymous = guarded.post(None, of_nobody)
    kit.assert_problem(guarded.post("ann", of_nobody), "not-found")
    kit.assert_replay(first, guarded.post("ann", of_ann))
    kit.assert_replay(anonymous, guarded.post(None, of_nobody))
    assert effects.runs == 2
