"""Processes to kill: an app with a route of each kind, which dies at a given point, and a nursery that forks them.

``python -m tests.crash.worker`` is the nursery. It imports everything once, and forks a worker for each line on its
stdin, in some tens of milliseconds; `Nursery` starts it and speaks with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import gc
import http.client
import itertools
import json
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from types import TracebackType
from typing import Any

import psycopg  # noqa: F401  imported before the forks, as the next is
import pymysql  # noqa: F401
import sqlalchemy as sa
from flask import Flask, g, got_request_exception, make_response, request
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import event
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Mapped, mapped_column
from werkzeug.serving import WSGIRequestHandler, make_server

from flask_idempotent import (
    Idempotent,
    NothingHappened,
    Orphan,
    Provider,
    Saga,
    Settlement,
    TransientStepError,
    current_idempotency,
    idempotent,
)
from flask_idempotent.errors import LeaseLost
from flask_idempotent.testing import FaultyStore
from tests.provider import NoAnswer, ProviderClient, Refused

__all__ = [
    "CAUSE",
    "ENDPOINTS",
    "HOLD_S",
    "KINDS",
    "OPERATIONS",
    "PATHS",
    "RAIL_SETTLE_S",
    "SAGA_LEASES",
    "VIEW_POINTS",
    "Answer",
    "Nursery",
    "Worker",
    "create_app",
    "create_tables",
    "send",
]

ROOT = Path(__file__).parents[2]
KEY = "Idempotency-Key"
#: What the kinds of routes are called, and where they are. A rail's and a saga's are ``intent`` routes; a rail
#: recognises nothing that it has done before, though the route takes it for a provider that does.
PATHS = {
    "redis": "/tallies",
    "transaction": "/orders",
    "intent": "/charges",
    "rail": "/payouts",
    "saga": "/checkouts",
}
KINDS = tuple(PATHS)
ENDPOINTS = {
    "redis": "tally",
    "transaction": "take_order",
    "intent": "take_charge",
    "rail": "pay_out",
    "saga": "check_out",
}
#: What they do, at the provider and in the database.
OPERATIONS = {
    "redis": ("transfers",),
    "transaction": ("orders",),
    "intent": ("charges",),
    "rail": ("captures",),
    "saga": ("transfers", "charges", "refunds"),
}
#: A saga's lease, in leases of the others: it notes many things one after another.
SAGA_LEASES = 3
#: Seconds after which a look-up at a rail is believed: longer than any call is on its way.
RAIL_SETTLE_S = 2.0
#: A call that is on its way when its process dies: it lands so many seconds after it was sent, and that dies after
#: so many.
HOLD_S, DYING_S = 1.8, 0.1
#: The header that says what a view raised.
CAUSE = "X-Cause"
#: Where a fault of the layer "view" can be: around the effect, around the local row of a charge, around what undoes a
#: saga's step, before the answer goes out (it is kept by then), and around the reconciler's look-up. (There are two
#: more, for random crashes: "begin", where a view has just begun, and "sent", for `Faults.hold`.)
VIEW_POINTS = ("effect", "local", "undo", "answer", "look_up")
#: What a worker notes whose view stops it.
STOPPED = "view.stopped now"
#: What one notes that was too slow to keep its lease.
LOST = "view.lost its lease"
#: Seconds that a worker may take to serve, or to end.
WAIT_S = 60.0

BANK = Provider("bank", window=86_400, max_length=64)
#: It takes a key, and does what it is told each time: nothing but look-ups keeps it from doing so twice.
RAIL = Provider("rail", window=86_400, max_length=64)
#: Settings of the workers, unless the config says otherwise.
DEFAULTS = {"LEASE": 0.8, "SKEW": 0.1, "SETTLE_AFTER": 0.2, "RATE_LIMIT": None}


# -- the app -------------------------------------------------------------------------------------------------------


class Told(Exception):
    """An error that a view was told to have."""


class Faults:
    """The one fault of a worker, and the file in which it says that it got there."""

    def __init__(self, fault: Mapping[str, Any] | None, notes: int | None) -> None:
        self.fault = dict(fault or {})
        self.notes = notes
        self._calls = 0
        self._counting = threading.Lock()

    def does(self, what: str) -> bool:
        """What the view does besides, one or a list: ``"waits"``, ``"stops"`` (its whole process, until it is resumed),
        ``"renews"``, ``"gives back"``, ``"fails early"`` before the effect, ``"declines"`` the second step of a saga;
        ``"commits"`` (ends the transaction around it), ``"fails"``, ``"waits after"`` behind it; the reconciler
        ``"is unsure"``. It waits for as long as a lease."""
        said = self.fault.get("does", ())
        return what in ([said] if isinstance(said, str) else said)

    def note(self, layer: str, at: str, when: str) -> None:
        if self.notes is not None:
            os.write(self.notes, f"{os.getpid()} {layer}.{at} {when}\n".encode())

    def install(self, app: Flask) -> None:
        """Put the fault in front of its store; one of the view is met by `pass_by`."""
        if self.fault.get("layer") not in (None, "view"):
            found = _NotedStore.within(app, self.fault["layer"], **self._arguments("at", "when", "n"))
            found.faults = self  # type: ignore[attr-defined]

    def pass_by(self, at: str, when: str) -> None:
        """A point in the view."""
        fault = self.fault
        if (fault.get("layer"), fault.get("at"), fault.get("when", "before")) != ("view", at, when):
            return
        with self._counting:
            self._calls += 1
            if self._calls != fault.get("n", 1):
                return
        self.note("view", at, when)
        action = fault.get("action", "kill")
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if action == "raise":
            raise Told(f"{when} {at}")
        if action == "stop":
            self.stop()
        time.sleep(fault.get("seconds", 0))

    def stop(self) -> None:
        """The whole process, until somebody resumes it. The signal is for this thread: it would go on for a while where
        another one has to take it first."""
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

    def hold(self) -> float:
        """For how many seconds the provider holds the next call, while this process dies."""
        if (self.fault.get("layer"), self.fault.get("at")) != ("view", "sent"):
            return 0.0
        with self._counting:
            self._calls += 1
            if self._calls != self.fault.get("n", 1):
                return 0.0
        self.note("view", "sent", "now")
        threading.Timer(DYING_S, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return HOLD_S

    def _arguments(self, *required: str) -> dict[str, Any]:
        known = (*required, "action", "seconds")
        return {name: self.fault[name] for name in known if name in self.fault}


class _NotedStore(FaultyStore):
    """Says where it fails before it does."""

    def _act(self, *arguments: Any) -> None:
        faults: Faults = self.faults
        faults.note(faults.fault["layer"], self._at, self._when)
        super()._act(*arguments)


def create_app(config: Mapping[str, Any], *, notes: int | None = None) -> Flask:
    """The app of a worker.

    :param config: ``redis_url``, ``database_url``, ``provider_url``, perhaps a ``fault``; names in capitals are
        ``IDEMPOTENT_`` settings.
    :param notes: a file that says where the fault was met.
    """
    faults = Faults(config.get("fault"), notes)
    settings = {**DEFAULTS, **{name: value for name, value in config.items() if name.isupper()}}
    app = Flask("crash")
    app.config.update(
        IDEMPOTENT_REDIS_URL=config["redis_url"],
        SQLALCHEMY_DATABASE_URI=config["database_url"],
        SQLALCHEMY_ENGINE_OPTIONS=config.get("engine_options", {}),
    )
    app.config.update({f"IDEMPOTENT_{name}": value for name, value in settings.items()})
    bank = ProviderClient(config["provider_url"])
    db = SQLAlchemy(app)
    order, payment = _models(db)
    if config["database_url"].startswith("sqlite"):
        with app.app_context():
            # Nothing here is about power cuts.
            event.listen(db.engine, "connect", lambda connection, _: connection.execute("PRAGMA synchronous = OFF"))
    idem = Idempotent(app, db=db)
    idem.principal_loader(lambda: request.headers.get("X-User"))
    lease_s: float = settings["LEASE"]
    app.extensions["crash"] = db

    def begin() -> dict[str, Any]:
        """What is asked for, the run's name, and when it began: the key is its own by then."""
        asked = {**request.get_json(), "run": str(uuid.uuid4()), "began": time.time()}
        if faults.does("waits"):
            time.sleep(lease_s)
        faults.pass_by("begin", "after")
        if faults.does("stops"):
            faults.note("view", "stopped", "now")
            faults.stop()
        if faults.does("renews"):
            current_idempotency.renew()
        if faults.does("gives back"):
            raise NothingHappened(make_response({"code": "nothing happened"}, 503))
        if faults.does("fails early"):
            raise Told("before the effect")
        return asked

    def end(asked: dict[str, Any], **done: Any) -> Any:
        """Every answer is that of one run alone."""
        if faults.does("fails"):
            raise Told("after the effect")
        if faults.does("waits after"):
            time.sleep(lease_s)
        told = {name: asked[name] for name in ("run", "name", "began")}
        return {**told, "pad": "x" * asked.get("pad", 0), **done}, 201, {"Location": f"/runs/{asked['run']}"}

    def act(operation: str, **parameters: Any) -> dict[str, Any]:
        done = bank.act(operation, hold=faults.hold(), **parameters)
        faults.pass_by("effect", "after")
        return done

    @app.post(PATHS["redis"])
    @idempotent
    def tally() -> Any:
        asked = begin()
        faults.pass_by("effect", "before")
        done = act("transfers", reference=asked["name"])  # without a key: a second one is seen
        return end(asked, entry=done["id"])

    @app.post(PATHS["transaction"])
    @idempotent(durable="transaction")
    def take_order() -> Any:
        asked = begin()
        faults.pass_by("effect", "before")
        db.session.add(order(name=asked["name"], run=asked["run"]))
        db.session.flush()
        faults.pass_by("effect", "after")
        if faults.does("commits"):
            db.session.connection().exec_driver_sql("COMMIT")
            return end(asked)
        answer = end(asked)
        faults.pass_by("local", "before")
        db.session.commit()
        faults.pass_by("local", "after")
        return answer

    def note_payment(charge: str) -> None:
        faults.pass_by("local", "before")
        if db.session.scalar(sa.select(payment).filter_by(charge=charge)) is None:
            db.session.add(payment(charge=charge))
            try:
                db.session.commit()
            except IntegrityError:  # somebody else has noted it meanwhile: a look-up, when the lease was lost
                db.session.rollback()
        faults.pass_by("local", "after")

    @app.post(PATHS["intent"])
    @idempotent(durable="intent", provider=BANK)
    def take_charge() -> Any:
        try:
            return charge()
        except LeaseLost:
            faults.note("view", "lost", "its lease")
            raise

    def charge() -> Any:
        current_idempotency.remember(name=request.get_json()["name"])
        asked = begin()
        faults.pass_by("effect", "before")
        key = current_idempotency.provider_key()
        done = act("charges", key=key, amount=100, reference=asked["name"])
        note_payment(done["id"])
        return end(asked, charge=done["id"])

    @take_charge.reconciler
    def settle(orphan: Orphan) -> Settlement:
        if faults.does("is unsure"):
            return Settlement.pending()
        faults.pass_by("look_up", "before")
        found = bank.find(orphan.provider_key())
        faults.pass_by("look_up", "after")
        if found is None:
            return Settlement.retry()
        note_payment(found["id"])
        return Settlement.completed(
            {"run": f"looked up {uuid.uuid4()}", "charge": found["id"], "name": orphan.context["name"]}, 201
        )

    @app.post(PATHS["rail"])
    @idempotent(durable="intent", provider=RAIL, settle_after=RAIL_SETTLE_S)
    def pay_out() -> Any:
        current_idempotency.remember(name=request.get_json()["name"])
        asked = begin()
        faults.pass_by("effect", "before")
        key = current_idempotency.provider_key()
        return end(asked, charge=act("captures", sent=key, reference=asked["name"])["id"])

    @pay_out.reconciler
    def find(orphan: Orphan) -> Settlement:
        if faults.does("is unsure"):
            return Settlement.pending()
        faults.pass_by("look_up", "before")
        name = orphan.context.get("name")
        found = bank.done_for(name, "captures") if name else []
        faults.pass_by("look_up", "after")
        if not found:
            return Settlement.retry()
        return Settlement.completed({"run": f"looked up {uuid.uuid4()}", "charge": found[0]["id"], "name": name}, 201)

    checkout = Saga("checkout")

    def call(operation: str, key: str, **parameters: Any) -> dict[str, Any]:
        try:
            return bank.act(operation, key=key, hold=faults.hold(), **parameters)
        except (NoAnswer, Refused) as error:
            raise TransientStepError(str(error)) from error  # this bank refuses nobody for good

    def undo(state: dict[str, Any], key: str, step: str) -> None:
        faults.pass_by("undo", "before")
        call("refunds", key, reference=state["name"], step=step)
        faults.pass_by("undo", "after")

    @checkout.step(compensate=functools.partial(undo, step="reserve"))
    def reserve(state: dict[str, Any], key: str) -> None:
        call("transfers", key, reference=state["name"])

    @checkout.step(compensate=functools.partial(undo, step="pay"))
    def pay(state: dict[str, Any], key: str) -> dict[str, Any]:
        if state["declined"] or faults.does("declines"):
            raise Told("declined")
        faults.pass_by("effect", "before")
        done = call("charges", key, amount=100, reference=state["name"])
        faults.pass_by("effect", "after")
        return {"charge": done["id"]}

    @app.post(PATHS["saga"])
    @idempotent(durable="intent", provider=BANK, saga=checkout, lease=SAGA_LEASES * lease_s)
    def check_out() -> Any:
        try:
            asked = begin()
            wanted = {"name": asked["name"], "declined": asked.get("declined", False)}
            return end(asked, charge=checkout.run(wanted)["charge"])
        except LeaseLost:
            faults.note("view", "lost", "its lease")
            raise

    @app.after_request
    def goes_out(response: Any) -> Any:
        if response.status_code == 201:
            faults.pass_by("answer", "before")
        return response

    def note_cause(app: Flask, exception: BaseException, **_: Any) -> None:
        g.cause = type(exception).__name__

    got_request_exception.connect(note_cause, app, weak=False)

    @app.after_request
    def tell_cause(response: Any) -> Any:
        if response.status_code == 500:
            response.headers[CAUSE] = g.get("cause", "")
        return response

    faults.install(app)
    return app


def _models(db: SQLAlchemy) -> tuple[Any, Any]:
    class Order(db.Model):  # type: ignore[name-defined, misc]
        __tablename__ = "orders"
        id: Mapped[int] = mapped_column(primary_key=True)
        name: Mapped[str] = mapped_column(sa.String(80))
        run: Mapped[str] = mapped_column(sa.String(40))

    class Payment(db.Model):  # type: ignore[name-defined, misc]
        __tablename__ = "payments"
        id: Mapped[int] = mapped_column(primary_key=True)
        charge: Mapped[str] = mapped_column(sa.String(50), unique=True)

    return Order, Payment


def create_tables(config: Mapping[str, Any]) -> None:
    """The app's tables and the package's, in the database of a config."""
    app = create_app({**config, "fault": None})
    db: SQLAlchemy = app.extensions["crash"]
    with app.app_context():
        db.create_all()
        db.engine.dispose()


# -- what a client does --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes
    headers: Message

    def json(self) -> Any:
        return json.loads(self.body)


class _Connection(http.client.HTTPConnection):
    """To a socket in the file system."""

    def __init__(self, address: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._address = address

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._address)


def send(address: str, path: str, key: str, body: object, user: str = "ann", timeout: float = WAIT_S) -> Answer:
    """One request.

    :param address: a worker's.
    :raises OSError: the connection broke, or the time was up.
    """
    connection = _Connection(address, timeout)
    headers = {KEY: key, "X-User": user, "Content-Type": "application/json"}
    try:
        connection.request("POST", path, json.dumps(body), headers)
        response = connection.getresponse()
        return Answer(response.status, response.read(), response.headers)
    except http.client.HTTPException as error:
        raise ConnectionError(f"{type(error).__name__}: {error}") from error
    finally:
        connection.close()


# -- the nursery, seen from the test -------------------------------------------------------------------------------


class Worker:
    """A process that serves at `address`, a socket in the file system: no other process ever has the same, as one has
    the port of another that died."""

    def __init__(self, nursery: Nursery, number: int) -> None:
        self.pid = 0
        self.address = ""
        self._nursery = nursery
        self._number = number
        self._since = os.fstat(nursery._notes.fileno()).st_size
        self._status: int | None = None

    def ended(self) -> int | None:
        """How it ended: its exit status, or minus the number of the signal that killed it. ``None`` while it lives."""
        return self._status

    def alive(self) -> bool:
        return self._status is None

    def wait(self, seconds: float = WAIT_S) -> int:
        """Until it has ended; how it did."""
        self._nursery._wait(lambda: self._status is not None, f"the end of worker {self.pid}", seconds)
        assert self._status is not None
        return self._status

    def met(self) -> str | None:
        """Where its fault was met, as ``redis.claim after``; written before it acted."""
        return next((text for text in self._notes() if text not in (STOPPED, LOST)), None)

    def wait_met(self, seconds: float = WAIT_S) -> str:
        """The same, once it got there."""
        deadline = time.monotonic() + seconds
        while (found := self.met()) is None:
            assert time.monotonic() < deadline, f"worker {self.pid} never met its fault"
            time.sleep(0.005)
        return found

    def has_stopped(self) -> bool:
        """Whether its view stopped it."""
        return STOPPED in self._notes()

    def has_lost(self) -> bool:
        """Whether its view was told that the lease is over."""
        return LOST in self._notes()

    def _notes(self) -> list[str]:
        return [text for pid, text in self._nursery.notes(self._since) if pid == self.pid]

    def kill(self) -> None:
        """SIGKILL, and wait for its end."""
        self._send(signal.SIGKILL)
        self.wait()

    def pause(self) -> None:
        self._send(signal.SIGSTOP)

    def resume(self) -> None:
        self._send(signal.SIGCONT)

    def stop(self) -> None:
        """End it in whatever state it is."""
        self._send(signal.SIGTERM)
        self._send(signal.SIGCONT)
        self.wait()

    def _send(self, number: signal.Signals) -> None:
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def __repr__(self) -> str:
        return f"<Worker {self.pid} {self.address} {self._status}>"


class Nursery:
    """A process that forks workers; all end with it. Its methods may be called from many threads.

    :param config: that of `create_app`, for every worker.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = dict(config)
        self._numbers = itertools.count(1)
        self._workers: dict[int, Worker] = {}
        self._news = threading.Condition()
        self._writing = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Nursery:
        self._notes = tempfile.TemporaryFile()
        self._log = tempfile.TemporaryFile()
        self._sockets = tempfile.TemporaryDirectory(prefix="crash-")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.worker", str(self._notes.fileno())],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            pass_fds=[self._notes.fileno()],
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._write(config=self.config)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._reader.join(WAIT_S)
        process.stdout.close()
        self._notes.close()
        self._log.close()
        self._sockets.cleanup()

    def spawn(self, fault: Mapping[str, Any] | None = None, **config: Any) -> Worker:
        """A worker that serves.

        :param fault: ``layer`` (``"redis"``, ``"transaction"``, ``"intent"``, ``"view"``), ``at`` (a method of that
            store, or one of `VIEW_POINTS`), ``when``, ``n``, ``action`` (``"kill"`` unless said), ``seconds``; ``does``
            says what the view does besides, see `Faults.does`.
        :param config: for this worker alone.
        """
        number = next(self._numbers)
        worker = Worker(self, number)
        with self._news:
            self._workers[number] = worker
        address = f"{self._sockets.name}/{number}"
        self._write(number=number, address=address, config={**self.config, **config, "fault": fault})
        self._wait(lambda: bool(worker.address) or not worker.alive(), "a worker that serves", WAIT_S)
        if not worker.address:
            raise AssertionError(f"a worker ended with {worker.ended()}:\n{self.log[-3000:]}")
        return worker

    def notes(self, since: int = 0) -> list[tuple[int, str]]:
        """Which process met its fault, and where: ``(1234, "redis.claim after")``.

        :param since: a size that the file had: a system may give a number again that a process had before.
        """
        text = os.pread(self._notes.fileno(), os.fstat(self._notes.fileno()).st_size, since).decode()
        found = []
        for line in text.splitlines():
            pid, _, where = line.partition(" ")
            found.append((int(pid), where))
        return found

    @property
    def log(self) -> str:
        """What the workers wrote to stderr."""
        return os.pread(self._log.fileno(), os.fstat(self._log.fileno()).st_size, 0).decode(errors="replace")

    def _write(self, **command: Any) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with self._writing:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            told = json.loads(line)
            with self._news:
                worker = self._workers[told["number"]]
                worker.pid = told["pid"]
                if "address" in told:
                    worker.address = told["address"]
                else:
                    worker._status = told["ended"]
                self._news.notify_all()
        with self._news:  # the nursery is gone, and took them along
            for worker in self._workers.values():
                if worker._status is None:
                    worker._status = -signal.SIGKILL
            self._news.notify_all()

    def _wait(self, condition: Any, what: str, seconds: float) -> None:
        with self._news:
            if not self._news.wait_for(condition, seconds):
                raise AssertionError(f"waited {seconds} s in vain: {what}\n{self.log[-3000:]}")


# -- the nursery, inside -------------------------------------------------------------------------------------------


class _Quiet(WSGIRequestHandler):
    def log(self, type: str, message: str, *args: Any) -> None:
        pass


def _tell(**what: Any) -> None:
    os.write(1, json.dumps(what).encode() + b"\n")


def _warm_up(config: Mapping[str, Any]) -> None:
    """Import what is imported late, and fill what is cached. Nothing connects to anything."""
    create_app(config).test_client().get("/")
    gc.collect()
    gc.freeze()


def _serve(command: Mapping[str, Any], notes: int) -> None:
    """A worker, from its fork to its end."""
    app = create_app(command["config"], notes=notes)
    address = command["address"]
    server = make_server(f"unix://{address}", 0, app, threaded=True, request_handler=_Quiet)
    _tell(number=command["number"], pid=os.getpid(), address=address)
    server.serve_forever(poll_interval=60)


def _fork(command: Mapping[str, Any], notes: int, *closing: int) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in closing:
            os.close(number)
        faulthandler.enable()
        _die_with_parent(parent)
        _serve(command, notes)
    except BaseException:
        logging.exception("a worker failed")
    finally:
        os._exit(1)


def _die_with_parent(parent: int) -> None:
    """Linux tells a child of its parent's end; elsewhere the nursery kills its children when its stdin ends."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _reap(children: dict[int, int]) -> None:
    """Tell of every child that has ended."""
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        _tell(number=children.pop(pid), pid=pid, ended=os.waitstatus_to_exitcode(status))


def main(notes: int) -> None:
    """Read commands, fork workers, tell of their ends; when stdin ends, so do they all."""
    children: dict[int, int] = {}  # pid -> number
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    selector.register(woken, selectors.EVENT_READ)
    waiting = b""
    try:
        while True:
            for key, _ in selector.select():
                if key.fd == woken:
                    os.read(woken, 4096)
                    _reap(children)
                    continue
                read = os.read(0, 65536)
                if not read:
                    return
                *lines, waiting = (waiting + read).split(b"\n")
                for line in lines:
                    command = json.loads(line)
                    if "number" not in command:
                        _warm_up(command["config"])
                        continue
                    children[_fork(command, notes, 0, woken, wakes)] = command["number"]
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        while children:
            pid, status = os.waitpid(-1, 0)
            _tell(number=children.pop(pid), pid=pid, ended=os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    main(int(sys.argv[1]))
