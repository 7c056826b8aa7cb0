"""A small shop whose writes are safe to retry. Read ``app.py`` and ``views.py`` first; both are short.

``python -m example`` starts two instances in real server processes, sends every request more than once, and counts what
happened.
"""

from .app import create_app

__all__ = ["create_app"]
