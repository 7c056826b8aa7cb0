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

from . import page, recorder, views
from .auth import auth
from .ledger import Ledger

idem = Idempotent()
idem.principal_loader(httpauth_user(auth))


def create_app(config: Mapping[str, object] | None = None) -> Flask:
    """The shop. It needs no server: ``embedded://`` starts a Valkey; ``REDIS_URL`` names another one."""
    app = Flask(__name__)
    app.config.from_mapping(
        IDEMPOTENT_REDIS_URL=os.environ.get("REDIS_URL", "embedded://"),
        IDEMPOTENT_KEY_PREFIX="shop",
        SHOP_LEDGER=os.environ.get("SHOP_LEDGER", Path(app.instance_path, "shop.sqlite")),
    )
    app.config.from_mapping(config)

    idem.init_app(app)
    app.extensions["ledger"] = ledger = Ledger(app.config["SHOP_LEDGER"])
    recorder.watch(app, ledger)

    app.register_blueprint(views.shop)
    app.register_blueprint(page.page)
    app.register_error_handler(ValidationError, _invalid)
    return app


def _invalid(error: ValidationError) -> ResponseReturnValue:
    return {"errors": error.messages}, 400
