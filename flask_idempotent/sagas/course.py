"""The course of one saga in one attempt: forward from the first step that isn't done, or back to the beginning."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TypeVar, cast

from ..call import Call
from ..errors import (
    CompensationFailed,
    EncryptionError,
    IdempotencyError,
    Indeterminate,
    NothingHappened,
    SagaFailed,
    TransientStepError,
)
from ..providers.base import Provider
from ..records import Step, StepStatus
from ..settling import IntentEngine
from .steps import NoItems, SagaStep, Unit, from_json, to_json, units_of

__all__ = ["DEFAULT", "Course"]

log = logging.getLogger("flask_idempotent")

E = TypeVar("E", bound=IdempotencyError)

#: What the services behind the steps are taken for where the route names no provider=: they know a key for 24 hours.
DEFAULT = Provider("saga", window=timedelta(hours=24), max_length=64)
#: What the names of rows begin with: of the one that heads a saga, and of its steps.
HEAD, STEP = "saga:", "step:"
#: The saga goes back, or has gone.
BACK = frozenset({StepStatus.UNDOING, StepStatus.UNDO_FAILED, StepStatus.UNDONE})


class _GaveUp(Exception):
    """A call failed for good: the row of its last try, and the error."""

    def __init__(self, row: Step, error: Exception) -> None:
        super().__init__()
        self.row = row
        self.error = error


class _Forgotten(Exception):
    """A call was begun so long ago that its key may not be known any more."""


class Course:
    """Everything is found from the rows: the state that the saga began with, each step, and which way it goes.

    The head's row says the way. It is turned in the same transaction in which the failure of a step is noted, before
    anything is undone; from then on nothing goes forward. While the saga is at no end, no answer is kept.

    :raises Indeterminate: the rows can't be read, or are another saga's.
    """

    def __init__(self, name: str, steps: Sequence[SagaStep], call: Call) -> None:
        self._name = name
        self._steps = steps
        self._call = call
        self._engine = cast("IntentEngine", call.engine)
        call.unfinished = f"the saga {name} has not come to an end"
        asked = time.monotonic()
        try:
            rows = {(row.name, row.item): row for row in self._engine.steps(call)}
        except EncryptionError:
            raise self._stays("its steps can't be read: is a Fernet key missing?") from None
        self._first_used = {place: asked - row.age_ms / 1000 for place, row in rows.items()}
        self._head = rows.pop((HEAD + name, 0), None)
        self._rows = rows
        if rows and self._head is None:
            raise self._changed()
        self._state = {} if self._head is None else from_json(self._head.result)

    def forward(self, state: dict[str, object]) -> dict[str, object]:
        """Call each step that isn't done. See ``Saga.run``."""
        if self._head is None:
            began = Step(HEAD + self._name, result=to_json(state, "the state of a saga"))
            self._begin(began)
            self._state = from_json(began.result)
        elif self._head.status in BACK:
            raise self._back()
        if self._head is None or self._head.status is not StepStatus.DONE:
            self._go_on()
        self._call.unfinished = ""
        return self._state

    def back_if_it_goes_back(self) -> None:
        """See ``Saga.resume``."""
        if self._head is None:
            self._call.unfinished = ""
        elif self._head.status in BACK:
            raise self._back()

    # -- forward -----------------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        seen = 0
        try:
            for unit, row in self._walk():
                seen += row is not None
                if row is None or row.status is not StepStatus.DONE:
                    if seen != len(self._rows):
                        raise self._changed()
                    self._do(unit, row)
                    seen += row is None
        except NoItems as error:
            raise self._fail(error.step, error) from error
        if seen != len(self._rows):
            raise self._changed()
        assert self._head is not None
        # The way is at its end: what the state is now doesn't hang on the steps that a later version has.
        self._keep(replace(self._head, status=StepStatus.DONE, result=to_json(self._state, "the state of a saga")))

    def _walk(self) -> Iterator[tuple[Unit, Step | None]]:
        """Every unit in order, with its row. Behind each its result is merged into the state."""
        for step in self._steps:
            for unit in units_of(step, self._state):
                yield unit, self._rows.get(_place(unit))
                row = self._rows.get(_place(unit))
                if row is not None and row.result:
                    self._state.update(from_json(row.result))

    def _do(self, unit: Unit, row: Step | None) -> None:
        step, first = unit.step, row is None
        try:
            row, result = self._send(step.act, unit, row or self._begin(Step(*_place(unit))), self._state, first=first)
        except _Forgotten:
            raise self._stays(f"step {step.name}: sending again is not safe, its key may be forgotten") from None
        except _GaveUp as gave_up:
            # What certainly did not happen needs no undoing; what was merely refused may have happened.
            certain = isinstance(gave_up.error, NothingHappened)
            status = StepStatus.UNDONE if certain else StepStatus.FAILED
            failed = replace(gave_up.row, status=status, reason=type(gave_up.error).__name__)
            raise self._fail(step, gave_up.error, failed) from gave_up.error
        self._keep(replace(row, status=StepStatus.DONE, result=result))

    def _fail(self, step: SagaStep, error: Exception, *rows: Step) -> SagaFailed:
        """Turn back, and go back."""
        assert self._head is not None
        reason = f"{step.name}: {type(error).__name__}"
        log.warning("record %s: the saga %s goes back: step %s", self._digest, self._name, reason)
        self._keep(replace(self._head, status=StepStatus.UNDOING, reason=reason), *rows)
        return self._back()

    # -- back --------------------------------------------------------------------------------------------------------

    def _back(self) -> SagaFailed:
        """Undo what was done, or may have been, in reverse order; what to raise then."""
        assert self._head is not None
        failed = self._head.reason.partition(":")[0]
        if self._head.status is not StepStatus.UNDONE:
            for unit, row in reversed(self._begun()):
                if row.status is not StepStatus.UNDONE and unit.step.undo is not None:
                    left = self._undo(unit.step.undo, unit, row)
                    if left is not None:
                        return left
            self._keep(replace(self._head, status=StepStatus.UNDONE))
        self._call.unfinished = ""
        self._call.rolled_back = f"rolled back: step {self._head.reason}"
        return self._refuse(SagaFailed(failed))

    def _begun(self) -> list[tuple[Unit, Step]]:
        """Every unit that has a row. The state is then what the last of them left."""
        assert self._head is not None
        self._state = from_json(self._head.result)
        found: list[tuple[Unit, Step]] = []
        try:
            for unit, row in self._walk():
                if row is None:
                    break
                found.append((unit, row))
        except NoItems:
            pass  # the step that the saga failed at
        if len(found) != len(self._rows):
            raise self._changed()
        return found

    def _undo(self, undo: Callable[..., object], unit: Unit, row: Step) -> SagaFailed | None:
        """Compensate one unit; what to raise where that can't be."""
        state = {**self._state, **(from_json(row.result) if row.result else {})}
        reason = row.reason
        if row.status is not StepStatus.UNDO_FAILED:
            first = row.status is not StepStatus.UNDOING
            if first:
                row = self._begin(replace(row, status=StepStatus.UNDOING, attempt=1, reason=""))
            try:
                row, _ = self._send(undo, unit, row, state, first=first)
            except _Forgotten:
                reason = "sending it again is not safe, its key may be forgotten"
            except _GaveUp as gave_up:
                row, reason = gave_up.row, type(gave_up.error).__name__
            else:
                self._keep(replace(row, status=StepStatus.UNDONE))
                return None
            assert self._head is not None
            failed = StepStatus.UNDO_FAILED
            self._keep(replace(self._head, status=failed), replace(row, status=failed, reason=reason))
            log.error(
                "record %s waits for a human: the compensation of step %s of the saga %s failed: %s",
                *(self._digest, unit.step.name, self._name, reason),
            )
        self._call.unfinished = f"for a human: the compensation of step {unit.step.name} failed: {reason}"
        return self._refuse(CompensationFailed(unit.step.name))

    # -- calls -------------------------------------------------------------------------------------------------------

    def _send(
        self, function: Callable[..., object], unit: Unit, row: Step, state: dict[str, object], *, first: bool
    ) -> tuple[Step, bytes]:
        """Call a step or a compensation, again and again with the same key while retries are left.

        :param first: it was never called before.
        :returns: its row, and its result as JSON.
        :raises _GaveUp: it failed for good.
        :raises _Forgotten: it may not be called again.
        """
        step, undoes = unit.step, row.status is StepStatus.UNDOING
        key = self._key(unit, "undo" if undoes else "do")
        while True:
            if not first and self._may_be_forgotten(row):
                raise _Forgotten
            first = False
            self._engine.held(self._call)
            # What a step does to its arguments would be gone after a crash, so it never counts.
            copies = from_json(to_json({"state": state, "item": unit.value}, "a state"))
            arguments = [copies["state"], key, *([copies["item"]] if step.over is not None else [])]
            try:
                result = function(*arguments)
                return row, to_json({} if result is None else result, f"what {step.name} returns")
            except IdempotencyError:
                raise  # of ours: the lease is lost, a store is away. It says nothing of the step.
            except TransientStepError as error:
                what = "the compensation of step" if undoes else "step"
                raise self._stays(f"{what} {step.name} is to be tried again") from error
            except Exception as error:
                if row.attempt > step.retries:
                    raise _GaveUp(row, error) from error
                row = replace(row, attempt=row.attempt + 1, reason=type(error).__name__)
                self._keep(row)

    def _key(self, unit: Unit, what: str) -> str:
        """The key of one call: from the record, the saga and the step alone, so that every attempt has the same."""
        assert self._call.claim is not None
        parts = (self._call.claim.scope.digest, self._name, what, unit.step.name, str(unit.item))
        return (self._call.policy.provider or DEFAULT).key("\0".join(("saga", *parts)), 0)

    def _may_be_forgotten(self, row: Step) -> bool:
        provider = self._call.policy.provider or DEFAULT
        age_ms = (time.monotonic() - self._first_used[row.name, row.item]) * 1000
        return not provider.deduplicates or age_ms > provider.window_ms

    # -- rows --------------------------------------------------------------------------------------------------------

    def _begin(self, row: Step) -> Step:
        """Note that something is about to be called for the first time."""
        self._first_used[row.name, row.item] = time.monotonic()
        self._keep(row, begun=True)
        return row

    def _keep(self, *rows: Step, begun: bool = False) -> None:
        self._engine.keep_steps(self._call, *rows, begun=begun)
        for row in rows:
            if row.name.startswith(HEAD):
                self._head = row
            else:
                self._rows[row.name, row.item] = row

    # -- what stops it -----------------------------------------------------------------------------------------------

    def _stays(self, reason: str) -> IdempotencyError:
        """It stays where it is, unknown, for a retry or for a human."""
        log.warning("record %s: the saga %s stays where it is: %s", self._digest, self._name, reason)
        self._call.unfinished = reason
        return self._refuse(Indeterminate())

    def _changed(self) -> IdempotencyError:
        return self._stays("its steps are not those that it was begun with: renamed, moved or taken away")

    def _refuse(self, error: E) -> E:
        self._engine.refuse(self._call, error, self._call.claim)
        return error

    @property
    def _digest(self) -> str:
        return self._call.claim.scope.digest[:12] if self._call.claim is not None else ""


def _place(unit: Unit) -> tuple[str, int]:
    return STEP + unit.step.name, unit.item
