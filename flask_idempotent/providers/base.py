"""A provider: how long it remembers a key, and how a key of ours becomes one of its."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ..errors import ConfigurationError

__all__ = ["BUILT_IN", "Provider", "resolve"]

#: The share of a window that is left for the call itself: a key is not handed out in the last tenth.
MARGIN = 0.1
_NAMESPACE = uuid.UUID("6f1f6a8e-6c0e-5a7e-9a36-0d6f3f6b2f10")


@dataclass(frozen=True, slots=True, init=False)
class Provider:
    """A service that acts outside of the app's database, and recognises a key that it has seen.

    :param name: stable: it is part of every key.
    :param window: seconds or ``timedelta`` for which it remembers a key.
    :param max_length: of a key, in characters.
    :param alphabet: what a key may consist of, as inside the brackets of a regular expression.
    :param search_delay: seconds or ``timedelta`` until its search shows what it did.
    :param derive: makes the key itself, from 64 hexadecimal digits and the step.
    :raises ConfigurationError: for values that can't be.
    """

    name: str
    window: timedelta
    max_length: int
    alphabet: str = "A-Za-z0-9_-"
    search_delay: timedelta = timedelta(0)
    derive: Callable[[str, int], str] | None = None
    #: Whether it recognises a key at all.
    deduplicates: bool = True

    def __init__(
        self,
        name: str,
        *,
        window: float | timedelta,
        max_length: int,
        alphabet: str = "A-Za-z0-9_-",
        search_delay: float | timedelta = 0,
        derive: Callable[[str, int], str] | None = None,
        deduplicates: bool = True,
    ) -> None:
        values = {
            "name": name,
            "window": _length(window),
            "max_length": max_length,
            "alphabet": alphabet,
            "search_delay": _length(search_delay),
            "derive": derive,
            "deduplicates": deduplicates,
        }
        for field, value in values.items():
            object.__setattr__(self, field, value)
        self._check()

    def _check(self) -> None:
        if not self.name:
            raise ConfigurationError("Provider: name must not be empty")
        if self.search_delay < timedelta(0) or self.window < timedelta(0) or (self.deduplicates and not self.window):
            raise ConfigurationError(f"Provider {self.name!r}: window and search_delay must be positive durations")
        if self.max_length < 32 and self.derive is None:
            raise ConfigurationError(
                f"Provider {self.name!r}: max_length={self.max_length} is too short for a key that nobody guesses; "
                "give derive=callable(digits, step)"
            )
        try:
            re.compile(f"[{self.alphabet}]+")
        except re.error as error:
            raise ConfigurationError(f"Provider {self.name!r}: alphabet is not the inside of [...]") from error

    @classmethod
    def none(cls, name: str) -> Provider:
        """A rail without deduplication, such as a bank transfer. What it did can only be looked up."""
        return cls(name, window=timedelta(0), max_length=255, deduplicates=False)

    @property
    def window_ms(self) -> int:
        """How long a key may be handed out again after its first use, with time left for the call."""
        return int(self.window.total_seconds() * 1000 * (1 - MARGIN))

    @property
    def search_delay_ms(self) -> int:
        return int(self.search_delay.total_seconds() * 1000)

    def key(self, material: str, step: int) -> str:
        """The provider's key: the same for the same material and step, in every process, and never the client's key.

        :raises ConfigurationError: ``derive`` made something that the provider would refuse.
        """
        digits = hashlib.sha256(
            f"flask-idempotent provider key 1\0{self.name}\0{material}\0{step}".encode()
        ).hexdigest()
        key = self.derive(digits, step) if self.derive is not None else f"{digits[: self.max_length - 4]}_{step}"
        if len(key) > self.max_length or not re.fullmatch(f"[{self.alphabet}]+", key):
            raise ConfigurationError(
                f"Provider {self.name!r}: the derived key is longer than {self.max_length} characters, or has others "
                f"than [{self.alphabet}]"
            )
        return key


def _length(value: float | timedelta) -> timedelta:
    if isinstance(value, timedelta):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigurationError("Provider: window and search_delay are seconds, such as 86400, or a timedelta")
    return timedelta(seconds=value)


def _paypal(digits: str, step: int) -> str:
    return str(uuid.uuid5(_NAMESPACE, f"{digits}_{step}"))


#: https://docs.stripe.com/api/idempotent_requests · https://docs.adyen.com/development-resources/api-idempotency ·
#: https://developer.paypal.com/api/rest/reference/idempotency
BUILT_IN: Mapping[str, Provider] = {
    "stripe": Provider("stripe", window=timedelta(hours=24), max_length=255),
    "adyen": Provider("adyen", window=timedelta(days=30), max_length=80),
    "paypal": Provider("paypal", window=timedelta(hours=6), max_length=38, derive=_paypal),
}


def resolve(provider: str | Provider, stated: Mapping[str, object]) -> Provider:
    """A provider by its name or as it is, with the window and search delay that ``IDEMPOTENT_PROVIDERS`` states.

    :raises ConfigurationError: for a name that nobody knows.
    """
    if isinstance(provider, str):
        if provider not in BUILT_IN:
            raise ConfigurationError(
                f"provider={provider!r} is not known ({', '.join(BUILT_IN)}): give a "
                "Provider(name, window=, max_length=)"
            )
        provider = BUILT_IN[provider]
    changes = stated.get(provider.name)
    if changes is None:
        return provider
    given: dict[str, Any] = dict(changes) if isinstance(changes, Mapping) else {"window": changes}
    try:
        return dataclasses.replace(provider, **given)
    except TypeError as error:
        raise ConfigurationError(
            f"IDEMPOTENT_PROVIDERS[{provider.name!r}]: state window and search_delay in seconds"
        ) from error
