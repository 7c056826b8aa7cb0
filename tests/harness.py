"""Tools for tests over real processes and real wires: gunicorn, a counter of Redis commands, a faulty TCP proxy."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import redis

WAIT_SECONDS = 20.0

_T = TypeVar("_T", bound="_Context")


def wait_until(condition: Callable[[], bool], what: str, seconds: float = WAIT_SECONDS) -> None:
    """Poll until the condition holds; AssertionError that says what was awaited after so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds} s in vain: {what}")
        time.sleep(0.01)


class _Context:
    def start(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        raise NotImplementedError

    def __enter__(self: _T) -> _T:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


class GunicornApp(_Context):
    """Gunicorn with an app, on a free loopback port.

    :param source: text of a module that defines the app; or use ``target`` alone for an importable one.
    :param target: gunicorn's app argument; ``app`` and ``create_app()`` are looked up in the source's module.
    :param worker_class: ``"sync"``, ``"gthread"``, ``"gevent"``.
    :param env: set over this process's environment.
    :param options: further gunicorn options, e.g. ``["--preload"]``.

    `start` returns when every worker has loaded the app.
    """

    CONFIG = """
import os, pathlib
control_socket_disable = True
here = pathlib.Path(__file__).parent
def post_worker_init(worker):
    (here / f"ready.{os.getpid()}").touch()
def child_exit(server, worker):
    (here / f"ready.{worker.pid}").unlink(missing_ok=True)
"""

    def __init__(
        self,
        source: str | None = None,
        *,
        target: str = "app",
        workers: int = 2,
        threads: int = 1,
        worker_class: str = "gthread",
        env: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
    ) -> None:
        self.source = source
        self.target = target if source is None else f"app_under_test:{target}"
        self.workers = workers
        self.arguments = [f"--workers={workers}", f"--threads={threads}", f"--worker-class={worker_class}", *options]
        self.env = {**os.environ, **(env or {})}
        self.url = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    def start(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="gunicorn-")
        (self.directory / "gunicorn.conf.py").write_text(self.CONFIG)
        if self.source is not None:
            (self.directory / "app_under_test.py").write_text(self.source)
        with socket.create_server(("127.0.0.1", 0)) as listener, (self.directory / "log").open("wb") as log:
            self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "gunicorn", "--config", str(self.directory / "gunicorn.conf.py")),
                    *("--bind", f"fd://{listener.fileno()}", "--graceful-timeout=2"),
                    *("--pythonpath", f"{self.directory},{os.getcwd()}", *self.arguments, self.target),
                ],
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[listener.fileno()],
                start_new_session=True,
            )
        try:
            self.wait_for_workers(self.workers)
        except BaseException:
            self.stop()
            raise

    @property
    def directory(self) -> Path:
        """Where the app's module, its log and the hooks' files are."""
        assert self._directory is not None, "not started"
        return Path(self._directory.name)

    @property
    def log(self) -> str:
        """What gunicorn and the app have written to stdout and stderr."""
        return (self.directory / "log").read_text(errors="replace")

    @property
    def pid(self) -> int:
        """The master's process id."""
        assert self._process is not None, "not started"
        return self._process.pid

    def worker_pids(self) -> list[int]:
        """The workers that have loaded the app and are alive."""
        pids = sorted(int(path.suffix[1:]) for path in self.directory.glob("ready.*"))
        return [pid for pid in pids if _alive(pid)]

    def wait_for_workers(self, count: int, seconds: float = WAIT_SECONDS) -> None:
        """Wait until so many workers are ready, e.g. after `kill_worker`."""
        assert self._process is not None, "not started"
        process = self._process

        def ready() -> bool:
            if process.poll() is not None:
                raise AssertionError(f"gunicorn ended with {process.returncode}:\n{self.log}")
            return len(self.worker_pids()) >= count

        try:
            wait_until(ready, f"{count} gunicorn workers", seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log}") from None

    def kill_worker(self, pid: int, sig: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to one worker and wait until the master has noticed its end; a new one follows."""
        os.kill(pid, sig)
        wait_until(lambda: pid not in self.worker_pids(), f"the end of worker {pid}")

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(6)
            # The session's process group: the master if it hangs, and workers that outlived it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None


class CommandCounter(_Context):
    """The commands that a Redis server received from its clients inside the ``with`` block, seen through MONITOR.

    Commands that scripts call are not counted, nor is what a new connection says of itself. One command outside a
    pipeline is one round trip. Use it on the embedded server: other users of a shared one would be counted too.

    Attributes, complete after the block:
        commands: names in order, upper case.
        calls: how many of each.
    """

    GREETINGS = frozenset({"HELLO", "AUTH", "CLIENT", "SELECT", "COMMAND"})

    def __init__(self, url: str) -> None:
        self.url = url
        self.commands: list[str] = []

    @property
    def calls(self) -> Counter[str]:
        return Counter(self.commands)

    def start(self) -> None:
        self.commands = []
        self._client = redis.Redis.from_url(self.url)
        self._client.ping()
        self._monitor = redis.Redis.from_url(self.url, socket_timeout=WAIT_SECONDS)
        self._stream = self._monitor.monitor().__enter__()

    def stop(self) -> None:
        # All that was received before this mark comes before it in the stream.
        mark = f"mark-{uuid.uuid4()}"
        self._client.echo(mark)
        for seen in self._stream.listen():
            if mark in seen["command"]:
                break
            name = seen["command"].split(" ", 1)[0].upper()
            if seen["client_type"] != "lua" and name not in self.GREETINGS:
                self.commands.append(name)
        self._stream.__exit__(None, None, None)
        self._monitor.close()
        self._client.close()

    def __repr__(self) -> str:
        return f"<CommandCounter {dict(self.calls)}>"


class Proxy(_Context):
    """A TCP proxy in front of a server, which can lose replies, delay them, hold everything back and swallow it.

    :param target: a URL (Redis, PostgreSQL, MySQL or ``unix://``), or a (host, port).

    Attributes:
        url: the target's URL through the proxy.
        port: where it listens, on 127.0.0.1.
        round_trips: requests that were answered, pipelined ones as one.
        cuts: how many replies were lost.
    """

    def __init__(self, target: str | tuple[str, int]) -> None:
        self.address: str | tuple[str, int] = target if isinstance(target, tuple) else _address(target)
        self.target = target
        self.port = 0
        self.round_trips = 0
        self.cuts = 0
        self._lock = threading.Lock()
        self._armed = 0
        self._match = b""
        self._delay = 0.0
        self._black_hole = False
        self._flows = threading.Event()
        self._flows.set()
        self._sockets: set[socket.socket] = set()

    @property
    def url(self) -> str:
        if isinstance(self.target, tuple):
            return f"tcp://127.0.0.1:{self.port}"
        parts = urllib.parse.urlsplit(self.target)
        if parts.scheme == "unix":
            return f"redis://127.0.0.1:{self.port}?{parts.query}".rstrip("?")
        user, at, _ = parts.netloc.rpartition("@")
        query = urllib.parse.urlencode([pair for pair in urllib.parse.parse_qsl(parts.query) if pair[0] != "host"])
        return urllib.parse.urlunsplit(parts._replace(netloc=f"{user}{at}127.0.0.1:{self.port}", query=query))

    def cut_reply(self, n: int = 1, match: bytes = b"") -> None:
        """Lose the next n replies to requests that contain ``match``: the server does the work, the client's
        connection breaks."""
        with self._lock:
            self._armed, self._match = n, match

    def delay(self, seconds: float) -> None:
        """Hold back every reply for so many seconds."""
        self._delay = seconds

    def black_hole(self) -> None:
        """Accept connections and requests, deliver nothing, answer nothing."""
        self._black_hole = True

    def hold(self) -> None:
        """Deliver nothing until healed, and then all of it: also what a client sent that has gone away since."""
        self._flows.clear()

    def release(self) -> None:
        """The end of `hold`."""
        self._flows.set()

    def fill_hole(self) -> None:
        """The end of `black_hole`: connections that it swallowed are broken."""
        swallowed, self._black_hole = self._black_hole, False
        if swallowed:
            self.break_connections()

    def heal(self) -> None:
        """Work as a plain proxy from now on."""
        self._delay = 0.0
        self.cut_reply(0)
        self.release()
        self.fill_hole()

    def break_connections(self) -> None:
        """Break every open connection."""
        with self._lock:
            sockets = list(self._sockets)
        for each in sockets:
            _shut(each)

    def start(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def stop(self) -> None:
        _shut(self._listener)  # wakes accept()
        self._accepting.join()
        self._listener.close()
        self._flows.set()
        self.break_connections()
        wait_until(lambda: not self._sockets, "the end of the proxy's connections")

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        family = socket.AF_UNIX if isinstance(self.address, str) else socket.AF_INET
        with client, socket.socket(family, socket.SOCK_STREAM) as server:
            pair = {client, server}
            with self._lock:
                self._sockets |= pair
            try:
                server.connect(self.address)
                connection = _Connection(self, client, server)
                replies = threading.Thread(target=connection.pump_replies, daemon=True)
                replies.start()
                connection.pump_requests()
                replies.join()
            except OSError:
                pass
            finally:
                with self._lock:
                    self._sockets -= pair


class _Connection:
    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self.proxy = proxy
        self.client = client
        self.server = server
        self.open_request = False
        self.doomed = False

    def pump_requests(self) -> None:
        with contextlib.suppress(OSError):
            while data := self.client.recv(65536):
                self.proxy._flows.wait()
                if self.proxy._black_hole:
                    continue
                with self.proxy._lock:
                    if self.proxy._armed and self.proxy._match in data:
                        self.proxy._armed -= 1
                        self.doomed = True
                self.open_request = True
                self.server.sendall(data)
        self.end()

    def pump_replies(self) -> None:
        with contextlib.suppress(OSError):
            while data := self.server.recv(65536):
                self.proxy._flows.wait()
                if self.proxy._delay:
                    time.sleep(self.proxy._delay)
                with self.proxy._lock:
                    if self.doomed:
                        self.proxy.cuts += 1
                        break
                    if self.open_request:
                        self.open_request = False
                        self.proxy.round_trips += 1
                if not self.proxy._black_hole:
                    self.client.sendall(data)
        self.end()

    def end(self) -> None:
        _shut(self.client)
        _shut(self.server)


def _address(url: str) -> str | tuple[str, int]:
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "unix":
        return parts.path
    default = {"redis": 6379, "postgresql": 5432, "mysql": 3306, "mariadb": 3306}[parts.scheme.partition("+")[0]]
    port = parts.port or default
    if directory := dict(urllib.parse.parse_qsl(parts.query)).get("host"):  # PostgreSQL's way to name a socket
        return f"{directory}/.s.PGSQL.{port}"
    return parts.hostname or "127.0.0.1", port


def _shut(each: socket.socket) -> None:
    with contextlib.suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
