"""Every Python block of the README and the docs runs; the blocks of one page share a namespace, in order.

A block below a line ``<!-- not run: reason -->`` is only compiled. ``redis://localhost:6379/0``, the default of
``REDIS_URL``, and ``embedded://`` are the session's embedded server here; ``IDEMPOTENT_REDIS_URL`` and ``REDIS_URL`` in
the environment name it too.
"""

import os
import re
import sys
import types
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis.connection

from flask_idempotent.stores import embedded

ROOT = Path(__file__).parents[2]
PAGES = [path for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))] if path.exists()]

FENCE = re.compile(r"^(?P<indent> *)```(?P<info>.*)$")
NOT_RUN = re.compile(r"^\s*<!--\s*not run:\s*\S.*-->\s*$")
DEFAULT_SERVER = re.compile(r"^redis://(localhost|127\.0\.0\.1)(:6379)?(/\d+)?$")


@dataclass(frozen=True)
class Block:
    line: int
    code: str
    run: bool


def python_blocks(text: str) -> list[Block]:
    blocks = []
    lines = text.splitlines()
    number = 0
    last = ""  # the last line that isn't empty
    while number < len(lines):
        fence = FENCE.match(lines[number])
        if fence is None:
            last = lines[number] if lines[number].strip() else last
            number += 1
            continue
        indent = len(fence["indent"])
        start = number + 1
        number = next(n for n in range(start, len(lines)) if lines[n].strip() == "```") + 1
        if re.match(r"(python|py|\{code-block\} python)\b", fence["info"].strip()):
            code = "\n".join(line[indent:] for line in lines[start : number - 1])
            blocks.append(Block(start + 1, code, NOT_RUN.match(last) is None))
        last = ""
    return blocks


@pytest.fixture
def default_server(redis_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    parse_url = redis.connection.parse_url
    monkeypatch.setattr(
        redis.connection, "parse_url", lambda url: parse_url(redis_url if DEFAULT_SERVER.match(url) else url)
    )
    monkeypatch.setattr(embedded, "shared_embedded_url", lambda: redis_url)
    monkeypatch.setenv("IDEMPOTENT_REDIS_URL", redis_url)
    monkeypatch.setenv("REDIS_URL", redis_url)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("default_server")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: os.path.relpath(page, ROOT))
def test_blocks(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "page_" + re.sub(r"\W", "_", page.stem)
    module = types.ModuleType(name)
    # Under its name, so that what looks up a class or function by its module finds it.
    monkeypatch.setitem(sys.modules, name, module)
    for block in python_blocks(page.read_text()):
        # Empty lines in front make the traceback's line that of the page.
        code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
        if block.run:
            exec(code, module.__dict__)


def test_the_default_server_is_the_embedded_one(default_server: None, redis_url: str) -> None:
    with redis.Redis.from_url("redis://localhost:6379/0") as client, redis.Redis.from_url(redis_url) as server:
        server.set("k", "v")
        assert client.get("k") == b"v"


def test_blocks_are_found() -> None:
    page = """
```python
a = 1
```
<!-- not run: needs an account -->

```python
b = 2
```
1. in a list

   ```python
   if a:
       c = 3
   ```
```bash
d
```
"""
    assert python_blocks(page) == [
        Block(3, "a = 1", True),
        Block(8, "b = 2", False),
        Block(13, "if a:\n    c = 3", True),
    ]
