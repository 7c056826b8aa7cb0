"""``python -m tests.provider [--port N] [--print-ledger]``: prints its URL, and serves until it is ended."""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
from types import FrameType

from werkzeug.serving import make_server

from .app import create_app


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.provider", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="on 127.0.0.1; the default is a free one")
    parser.add_argument("--print-ledger", action="store_true", help="a line of JSON for each entry, at the end")
    arguments = parser.parse_args()

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    app = create_app()
    server = make_server("127.0.0.1", arguments.port, app, threaded=True)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
    if arguments.print_ledger:
        for entry in app.extensions["ledger"].entries:
            print(json.dumps(entry.as_dict()))
    sys.stdout.flush()


main()
