"""The process that stands between an embedded server and the processes that use it.

`embedded.py` runs this file as a script, outside the package and with the standard library only, so that it starts in
a few milliseconds. It starts the server, waits until no process holds the lock on ``users.lock`` any more (the kernel
drops the lock of a killed process, too), then ends the server and removes its directory. The user process needs no
exit handler for that, and a `kill -9` leaves nothing behind.
"""

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from types import FrameType

START_LOCK = "start.lock"  # held while the server is started, joined or ended
USERS_LOCK = "users.lock"  # shared by all users
CONFIG_FILE = "server.conf"
LOG_FILE = "server.log"
SOCKET_FILE = "redis.sock"

START_TIMEOUT_SECONDS = 10.0
STOP_TIMEOUT_SECONDS = 5.0


def ping(address: str | tuple[str, int], timeout_seconds: float = 1.0) -> bool:
    """Whether a server at the socket path or (host, port) answers PING."""
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_seconds)
            connection.connect(address)
            connection.sendall(b"*1\r\n$4\r\nPING\r\n")
            # With a password set, the refusal proves as well that the server is up.
            return connection.recv(64).startswith((b"+PONG", b"-NOAUTH"))
    except OSError:
        return False


class Supervisor:
    """One server process in one directory, and the lock that says who needs it."""

    def __init__(self, directory: str, binary: str, port: int) -> None:
        self.directory = directory
        self.binary = binary
        self.address: str | tuple[str, int] = ("127.0.0.1", port) if port else os.path.join(directory, SOCKET_FILE)
        self.users = os.open(os.path.join(directory, USERS_LOCK), os.O_RDWR)
        self.server: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        """Serve until nobody needs the server; the starter reads one line from stdout for each (re)start."""
        signal.signal(signal.SIGCHLD, self._reap)
        signal.signal(signal.SIGUSR1, self._restart)
        try:
            self._start()
            self._wait_until_unused()
        finally:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
            self._stop()
            self._remove_directory()

    def _start(self) -> None:
        path = os.path.join(self.directory, LOG_FILE)
        with open(path, "ab") as log:
            log_start = log.tell()
            self.server = subprocess.Popen(
                [self.binary, os.path.join(self.directory, CONFIG_FILE)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.directory,
                preexec_fn=_die_with_parent,
            )
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while not ping(self.address):
            if self.server.poll() is not None or time.monotonic() > deadline:
                with open(path, "rb") as log_read:
                    log_read.seek(log_start)
                    text = log_read.read().decode(errors="replace")
                _report("failed " + " | ".join(text.split("\n")[-12:]))
                raise SystemExit(1)
            time.sleep(0.003)
        _report(f"ready {self.server.pid} {os.getpid()}")

    def _stop(self) -> None:
        server, self.server = self.server, None
        if server is None or server.poll() is not None:
            return
        server.terminate()
        try:
            server.wait(STOP_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()

    def _restart(self, signum: int, frame: FrameType | None) -> None:
        self._stop()
        self._start()

    def _reap(self, signum: int, frame: FrameType | None) -> None:
        # A restart that came in the middle would wait for a lock that this holds: a server that was killed makes both
        # signals come at once.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        try:
            if self.server is not None:
                self.server.poll()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})

    def _wait_until_unused(self) -> None:
        while True:
            fcntl.flock(self.users, fcntl.LOCK_EX)
            fcntl.flock(self.users, fcntl.LOCK_UN)
            # Whoever joins does so under the start lock; so the last look happens under it, and it is held to the end.
            try:
                start = os.open(os.path.join(self.directory, START_LOCK), os.O_RDWR)
            except FileNotFoundError:  # somebody removed the directory
                return
            fcntl.flock(start, fcntl.LOCK_EX)
            try:
                fcntl.flock(self.users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                os.close(start)

    def _remove_directory(self) -> None:
        # The rename makes room at once: a process that wants this path for a new server never meets a half-removed one.
        gone = f"{self.directory}.gone-{os.getpid()}"
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(self.users), os.stat(os.path.join(self.directory, USERS_LOCK))):
                os.rename(self.directory, gone)
        shutil.rmtree(gone, ignore_errors=True)


def _die_with_parent() -> None:
    """On Linux, end the server even if the supervisor itself is killed (prctl(2), PR_SET_PDEATHSIG)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)


def _report(line: str) -> None:
    # The starter may have been killed meanwhile; then the lock is free and the supervisor ends in its own time.
    with contextlib.suppress(BrokenPipeError):
        os.write(1, line.encode() + b"\n")


def main() -> None:
    """Detach from the starter, so that no application gets a child that it doesn't know, and supervise."""
    if os.fork():
        os._exit(0)
    os.setsid()
    directory, binary, port = sys.argv[1:]
    Supervisor(directory, binary, int(port)).run()


if __name__ == "__main__":
    main()
