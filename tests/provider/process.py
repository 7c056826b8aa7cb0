"""The provider as a process of its own."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from .client import ProviderClient

__all__ = ["provider_process"]

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def provider_process(port: int = 0) -> Iterator[ProviderClient]:
    """Start it, and end it with the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.provider", "--port", str(port)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        if not url:
            raise RuntimeError("the provider did not start")
        yield ProviderClient(url)
    finally:
        process.terminate()
        process.wait(10)
        process.stdout.close()
