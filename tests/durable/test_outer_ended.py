"""What a view can do to the transaction that it shares, and set-ups in which sharing is hard."""

import logging
from typing import Any

import pytest
import sqlalchemy as sa
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy.orm import Mapped, Session, mapped_column

from flask_idempotent import Idempotent, idempotent
from flask_idempotent.errors import ConfigurationError
from flask_idempotent.stores.models import add_tables
from tests.web import kit
from tests.web.kit import new_key

from .kit import MANY, Shop, empty_tables

# The view ends the transaction itself


def raw_commit(shop: Shop) -> None:
    shop.order("a")
    shop.db.session.flush()
    shop.db.session.execute(sa.text("COMMIT"))


def raw_commit_of_the_driver(shop: Shop) -> None:
    shop.order("a")
    shop.db.session.flush()
    shop.db.session.connection().connection.commit()


def commits_the_connection(shop: Shop) -> None:
    shop.order("a")
    shop.db.session.flush()
    shop.db.session.connection().commit()


def commits_a_connection_that_it_kept(shop: Shop) -> None:
    """No savepoint of the session is open then, whose loss would tell."""
    connection = shop.db.session.connection()
    shop.order("a")
    shop.db.session.commit()
    connection.commit()


def implicit_commit(shop: Shop) -> None:
    shop.order("a")
    shop.db.session.flush()
    shop.db.session.execute(sa.text("CREATE TABLE IF NOT EXISTS made_by_a_view (id INT)"))


ENDINGS = [
    raw_commit,
    raw_commit_of_the_driver,
    commits_the_connection,
    commits_a_connection_that_it_kept,
    implicit_commit,
]


@pytest.fixture(params=ENDINGS, ids=lambda ending: ending.__name__)
def ending(request, database_url):
    if request.param is implicit_commit and not database_url.startswith("mysql"):
        pytest.skip("DDL is part of the transaction here")
    return request.param


def told(caplog: pytest.LogCaptureFixture) -> bool:
    return any("ended the transaction that it shares with its key" in message for message in caplog.messages)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> "pytest.LogCaptureFixture":
    caplog.set_level(logging.INFO, "flask_idempotent")
    return caplog


def test_the_answer_is_added_to_what_the_view_committed(shop, ending, log):
    """The work is there, so its answer is settled at once, by token; the log tells the developer."""

    @shop.view
    def view() -> Any:
        shop.runs += 1
        ending(shop)
        return {"made": True}, 201

    post = shop.poster()
    first = post()
    assert first.status_code == 201
    assert told(log)
    shop.assert_done("a")
    shop.assert_replays(first, post)
    assert shop.runs == 1


@pytest.mark.parametrize("leave", ["raises", "status 503", "handled"])
def test_work_that_was_committed_before_the_view_failed_is_not_done_again(shop, ending, log, leave):
    """Nobody can take it back, and there is no answer to keep: the outcome is unknown."""

    @shop.app.errorhandler(LookupError)
    def handle(_: LookupError) -> Any:
        return "handled", 422

    @shop.view
    def view() -> Any:
        shop.runs += 1
        ending(shop)
        if leave == "raises":
            raise RuntimeError("after the commit")
        if leave == "handled":
            raise LookupError("after the commit")
        return "busy", 503

    post = shop.poster()
    first = post()
    assert first.status_code == (500 if leave == "raises" else 503)
    if leave == "handled":
        assert "It is not known" in kit.assert_problem(first, "store-unavailable")["detail"]
    assert told(log)
    assert (shop.orders(), shop.states(), shop.answers()) == (["a"], ["indeterminate"], 0)
    shop.redis.flushdb()
    for _ in range(2):
        again = post()
        assert (again.status_code, again.get_json()["code"]) == (409, "indeterminate")
        assert again.headers["Retry-After"]
    assert shop.runs == 1


@pytest.mark.parametrize("raw", ["ROLLBACK", "driver", "connection"])
def test_a_raw_rollback(shop, log, raw):
    """The key's row is gone with the work: nothing is kept, and the client is told to ask again."""

    @shop.view
    def view() -> Any:
        shop.runs += 1
        shop.order("a" if shop.runs > 1 else "gone")
        shop.db.session.flush()
        if shop.runs == 1:
            if raw == "ROLLBACK":
                shop.db.session.execute(sa.text("ROLLBACK"))
            elif raw == "driver":
                shop.db.session.connection().connection.rollback()
            else:
                shop.db.session.connection().rollback()
        else:
            shop.db.session.commit()
        return {"made": True}, 201

    post = shop.poster()
    kit.assert_problem(post(), "store-unavailable")
    assert (shop.orders(), shop.states(), shop.answers()) == ([], [], 0)
    first = kit.until(post)
    assert first.status_code == 201
    shop.assert_done("a")
    shop.assert_replays(first, post)


def test_a_commit_and_more_work_after_it(shop, log):
    """What came after the COMMIT was in nobody's transaction: it is given up."""

    @shop.view
    def view() -> Any:
        shop.runs += 1
        raw_commit(shop)
        shop.db.session.execute(sa.text("INSERT INTO orders (item) VALUES ('after')"))
        return {"made": True}, 201

    post = shop.poster()
    first = post()
    assert first.status_code == 201
    assert told(log)
    shop.assert_done("a")
    shop.assert_replays(first, post)


# Sessions and engines that are not joined


def test_a_session_made_before_the_extension(make_shop, database_url):
    """It would not join, so it is replaced by one that does; what was pending in it is committed first."""
    shop = make_shop(database_url, protect=False)
    with shop.app.app_context():
        shop.db.create_all()
        before = shop.db.session()
        shop.db.session.add(shop.Coupon(code="pending"))
        shop.protect()

        @shop.view
        def view() -> Any:
            shop.runs += 1
            shop.order("a")
            shop.db.session.commit()
            if shop.runs == 1:
                raise RuntimeError("at the end")
            return {"made": True}, 201

        post = shop.poster()
        assert post().status_code == 500
        assert shop.db.session() is not before
        shop.assert_nothing()
        assert shop.ask("SELECT code FROM coupons") == [("pending",)]
        first = post()
        assert first.status_code == 201
        shop.assert_done("a")
        kit.assert_replay(first, post())
        shop.db.session.remove()


def test_two_apps_share_one_db(make_shop, database_url):
    """Each request works in its own app's transaction, and their keys don't meet by name alone."""
    db = SQLAlchemy()
    one = make_shop(database_url, db=db, name="one", KEY_PREFIX="one", add_models=True)
    two = make_shop(database_url, db=db, name="two", KEY_PREFIX="two")
    fail = True
    for shop in (one, two):

        @shop.view
        def view(shop: Shop = shop) -> Any:
            shop.order(shop.app.name)
            shop.db.session.commit()
            if fail:
                raise RuntimeError("at the end")
            return {"made": shop.app.name}, 201

    key = new_key()
    for shop in (one, two):
        assert shop.post(key).status_code == 500
        assert (one.orders(), one.states()) == ([], [])
    fail = False
    answers = [shop.post(key) for shop in (one, two)]
    assert [answer.get_json()["made"] for answer in answers] == ["one", "two"]
    assert (one.orders(), one.states(), one.answers()) == (["one", "two"], ["succeeded"] * 2, 2)
    one.redis.flushdb()
    for shop, answer in zip((one, two), answers, strict=True):
        kit.assert_replay(answer, shop.post(key))


def test_one_extension_object_on_two_apps_of_one_db(make_shop, database_url):
    """Their key prefix is the same, so a key of one is a key of the other."""
    db, idem = SQLAlchemy(), Idempotent()
    one = make_shop(database_url, db=db, idem=idem, name="one", add_models=True)
    two = make_shop(database_url, db=db, idem=idem, name="two")
    one.take_orders()
    two.take_orders()
    key = new_key()
    first = one.post(key)
    kit.assert_replay(first, two.post(key))
    assert (one.runs, two.runs) == (1, 0)


@pytest.fixture
def two_binds(make_shop, database_url, tmp_path):
    """A shop with a second database, and a model in it."""

    def make(**settings: Any) -> Shop:
        other = f"sqlite:///{tmp_path / 'other.sqlite'}"
        options = {"url": other, "pool_size": 1, "max_overflow": 0, "pool_timeout": 3}
        shop = make_shop(database_url, protect=False, config={"SQLALCHEMY_BINDS": {"other": options}}, **settings)

        class Note(shop.db.Model):  # type: ignore[name-defined, misc]
            __bind_key__ = "other"
            __tablename__ = "notes"
            id: Mapped[int] = mapped_column(primary_key=True)
            text: Mapped[str] = mapped_column(sa.String(50))

        shop.Note = Note
        shop.protect()
        shop.other = sa.create_engine(other, poolclass=sa.NullPool)
        with shop.other.begin() as connection:
            connection.execute(sa.text("INSERT INTO notes (text) VALUES ('there')"))
        return shop

    return make


def notes(shop: Shop) -> list[str]:
    with shop.other.begin() as connection:
        return [text for (text,) in connection.execute(sa.text("SELECT text FROM notes"))]


def test_another_bind_can_be_read(two_binds):
    shop = two_binds()

    @shop.view
    def view() -> Any:
        found = shop.db.session.query(shop.Note).one().text
        shop.order(found)
        shop.db.session.commit()
        return {"found": found}, 201

    post = shop.poster()
    first = post()
    assert first.get_json() == {"found": "there"}
    shop.assert_done("there")
    shop.assert_replays(first, post)


@pytest.mark.parametrize("how", ["flush", "update", "core"])
def test_another_bind_can_not_be_written(two_binds, how):
    """Two databases can't be committed as one: the view fails, and all is rolled back and released."""
    shop = two_binds()
    seen: list[Exception] = []

    @shop.view
    def view() -> Any:
        shop.order("a")
        shop.db.session.commit()
        try:
            if how == "flush":
                shop.db.session.add(shop.Note(text="new"))
                shop.db.session.commit()
            elif how == "update":
                shop.db.session.query(shop.Note).one().text = "changed"
                shop.db.session.flush()
            else:
                shop.db.session.execute(sa.insert(shop.Note).values(text="new"))
        except Exception as error:
            seen.append(error)
            raise
        return {"made": True}, 201

    post = shop.poster()
    assert post().status_code == 500
    (error,) = seen
    assert isinstance(error, ConfigurationError)
    assert "IDEMPOTENT_BIND_KEY" in str(error)
    assert "other.sqlite" in str(error)
    shop.assert_nothing()
    assert notes(shop) == ["there"]
    assert post().status_code == 500  # released: it ran again
    assert len(seen) == 2


@pytest.mark.parametrize("fails", [False, True], ids=["answers", "raises"])
def test_the_bind_key_names_the_engine(two_binds, fails):
    """Key and work are in the bind; the default database is the one that can't be written then."""
    shop = two_binds(BIND_KEY="other")

    @shop.view
    def view() -> Any:
        shop.db.session.add(shop.Note(text="new"))
        shop.db.session.commit()
        if fails:
            raise RuntimeError("at the end")
        return {"made": True}, 201

    @shop.view(rule="/default")
    def default() -> Any:
        shop.order("a")
        shop.db.session.commit()
        return {"made": True}, 201

    post = shop.poster()
    first = post()
    with shop.other.begin() as connection:
        keys = connection.execute(sa.text("SELECT status FROM idempotency_keys")).all()
    if fails:
        assert (first.status_code, notes(shop), keys) == (500, ["there"], [])
    else:
        assert (first.status_code, notes(shop), keys) == (201, ["there", "new"], [("succeeded",)])
        shop.redis.flushdb()
        kit.assert_replay(first, post())
        assert notes(shop) == ["there", "new"]
    assert shop.post(path="/default").status_code == 500
    assert shop.orders() == []


def test_an_unknown_bind_key_is_refused(make_shop, database_url):
    shop = make_shop(database_url, protect=False, BIND_KEY="nowhere")
    shop.idem.init_app(shop.app, db=shop.db)
    shop.take_orders()
    with pytest.raises(ConfigurationError, match="IDEMPOTENT_BIND_KEY: the app has no bind 'nowhere'"):
        shop.idem.verify(shop.app)


@pytest.mark.parametrize("how", ["engine", "session"])
def test_an_engine_or_session_of_the_views_own_commits_outside(make_shop, database_url, how):
    """It can't be caught, as the docs say; and on SQLite, which has one writer, it waits for itself and fails."""
    sqlite = database_url.startswith("sqlite")
    patience = {"connect_args": {"timeout": 0.3}} if sqlite else {}
    shop = make_shop(database_url, engine_options={**MANY, **patience})

    @shop.view
    def view() -> Any:
        shop.order("a")
        shop.db.session.commit()
        if how == "engine":
            with shop.db.engine.begin() as connection:
                connection.execute(sa.insert(shop.Order).values(item="outside"))
        else:
            with Session(shop.db.engine) as session:
                session.add(shop.Order(item="outside"))
                session.commit()
        raise RuntimeError("at the end")

    assert shop.post().status_code == 500
    assert shop.orders() == ([] if sqlite else ["outside"])
    assert (shop.states(), shop.answers()) == ([], 0)


def test_a_protected_view_inside_a_transaction(shop):
    """Two keys can't share one transaction."""
    seen: list[Exception] = []

    @idempotent(durable="transaction")
    def inner() -> Any:
        shop.order("inner")
        shop.db.session.commit()
        return "inner", 201

    shop.app.post("/inner", endpoint="inner")(inner)

    @shop.view
    def outer() -> Any:
        shop.order("outer")
        shop.db.session.commit()
        try:
            return inner()
        except ConfigurationError as error:
            seen.append(error)
            raise

    assert shop.post().status_code == 500
    assert "two keys can't share one transaction" in str(seen[0])
    shop.assert_nothing()


# Where the tables are


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:"])
def test_sqlite_in_memory_is_refused(make_shop, url):
    shop = make_shop(url, protect=False, engine_options={})
    shop.idem.init_app(shop.app, db=shop.db)
    shop.take_orders()
    with pytest.raises(ConfigurationError, match="use a file"):
        shop.post()
    assert shop.runs == 0


@pytest.mark.parametrize("where", ["engine", "options"])
def test_an_engine_that_commits_by_itself_is_refused(make_shop, sqlite_url, where):
    level = {"isolation_level": "AUTOCOMMIT"}
    options = level if where == "engine" else {"execution_options": level}
    shop = make_shop(sqlite_url, engine_options=options)
    shop.take_orders()
    with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
        shop.post()
    assert shop.runs == 0


def test_in_memory_is_no_matter_where_nothing_is_durable(make_shop):
    shop = make_shop("sqlite://", protect=False, engine_options={})
    shop.idem.init_app(shop.app, db=shop.db)

    @shop.view(durable=False)
    def view() -> Any:
        return "made", 201

    assert shop.post().status_code == 201


def test_durable_without_db_is_refused(redis_url):
    app = kit.make_app(redis_url)
    app.post("/orders", endpoint="orders")(idempotent(durable="transaction")(lambda: "made"))
    with pytest.raises(ConfigurationError, match=r"'orders'.*init_app\(app, db=db\)"):
        app.test_client().post("/orders", headers=kit.keyed())


def test_tables_in_a_metadata_of_the_apps_own(make_shop, database_url):
    """An app that makes its tables itself, by Alembic say, adds them where it likes."""
    shop = make_shop(database_url, protect=False)
    metadata = sa.MetaData()
    tables = add_tables(metadata)
    assert add_tables(metadata) == tables
    metadata.drop_all(shop.outside)
    metadata.create_all(shop.outside)
    shop.db.metadata.create_all(shop.outside)
    shop.idem.init_app(shop.app, db=shop.db)
    shop.take_orders()
    post = shop.poster()
    first = post()
    assert first.status_code == 201
    shop.assert_done("a")
    shop.assert_replays(first, post)


def test_tables_that_are_missing(make_shop, database_url, caplog):
    """503 before any work, and a log that names the remedy."""
    shop = make_shop(database_url)
    add_tables(sa.MetaData()).keys.metadata.drop_all(shop.outside)
    try:
        shop.take_orders()
        kit.assert_problem(shop.post(), "store-unavailable")
        assert (shop.runs, shop.orders()) == (0, [])
        assert "are the tables there? see `flask idempotent ddl`" in caplog.text
    finally:
        add_tables(sa.MetaData()).keys.metadata.create_all(shop.outside)
        empty_tables(database_url)
