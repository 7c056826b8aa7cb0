"""Several sessions of one view: nested app contexts, sessions of its own, contexts of requests inside the request.

They share one connection, and so one stack of savepoints. Whatever they do to each other, what one of them committed is
there with the key, or there is neither.
"""

import contextlib
import random
from typing import Any

import pytest
import sqlalchemy as sa
from flask_sqlalchemy import SQLAlchemy
from flask_sqlalchemy.session import Session
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from flask_idempotent.call import current_call
from flask_idempotent.errors import ConfigurationError
from flask_idempotent.stores.transaction import Transaction
from tests.web import kit

from .kit import Shop, empty_tables, new_key


def read_again(shop: Shop) -> None:
    """The outer session reads, as an object does that a commit has expired."""
    order = shop.Order(item="outer")
    shop.db.session.add(order)
    shop.db.session.commit()
    assert order.id


def read_only(shop: Shop) -> None:
    assert shop.db.session.query(shop.Order).all() == []


def begin_nested(shop: Shop) -> None:
    read_only(shop)
    shop.db.session.begin_nested()
    read_only(shop)


@contextlib.contextmanager
def app_context(shop: Shop) -> Any:
    with shop.app.app_context():
        yield shop.db.session


@contextlib.contextmanager
def own_session(shop: Shop) -> Any:
    with shop.db.session.session_factory() as session:
        yield session


BEFORE = {"reads": read_only, "reads again": read_again, "a nested transaction": begin_nested}
AFTER = {
    "nothing": lambda session: None,
    "rollback": lambda session: session.rollback(),
    "remove": lambda session: session.remove(),
    "commit": lambda session: session.commit(),
    "reads": lambda session: session.connection().exec_driver_sql("SELECT 1").close(),
}


@pytest.mark.parametrize("after", AFTER.values(), ids=AFTER)
@pytest.mark.parametrize("inner", [app_context, own_session], ids=["app context", "session of its own"])
@pytest.mark.parametrize("before", BEFORE.values(), ids=BEFORE)
def test_an_inner_commit_stays(shop, before, inner, after):
    """The outer session holds a savepoint, since it read. Its end takes nothing along."""

    @shop.view
    def view():
        before(shop)
        with inner(shop) as session:
            session.add(shop.Order(item="inner"))
            session.commit()
        after(shop.db.session)
        return {}, 201

    assert shop.post().status_code == 201
    shop.assert_done(*["outer"] * (before is read_again), "inner")


def test_inner_work_that_is_taken_back_is_gone(shop):
    @shop.view
    def view():
        read_again(shop)
        with shop.app.app_context():
            shop.db.session.add(shop.Order(item="inner"))
            shop.db.session.flush()
            shop.db.session.rollback()
        shop.db.session.add(shop.Order(item="last"))
        shop.db.session.commit()
        return {}, 201

    assert shop.post().status_code == 201
    shop.assert_done("last", "outer")


@pytest.mark.parametrize("end", ["commit", "rollback", "nothing"])
def test_an_inner_commit_inside_of_open_work(shop, caplog, end):
    """What is open around it decides: committed, both are there; taken back, the inner commit can't be kept, so nothing
    is, and the log says why."""

    @shop.view
    def view():
        shop.db.session.add(shop.Order(item="outer"))
        shop.db.session.flush()
        with shop.app.app_context():
            shop.db.session.add(shop.Order(item="inner"))
            shop.db.session.commit()
        if end != "nothing":
            getattr(shop.db.session, end)()
        return {}, 201

    answer = shop.post()
    if end == "commit":
        assert answer.status_code == 201
        shop.assert_done("inner", "outer")
        return
    kit.assert_problem(answer, "store-unavailable")
    shop.assert_nothing()
    assert any("committed work in one session" in message for message in caplog.messages)


def test_an_error_of_the_inner_session_is_its_own(shop):
    @shop.view
    def view():
        shop.db.session.add(shop.Coupon(code="a"))
        shop.db.session.commit()
        assert shop.db.session.query(shop.Coupon).count() == 1
        with shop.app.app_context():
            shop.db.session.add(shop.Coupon(code="a"))
            with pytest.raises(IntegrityError):
                shop.db.session.commit()
            shop.db.session.rollback()
            shop.db.session.add(shop.Order(item="inner"))
            shop.db.session.commit()
        shop.db.session.add(shop.Order(item="outer"))
        shop.db.session.commit()
        return {}, 201

    assert shop.post().status_code == 201
    shop.assert_done("inner", "outer")


# Requests inside the request


def mail(shop: Shop) -> None:
    """As for `url_for` in a mail's template."""
    with shop.app.test_request_context("/mail"):
        shop.order("mail")
        shop.db.session.commit()


def ask_itself(shop: Shop) -> None:
    assert shop.app.test_client().post("/unprotected").status_code == 200


@pytest.mark.parametrize("act", [mail, ask_itself])
@pytest.mark.parametrize("raises", [False, True], ids=["answers", "raises"])
def test_a_request_context_inside(shop, act, raises):
    """The session there is the view's own, and so is the transaction."""

    @shop.app.post("/unprotected")
    def unprotected():
        shop.order("unprotected")
        shop.db.session.commit()
        return "done"

    @shop.view
    def view():
        act(shop)
        shop.order("last")
        shop.db.session.commit()
        if raises:
            raise RuntimeError
        return {}, 201

    assert shop.post().status_code == (500 if raises else 201)
    if raises:
        shop.assert_nothing()
    else:
        shop.assert_done("last", "mail" if act is mail else "unprotected")


def test_a_request_behind_a_view_that_is_not_over(shop):
    """A transaction that was never ended, as where a server drops a thread: the next request of the same thread has
    nothing to do with it."""
    opened = []

    @shop.view
    def view():
        opened.append(current_call().claim.backing)
        shop.order("a")
        shop.db.session.commit()
        return {}, 201

    shop.app.post("/unprotected")(lambda: (shop.order("b"), shop.db.session.commit()) and "done")
    close = Transaction.close
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Transaction, "close", lambda transaction: None)
        assert shop.app.test_client().post("/orders", headers=kit.keyed(X_User="ann")).status_code == 201
        (left,) = opened
        assert left.is_open
        seen = []
        patch.setattr(Transaction, "join", lambda transaction, session: seen.append(transaction))
        with contextlib.suppress(SQLAlchemyError):  # there is one connection, and it is not back
            shop.app.test_client().post("/unprotected")
    assert seen == []
    close(left)


def test_behind_the_view_such_a_context_is_not_part_of_anything(shop):
    @shop.view
    def view():
        shop.order("a")
        shop.db.session.commit()
        return {}, 201

    assert shop.post().status_code == 201
    mail(shop)
    assert shop.orders() == ["a", "mail"]


# Anything at all


class Program:
    """What three sessions do in some order, and what would be there if each had a connection of its own."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.steps = [(draw.randrange(3), draw.choice(STEPS)) for _ in range(draw.randrange(4, 14))]
        self.kept: list[str] = []

    def run(self, shop: Shop) -> None:
        factory = shop.db.session.session_factory
        sessions = [shop.db.session(), factory(), factory()]
        #: For each, the names written at each level.
        levels: list[list[list[str]]] = [[[]], [[]], [[]]]
        for number, (which, step) in enumerate(self.steps):
            session, mine = sessions[which], levels[which]
            if step == "write":
                session.add(shop.Order(item=f"{number}"))
                session.flush()
                mine[-1].append(f"{number}")
            elif step == "read":
                session.query(shop.Order).count()
            elif step == "nest":
                session.begin_nested()
                mine.append([])
            elif step == "unnest" and len(mine) > 1:
                session.get_nested_transaction().commit()
                done = mine.pop()
                mine[-1].extend(done)
            elif step == "undo nested" and len(mine) > 1:
                session.get_nested_transaction().rollback()
                mine.pop()
            elif step == "commit":
                session.commit()
                self.kept.extend(name for level in mine for name in level)
                mine[:] = [[]]
            elif step == "rollback":
                session.rollback()
                mine[:] = [[]]
            elif step == "close":
                session.close()
                mine[:] = [[]]
        for session in sessions[1:]:
            session.close()


#: Most of them are the usual ones.
STEPS = [*["write"] * 3, *["read"] * 2, *["commit"] * 2, "rollback", "close", "nest", "unnest", "undo nested"]


@pytest.mark.filterwarnings("ignore:nested transaction already:sqlalchemy.exc.SAWarning")
@pytest.mark.parametrize("seed", range(40))
def test_any_order(shop, seed):
    """Each commit is there and each rollback took back, or the request came to nothing."""
    program = Program(seed)

    @shop.view
    def view():
        program.kept.clear()
        program.run(shop)
        return {}, 201

    answer = shop.post(new_key())
    if answer.status_code == 201:
        shop.assert_done(*program.kept)
    else:
        assert answer.status_code in (500, 503)
        shop.assert_nothing()


# Sessions of a class, or with options, of the app's own


def test_a_class_whose_get_bind_takes_two_arguments(make_shop, database_url):
    """As SQLAlchemy's documentation writes it: on all routes it is asked as it expects to be."""

    class Routing(Session):
        def get_bind(self, mapper=None, clause=None):
            return shop.engine

    shop = make_shop(database_url, db=SQLAlchemy(session_options={"class_": Routing}), add_models=True)
    shop.take_orders()
    shop.app.get("/count")(lambda: {"orders": shop.db.session.query(shop.Order).count()})
    assert shop.post().status_code == 201
    shop.assert_done("a")
    assert shop.app.test_client().get("/count").get_json() == {"orders": 1}


def test_two_phases_are_refused_at_the_start(make_shop, database_url):
    shop = make_shop(database_url, db=SQLAlchemy(session_options={"twophase": True}), add_models=True)
    shop.take_orders()
    with pytest.raises(ConfigurationError, match="twophase"):
        shop.idem.verify(shop.app)


@pytest.fixture(params=["postgres_url", "mariadb_url"])
def elsewhere(request) -> Any:
    """A database's URL, and the name of a schema there, where the other tables are."""
    url = request.getfixturevalue(request.param)
    empty_tables(url)
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    name = f"idempotent_schema_{new_key()[:8]}"
    with engine.begin() as connection:
        connection.execute(sa.schema.CreateSchema(name))
    yield url, name
    with engine.begin() as connection:
        connection.execute(sa.schema.DropSchema(name, cascade=engine.dialect.name == "postgresql"))


def orders_in(shop: Shop, schema: str) -> list[str]:
    return [item for (item,) in shop.ask(f"SELECT item FROM {schema}.orders ORDER BY item")]


def test_all_tables_in_another_schema(make_shop, elsewhere):
    url, schema = elsewhere
    shop = make_shop(url, engine_options={"execution_options": {"schema_translate_map": {None: schema}}})
    shop.take_orders()
    key = new_key()
    first = shop.post(key)
    assert first.status_code == 201
    shop.redis.flushdb()
    kit.assert_replay(first, shop.post(key))
    assert orders_in(shop, schema) == ["a"]
    assert shop.ask(f"SELECT status FROM {schema}.idempotency_keys") == [("succeeded",)]
    assert (shop.orders(), shop.states()) == ([], [])


@pytest.mark.parametrize("ending", ["answers", "raises"])
def test_a_tenants_schema(make_shop, elsewhere, ending):
    """Set by the session for its own work: the keys stay where they are, also when the work is taken back."""
    url, schema = elsewhere
    shop = make_shop(url)
    shop.ask(f"CREATE TABLE {schema}.orders (id INTEGER PRIMARY KEY, item VARCHAR(50))")
    shop.app.register_error_handler(LookupError, lambda error: ("no such thing", 400))

    @shop.view
    def view():
        shop.db.session.connection(execution_options={"schema_translate_map": {None: schema}})
        shop.db.session.add(shop.Order(id=1, item="a"))
        shop.db.session.commit()
        if ending == "raises":
            raise LookupError
        return {}, 201

    key = new_key()
    first = shop.post(key)
    assert first.status_code == (201 if ending == "answers" else 400)
    assert orders_in(shop, schema) == (["a"] if ending == "answers" else [])
    assert shop.states() == ["succeeded" if ending == "answers" else "failed"]
    shop.redis.flushdb()
    kit.assert_replay(first, shop.post(key))
