"""A view, asked twice under one key."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from flask import Flask
from werkzeug.test import TestResponse

from flask_idempotent import idempotent

from .. import kit


def serve(app: Flask, effects: kit.Effects, make: Callable[..., Any], **keywords: Any) -> Callable[..., TestResponse]:
    """``POST /x`` with one key, as often as it is called; ``make`` gives the view's answer."""

    def view() -> Any:
        effects.add()
        return make()

    methods = sorted(keywords.get("methods", {"POST"}))
    app.add_url_rule("/x", "x", idempotent(**keywords)(view), methods=methods)
    key = kit.new_key()

    def send(method: str = "POST", **headers: str) -> TestResponse:
        return app.test_client().open("/x", method=method, headers=kit.keyed(key, **headers))

    return send


def twice(app: Flask, effects: kit.Effects, make: Callable[..., Any], **keywords: Any) -> list[TestResponse]:
    send = serve(app, effects, make, **keywords)
    answers = [send(), send()]
    assert effects.runs == 1
    return answers


needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are read from Linux's /proc")


def open_files(path: Path) -> int:
    """How many handles this process has on the file."""

    def targets() -> Iterator[str]:
        for link in Path("/proc/self/fd").iterdir():
            try:
                yield str(link.readlink())
            except OSError:  # closed meanwhile
                continue

    return sum(target == str(path) for target in targets())


class Source:
    """A body whose end is counted: ``closed`` says how often it was closed."""

    def __init__(
        self, chunks: int = 10, *, size: int = 100, breaks_at: "int | None" = None, error: "BaseException | None" = None
    ) -> None:
        self.left = [bytes([number % 256]) * size for number in range(chunks)]
        self.sent = 0
        self.breaks_at = breaks_at
        self.error = error or LookupError("the source broke off")
        self.closed = 0

    def __iter__(self) -> "Source":
        return self

    def __next__(self) -> bytes:
        if self.sent == self.breaks_at:
            raise self.error
        if self.sent == len(self.left):
            raise StopIteration
        self.sent += 1
        return self.left[self.sent - 1]

    def close(self) -> None:
        self.closed += 1

    @property
    def whole(self) -> bytes:
        return b"".join(self.left)
