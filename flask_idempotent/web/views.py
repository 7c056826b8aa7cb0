"""The decorator, and how its mark is found again on whatever a route was given."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, overload

from flask import current_app
from werkzeug.exceptions import HTTPException
from werkzeug.wrappers import Response

from ..call import Call
from ..errors import ConfigurationError, NothingHappened
from ..keywords import Keywords, keywords_from
from ..sagas import resume
from .outcome import own_status

if TYPE_CHECKING:
    from ..records import Settlement
    from ..settling import Orphan
    from .protection import Protection

__all__ = ["EXTENSION", "Deliver", "Mark", "chain_of", "idempotent", "marks_below", "marks_on", "protect_view"]

#: The key of ``app.extensions``.
EXTENSION = "idempotent"
_MARK = "_idempotent_mark"
_BELOW = "_idempotent_marks_above"

P = ParamSpec("P")
R = TypeVar("R", covariant=True)
C = TypeVar("C", bound="Callable[[Orphan], Settlement]")


class Mark:
    """What the decorator was told about one view. It is bound to an app, an endpoint and a method when it is used.

    :param view: what the mark stands on.
    :param declared: it comes from ``protect()``; a mark nearer to the work goes before it.
    """

    __slots__ = ("declared", "keywords", "name", "reconciler", "view")

    def __init__(
        self, keywords: Keywords, name: str, *, view: Callable[..., Any] | None = None, declared: bool = False
    ) -> None:
        self.keywords = keywords
        self.name = name
        self.view = view
        self.declared = declared
        #: Set by ``@view.reconciler``.
        self.reconciler: Callable[..., Any] | None = None

    def register_reconciler(self, reconciler: C) -> C:
        """``@create_charge.reconciler``: finds out what became of an attempt that ended without an answer.

        :raises ConfigurationError: it can't be called with an orphan, or there is one already.
        """
        if self.reconciler is not None or self.keywords.reconcile is not None:
            raise ConfigurationError(f"the view {self.name} has a reconciler already: keep one")
        try:
            fits = inspect.signature(reconciler).bind(object()) is not None and not inspect.iscoroutinefunction(
                reconciler
            )
        except (TypeError, ValueError):
            fits = False
        if not fits:
            raise ConfigurationError(
                f"the reconciler of {self.name} must be a plain function of one argument, the Orphan, that returns a "
                "Settlement"
            )
        self.reconciler = reconciler
        return reconciler


class Deliver(HTTPException):
    """Carries a kept answer past the decorators around the view; Flask returns it untouched.

    Of a stream it carries the status and the headers alone: whoever looks at the body would use it up, as Flask does.
    Completion puts the answer itself in place.
    """

    code = None

    def __init__(self, response: Response) -> None:
        if not response.is_sequence:
            response = type(response)(status=response.status, headers=response.headers)
        super().__init__(response=response)


class ProtectedView(Protocol[P, R]):
    """A view behind its protection."""

    __name__: str

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...

    def __get__(self, instance: Any, owner: Any = None, /) -> Callable[..., R]:
        """A method of a class-based view."""

    def reconciler(self, reconciler: C, /) -> C:
        """Register what finds out about an attempt that ended without an answer: ``(Orphan) -> Settlement``."""


@overload
def idempotent(view: Callable[P, R], /) -> ProtectedView[P, R]: ...


@overload
def idempotent(**keywords: object) -> Callable[[Callable[P, R]], ProtectedView[P, R]]: ...


def idempotent(view: Callable[..., Any] | None = None, /, **keywords: object) -> Callable[..., Any]:
    """Protect a view: the second arrival of a request gets the first result, and never runs the work again.

    It stands directly on the view, below the route and below every guard, with or without parentheses. The keywords
    are those of :class:`~flask_idempotent.keywords.Keywords`; each that is left out comes from the app's settings.

    :raises ConfigurationError: for a keyword that is unknown, of a wrong type or out of range.
    """
    checked = keywords_from(**keywords)
    return functools.partial(_mark, keywords=checked) if view is None else _mark(view, keywords=checked)


def _mark(view: Callable[..., Any], *, keywords: Keywords) -> Callable[..., Any]:
    if isinstance(view, type):
        raise ConfigurationError(
            f"@idempotent stands on the class {view.__name__}: put it on the methods, such as post(), or "
            "into decorators = [...]"
        )
    if not callable(view):
        raise ConfigurationError("@idempotent takes keywords only, such as @idempotent(scope='orders.create')")
    mark = Mark(keywords, getattr(view, "__qualname__", repr(type(view))), view=view)
    wrapper = protect_view(view, mark)
    # Found by verification on a view that was registered without its wrapper: the decorator stood above the route.
    if hasattr(view, "__dict__"):
        setattr(view, _BELOW, (*getattr(view, _BELOW, ()), mark))
    return wrapper


def protect_view(view: Callable[..., Any], mark: Mark) -> Callable[..., Any]:
    """The view, behind the protection that a mark asks for."""
    if inspect.iscoroutinefunction(view):

        @functools.wraps(view)
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            call = _begin(mark)
            if isinstance(call, Response):
                return call
            try:
                resume(call)
                value = await view(*args, **kwargs)
            except BaseException as error:
                _failed(call, error)
                raise
            return _returned(call, value)

    else:

        @functools.wraps(view)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            call = _begin(mark)
            if isinstance(call, Response):
                return call
            try:
                resume(call)
                value = view(*args, **kwargs)
            except BaseException as error:
                _failed(call, error)
                raise
            return _returned(call, value)

    setattr(wrapper, _MARK, mark)
    wrapper.reconciler = mark.register_reconciler  # type: ignore[attr-defined]
    return wrapper


def marks_on(view: Callable[..., Any] | None) -> Iterator[Mark]:
    """The marks on a view and on what it wraps, outermost first."""
    seen: set[int] = set()
    for function in chain_of(view):
        mark = vars(function).get(_MARK) if hasattr(function, "__dict__") else None
        if mark is not None and id(mark) not in seen:
            seen.add(id(mark))
            yield mark


def marks_below(view: Callable[..., Any]) -> Iterator[Mark]:
    """The marks that stand on a wrapper of this view which the view itself doesn't lead to."""
    own = {id(mark) for mark in marks_on(view)}
    for function in chain_of(view):
        for mark in getattr(function, _BELOW, ()):
            if id(mark) not in own:
                yield mark


def chain_of(view: Callable[..., Any] | None) -> Iterator[Callable[..., Any]]:
    """A function, what it wraps, what that wraps."""
    while view is not None:
        yield view
        view = getattr(view, "__wrapped__", None)


def _begin(mark: Mark) -> Call | Response | None:
    """Runs before the view. A call: the view runs for it; a response: it doesn't; ``None``: it runs unwatched."""
    protection: Protection | None = current_app.extensions.get(EXTENSION)
    if protection is None:
        raise ConfigurationError(
            f"the view {mark.name} is marked with @idempotent, but this app has no Idempotent extension: "
            "call Idempotent(app), or init_app(app)"
        )
    return protection.begin(mark)


def _returned(call: Call | None, value: Any) -> Any:
    if call is not None:
        call.returned = True
        call.own_status = own_status(value)
    return value


def _failed(call: Call | None, error: BaseException) -> None:
    if call is not None:
        if isinstance(error, NothingHappened):
            call.nothing_happened = True
        elif isinstance(error, HTTPException):
            call.own_status = error.response.status_code if error.response is not None else error.code
