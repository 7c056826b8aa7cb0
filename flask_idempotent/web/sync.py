"""Calls what an app registered, ``async def`` or not, from wherever this request is."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from flask import Flask

__all__ = ["call_sync"]


def call_sync(app: Flask, function: Callable[..., Any], *arguments: object) -> Any:
    """The function's result. An ``async def`` one is waited for, also inside of an async view: that occupies its
    thread's event loop, so another thread waits in a copy of the context."""
    sync: Callable[..., Any] = app.ensure_sync(function)
    if not inspect.iscoroutinefunction(function) or not _in_event_loop():
        return sync(*arguments)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(contextvars.copy_context().run, sync, *arguments).result()


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
