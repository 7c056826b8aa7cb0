"""Whose key it is: texts, digests, and where the principal comes from."""

import base64
import enum
import hashlib
import re
import sys
import uuid
from collections.abc import Callable, Iterator

import flask
import flask_httpauth  # type: ignore[import-untyped]
import flask_jwt_extended
import flask_login  # type: ignore[import-untyped]
import pytest
from flask.testing import FlaskClient
from hypothesis import given
from hypothesis import strategies as st
from werkzeug.local import LocalProxy
from werkzeug.test import EnvironBuilder
from werkzeug.wrappers import Request

from flask_idempotent.errors import ConfigurationError
from flask_idempotent.loaders import httpauth_user, jwt_identity
from flask_idempotent.request.scope import (
    binding_digest,
    bucket_digest,
    identify,
    make_scope,
    plain_text,
    principal_digest,
    text_of,
)

HEX = re.compile(r"[0-9a-f]{64}")
SOME_UUID = uuid.UUID("12345678-1234-5678-1234-567812345678")


class Role(str, enum.Enum):
    ADMIN = "admin"


class Number(enum.IntEnum):
    SEVEN = 7


class Model:
    def __repr__(self) -> str:
        return "Model(secret)"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, None),
        ("acme", "acme"),
        ("1", "1"),
        (1, "1"),
        (0, "0"),
        (-1, "-1"),
        (SOME_UUID, str(SOME_UUID)),
        (Role.ADMIN, "admin"),
        (Number.SEVEN, "7"),
        ("é\ud800", "é\ud800"),
    ],
)
def test_text_of_what_a_loader_may_give(value: object, text: str | None) -> None:
    result = text_of(value, what="tenant_loader")
    assert result == text
    assert result is None or type(result) is str


@pytest.mark.parametrize(
    "value", [True, False, 1.0, b"acme", ["acme"], {"id": 1}, Model(), object, LocalProxy(lambda: "x")]
)
def test_other_values_are_an_error_that_names_the_loader_only(value: object) -> None:
    """F39: the text of a model instance holds a memory address."""
    with pytest.raises(ConfigurationError) as caught:
        text_of(value, what="tenant_loader")
    assert "tenant_loader" in str(caught.value)
    assert type(value).__name__ in str(caught.value)
    assert "secret" not in str(caught.value)
    assert plain_text(value) is None


def test_an_empty_string_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="tenant_loader"):
        text_of("", what="tenant_loader")


PARTS = st.tuples(
    st.text(max_size=4),
    st.none() | st.text(max_size=4),
    st.text(max_size=4),
    st.text(max_size=4),
    st.none() | st.text(),
)


@given(PARTS, PARTS)
def test_scopes_are_equal_only_if_every_part_is(
    one: tuple[str, str | None, str, str, str | None], other: tuple[str, str | None, str, str, str | None]
) -> None:
    """F39."""
    digests = {make_scope(*parts[:4], isolate_principal=parts[4]).digest for parts in (one, other)}
    assert len(digests) == len({one, other})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("p", "ab", "c", "k", None), ("p", "a", "bc", "k", None)),
        (("p", None, "e", "k", None), ("p", "", "e", "k", None)),
        (("p", None, "e", "k", None), ("p", "-", "e", "k", None)),
        (("p", "t", "e", "k", None), ("p", "t", "e", "k", "")),
        (("p", "t", "e", "k", None), ("p", "t", "e", "k-", None)),
        (("p", "t", "e", "k", "u"), ("p", "t", "e", "k1:u", None)),
        (("p", "t", "e", "k", "u"), ("p", "t", "e", "k", "v")),
        (("p", "t", "e", "k", None), ("q", "t", "e", "k", None)),
        (("1:a", None, "e", "k", None), ("a", None, "e", "k", None)),
        (("p", "\ud800", "e", "k", None), ("p", "\ud801", "e", "k", None)),
    ],
)
def test_scopes_that_look_alike_are_not(
    one: tuple[str, str | None, str, str, str | None], other: tuple[str, str | None, str, str, str | None]
) -> None:
    first, second = (make_scope(*parts[:4], isolate_principal=parts[4]) for parts in (one, other))
    assert first.digest != second.digest
    assert HEX.fullmatch(first.digest)


def test_a_scope_shows_tenant_and_endpoint_but_no_key() -> None:
    scope = make_scope("idempotent", "acme", "charges.create", "secret-key")
    assert (scope.tenant, scope.endpoint) == ("acme", "charges.create")
    assert "secret-key" not in repr(scope)


def test_the_digest_of_a_scope_is_part_of_the_stored_format() -> None:
    """A change here makes every record of a running system unknown."""
    layout = b"flask-idempotent/scope/1\x0010:idempotent4:acme7:charges3:abc-"
    assert make_scope("idempotent", "acme", "charges", "abc").digest == hashlib.sha256(layout).hexdigest()


def test_digests_of_different_kinds_are_unrelated() -> None:
    digests = [
        principal_digest("p", "t", "x"),
        principal_digest("p", "u", "x"),
        principal_digest("p", None, "x"),
        principal_digest("q", "t", "x"),
        binding_digest("p", "t", "x"),
        binding_digest("p", "u", "x"),
        bucket_digest("p", "t", "x", None),
        bucket_digest("p", "u", "x", None),
        bucket_digest("p", "t", None, "x"),
        bucket_digest("p", "t", None, None),
        make_scope("p", "t", "x", "").digest,
    ]
    assert len(set(digests)) == len(digests)
    assert all(HEX.fullmatch(digest) for digest in digests)


def test_nobody_has_an_empty_digest() -> None:
    assert principal_digest("p", "t", None) == ""
    assert binding_digest("p", "t", None) == ""


def test_a_known_principal_is_counted_wherever_the_request_comes_from() -> None:
    assert bucket_digest("p", "t", "ann", "10.0.0.1") == bucket_digest("p", "t", "ann", "10.0.0.2")
    assert bucket_digest("p", "t", None, "10.0.0.1") != bucket_digest("p", "t", None, "10.0.0.2")
    assert bucket_digest("p", "t", None, None) == bucket_digest("p", "t", None, "")


def request_with(**headers: str) -> Request:
    builder = EnvironBuilder()
    for name, value in headers.items():
        builder.headers[name.replace("_", "-")] = value
    return Request(builder.get_environ())


def basic(user: str, password: str = "pw") -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def who(*, login_manager: bool = False, **headers: str) -> str | None:
    return identify(request_with(**headers), loader=None, login_manager=login_manager)


def test_the_loader_decides_alone() -> None:
    request = request_with(Authorization=basic("ann"), X_API_Key="k")
    assert identify(request, loader=lambda: 7, login_manager=False) == "7"
    assert identify(request, loader=lambda: "7", login_manager=False) == "7"
    assert identify(request, loader=lambda: None, login_manager=False) is None
    with pytest.raises(ConfigurationError, match="principal_loader"):
        identify(request, loader=Model, login_manager=False)


def test_a_failing_loader_is_not_an_anonymous_caller() -> None:
    def loader() -> str:
        raise LookupError

    with pytest.raises(LookupError):
        identify(request_with(), loader=loader, login_manager=False)


def test_basic_authentication_gives_the_user_name() -> None:
    assert who(Authorization=basic("ann", "a")) == who(Authorization=basic("ann", "b")) == "basic:ann"


def test_basic_authentication_without_a_name_tells_callers_apart() -> None:
    one, other = who(Authorization=basic("", "token-1")), who(Authorization=basic("", "token-2"))
    assert one is not None
    assert other is not None
    assert one != other
    assert "token-1" not in one
    assert who(Authorization=basic("", "")) is None


def test_an_api_key_and_a_bearer_token_are_digests() -> None:
    texts = [
        who(X_API_Key="alpha"),
        who(X_API_Key="beta"),
        who(Authorization="Bearer alpha"),
        who(Authorization="Bearer beta"),
        who(Authorization="Bearer a=b"),
        who(Authorization="Bearer a=c"),
        who(Authorization=basic("alpha")),
    ]
    assert len(set(texts)) == len(texts)
    for text, prefix in zip(texts, ["api-key:"] * 2 + ["bearer:"] * 4 + ["basic:"], strict=True):
        assert text is not None
        assert text.startswith(prefix)
    assert "alpha" not in f"{texts[0]}{texts[2]}"
    assert who(Authorization="bearer   alpha") == texts[2]


def test_the_order_of_sources() -> None:
    assert who(Authorization=basic("ann"), X_API_Key="k") == "basic:ann"
    assert who(Authorization="Bearer t", X_API_Key="k") == who(X_API_Key="k")


@pytest.mark.parametrize(
    "headers",
    [{}, {"X_API_Key": " "}, {"Authorization": "Bearer "}, {"Authorization": "Basic !"}, {"Authorization": ""}],
)
def test_without_credentials_a_caller_is_anonymous(headers: dict[str, str]) -> None:
    assert identify(request_with(**headers), loader=None, login_manager=False) is None


def test_a_login_manager_of_another_make_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flask_login", None)
    assert who(login_manager=True, X_API_Key="k") == who(X_API_Key="k")


class User(flask_login.UserMixin):  # type: ignore[misc]
    def __init__(self, id: object) -> None:
        self.id = id

    def __len__(self) -> int:
        return 0

    def get_id(self) -> object:
        return self.id


@pytest.fixture
def login_app() -> Iterator[FlaskClient]:
    app = flask.Flask(__name__)
    app.secret_key = "k"
    manager = flask_login.LoginManager(app)
    users: dict[str, User] = {"7": User("7"), "none": User(None), "model": User(Model())}
    manager.request_loader(lambda request: users.get(request.headers.get("X-User", "")))

    @app.get("/")
    def show() -> dict[str, str | None]:
        return {"who": identify(flask.request, loader=None, login_manager=hasattr(app, "login_manager"))}

    app.testing = True
    with app.test_client() as client:
        yield client


def ask(client: FlaskClient, **headers: str) -> object:
    return client.get("/", headers={name.replace("_", "-"): value for name, value in headers.items()}).get_json()["who"]


def test_flask_login_gives_its_user_before_the_headers(login_app: FlaskClient) -> None:
    assert ask(login_app, X_User="7", Authorization=basic("ann"), X_API_Key="k") == "login:7"


def test_flask_login_without_a_user_goes_on_to_the_headers(login_app: FlaskClient) -> None:
    assert ask(login_app, Authorization=basic("ann")) == "basic:ann"
    assert ask(login_app) is None


@pytest.mark.parametrize("user", ["none", "model"])
def test_a_flask_login_user_without_an_identifier_is_not_anonymous(login_app: FlaskClient, user: str) -> None:
    with pytest.raises(ConfigurationError, match="get_id"):
        ask(login_app, X_User=user)


# -- the ready loaders, with the real packages --


@pytest.fixture
def jwt_app() -> flask.Flask:
    app = flask.Flask(__name__)
    app.testing = True
    app.config["JWT_SECRET_KEY"] = "0123456789abcdef0123456789abcdef"
    flask_jwt_extended.JWTManager(app)

    def show() -> dict[str, object]:
        return {"who": jwt_identity()}

    app.add_url_rule("/open", "open", show)
    app.add_url_rule("/optional", "optional", flask_jwt_extended.jwt_required(optional=True)(show))
    app.add_url_rule("/guarded", "guarded", flask_jwt_extended.jwt_required()(show))
    return app


def token_for(app: flask.Flask, identity: str) -> dict[str, str]:
    with app.app_context():
        return {"Authorization": f"Bearer {flask_jwt_extended.create_access_token(identity)}"}


def test_jwt_identity_outlives_a_refreshed_token(jwt_app: flask.Flask) -> None:
    client = jwt_app.test_client()
    tokens = [token_for(jwt_app, "ann"), token_for(jwt_app, "ann"), token_for(jwt_app, "bob")]
    assert tokens[0] != tokens[1]
    assert [client.get("/guarded", headers=token).get_json()["who"] for token in tokens] == ["ann", "ann", "bob"]
    assert client.get("/optional", headers=tokens[0]).get_json() == {"who": "ann"}


def test_jwt_identity_believes_no_token_that_was_not_verified(jwt_app: flask.Flask) -> None:
    client = jwt_app.test_client()
    assert client.get("/open", headers=token_for(jwt_app, "ann")).get_json() == {"who": None}
    assert client.get("/optional").get_json() == {"who": None}


def test_jwt_identity_of_another_type_is_an_error(jwt_app: flask.Flask) -> None:
    with jwt_app.test_request_context():
        flask.g._jwt_extended_jwt = {"sub": {"id": "secret"}}
        with pytest.raises(ConfigurationError, match="dict") as caught:
            jwt_identity()
    assert "secret" not in str(caught.value)


def run_guarded(auth: object, headers: dict[str, str], *, optional: bool = False) -> object:
    """What the loader says inside a view that `auth` guards."""
    app = flask.Flask(__name__)
    app.testing = True
    app.secret_key = "k"
    load: Callable[[], object] = httpauth_user(auth)  # type: ignore[arg-type]
    guard = auth.login_required(optional=True) if optional else auth.login_required  # type: ignore[attr-defined]
    app.add_url_rule("/", "show", guard(lambda: {"who": load()}))
    app.add_url_rule("/open", "open", lambda: {"who": load()})
    assert app.test_client().get("/open", headers=headers).get_json() == {"who": None}  # no guard: nobody
    answer = app.test_client().get("/", headers=headers)
    return answer.get_json()["who"] if answer.status_code == 200 else answer.status_code


@pytest.mark.parametrize(
    ("verified", "text"), [("ann", "ann"), (7, "7"), (SOME_UUID, str(SOME_UUID)), (True, "login"), (Model(), "login")]
)
def test_httpauth_basic_user(verified: object, text: str) -> None:
    auth = flask_httpauth.HTTPBasicAuth()
    auth.verify_password(lambda name, password: verified if password == "pw" else None)
    assert run_guarded(auth, {"Authorization": basic("login")}) == text
    assert run_guarded(auth, {"Authorization": basic("login", "wrong")}) == 401
    assert run_guarded(auth, {}, optional=True) is None
    assert run_guarded(auth, {"Authorization": basic("login", "wrong")}, optional=True) is None


def test_httpauth_token_user() -> None:
    auth = flask_httpauth.HTTPTokenAuth()
    auth.verify_token(lambda token: {"t1": "ann"}.get(token))
    assert run_guarded(auth, {"Authorization": "Bearer t1"}) == "ann"
    assert run_guarded(auth, {"Authorization": "Bearer t2"}) == 401


def test_httpauth_never_takes_a_name_that_was_not_verified() -> None:
    """A token in a header of its own, with somebody else's name in Authorization beside it."""
    auth = flask_httpauth.HTTPTokenAuth(header="X-API-Key")
    auth.verify_token(lambda token: Model())
    with pytest.raises(ConfigurationError, match="Model") as caught:
        run_guarded(auth, {"X-API-Key": "t", "Authorization": basic("victim")})
    assert "secret" not in str(caught.value)


def test_httpauth_multi_user() -> None:
    first, second = flask_httpauth.HTTPBasicAuth(), flask_httpauth.HTTPTokenAuth()
    first.verify_password(lambda name, password: name)
    second.verify_token(lambda token: 7)
    auth = flask_httpauth.MultiAuth(first, second)
    assert run_guarded(auth, {"Authorization": basic("ann")}) == "ann"
    assert run_guarded(auth, {"Authorization": "Bearer t"}) == "7"
