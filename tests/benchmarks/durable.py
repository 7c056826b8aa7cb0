"""Durable routes, their key in the transaction of the work or committed before it, against the same work alone."""

from __future__ import annotations

import io
import json
import random
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from flask import Flask
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import ForeignKey, event
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship

from flask_idempotent import Idempotent, current_idempotency, idempotent
from tests import servers

#: Requests of each case in a round; the cases take turns in an order that is shuffled every round.
ROUND = 20


class Base(DeclarativeBase):
    pass


db = SQLAlchemy(model_class=Base)


class Product(db.Model):  # type: ignore[name-defined, misc]
    __tablename__ = "benchmark_products"
    id: Mapped[int] = mapped_column(primary_key=True)
    stock: Mapped[int]


class Order(db.Model):  # type: ignore[name-defined, misc]
    __tablename__ = "benchmark_orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    lines: Mapped[list[Line]] = relationship()


class Line(db.Model):  # type: ignore[name-defined, misc]
    __tablename__ = "benchmark_lines"
    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int] = mapped_column(ForeignKey("benchmark_orders.id"))
    product_id: Mapped[int] = mapped_column(ForeignKey("benchmark_products.id"))


#: What an order takes from stock.
PRODUCTS = (1, 2, 3)


def place_order() -> tuple[dict[str, int], int]:
    """The business: an order of three lines. Each product is held and its stock lowered, the order and its lines are
    written, and all is committed."""
    order = Order()
    for number in PRODUCTS:
        product = db.session.get_one(Product, number, with_for_update=True)
        product.stock -= 1
        order.lines.append(Line(product_id=number))
    db.session.add(order)
    db.session.flush()
    number = order.id
    db.session.commit()
    return {"id": number}, 201


def insert_one() -> tuple[dict[str, int], int]:
    """The least that work can be: one row. What protection costs weighs most beside it."""
    order = Order()
    db.session.add(order)
    db.session.flush()
    number = order.id
    db.session.commit()
    return {"id": number}, 201


def charge_and_place_order() -> tuple[dict[str, int], int]:
    """The same work where a provider is called too. Its call costs nothing here, so that all that is measured beside
    the work is the key's: it is committed, handed out, and the answer is committed. (A real call takes 100 ms or more,
    and brings the ratio close to 1.)"""
    current_idempotency.provider_key()
    return place_order()


def make_app(database: str, redis: str) -> Flask:
    """The same work behind three routes: alone, protected in its own transaction, and as if there was an effect outside
    of it."""
    app = Flask(__name__)
    app.config.update(SQLALCHEMY_DATABASE_URI=database, IDEMPOTENT_REDIS_URL=redis, IDEMPOTENT_RATE_LIMIT=None)
    db.init_app(app)
    idem = Idempotent(app, db=db)
    idem.principal_loader(lambda: "benchmark")
    app.add_url_rule("/alone", "alone", lambda: place_order(), methods=["POST"])
    app.add_url_rule("/transaction", "transaction", idempotent(durable="transaction")(place_order), methods=["POST"])
    app.add_url_rule("/insert/alone", "insert_alone", lambda: insert_one(), methods=["POST"])
    app.add_url_rule("/insert", "insert", idempotent(durable="transaction")(insert_one), methods=["POST"])
    intent = idempotent(durable="intent", provider="stripe", recovery="manual")(charge_and_place_order)
    app.add_url_rule("/intent", "intent", intent, methods=["POST"])
    with app.app_context():
        db.drop_all()
        db.create_all()
        db.session.add_all(Product(id=number, stock=1_000_000) for number in PRODUCTS)
        db.session.commit()
    return app


def post(app: Flask, path: str, key: str) -> float:
    """One request through the WSGI app itself; the seconds it took."""
    body = b'{"item": "book"}'
    environ = {
        "REQUEST_METHOD": "POST",
        "PATH_INFO": path,
        "SERVER_NAME": "localhost",
        "SERVER_PORT": "80",
        "SERVER_PROTOCOL": "HTTP/1.1",
        "CONTENT_TYPE": "application/json",
        "CONTENT_LENGTH": str(len(body)),
        "HTTP_IDEMPOTENCY_KEY": key,
        "wsgi.input": io.BytesIO(body),
        "wsgi.errors": io.StringIO(),
        "wsgi.url_scheme": "http",
    }
    status: list[str] = []

    def start_response(line: str, headers: object, exc_info: object = None) -> Callable[[bytes], object]:
        status.append(line)
        return lambda data: None

    started = time.perf_counter()
    b"".join(app.wsgi_app(environ, start_response))  # type: ignore[arg-type]
    took = time.perf_counter() - started
    if not status[0].startswith("201"):
        print(environ["wsgi.errors"].getvalue())
        raise RuntimeError(f"{path} answered {status[0]}")
    return took


def run(rounds: int = 40) -> Mapping[str, float]:
    """Medians over the rounds. A ratio is that of two cases in one round, which a machine whose pace drifts leaves as
    it is."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        app = make_app(stack.enter_context(servers.postgres(folder)), stack.enter_context(servers.embedded_redis()))
        kept = str(uuid.uuid4())
        post(app, "/transaction", kept)
        cases: dict[str, Callable[[], float]] = {
            "alone": lambda: post(app, "/alone", str(uuid.uuid4())),
            "transaction": lambda: post(app, "/transaction", str(uuid.uuid4())),
            "intent": lambda: post(app, "/intent", str(uuid.uuid4())),
            "replay": lambda: post(app, "/transaction", kept),
            "insert_alone": lambda: post(app, "/insert/alone", str(uuid.uuid4())),
            "insert": lambda: post(app, "/insert", str(uuid.uuid4())),
        }
        statements = 0

        def count(*_: object) -> None:
            nonlocal statements
            statements += 1

        times: dict[str, list[float]] = {name: [] for name in cases}
        for number in range(rounds + 1):
            for name in random.sample(list(cases), len(cases)):
                taken = [cases[name]() for _ in range(ROUND)]
                if number:  # the first round warms up
                    times[name].append(statistics.median(taken))
        with app.app_context():
            event.listen(db.engine, "before_cursor_execute", count)
            cases["replay"]()
            event.remove(db.engine, "before_cursor_execute", count)

    def ratio(case: str, base: str) -> float:
        return round(statistics.median(a / b for a, b in zip(times[case], times[base], strict=True)), 3)

    def milliseconds(case: str) -> float:
        return round(statistics.median(times[case]) * 1000, 3)

    return {
        "transaction_ratio": ratio("transaction", "alone"),
        "intent_ratio": ratio("intent", "alone"),
        "replay_ratio": ratio("replay", "alone"),
        "insert_ratio": ratio("insert", "insert_alone"),
        "replay_statements": statements,
        **{f"{case}_ms": milliseconds(case) for case in ("alone", "transaction", "intent", "replay")},
    }


def show(figures: Mapping[str, float], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:20} {value}")
