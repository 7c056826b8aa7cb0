"""The provider's HTTP interface, and how a test misuses it.

``POST /charges`` (or ``/refunds``, ``/captures``, ``/transfers``) with a JSON object does something, and deduplicates
by the header ``Idempotency-Key``. ``GET /charges?key=…`` or ``?reference=…`` is the search. ``/control``, ``/ledger``
and two headers belong to the tests: ``X-Sent-At`` is noted, ``X-Hold`` keeps a request on its way for so many seconds.
"""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import dataclass
from typing import Any, Literal

from flask import Flask, Response, jsonify, request

from .ledger import Entry, KeyInUse, KeyReused, Ledger

__all__ = ["Fault", "create_app"]

OPERATIONS = "any(charges,refunds,captures,transfers)"


@dataclass(slots=True)
class Fault:
    """What the next requests meet: a wait, a connection that breaks, or an answer that is not the result.

    ``when`` says whether it comes before the work, or after it was done.
    """

    action: Literal["wait", "drop", "answer"]
    when: Literal["before", "after"] = "after"
    seconds: float = 0.0
    status: int = 500
    code: str = "error"
    times: int = 1


class Faults:
    """Faults in order; each is used up after its times."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._coming: list[Fault] = []

    def plan(self, faults: list[Fault]) -> None:
        with self._lock:
            self._coming = list(faults)

    def next(self) -> Fault | None:
        with self._lock:
            while self._coming:
                fault = self._coming[0]
                fault.times -= 1
                if fault.times <= 0:
                    self._coming.pop(0)
                return fault
            return None


def create_app(ledger: Ledger | None = None) -> Flask:
    """A provider with its ledger in ``app.extensions["ledger"]``."""
    app = Flask(__name__)
    ledger = ledger or Ledger()
    faults = Faults()
    calls: list[dict[str, object]] = []
    app.extensions["ledger"] = ledger

    @app.post(f"/<{OPERATIONS}:operation>")
    def act(operation: str) -> Any:
        key, parameters = request.headers.get("Idempotency-Key", ""), request.get_json()
        call: dict[str, object] = {"operation": operation, "key": key, "outcome": "began"}
        calls.append(call)
        try:
            entry = ledger.begin(operation, key, parameters)
        except KeyReused:
            call["outcome"] = "key reused"
            return _error(400, "idempotency_key_reused", "This key was used with other parameters.")
        except KeyInUse as error:
            call |= {"outcome": "key in use", "age": error.age}
            return _error(409, "idempotency_key_in_use", "Another request with this key is being worked on.")
        if entry is not None:
            call["outcome"] = "repeated"
            return _result(entry, repeated=True)
        time.sleep(float(request.headers.get("X-Hold", 0)))
        fault = faults.next()
        if fault is not None and fault.when == "before":
            spoilt = _spoil(fault)
            if spoilt is not None:
                ledger.drop(key)
                call["outcome"] = "came to nothing"
                return spoilt
        entry = ledger.apply(operation, key, parameters, request.headers.get("X-Sent-At", type=float))
        call["outcome"] = "done"
        if fault is not None and fault.when == "after":
            spoilt = _spoil(fault)
            if spoilt is not None:
                return spoilt
        return _result(entry)

    @app.get(f"/<{OPERATIONS}:operation>")
    def search(operation: str) -> Any:
        found = ledger.search(operation, key=request.args.get("key"), reference=request.args.get("reference"))
        return jsonify([entry.as_dict() for entry in found])

    @app.get("/ledger")
    def show() -> Any:
        return jsonify(entries=[entry.as_dict() for entry in ledger.entries], calls=calls)

    @app.delete("/ledger")
    def reset() -> Any:
        ledger.reset()
        ledger.window, ledger.search_delay = 86_400.0, 0.0
        faults.plan([])
        calls.clear()
        return "", 204

    @app.put("/control")
    def control() -> Any:
        """``window``, ``search_delay`` and ``advance`` in seconds, ``faults``, ``forget``; each may be left out."""
        wanted = request.get_json()
        ledger.window = wanted.get("window", ledger.window)
        ledger.search_delay = wanted.get("search_delay", ledger.search_delay)
        if "faults" in wanted:
            faults.plan([Fault(**fault) for fault in wanted["faults"]])
        ledger.advance(wanted.get("advance", 0))
        if wanted.get("forget"):
            ledger.forget()
        return "", 204

    return app


def _result(entry: Entry, *, repeated: bool = False) -> Response:
    response = jsonify(entry.as_dict())
    response.status_code = 201
    if repeated:
        response.headers["Idempotent-Replayed"] = "true"
    return response


def _error(status: int, code: str, message: str) -> Response:
    response = jsonify(error={"code": code, "message": message})
    response.status_code = status
    return response


def _spoil(fault: Fault) -> Response | None:
    """The answer that a fault makes; ``None`` where it only took time."""
    time.sleep(fault.seconds)
    if fault.action == "wait":
        return None
    if fault.action == "drop":
        # What is written after this finds nobody.
        request.environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        return Response(status=500)
    return _error(fault.status, fault.code, "The provider has a bad day.")
