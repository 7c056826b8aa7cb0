"""``Saga``: the steps of one piece of work, in order, and what undoes each of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar, cast, overload

from ..call import Call, held_call
from ..errors import ConfigurationError
from .course import Course
from .steps import SagaStep, require_fit

__all__ = ["Saga", "resume"]

F = TypeVar("F", bound=Callable[..., Any])


class Saga:
    """Several effects outside that belong together: all of them happen, or what happened is undone.

    Each step is called with a key of its own, the same in every attempt, and its result is committed before the next
    one. A retry of the request goes on at the first step that isn't done. A step that fails for good lets the done ones
    be compensated, in reverse order (H. Garcia-Molina, K. Salem, *Sagas*, 1987).

    :param name: stable: it is part of the keys. Up to 50 letters, digits and ``. _ -``.
    :raises ConfigurationError: for another name.
    """

    def __init__(self, name: str) -> None:
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9._-]{1,50}", name):
            raise ConfigurationError("Saga(name) takes up to 50 letters, digits and '.', '_', '-': Saga('checkout')")
        self.name = name
        self._steps: dict[str, SagaStep] = {}

    @overload
    def step(self, function: F, /) -> F: ...

    @overload
    def step(
        self, /, *, compensate: Callable[..., object] | None = None, retries: int = 0, over: str | None = None
    ) -> Callable[[F], F]: ...

    def step(
        self,
        function: Callable[..., Any] | None = None,
        /,
        *,
        compensate: Callable[..., object] | None = None,
        retries: int = 0,
        over: str | None = None,
    ) -> Any:
        """Add a step: ``(state, key) -> dict | None``, under the function's name, which is part of its key.

        ``state`` is a copy of what ``run()`` was given and of the results so far; ``key`` goes out with the call. The
        result is JSON, and is merged into the state of the next steps. An exception is a failure for good, after
        ``retries``; :class:`~flask_idempotent.TransientStepError` leaves the saga where it is.

        :param compensate: what undoes it, with arguments like the step's and a key of its own; the step's own results
            are in ``state``, unless it failed. ``None``: there is nothing to undo.
        :param retries: how many more times it is called at once, with the same key, after an exception; its
            compensation likewise.
        :param over: the member of the state that holds a list: the step runs for each item, as ``(state, key, item)``.
        :raises ConfigurationError: the function, or what it is said to be, can't be a step.
        """
        if function is None:
            return lambda function: self._add(function, compensate, retries, over)
        return self._add(function, compensate, retries, over)

    def run(self, state: dict[str, Any]) -> dict[str, Any]:
        """Go through the steps, from the first that isn't done. Once in a view that has ``saga=`` this saga.

        :param state: what the steps work on, as JSON. It is committed with the first attempt; a later one goes on with
            that, whatever it brings itself.
        :returns: the state, with the results of all steps.
        :raises SagaFailed: a step failed for good, now or in an earlier attempt. ``ROLLED_BACK``: all is undone;
            ``COMPENSATION_FAILED``: a human decides what is left.
        :raises Indeterminate: it stays at a step: that said so, or it may not be sent again.
        :raises LeaseLost: another request holds the key by now, or may.
        :raises StoreUnavailable: a step could not be noted.
        :raises NotProtected: there is no protected view around it.
        :raises ConfigurationError: the view has another saga, or none; or it was run already.
        :raises TypeError: the state is no dict, or no JSON.
        """
        call = held_call(f"the saga {self.name!r}")
        if call.policy.saga is not self:
            raise ConfigurationError(
                f"{call.endpoint} runs the saga {self.name!r} without saying so: set durable='intent' and saga= on it"
            )
        if call.saga_ran:
            raise ConfigurationError(f"{call.endpoint} runs the saga {self.name!r} twice: once is for a whole request")
        call.saga_ran = True
        return self._course(call).forward(state)

    def resume(self, call: Call) -> None:
        """Before the view of a retry: where the saga goes back, it goes on with that, and the view doesn't run.

        :raises SagaFailed: that came to its end.
        """
        self._course(call).back_if_it_goes_back()

    def _course(self, call: Call) -> Course:
        if not self._steps:
            raise ConfigurationError(f"the saga {self.name!r} has no steps: add functions with @….step(compensate=…)")
        return Course(self.name, tuple(self._steps.values()), call)

    def _add(self, function: F, undo: Callable[..., object] | None, retries: int, over: str | None) -> F:
        name = getattr(function, "__name__", "")
        what = f"step {name!r} of the saga {self.name!r}"
        if not re.fullmatch(r"[A-Za-z0-9_]{1,50}", name):
            raise ConfigurationError(f"{what}: its function needs a name of up to 50 letters, digits and '_'")
        if name in self._steps:
            raise ConfigurationError(f"{what} is there already: give each step's function a name of its own")
        if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
            raise ConfigurationError(f"{what}: retries= is a number of further calls, from 0 on")
        if over is not None and (not isinstance(over, str) or not over):
            raise ConfigurationError(f"{what}: over= is the name of a list in the state, such as over='items'")
        arguments = 2 if over is None else 3
        require_fit(function, arguments, what)
        if undo is not None:
            require_fit(undo, arguments, f"the compensation of {what}")
        self._steps[name] = SagaStep(name, function, undo, retries, over)
        return function


def resume(call: Call | None) -> None:
    """Before a view runs: see :meth:`Saga.resume`. A first attempt has nothing to go on with."""
    if call is not None and call.claim is not None and call.policy.saga is not None and call.attempt > 1:
        cast("Saga", call.policy.saga).resume(call)
