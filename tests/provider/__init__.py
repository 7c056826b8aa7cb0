"""A payment provider for tests and the example: a process of its own, with a ledger that says what really happened.

``python -m tests.provider --port 5001`` starts it; `ProviderClient` talks to it.
"""

from .client import LocalClient, NoAnswer, ProviderClient, Refused
from .ledger import Entry, Ledger
from .process import provider_process

__all__ = ["Entry", "Ledger", "LocalClient", "NoAnswer", "ProviderClient", "Refused", "provider_process"]
