"""Runs the shop in real server processes, on loopback only."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import httpx

__all__ = ["ServerFailed", "ShopServer", "listen"]

HOST = "127.0.0.1"
START_SECONDS = 30.0
_HERE = Path(__file__).parent


class ServerFailed(Exception):
    """The shop could not be started; the text has the last lines of its log."""


def listen(port: int) -> socket.socket:
    """Take a port, 0 for any free one.

    :raises OSError: the port is taken.
    """
    return socket.create_server((HOST, port), backlog=512)


class ShopServer:
    """Gunicorn with the shop. It ends with its starter, however that one ends.

    :param target: the app, as gunicorn takes it.
    :param listener: where it answers; closed here once the server has it.
    :param log: the file for what server and app have to say.
    :param env: set over the environment of this process.
    """

    def __init__(self, target: str, *, listener: socket.socket, log: Path, env: Mapping[str, str]) -> None:
        self._target = target
        self._listener = listener
        self._log = log
        self._env = {**os.environ, **env}
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"http://{HOST}:{listener.getsockname()[1]}"

    def start(self) -> None:
        """Return when the shop answers.

        :raises ServerFailed: it doesn't.
        """
        with self._listener, self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "gunicorn", "--config", str(_HERE / "gunicorn.conf.py")),
                    *("--pythonpath", str(_HERE.parent), "--bind", f"fd://{self._listener.fileno()}", self._target),
                ],
                env=self._env,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[self._listener.fileno()],
                start_new_session=True,  # Ctrl-C is for the starter, which then ends the server in good order
            )
        self._wait_until_it_answers(self._process)

    def wait(self) -> None:
        """Return when the server has ended, which it doesn't by itself."""
        assert self._process is not None
        self._process.wait()

    def stop(self) -> None:
        """End the server and its workers; harmless where none runs."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # workers that outlived it
        process.wait()

    def log_tail(self, lines: int = 12) -> str:
        """The last lines of the log."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])

    def _wait_until_it_answers(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + START_SECONDS
        with httpx.Client(trust_env=False, timeout=1) as client:
            while time.monotonic() < deadline:
                if process.poll() is not None:
                    raise ServerFailed(f"The shop did not start:\n{self.log_tail()}")
                with contextlib.suppress(httpx.TransportError):
                    answer = client.get(self.url)
                    if answer.is_success:
                        return
                    raise ServerFailed(f"The shop answers with {answer.status_code}:\n{self.log_tail()}")
                time.sleep(0.05)
        raise ServerFailed(f"The shop did not answer within {START_SECONDS:.0f} s:\n{self.log_tail()}")
