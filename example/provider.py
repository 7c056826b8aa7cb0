"""The bank: a server of its own, as payment providers have it. ``python example/provider.py --port 5001``

It moves money once for each key that it is sent, can be asked what it did, and can be told to fail after it did it.
Nothing of the shop is imported here; the ledger in its memory is where the storm counts charges.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

__all__ = ["BankServer"]

#: Banks are slow. Seconds until the money has moved.
SECONDS = 0.9
#: How long a bank that is to be silent keeps its answer.
SILENCE_SECONDS = 8.0


class BankServer(ThreadingHTTPServer):
    """The bank on a socket that listens already."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, listener: socket.socket, *, seconds: float = SECONDS) -> None:
        super().__init__(listener.getsockname(), _Request, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.seconds = seconds
        self.lock = threading.Lock()
        self.ledger: list[dict[str, Any]] = []
        #: What happens once, after the charge of a reference: ``drop`` or ``silence``.
        self.faults: dict[str, str] = {}

    def charge(self, key: str, wanted: dict[str, Any]) -> tuple[int, dict[str, Any], str | None]:
        """Move the money, once for each key. Status, answer, and what shall go wrong after it."""
        time.sleep(self.seconds)
        with self.lock:
            known = next((entry for entry in self.ledger if entry["key"] == key), None)
            if known is None:
                known = {**wanted, "key": key, "number": len(self.ledger) + 1, "at": time.time()}
                self.ledger.append(known)
            elif any(known[name] != value for name, value in wanted.items()):
                return 422, {"error": "this key was used for another charge"}, None
            return 200, known, self.faults.pop(wanted["reference"], None)


class _Request(BaseHTTPRequestHandler):
    server: BankServer

    def do_GET(self) -> None:
        """``/charges``, or ``/charges?key=…``: what was done."""
        keys = parse_qs(urlsplit(self.path).query).get("key")
        with self.server.lock:
            found = [entry for entry in self.server.ledger if keys is None or entry["key"] in keys]
        self._answer(200, found)

    def do_POST(self) -> None:
        """``/charges`` with an ``Idempotency-Key``; ``/faults`` for what shall go wrong after a charge."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/faults":
            self.server.faults[body["reference"]] = body["fault"]
            return self._answer(200, body)
        status, answer, fault = self.server.charge(self.headers["Idempotency-Key"], body)
        if fault == "silence":
            time.sleep(SILENCE_SECONDS)
        if fault != "drop":
            self._answer(status, answer)

    def _answer(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


def _end_with_standard_input(server: BankServer) -> None:
    while os.read(0, 1024):
        pass
    server.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description="The bank of the example.")
    parser.add_argument("--port", type=int, default=5001, help="on 127.0.0.1 (default: 5001)")
    parser.add_argument("--fd", type=int, help="a socket that listens already; then it ends with its standard input")
    arguments = parser.parse_args()
    if arguments.fd is None:
        server = BankServer(socket.create_server(("127.0.0.1", arguments.port)))
    else:
        server = BankServer(socket.socket(fileno=arguments.fd))
        threading.Thread(target=_end_with_standard_input, args=(server,), daemon=True).start()
    with server:
        server.serve_forever(0.1)


if __name__ == "__main__":
    main()
