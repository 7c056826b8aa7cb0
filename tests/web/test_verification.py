"""A view that would not be protected stops the app: at its first call and at every later one, and in commands."""

import functools

import pytest
import redis
from flask import Blueprint, Flask, current_app
from flask.cli import FlaskGroup
from flask.views import MethodView

from flask_idempotent import Idempotent, idempotent
from flask_idempotent.errors import ConfigurationError

from . import kit
from .kit import keyed


def add_above_the_route(app, effects):
    @idempotent
    @app.post("/orders")
    def orders():
        effects.add()
        return "ok"


def add_above_a_blueprints_route(app, effects):
    blueprint = Blueprint("shop", __name__)

    @idempotent()
    @blueprint.route("/orders", methods=["GET", "POST"])
    def orders():
        effects.add()
        return "ok"

    app.register_blueprint(blueprint)


def add_get_only(app, effects):
    @app.get("/orders")
    @idempotent
    def orders():
        effects.add()
        return "ok"


def add_other_methods_only(app, effects):
    app.add_url_rule("/orders", "orders", idempotent(methods={"PUT"})(kit.answering(effects, "ok")), methods=["POST"])


def add_get_of_a_class(app, effects):
    class Orders(MethodView):
        @idempotent
        def get(self):
            effects.add()
            return "ok"

    app.add_url_rule("/orders", view_func=Orders.as_view("orders"))


def add_contradiction(app, effects):
    app.add_url_rule("/orders", "orders", idempotent(ttl=10)(kit.answering(effects, "ok")), methods=["POST"])


def add_long_lease(app, effects):
    view = idempotent(lease=60, max_processing=30)(kit.answering(effects, "ok"))
    app.add_url_rule("/orders", "orders", view, methods=["POST"])


def add_pii_without_keys(app, effects):
    app.add_url_rule("/orders", "orders", idempotent(pii=True)(kit.answering(effects, "ok")), methods=["POST"])


#: What `add_contradiction` contradicts.
WINDOW = {"CLIENT_RETRY_WINDOW": 3600}

#: What is wrong -> a part of the sentence that says so.
WRONG = {
    add_above_the_route: "stands above its route",
    add_above_a_blueprints_route: "stands above its route",
    add_get_only: "none of the protected methods",
    add_other_methods_only: "none of the protected methods",
    add_get_of_a_class: "none of the protected methods",
    add_contradiction: "ttl",
    add_long_lease: "max_processing",
    add_pii_without_keys: "FERNET_KEYS",
}

wrong = pytest.mark.parametrize(("add", "sentence"), WRONG.items(), ids=[add.__name__[4:] for add in WRONG])


@wrong
def test_the_first_call_says_so_and_every_later_one(make_app, effects, store, add, sentence):
    app: Flask = make_app(**WINDOW)
    app.get("/plain")(lambda: "plain")
    add(app, effects)
    client = app.test_client()
    for send in (client.get, client.get, client.post):
        with pytest.raises(ConfigurationError, match=sentence):
            send("/plain")
    with pytest.raises(ConfigurationError, match=sentence):
        client.post("/orders", headers=keyed())
    assert effects.runs == 0
    assert kit.our_keys(store) == []


@wrong
def test_verify(redis_url, effects, add, sentence):
    idem = Idempotent()
    app = kit.make_app(redis_url, idem=idem, **WINDOW)
    add(app, effects)
    with pytest.raises(ConfigurationError, match=sentence):
        idem.verify(app)


@wrong
@pytest.mark.parametrize("command", ["work", "routes"])
def test_a_command(make_app, effects, add, sentence, command):
    app: Flask = make_app(**WINDOW)
    add(app, effects)
    ran = []
    app.cli.command("work")(lambda: ran.append(True))
    result = app.test_cli_runner().invoke(FlaskGroup(create_app=lambda: app), [command])
    assert isinstance(result.exception, ConfigurationError)
    assert sentence in str(result.exception)
    assert ran == []
    assert not current_app, "the context that was refused is gone"


def test_a_command_of_an_app_that_is_right(make_app, effects):
    app: Flask = kit.add_orders(make_app(), effects)
    ran = []
    app.cli.command("work")(lambda: ran.append(True))
    for command in ("work", "routes"):
        result = app.test_cli_runner().invoke(FlaskGroup(create_app=lambda: app), [command])
        assert (result.exception, result.exit_code) == (None, 0)
    assert ran == [True]


def test_all_problems_are_told_at_once(redis_url, effects):
    idem = Idempotent()
    app = kit.make_app(redis_url, idem=idem, **WINDOW)
    app.get("/a")(idempotent(kit.answering(effects, "ok")))
    view = idempotent(ttl=10)(kit.answering(effects, "ok"))
    app.add_url_rule("/b", "b", view, methods=["POST"])
    app.add_url_rule("/c", "c", idempotent(pii=True)(kit.answering(effects, "ok")), methods=["POST"])
    with pytest.raises(ConfigurationError) as told:
        idem.verify(app)
    for word in ("none of the protected methods", "'b'", "'c'", "FERNET_KEYS"):
        assert word in str(told.value)


def test_an_app_that_is_mended_works(make_app, effects):
    app: Flask = make_app()
    add_above_the_route(app, effects)
    client, headers = app.test_client(), keyed()
    with pytest.raises(ConfigurationError):
        client.get("/")
    app.view_functions["orders"] = idempotent(kit.answering(effects, "ok"))
    kit.assert_replay(client.post("/orders", headers=headers), client.post("/orders", headers=headers))
    assert effects.runs == 1


def test_no_false_alarm(make_app, effects):
    """The bare function behind a GET, the marked one behind the POST; guards in between; a class with both."""
    app: Flask = make_app()

    def guard(view):
        @functools.wraps(view)
        def inner(*args, **kwargs):
            return view(*args, **kwargs)

        return inner

    def orders():
        return {"run": effects.add()}

    app.add_url_rule("/orders", "list", orders)
    app.add_url_rule("/orders", "create", guard(guard(idempotent(orders))), methods=["POST"])

    class Items(MethodView):
        decorators = (guard,)

        def get(self):
            return "items"

        @guard
        @idempotent
        def post(self):
            return "item"

    app.add_url_rule("/items", view_func=Items.as_view("items"))
    client, headers = app.test_client(), keyed()
    assert client.get("/items").status_code == 200
    assert client.get("/orders").get_json() == {"run": 1}
    kit.assert_replay(client.post("/orders", headers=headers), client.post("/orders", headers=headers))
    kit.assert_replay(client.post("/items", headers=headers), client.post("/items", headers=headers))
    assert effects.runs == 2


def test_an_app_without_the_extension(effects):
    app = kit.add_orders(Flask("bare"), effects)
    app.testing = True
    with pytest.raises(ConfigurationError, match="init_app"):
        app.test_client().post("/orders", headers=keyed())
    app.testing = False
    assert app.test_client().post("/orders", headers=keyed()).status_code == 500
    assert effects.runs == 0


def test_verify_of_an_app_without_the_extension():
    with pytest.raises(ConfigurationError, match="init_app"):
        Idempotent().verify(Flask("bare"))


def test_a_second_init_app(make_app):
    app = make_app()
    for again in (Idempotent().init_app, Idempotent):
        with pytest.raises(ConfigurationError, match="once"):
            again(app)


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("TLL", 10, "Did you mean 'IDEMPOTENT_TTL'"),
        ("LEASE", "30", "LEASE"),
        ("LEASE", 0, "LEASE"),
        ("LEASE", -1, "LEASE"),
        ("CLIENT_RETRY_WINDOW", 72 * 3600, "TTL"),
        ("REPLAY_HEADER", "idempotency-key", "HEADER"),
        ("MISMATCH_STATUS", 400, "MISMATCH_STATUS"),
    ],
)
def test_a_bad_setting_stops_init_app(make_app, key, value, sentence):
    """F02: among them a lease of nothing, and of less."""
    with pytest.raises(ConfigurationError, match=sentence):
        make_app(**{key: value})


def test_contradicting_settings_stop_init_app(make_app):
    with pytest.raises(ConfigurationError, match="MAX_PROCESSING"):
        make_app(LEASE=60, MAX_PROCESSING=30)


@pytest.mark.parametrize(
    "keywords",
    [{"tll": 1}, {"ttl": "2 days"}, {"lease": 0}, {"methods": {"GET"}}, {"fields": "amount"}, {"outcome": {7}}],
)
def test_a_bad_keyword_stops_the_import(keywords):
    with pytest.raises((ConfigurationError, TypeError)):
        idempotent(**keywords)


def test_a_client_that_decodes_is_refused(redis_url):
    """F76"""
    with (
        redis.Redis.from_url(redis_url, decode_responses=True) as client,
        pytest.raises(ConfigurationError, match="decode_responses"),
    ):
        kit.make_app(redis_url, client=client)


def test_a_bare_function_beside_its_protected_view_is_warned_of(make_app, caplog):
    app = make_app()

    def work():
        return "done"

    app.add_url_rule("/bare", "bare", work, methods=["POST"])
    app.add_url_rule("/kept", "kept", idempotent(work), methods=["POST"])
    assert app.test_client().post("/kept", headers=kit.keyed()).status_code == 200
    assert any("'bare'" in message and "nothing protects" in message for message in caplog.messages)
