"""Runs the shop and the bank in real server processes, on loopback only."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx

__all__ = ["Server", "ServerFailed", "bank_server", "listen", "shop_server"]

HOST = "127.0.0.1"
START_SECONDS = 40.0
_HERE = Path(__file__).parent


class ServerFailed(Exception):
    """A server could not be started; the text has the last lines of its log."""


def listen(port: int = 0) -> socket.socket:
    """Take a port, 0 for any free one.

    :raises OSError: the port is taken.
    """
    return socket.create_server((HOST, port), backlog=512)


def shop_server(name: str, target: str, *, listener: socket.socket, log: Path, env: Mapping[str, str]) -> Server:
    """Gunicorn with the shop.

    :param target: the app, as gunicorn takes it.
    """
    command = (
        *(sys.executable, "-m", "gunicorn", "--config", str(_HERE / "gunicorn.conf.py")),
        *("--pythonpath", str(_HERE.parent), "--bind", f"fd://{listener.fileno()}", target),
    )
    return Server(name, command, listener=listener, probe="/activity", log=log, env=env)


def bank_server(*, listener: socket.socket, log: Path) -> Server:
    """The bank. It is started as a file: it needs nothing of the shop."""
    command = (sys.executable, str(_HERE / "provider.py"), "--fd", str(listener.fileno()))
    return Server("bank", command, listener=listener, probe="/charges", log=log, env={})


class Server:
    """A server process and its children. It ends with its starter, however that one ends: its standard input closes.

    :param listener: where it answers; closed here once the server has it.
    :param probe: a path that answers when it is ready.
    :param log: the file for what it has to say.
    :param env: set over the environment of this process.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        listener: socket.socket,
        probe: str,
        log: Path,
        env: Mapping[str, str],
    ) -> None:
        self._name = name
        self._command = command
        self._listener = listener
        self._probe = probe
        self._log = log
        self._env = {**os.environ, **env}
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"http://{HOST}:{listener.getsockname()[1]}"

    def launch(self) -> None:
        """Start the process; :meth:`wait_until_it_answers` comes next."""
        with self._listener, self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._env,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[self._listener.fileno()],
                start_new_session=True,  # Ctrl-C is for the starter, which then ends the server in good order
            )

    def wait_until_it_answers(self) -> None:
        """Return when the server is ready.

        :raises ServerFailed: it isn't.
        """
        assert self._process is not None
        deadline = time.monotonic() + START_SECONDS
        with httpx.Client(trust_env=False, timeout=2) as client:
            while time.monotonic() < deadline:
                if self._process.poll() is not None:
                    raise ServerFailed(f"The {self._name} did not start:\n{self.log_tail()}")
                with contextlib.suppress(httpx.TransportError):
                    answer = client.get(self.url + self._probe)
                    if answer.is_success:
                        return
                    raise ServerFailed(f"The {self._name} answers with {answer.status_code}:\n{self.log_tail()}")
                time.sleep(0.05)
        raise ServerFailed(f"The {self._name} did not answer within {START_SECONDS:.0f} s:\n{self.log_tail()}")

    def wait(self) -> None:
        """Return when the server has ended, which it doesn't by itself."""
        assert self._process is not None
        self._process.wait()

    def kill(self) -> None:
        """As a power cut would: all its processes at once, in the middle of what they do."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        """End the server and its workers; harmless where none runs."""
        process, self._process = self._process, None
        self._listener.close()
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
