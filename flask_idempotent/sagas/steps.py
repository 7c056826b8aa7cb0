"""What a step of a saga is, and what it may take and give."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import ConfigurationError

__all__ = ["NoItems", "SagaStep", "Unit", "from_json", "require_fit", "to_json", "units_of"]


@dataclass(frozen=True, slots=True)
class SagaStep:
    """One step: what it does, what undoes it, and how often it is called again after an error."""

    name: str
    act: Callable[..., object]
    undo: Callable[..., object] | None
    retries: int
    #: The member of the state that holds a list: the step runs for each of its items.
    over: str | None


@dataclass(frozen=True, slots=True)
class Unit:
    """What is done, remembered and undone as one: a step, or a step for one item."""

    step: SagaStep
    item: int = 0
    value: object = None


class NoItems(TypeError):
    """The state has no list under the name that a step runs over."""

    def __init__(self, step: SagaStep) -> None:
        super().__init__(f"step {step.name!r} runs over {step.over!r}, and the state has no list of that name")
        self.step = step


def units_of(step: SagaStep, state: dict[str, object]) -> list[Unit]:
    """The units of a step, in order.

    :raises NoItems: there is nothing to run over.
    """
    if step.over is None:
        return [Unit(step)]
    items = state.get(step.over)
    if not isinstance(items, list):
        raise NoItems(step)
    return [Unit(step, number, value) for number, value in enumerate(items)]


def to_json(value: object, what: str) -> bytes:
    """A state or a result, as it is kept.

    :raises TypeError: it is no dict; also that, or ``ValueError``, where a member is no JSON value.
    """
    if not isinstance(value, dict):
        raise TypeError(f"{what} must be a dict, not {type(value).__name__}")
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def from_json(text: bytes) -> dict[str, object]:
    found: dict[str, object] = json.loads(text)
    return found


def require_fit(function: object, arguments: int, what: str) -> None:
    """See that a function can be called as a step is.

    :raises ConfigurationError: it can't.
    """
    takes = "(state, key, item)" if arguments == 3 else "(state, key)"
    try:
        if not callable(function) or inspect.iscoroutinefunction(function):
            raise TypeError
        inspect.signature(function).bind(*range(arguments))
    except (TypeError, ValueError):
        raise ConfigurationError(f"{what} must be a plain function of {takes} that returns a dict or None") from None
