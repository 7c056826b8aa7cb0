"""What an app calls the provider with, and a test controls it by."""

from __future__ import annotations

import http.client
import json
import time
import urllib.parse
from collections.abc import Mapping
from typing import Any

from .ledger import KeyInUse, KeyReused, Ledger

__all__ = ["LocalClient", "NoAnswer", "ProviderClient", "Refused"]


class NoAnswer(Exception):
    """The connection broke, or the time was up: nobody knows what became of the request."""


class Refused(Exception):
    """The provider answered with an error."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(f"{status} {code}")
        self.status = status
        self.code = code


class ProviderClient:
    """Talks to a provider's process.

    :param timeout: seconds for an answer.
    """

    def __init__(self, url: str, *, timeout: float = 10.0) -> None:
        self.url = url
        self.timeout = timeout
        self._address = urllib.parse.urlsplit(url).netloc

    # -- for the app ---------------------------------------------------------------------------------------------------

    def act(self, operation: str, *, key: str = "", hold: float = 0.0, **parameters: object) -> dict[str, Any]:
        """Do something: ``charges``, ``refunds``, ``captures`` or ``transfers``.

        :param hold: seconds for which it is on its way.
        :raises NoAnswer: it may have been done.
        :raises Refused: the provider's error.
        """
        headers = {"X-Sent-At": repr(time.time()), "X-Hold": repr(hold)}
        if key:
            headers["Idempotency-Key"] = key
        done: dict[str, Any] = self._send("POST", f"/{operation}", parameters, headers)
        return done

    def charge(self, amount: int = 100, *, key: str = "", **parameters: object) -> dict[str, Any]:
        return self.act("charges", key=key, amount=amount, **parameters)

    def find(self, key: str, operation: str = "charges") -> dict[str, Any] | None:
        """What was done with a key, as far as the search shows it."""
        found = self._send("GET", f"/{operation}?{urllib.parse.urlencode({'key': key})}")
        return found[0] if found else None

    # -- for the tests -------------------------------------------------------------------------------------------------

    def control(self, **wanted: object) -> None:
        """``window``, ``search_delay``, ``faults``, ``advance``, ``forget``: see the app."""
        self._send("PUT", "/control", wanted)

    def fault(self, action: str, when: str = "after", **more: object) -> None:
        """Spoil the next request."""
        self.control(faults=[{"action": action, "when": when, **more}])

    def advance(self, seconds: float) -> None:
        self.control(advance=seconds)

    def done_for(self, reference: str, operation: str = "charges") -> list[dict[str, Any]]:
        """What was done with a reference, as far as the search shows it."""
        found: list[dict[str, Any]] = self._send(
            "GET", f"/{operation}?{urllib.parse.urlencode({'reference': reference})}"
        )
        return found

    def entries(self) -> list[dict[str, Any]]:
        """Everything that was done."""
        entries: list[dict[str, Any]] = self._send("GET", "/ledger")["entries"]
        return entries

    def calls(self) -> list[dict[str, Any]]:
        """Every request that was received, with its key and what became of it."""
        calls: list[dict[str, Any]] = self._send("GET", "/ledger")["calls"]
        return calls

    def is_idle(self) -> bool:
        """Whether every request that was received has come to its end."""
        return all(call["outcome"] != "began" for call in self.calls())

    def reset(self) -> None:
        self._send("DELETE", "/ledger")

    def _send(self, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None) -> Any:
        connection = http.client.HTTPConnection(self._address, timeout=self.timeout)
        try:
            connection.request(
                method,
                path,
                None if body is None else json.dumps(body),
                {"Content-Type": "application/json", **(headers or {})},
            )
            response = connection.getresponse()
            text = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswer(type(error).__name__) from None
        finally:
            connection.close()
        answer = json.loads(text) if text else None
        if response.status >= 400:
            raise Refused(response.status, answer["error"]["code"])
        return answer


class LocalClient:
    """The same on a ledger in this process, for many quick runs."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def charge(self, amount: int = 100, *, key: str = "", **parameters: object) -> dict[str, Any]:
        try:
            return self.ledger.act("charges", key, {"amount": amount, **parameters}).as_dict()
        except KeyReused:
            raise Refused(400, "idempotency_key_reused") from None
        except KeyInUse:
            raise Refused(409, "idempotency_key_in_use") from None

    def find(self, key: str, operation: str = "charges") -> dict[str, Any] | None:
        found = self.ledger.search(operation, key=key)
        return found[0].as_dict() if found else None

    def advance(self, seconds: float) -> None:
        self.ledger.advance(seconds)

    def entries(self) -> list[dict[str, Any]]:
        return [entry.as_dict() for entry in self.ledger.entries]
