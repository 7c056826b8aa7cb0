"""The app factory: settings, who may call, and the routes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from flask import Flask
from flask.typing import ResponseReturnValue
from marshmallow import ValidationError

from flask_idempotent import Idempotent
from flask_idempotent.loaders import httpauth_user

from . import forms, models, page, recorder, views
from .auth import auth
from .bank import Bank
from .books import Books
from .ledger import Ledger
from .models import db

idem = Idempotent()
idem.principal_loader(httpauth_user(auth))


def create_app(config: Mapping[str, object] | None = None) -> Flask:
    """The shop. It needs no server: ``embedded://`` starts a Valkey, and SQLite is a file; ``REDIS_URL`` and
    ``DATABASE_URL`` name others. Charges need the bank: ``python example/provider.py`` starts it."""
    app = Flask(__name__)
    app.config.from_mapping(
        SQLALCHEMY_DATABASE_URI=os.environ.get("DATABASE_URL", f"sqlite:///{Path(app.instance_path, 'shop.sqlite')}"),
        IDEMPOTENT_REDIS_URL=os.environ.get("REDIS_URL", "embedded://"),
        IDEMPOTENT_KEY_PREFIX=os.environ.get("SHOP_PREFIX", "shop"),
        IDEMPOTENT_RATE_LIMIT="1000/minute",  # the storm's three customers stand for many people
        SHOP_BANK_URL=os.environ.get("SHOP_BANK_URL", "http://127.0.0.1:5001"),
        SHOP_LEDGER=os.environ.get("SHOP_LEDGER", Path(app.instance_path, "ledger.sqlite")),
    )
    app.config.from_mapping(config)
    app.config.setdefault("SQLALCHEMY_ENGINE_OPTIONS", models.engine_options(app.config["SQLALCHEMY_DATABASE_URI"]))

    db.init_app(app)
    idem.init_app(app, db=db)
    models.prepare(app)
    app.extensions["bank"] = bank = Bank(app.config["SHOP_BANK_URL"])
    app.extensions["ledger"] = ledger = Ledger(app.config["SHOP_LEDGER"])
    with app.app_context():
        app.extensions["books"] = Books(db.engine, bank, ledger)
    recorder.watch(app, ledger)

    app.register_blueprint(views.shop)
    app.register_blueprint(forms.forms)
    app.register_blueprint(page.page)
    app.register_error_handler(ValidationError, _invalid)
    return app


def _invalid(error: ValidationError) -> ResponseReturnValue:
    return {"errors": error.messages}, 400
