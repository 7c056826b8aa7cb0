"""All that the storm is played in: a Redis, a database, the bank, and two instances of the shop."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path

from flask import Flask
from sqlalchemy import delete
from sqlalchemy.exc import SQLAlchemyError

from flask_idempotent.stores.connect import connect
from flask_idempotent.testing import EmbeddedRedis

from .app import create_app
from .books import Books
from .models import Order, db
from .server import Server, ServerFailed, bank_server, listen, shop_server
from .storm.stage import Stage

__all__ = ["Theatre"]


class Theatre:
    """Opened and closed once. Servers of yours (``REDIS_URL``, ``DATABASE_URL``) are used with care: in Redis only keys
    under a prefix of this run are touched, in the database the example's own table and the extension's.

    :param target: the shop's app, as gunicorn takes it.
    :param listener: where the first instance answers.
    :param directory: for files that end with the storm.
    """

    stage: Stage
    books: Books

    def __init__(self, target: str, *, listener: socket.socket, directory: Path) -> None:
        self._target = target
        self._listener = listener
        self._directory = directory
        self._closing = contextlib.ExitStack()
        self._closing.callback(listener.close)
        self._prefix = f"shop-{secrets.token_hex(4)}"
        self._first: Server | None = None

    def open(self) -> None:
        """Start everything, and return when it answers.

        :raises ServerFailed: something didn't start.
        """
        redis_url = os.environ.get("REDIS_URL") or self._closing.enter_context(EmbeddedRedis()).url
        database_url = os.environ.get("DATABASE_URL") or f"sqlite:///{self._directory / 'shop.sqlite'}"
        bank = self._start(bank_server(listener=listen(), log=self._directory / "bank.log"))
        env = {
            "REDIS_URL": redis_url,
            "DATABASE_URL": database_url,
            "SHOP_PREFIX": self._prefix,
            "SHOP_LEDGER": str(self._directory / "ledger.sqlite"),
            "SHOP_BANK_URL": bank.url,
        }
        app = self._make_tables(env)
        shops = [
            self._start(
                shop_server(
                    f"shop's {place} instance",
                    self._target,
                    listener=taken,
                    log=self._directory / f"{place}.log",
                    env=env,
                )
            )
            for place, taken in (("first", self._listener), ("second", listen()))
        ]
        for server in (bank, *shops):
            server.wait_until_it_answers()
        self._first = shops[0]
        self.books = app.extensions["books"]
        self.stage = Stage(
            (shops[0].url, shops[1].url),
            app.extensions["bank"],
            forget=lambda: self._forget(redis_url),
            kill_second=shops[1].kill,
        )
        if os.environ.get("REDIS_URL"):
            self._closing.callback(self._forget, redis_url)

    def wait(self) -> None:
        """Return when the first instance has ended, which it doesn't by itself."""
        assert self._first is not None
        self._first.wait()

    def log_tail(self) -> str:
        """What the first instance said last."""
        return self._first.log_tail() if self._first is not None else ""

    def close(self) -> None:
        """End everything that was started."""
        self._closing.close()

    def _start(self, server: Server) -> Server:
        self._closing.callback(server.stop)
        server.launch()
        return server

    def _make_tables(self, env: Mapping[str, str]) -> Flask:
        """Make the tables before the instances start, and take away the orders of an earlier storm.

        :returns: an app in this process, whose books and bank the storm uses.
        :raises ServerFailed: the database can't be used.
        """
        try:
            app = create_app(
                {
                    "SQLALCHEMY_DATABASE_URI": env["DATABASE_URL"],
                    "IDEMPOTENT_REDIS_URL": env["REDIS_URL"],
                    "SHOP_BANK_URL": env["SHOP_BANK_URL"],
                    "SHOP_LEDGER": env["SHOP_LEDGER"],
                }
            )
            with app.app_context():
                db.session.execute(delete(Order))
                db.session.commit()
        except (SQLAlchemyError, ImportError) as error:
            raise ServerFailed(f"DATABASE_URL can't be used: {type(error).__name__}: {error}") from error
        return app

    def _forget(self, url: str) -> None:
        made = connect(url)
        with made() if callable(made) else made as client:
            for key in client.scan_iter(match=f"{self._prefix}:*", count=500):
                client.delete(key)
