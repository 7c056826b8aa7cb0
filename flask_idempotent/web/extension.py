"""The extension object: from settings and clients to an app that is protected."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click
from flask import Blueprint, Flask, appcontext_pushed
from flask.globals import app_ctx
from sqlalchemy import Engine as SqlEngine
from sqlalchemy import MetaData

from ..call import ENVIRON_KEY
from ..engine import Engine
from ..errors import ConfigurationError
from ..heartbeat import heartbeat
from ..keywords import keywords_from
from ..response.cipher import Cipher
from ..settings import load_settings
from ..settling import IntentEngine
from ..stores.connect import RedisClient, connect, require_bytes
from ..stores.durable import DurableIntentStore, DurableTransactionStore
from ..stores.intent import IntentStore
from ..stores.models import add_tables
from ..stores.redis import RedisStore
from ..stores.sql import SqlStore
from .claims import Loader, Loaders
from .forms import key_field
from .problems import install_handlers
from .protection import Protection
from .routes import Declaration
from .session import SharedSession, request_bounds
from .views import EXTENSION, Mark

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment
    from flask_sqlalchemy import SQLAlchemy

__all__ = ["Idempotent"]

log = logging.getLogger("flask_idempotent")

L = TypeVar("L", bound=Loader)


class Idempotent:
    """Makes the marked views of a Flask app safe to retry.

    One object can serve several apps; each has its own settings and connections, and they share the loaders.

    :param app: protected at once; leave it out and call :meth:`init_app` in an app factory.
    """

    def __init__(
        self, app: Flask | None = None, *, db: SQLAlchemy | None = None, redis: RedisClient | None = None
    ) -> None:
        self._loaders = Loaders()
        self._declarations: list[Declaration] = []
        if app is not None:
            self.init_app(app, db=db, redis=redis)

    def init_app(self, app: Flask, *, db: SQLAlchemy | None = None, redis: RedisClient | None = None) -> None:
        """Protect an app. Its ``IDEMPOTENT_`` settings are read and checked here; nothing is sent to Redis yet.

        :param db: the app's Flask-SQLAlchemy object, for durable routes.
        :param redis: a ready client that gives bytes, instead of ``IDEMPOTENT_REDIS_URL``. Its time-outs are its own.
        :raises ConfigurationError: for a setting that is unknown, wrong or contradicts another, or a second call.
        """
        if EXTENSION in app.extensions:
            raise ConfigurationError(
                "this app has an Idempotent extension already: call Idempotent(app) or init_app(app) once for each app"
            )
        if db is not None and not hasattr(db, "session"):
            raise ConfigurationError(
                "init_app(db=) takes the app's Flask-SQLAlchemy object, as in db = SQLAlchemy(app); the database's URL "
                "stays in SQLALCHEMY_DATABASE_URI"
            )
        settings = load_settings(app.config)
        if redis is not None:
            require_bytes(redis)
        client = redis if redis is not None else connect(settings.redis_url)
        front = RedisStore(client, prefix=settings.key_prefix)
        if redis is None:
            # Left to the collector, a socket may be taken before the connection that would close it.
            weakref.finalize(app, front.close).atexit = False
        cipher = Cipher(settings.fernet_keys or ())
        beats = heartbeat if settings.heartbeat else None
        waiters = threading.Semaphore(settings.max_waiters)
        engines: dict[str | bool, Engine] = {False: Engine(front, cipher, sender=app, heartbeat=beats, waiters=waiters)}
        session = None
        if db is not None:
            session = SharedSession(app, db, settings.bind_key)
            tables = add_tables(_metadata(db, settings.bind_key))

            def engine_of(session: SharedSession = session) -> SqlEngine:
                return session.engine

            back = SqlStore(engine_of, tables)
            store = DurableTransactionStore(front, back, inline_body=settings.inline_body)
            engines["transaction"] = Engine(store, cipher, sender=app, heartbeat=beats, waiters=waiters)
            outside = DurableIntentStore(front, IntentStore(engine_of, tables), inline_body=settings.inline_body)
            engines["intent"] = IntentEngine(
                outside, cipher, sender=app, heartbeat=beats, waiters=waiters, tries=settings.reconcile_tries
            )
        protection = Protection(
            app,
            settings,
            engines,
            self._loaders,
            declarations=self._declarations,
            shared_session=session,
        )
        app.extensions[EXTENSION] = protection
        app.url_value_preprocessor(protection.open_request)
        install_handlers(app, settings.docs_url)
        app.jinja_env.globals.setdefault("idempotent_key_field", partial(key_field, settings.form_field))
        app.wsgi_app = _net(app.wsgi_app, protection)  # type: ignore[assignment, method-assign]
        _verify_in_commands(app, protection)
        for warning in settings.warnings():
            log.warning("%s", warning)

    def principal_loader(self, loader: L) -> L:
        """Register who calls: ``() -> str | int | UUID | None``, asked after the guards. ``None`` is anonymous."""
        self._loaders.principal = _loader(loader, "principal_loader")
        return loader

    def tenant_loader(self, loader: L) -> L:
        """Register the tenant of a call: ``() -> str | int | UUID | None``. Keys of two tenants are unrelated."""
        self._loaders.tenant = _loader(loader, "tenant_loader")
        return loader

    def protect(
        self, target: str | Blueprint | Flask, *, guards: Literal["hooks"] | None = None, **keywords: object
    ) -> None:
        """Protect views that can't be decorated. A mark on a view goes before it, an endpoint's declaration before that
        of its blueprint, a nested blueprint's before its parent's.

        :param target: an endpoint (``"shop.create_order"``), a blueprint (or its full name), or the app.
        :param guards: ``"hooks"`` says that whoever decides about callers does so in hooks such as ``before_request``.
            Without it a decorated view is refused: protection would stand outside of its decorators.
        :param keywords: those of ``@idempotent``.
        :raises ConfigurationError: for a wrong keyword now; for a decorated view, or a name that the app doesn't have,
            when the app is verified.
        """
        if guards not in (None, "hooks"):
            raise ConfigurationError("protect(guards=) takes 'hooks', or is left out")
        if not isinstance(target, (str, Blueprint, Flask)):
            raise ConfigurationError("protect() takes an endpoint's name, a Blueprint or the Flask app")
        name = target if isinstance(target, str) else target.name
        mark = Mark(keywords_from(**keywords), name, declared=True)
        self._declarations.append(Declaration(target, mark, guards == "hooks"))

    def verify(self, app: Flask) -> None:
        """Check all marked views of an app together with its settings, as the first request does.

        :raises ConfigurationError: with one line for each view that would not be protected, and the fix.
        """
        protection: Protection | None = app.extensions.get(EXTENSION)
        if protection is None:
            raise ConfigurationError("this app has no Idempotent extension: call init_app(app) first")
        protection.verify()


def _loader(loader: L, name: str) -> L:
    if not callable(loader):
        raise ConfigurationError(f"{name} takes the loader itself, uncalled: @idem.{name} above a function")
    return loader


def _metadata(db: SQLAlchemy, bind_key: str | None) -> MetaData:
    """The metadata of a bind, which ``db.create_all()`` and migrations look at."""
    if bind_key not in db.metadatas:
        db.metadatas[bind_key] = MetaData(info={"bind_key": bind_key}, naming_convention=db.metadata.naming_convention)
    return db.metadatas[bind_key]


def _net(
    inner: Callable[[WSGIEnvironment, StartResponse], Iterable[bytes]], protection: Protection
) -> Callable[[WSGIEnvironment, StartResponse], Iterable[bytes]]:
    """The app's WSGI callable, with verification in front and a net behind.

    A teardown function would not do: it is skipped when another one fails, and a copied context runs it too early.
    """

    def wsgi_app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        protection.verify_once()
        outer = environ.pop(ENVIRON_KEY, None)  # of a view that sends its own environ through the app once more
        try:
            with request_bounds():
                return inner(environ, start_response)
        finally:
            call = environ.get(ENVIRON_KEY)
            if call is not None:
                protection.settle_open(call)
            if outer is not None:
                environ[ENVIRON_KEY] = outer

    return wsgi_app


def _verify_in_commands(app: Flask, protection: Protection) -> None:
    """Verify in every ``flask`` command that pushes the app's context: the app is complete then."""

    def pushed(sender: Flask, **_: Any) -> None:
        if click.get_current_context(silent=True) is None:
            return
        try:
            protection.verify_once()
        except ConfigurationError as error:
            # push() doesn't come back, so nobody else takes the context away again.
            app_ctx._get_current_object().pop(error)  # type: ignore[attr-defined]
            raise

    # The signal holds it weakly, the app's own state holds it: so the app can go.
    protection.on_command = pushed
    appcontext_pushed.connect(pushed, app)
