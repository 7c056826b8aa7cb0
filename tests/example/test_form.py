"""The form on the shop's page, in a real browser: whoever clicks twice orders once."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flask import Flask
from sqlalchemy import select

import example
from example.models import Order, db
from tests.browser.fixtures import *  # noqa: F403


@pytest.fixture
def shop(redis_url: str, sqlite_url: str, tmp_path: Path) -> Iterator[Flask]:
    app = example.create_app(
        {
            "IDEMPOTENT_REDIS_URL": redis_url,
            "SQLALCHEMY_DATABASE_URI": sqlite_url,
            "SHOP_BANK_URL": "http://127.0.0.1:1",
            "SHOP_LEDGER": tmp_path / "ledger.sqlite",
        }
    )
    yield app
    app.extensions["bank"].close()
    with app.app_context():
        db.engine.dispose()


@pytest.mark.parametrize("person", ["somebody", "without_javascript"])
def test_two_clicks_are_one_order(shop: Flask, serve: Any, person: str, request: pytest.FixtureRequest) -> None:
    person_ = request.getfixturevalue(person)
    site = serve(shop)
    person_.open(f"{site.url}/")
    person_.fill("[name=quantity]", "3")
    person_.click_twice("form button", 0.02)
    person_.reads("Your order number 1: 3 × tea")
    assert site.arrivals.count("POST /orders/form") >= 1
    person_.click("a")
    person_.reads("order 1: 3 × tea")
    with shop.app_context():
        assert db.session.scalars(select(Order.quantity)).all() == [3]
