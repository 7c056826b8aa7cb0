"""Key, effect and answer are there together, or none of them, however a view uses its session and however it ends."""

import asyncio
import inspect
import logging
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from flask import Response, abort, g, request, stream_with_context
from sqlalchemy.exc import IntegrityError

from flask_idempotent import NothingHappened
from tests.web import kit
from tests.web.kit import new_key

from .kit import Shop

# How a view works


def commits_in_the_middle(shop: Shop) -> None:
    shop.order("a")
    shop.db.session.commit()
    assert shop.db.session.query(shop.Order).count() == 1
    shop.order("b")
    shop.db.session.commit()


def flushes_then_commits(shop: Shop) -> None:
    shop.order("a")
    shop.db.session.flush()
    shop.order("b")
    shop.db.session.commit()


def rolls_back_a_part(shop: Shop) -> None:
    shop.order("a")
    shop.db.session.commit()
    shop.order("gone")
    shop.db.session.flush()
    shop.db.session.rollback()
    shop.order("b")
    shop.db.session.commit()


def begins_nested(shop: Shop) -> None:
    shop.order("a")
    with shop.db.session.begin_nested():
        shop.order("b")
    nested = shop.db.session.begin_nested()
    shop.order("gone")
    shop.db.session.flush()
    nested.rollback()
    shop.db.session.commit()


def removes_the_session(shop: Shop) -> None:
    shop.db.session.remove()
    shop.order("a")
    shop.db.session.commit()
    shop.db.session.remove()
    shop.order("gone")
    shop.db.session.flush()
    shop.db.session.remove()
    shop.order("b")
    shop.db.session.commit()


def closes_the_session(shop: Shop) -> None:
    shop.order("a")
    shop.db.session.commit()
    shop.db.session.close()
    shop.order("b")
    shop.db.session.commit()


def works_in_a_nested_app_context(shop: Shop) -> None:
    shop.order("a")
    shop.db.session.commit()
    with shop.app.app_context():
        shop.order("b")
        shop.db.session.commit()
        shop.order("gone")
        shop.db.session.flush()


def begins_explicitly(shop: Shop) -> None:
    with shop.db.session.begin():
        shop.order("a")
    with shop.db.session.begin():
        shop.order("b")


def survives_an_integrity_error(shop: Shop) -> None:
    shop.order("a")
    shop.db.session.add(shop.Coupon(code="once"))
    shop.db.session.commit()
    shop.order("gone")
    shop.db.session.execute(sa.insert(shop.Coupon).values(code="other"))
    shop.db.session.add(shop.Coupon(code="once"))
    with pytest.raises(IntegrityError):
        shop.db.session.flush()
    shop.db.session.rollback()
    shop.order("b")
    shop.db.session.commit()


def inserts_without_the_orm(shop: Shop) -> None:
    shop.db.session.execute(sa.insert(shop.Order).values(item="a"))
    shop.db.session.execute(sa.text("INSERT INTO orders (item) VALUES ('b')"))
    shop.db.session.commit()


def inserts_on_the_connection(shop: Shop) -> None:
    shop.db.session.connection().execute(sa.insert(shop.Order.__table__), [{"item": "a"}, {"item": "b"}])
    shop.db.session.commit()


def opens_a_session_of_the_factory(shop: Shop) -> None:
    with shop.db.session.session_factory() as session:
        session.add(shop.Order(item="a"))
        session.commit()
    with shop.db.session.session_factory.begin() as session:
        session.add(shop.Order(item="b"))


async def gathers(shop: Shop) -> None:
    async def one(item: str) -> None:
        await asyncio.sleep(0)
        shop.order(item)
        shop.db.session.commit()

    await asyncio.gather(one("a"), one("b"))


async def works_in_a_thread(shop: Shop) -> None:
    def one(item: str) -> None:
        shop.order(item)
        shop.db.session.commit()

    await asyncio.to_thread(one, "a")
    await asyncio.to_thread(one, "b")


WAYS = [
    commits_in_the_middle,
    flushes_then_commits,
    rolls_back_a_part,
    begins_nested,
    removes_the_session,
    closes_the_session,
    works_in_a_nested_app_context,
    begins_explicitly,
    survives_an_integrity_error,
    inserts_without_the_orm,
    inserts_on_the_connection,
    opens_a_session_of_the_factory,
    gathers,
    works_in_a_thread,
]


def add_view(shop: Shop, way: Callable[[Shop], Any], *ends: Callable[[], Any], **keywords: Any) -> None:
    """``POST /orders``: works this way, then leaves by the end of this run (the last one again and again)."""

    def leave() -> Any:
        shop.runs += 1
        return ends[min(shop.runs, len(ends)) - 1]()

    if inspect.iscoroutinefunction(way):

        @shop.view(**keywords)
        async def view() -> Any:
            await way(shop)
            return leave()

    else:

        @shop.view(**keywords)
        def view() -> Any:
            way(shop)
            return leave()


def answer() -> Any:
    return {"made": True}, 201


def fail() -> Any:
    raise RuntimeError("at the end")


ways = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)


@ways
def test_a_view_that_answers(shop, way, caplog):
    add_view(shop, way, answer)
    post = shop.poster()
    with caplog.at_level(logging.WARNING, "flask_idempotent"):
        first = post()
    assert first.status_code == 201, first.get_data(as_text=True)
    kit.assert_kept(first)
    shop.assert_done("a", "b")
    shop.assert_replays(first, post)
    assert shop.runs == 1
    assert not any("never committed" in message for message in caplog.messages)


@ways
def test_a_view_that_raises_at_the_end(shop, way):
    add_view(shop, way, fail, answer)
    key = new_key()
    first = shop.post(key)
    assert first.status_code == 500
    kit.assert_not_kept(first)
    shop.assert_nothing()
    assert shop.ask("SELECT * FROM coupons") == []
    # Nothing binds the key: not even the body, nor the caller.
    second = shop.post(key, {"item": "another"}, user="bob")
    assert second.status_code == 201
    shop.assert_done("a", "b")
    shop.assert_replays(second, lambda: shop.post(key, {"item": "another"}, user="bob"))
    assert shop.runs == 2


@pytest.mark.parametrize("end", [answer, fail], ids=["answers", "raises"])
def test_an_object_that_a_guard_loaded(shop, end):
    """It is expired by the guard's commit, and works on in the view's transaction. What a guard itself wrote stays."""
    shop.ask("INSERT INTO coupons (code, used) VALUES ('once', 0)")

    @shop.app.before_request
    def guard() -> None:
        g.coupon = shop.db.session.get(shop.Coupon, "once")
        shop.db.session.add(shop.Coupon(code=f"seen {request.headers['X-Request']}"))

    @shop.view
    def view() -> Any:
        g.coupon.used += 1
        shop.order("a")
        shop.db.session.commit()
        assert g.coupon.used == 1
        return end()

    key = new_key()
    first = shop.post(key, X_Request="1")
    used = dict(shop.ask("SELECT code, used FROM coupons"))
    if end is answer:
        shop.assert_done("a")
        assert used == {"once": 1, "seen 1": 0}
        kit.assert_replay(first, shop.post(key, X_Request="2"))
    else:
        shop.assert_nothing()
        assert used == {"once": 0, "seen 1": 0}


# How a view leaves


def order_a(shop: Shop) -> None:
    shop.order("a")
    shop.db.session.commit()


def test_an_abort_that_is_kept(shop):
    """Committed with what the view committed; what it only flushed is gone."""

    def way(shop: Shop) -> None:
        order_a(shop)
        shop.order("gone")
        shop.db.session.flush()

    add_view(shop, way, lambda: abort(Response("no funds", 402)))
    post = shop.poster()
    first = post()
    assert first.status_code == 402
    shop.assert_done("a", state="failed")
    shop.assert_replays(first, post)


@pytest.mark.parametrize(
    "leave",
    [lambda: abort(503), lambda: ({"error": "busy"}, 503), lambda: abort(409), lambda: ("slow down", 429)],
    ids=["abort 503", "return 503", "abort 409", "return 429"],
)
def test_a_status_that_is_released(shop, leave):
    add_view(shop, order_a, leave, answer)
    key = new_key()
    first = shop.post(key)
    assert first.status_code in (503, 409, 429)
    kit.assert_not_kept(first)
    shop.assert_nothing()
    # Nothing binds the key, so another body may use it.
    second = shop.post(key, {"item": "another"})
    assert second.status_code == 201
    shop.assert_done("a")
    kit.assert_problem(shop.post(key), "mismatch")


class OutOfStock(Exception):
    pass


def out_of_stock() -> Any:
    raise OutOfStock()


@pytest.mark.parametrize("handler_writes", [False, True], ids=["", "the handler writes"])
def test_a_handler_makes_a_kept_status_of_an_exception(shop, handler_writes):
    """The effect is rolled back, and the answer is stored."""
    add_view(shop, order_a, out_of_stock)

    @shop.app.errorhandler(OutOfStock)
    def handle(_: OutOfStock) -> Any:
        if handler_writes:
            shop.order("by the handler")
            shop.db.session.commit()
        return {"error": "out of stock"}, 422

    post = shop.poster()
    first = post()
    assert first.status_code == 422
    kit.assert_kept(first)
    shop.assert_done(state="failed")
    shop.assert_replays(first, post)
    assert shop.runs == 1


def test_a_handler_makes_a_released_status_of_an_exception(shop):
    add_view(shop, order_a, out_of_stock, answer)
    shop.app.register_error_handler(OutOfStock, lambda _: ("try again", 503))
    post = shop.poster()
    assert post().status_code == 503
    shop.assert_nothing()
    assert post().status_code == 201
    shop.assert_done("a")


@pytest.mark.parametrize("how", ["raises", "replaces", "no answer", "body breaks off"])
def test_a_later_layer_breaks_a_kept_answer(shop, how):
    """Rolled back and released: the client never saw it."""
    broken = [True]

    def leave() -> Any:
        if how == "no answer" and broken:
            return None
        if how == "body breaks off" and broken:

            def body() -> Any:
                yield b"begun"
                raise RuntimeError("broken off")

            return Response(body(), 201)
        return answer()

    add_view(shop, order_a, leave)
    inner = shop.app.view_functions["orders"]

    def outer() -> Any:
        value = inner()
        if broken and how == "raises":
            raise RuntimeError("a later layer")
        if broken and how == "replaces":
            return "conflict", 409
        return value

    shop.app.view_functions["orders"] = outer
    outer.__wrapped__ = inner  # type: ignore[attr-defined]
    post = shop.poster()
    assert post().status_code == (409 if how == "replaces" else 500)
    shop.assert_nothing()
    broken.clear()
    first = post()
    assert first.status_code == 201
    shop.assert_done("a")
    shop.assert_replays(first, post)
    assert shop.runs == 2


@pytest.mark.parametrize("with_answer", [False, True])
def test_nothing_happened(shop, with_answer):
    def leave() -> Any:
        raise NothingHappened(Response("nothing", 402) if with_answer else Response("nothing", 502))

    add_view(shop, order_a, leave, answer)
    post = shop.poster()
    assert post().status_code == (402 if with_answer else 502)
    shop.assert_nothing()
    assert post().status_code == 201
    shop.assert_done("a")


@pytest.mark.parametrize("said", ["release", "store"])
def test_the_outcome_callable_decides(shop, said):
    def outcome(response: Response) -> str:
        return said if shop.runs == 1 else "store"

    add_view(shop, order_a, lambda: ("said", 201 if said == "release" else 503), answer, outcome=outcome)
    post = shop.poster()
    first = post()
    if said == "release":
        assert first.status_code == 201
        kit.assert_not_kept(first)
        shop.assert_nothing()
        first = post()
        shop.assert_done("a")
    else:
        assert first.status_code == 503
        shop.assert_done("a", state="failed")
    shop.assert_replays(first, post)


@pytest.mark.parametrize("config", [{}, {"DEBUG": True}, {"PROPAGATE_EXCEPTIONS": True}], ids=str)
@pytest.mark.parametrize("error", [SystemExit(1), RuntimeError("end")], ids=repr)
def test_an_exit_past_everything(make_shop, database_url, config, error):
    """The net rolls back and gives the connection back, whatever runs past error handlers and hooks."""
    shop = make_shop(database_url, config=config)

    def leave() -> Any:
        raise error

    add_view(shop, order_a, leave, answer)
    post = shop.poster()
    if config or not isinstance(error, Exception):
        with pytest.raises(type(error)):
            post()
    else:
        assert post().status_code == 500
    assert shop.checked_out() == 0
    shop.assert_nothing()
    first = post()
    assert first.status_code == 201
    shop.assert_done("a")
    kit.assert_replay(first, post())


@pytest.mark.parametrize("way", ["the orm", "core", "a part was rolled back"])
def test_what_is_only_flushed_is_not_kept(shop, caplog, way):
    """No effect, as without the extension; the answer is kept, and the log tells of it."""

    def work(shop: Shop) -> None:
        if way == "core":
            shop.db.session.execute(sa.insert(shop.Order).values(item="gone"))
            return
        shop.order("gone")
        shop.db.session.flush()
        if way == "a part was rolled back":
            nested = shop.db.session.begin_nested()
            shop.order("gone too")
            shop.db.session.flush()
            nested.rollback()

    add_view(shop, work, answer)
    post = shop.poster()
    with caplog.at_level(logging.WARNING, "flask_idempotent"):
        first = post()
    assert first.status_code == 201
    assert [record.getMessage() for record in caplog.records if "never committed" in record.getMessage()]
    shop.assert_done()
    shop.assert_replays(first, post)


def test_a_body_that_is_made_late_is_made_in_the_transaction(shop):
    """A generator that reads and writes is run before the commit."""

    @shop.view
    def view() -> Any:
        def body() -> Any:
            order_a(shop)
            yield f"{shop.db.session.query(shop.Order).count()} order"

        return Response(stream_with_context(body()), 201)

    post = shop.poster()
    first = post()
    assert first.get_data(as_text=True) == "1 order"
    shop.assert_done("a")
    shop.assert_replays(first, post)


def test_after_the_answer_the_session_is_the_apps_own_again(shop):
    """A hook after the request writes in a transaction of its own, whatever became of the view's."""

    @shop.app.after_request
    def audit(response: Response) -> Response:
        shop.db.session.add(shop.Coupon(code=request.headers["X-Request"]))
        shop.db.session.commit()
        return response

    add_view(shop, order_a, fail, answer)
    key = new_key()
    assert shop.post(key, X_Request="failed").status_code == 500
    assert shop.post(key, X_Request="made").status_code == 201
    assert shop.post(key, X_Request="replayed").status_code == 201
    shop.assert_done("a")
    assert sorted(code for (code,) in shop.ask("SELECT code FROM coupons")) == ["failed", "made", "replayed"]


def test_requests_without_a_key_or_a_mark_use_the_session_as_ever(shop):
    """The joined class is a plain session wherever no transaction is shared."""

    @shop.app.post("/plain")
    def plain() -> Any:
        order_a(shop)
        return "", 204

    add_view(shop, order_a, answer)

    @shop.app.put("/orders")
    def put() -> Any:
        return shop.app.view_functions["plain"]()

    assert shop.post(path="/plain").status_code == 204
    assert shop.app.test_client().put("/orders").status_code == 204
    with shop.app.app_context():
        order_a(shop)
    assert shop.orders() == ["a", "a", "a"]
    assert shop.states() == []
