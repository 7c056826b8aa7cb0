"""Many equal requests at once, from several client processes over open connections."""

import contextlib
import hashlib
import json
import multiprocessing
import selectors
import socket
import time
from collections import Counter
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from types import TracebackType
from typing import NamedTuple

WAIT_S = 60.0


class Kind(NamedTuple):
    """What answers have in common."""

    status: int
    replayed: bool
    retry_after: bool
    code: str
    body: str  # a digest


class Swarm:
    """Holds ``size`` connections to a server, spread over client processes, and sends on all of them at once."""

    def __init__(self, address: tuple[str, int], size: int, *, processes: int = 2) -> None:
        context = multiprocessing.get_context("spawn")
        self._barrier = context.Barrier(processes)  # kept: the children look it up by name
        self._pipes: list[Connection] = []
        self._processes = []
        for number in range(processes):
            ours, theirs = context.Pipe()
            share = size // processes + (number < size % processes)
            process = context.Process(target=_member, args=(address, share, theirs, self._barrier), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        for pipe in self._pipes:
            assert pipe.poll(WAIT_S), "a client process does not start"
            assert pipe.recv() == "connected"

    def fire(self, request: bytes) -> "Counter[Kind]":
        """Send the request on every connection, released by a barrier; how many answers there were of each kind."""
        for pipe in self._pipes:
            pipe.send_bytes(request)
        answers: Counter[Kind] = Counter()
        for pipe in self._pipes:
            assert pipe.poll(WAIT_S), "a client process does not answer"
            found = pipe.recv()
            if isinstance(found, str):
                raise AssertionError(found)
            answers.update(found)
        return answers

    def __enter__(self) -> "Swarm":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send_bytes(b"")
            pipe.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()


def request_bytes(path: str, key: str, body: bytes) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: shop\r\nIdempotency-Key: {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _member(address: tuple[str, int], share: int, pipe: Connection, barrier: Barrier) -> None:
    sockets = [socket.create_connection(address, WAIT_S) for _ in range(share)]
    pipe.send("connected")
    while request := pipe.recv_bytes():
        barrier.wait(WAIT_S)
        try:
            for each in sockets:
                each.sendall(request)
            answers, closed = _collect(sockets)
            for each in closed:
                each.close()
                sockets[sockets.index(each)] = socket.create_connection(address, WAIT_S)
            pipe.send(answers)
        except (OSError, ValueError) as error:
            pipe.send(f"{type(error).__name__}: {error}")
    for each in sockets:
        each.close()


def _collect(sockets: list[socket.socket]) -> "tuple[Counter[Kind], list[socket.socket]]":
    """The answers, and the connections that the server closes now, as it may."""
    answers: Counter[Kind] = Counter()
    closed = []
    deadline = time.monotonic() + WAIT_S
    with selectors.DefaultSelector() as selector:
        for each in sockets:
            selector.register(each, selectors.EVENT_READ, bytearray())
        while selector.get_map():
            if time.monotonic() > deadline:
                raise ValueError(f"{len(selector.get_map())} connections were never answered")
            for ready, _ in selector.select(1):
                connection, buffer = ready.fileobj, ready.data
                assert isinstance(connection, socket.socket)
                data = connection.recv(65536)
                if not data:
                    raise ValueError(f"the server hung up after {bytes(buffer[:200])!r}")
                buffer += data
                kind = _parse(bytes(buffer))
                if kind is not None:
                    answers[kind] += 1
                    selector.unregister(connection)
                    if b"\r\nconnection: close\r\n" in buffer.lower():
                        closed.append(connection)
    return answers, closed


def _parse(data: bytes) -> Kind | None:
    head, end, body = data.partition(b"\r\n\r\n")
    if not end:
        return None
    lines = head.decode("latin-1").split("\r\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    if len(body) < int(headers["content-length"]):
        return None
    code = json.loads(body)["code"] if headers["content-type"] == "application/problem+json" else ""
    # Problems differ in their instance; what they say is in the code.
    digest = "" if code else hashlib.sha256(body).hexdigest()
    status = int(lines[0].split()[1])
    return Kind(status, headers.get("idempotent-replayed") == "true", "retry-after" in headers, code, digest)
