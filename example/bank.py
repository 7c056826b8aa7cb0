"""The shop's side of the bank: how a charge is sent, and how one is looked up that got no answer."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import httpx

from flask_idempotent import Provider

__all__ = ["PROVIDER", "Bank", "NoAnswer", "NotSent"]

#: What the bank promises: it knows a key again for a day.
PROVIDER = Provider("demo-bank", window=timedelta(days=1), max_length=64)


class NotSent(Exception):
    """The bank could not be reached: certainly nothing happened."""


class NoAnswer(Exception):
    """It was sent, and no answer came: nobody knows whether the money moved."""


class Bank:
    """A client of the bank.

    :param url: of its server.
    """

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=httpx.Timeout(10, connect=1), trust_env=False)

    def charge(self, key: str, charge: Mapping[str, object]) -> dict[str, Any]:
        """Charge a card.

        :param key: sent along; the bank moves money once for it.
        :raises NotSent: nothing happened.
        :raises NoAnswer: unknown.
        """
        try:
            response = self._http.post("/charges", json=charge, headers={"Idempotency-Key": key})
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            raise NotSent from error
        except httpx.TransportError as error:
            raise NoAnswer from error
        if not response.is_success:
            raise NoAnswer
        made: dict[str, Any] = response.json()
        return made

    def find(self, key: str) -> dict[str, Any] | None:
        """The charge that was made with a key.

        :raises httpx.TransportError: the bank can't be asked.
        """
        found: list[dict[str, Any]] = self._http.get("/charges", params={"key": key}).json()
        return found[0] if found else None

    def ledger(self) -> list[dict[str, Any]]:
        """All that it did, oldest first.

        :raises httpx.TransportError: the bank can't be asked.
        """
        entries: list[dict[str, Any]] = self._http.get("/charges").json()
        return entries

    def fail_after(self, reference: str, fault: str) -> None:
        """For the storm: once the charge of this reference is made, ``drop`` the connection or keep ``silence``."""
        self._http.post("/faults", json={"reference": reference, "fault": fault}).raise_for_status()

    def close(self) -> None:
        self._http.close()
