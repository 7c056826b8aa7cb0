"""Which routes of an app are protected, and how: marks and declarations, bound to the app, and checked."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from flask import Blueprint, Flask

from ..engine import Engine
from ..errors import ConfigurationError
from ..keywords import UNSET
from ..policy import Policy, bind_policy, policy_warnings
from ..request.fingerprint import Fingerprinter
from ..settings import Settings
from .views import Mark, chain_of, marks_below, marks_on, protect_view

__all__ = ["Bound", "Declaration", "Routes"]

log = logging.getLogger("flask_idempotent")

#: Packages whose decorators decide who may call. Below a mark they would be asked too late.
GUARDS = (
    "flask_login",
    "flask_jwt_extended",
    "flask_httpauth",
    "flask_security",
    "flask_principal",
    "flask_praetorian",
    "flask_wtf.csrf",
    "flask_limiter",
    "authlib",
)


@dataclass(frozen=True, slots=True)
class Declaration:
    """Protection of views that can't be decorated: an endpoint, a blueprint, or all of an app."""

    target: str | Blueprint | Flask
    mark: Mark
    #: The guards of these views are hooks, not decorators: protection may stand outside of the decorators.
    guarded_by_hooks: bool


@dataclass(frozen=True, slots=True)
class Bound:
    """A mark, bound to one endpoint of the app."""

    policy: Policy
    endpoint: str
    engine: Engine
    fingerprinter: Fingerprinter
    #: Whose counter of new keys is used: the route's own where it has a limit of its own, else the app's.
    counter: str


@dataclass(frozen=True, slots=True)
class Found:
    """The marks of an endpoint, valid while the view function is the same and nothing more was declared.

    ``by_method`` holds those on the methods of a class-based view, ``mark`` that of all others.
    """

    view: Callable[..., Any] | None
    declared: int
    mark: Mark | None = None
    by_method: dict[str, Mark] = field(default_factory=dict)


class Routes:
    """The protected routes of one app. Look-ups are cached by endpoint; a view that is swapped is looked at anew.

    :param engine_for: the engine of a policy; raises where the app lacks what the policy needs.
    """

    def __init__(
        self,
        app: Flask,
        settings: Settings,
        declarations: list[Declaration],
        engine_for: Callable[[Policy, str], Engine],
    ) -> None:
        self._app = app
        self._settings = settings
        self._declarations = declarations
        self._engine_for = engine_for
        self._found: dict[str, Found] = {}
        self._bound: dict[tuple[Mark, str], Bound] = {}

    def mark_of(self, endpoint: str, method: str) -> Mark | None:
        """The mark nearest to what a request will run; ``None`` for a route that nobody marked."""
        found = self._find(endpoint)
        return found.by_method.get(method, found.mark) if found.by_method else found.mark

    def class_mark(self, endpoint: str) -> Mark | None:
        """The mark around a class-based view some of whose methods have nearer marks of their own."""
        found = self._find(endpoint)
        return found.mark if found.by_method else None

    def bind(self, mark: Mark, endpoint: str) -> Bound:
        """A mark's policy for one endpoint.

        :raises ConfigurationError: its keywords and the settings contradict each other.
        """
        bound = self._bound.get((mark, endpoint))
        if bound is None:
            policy = bind_policy(mark.keywords, self._settings, where=f"view {endpoint!r}")
            fingerprinter = Fingerprinter(
                policy.fields,
                hmac_keys=self._settings.fingerprint_keys or (),
                form_field=policy.form_field,
                form_ignore=policy.form_ignore,
            )
            name = policy.scope or endpoint
            bound = self._bound[mark, endpoint] = Bound(
                policy,
                name,
                self._engine_for(policy, endpoint),
                fingerprinter,
                counter="" if mark.keywords.rate_limit is UNSET else name,
            )
        return bound

    def check(self) -> tuple[list[str], list[Policy]]:
        """Look at every view of the app: the problems, one text each, and the policies. Warnings go to the log."""
        problems: list[str] = []
        warnings: list[str] = []
        policies: list[Policy] = []
        served: dict[Mark, set[str]] = {}
        classes: dict[Mark, type | None] = {}
        hidden: dict[Mark, tuple[str, set[str]]] = {}
        for endpoint in list(self._app.view_functions):
            try:
                found = self._find(endpoint)
            except ConfigurationError as error:
                problems.append(str(error))
                continue
            methods = self._methods(endpoint)
            if found.view is not None and found.mark is not None:
                classes[found.mark] = _view_class(found.view)
            for mark, reached in _reach(found, methods):
                served.setdefault(mark, set()).update(reached)
                try:
                    policy = self.bind(mark, endpoint).policy
                except ConfigurationError as error:
                    problems.append(str(error))
                else:
                    problems += _unsettled(endpoint, policy, mark)
                    policies.append(policy)
                    warnings.extend(policy_warnings(policy, self._settings, where=f"view {endpoint!r}"))
            if found.mark is None and not found.by_method and found.view is not None:
                hidden.update((mark, (endpoint, methods)) for mark in marks_below(found.view))
        problems += _unreached(served) + _above_the_route(hidden, served) + self._idle(served)
        warnings += [
            f"view {endpoint!r} is the bare function of a view that is protected on another route: nothing protects it "
            "here"
            for mark, (endpoint, methods) in hidden.items()
            if mark in served and methods & mark.keywords.methods
        ]
        for mark in served:
            wrong, doubtful = _below(mark, classes.get(mark), served[mark] & mark.keywords.methods)
            problems += wrong
            warnings += doubtful
        for warning in warnings:
            log.warning("%s", warning)
        return problems, policies

    def _find(self, endpoint: str) -> Found:
        view = self._app.view_functions.get(endpoint)
        found = self._found.get(endpoint)
        if found is None or found.view is not view or found.declared != len(self._declarations):
            found = self._found[endpoint] = self._look(endpoint, view)
        return found

    def _look(self, endpoint: str, view: Callable[..., Any] | None) -> Found:
        count = len(self._declarations)
        if view is None:
            return Found(view, count)
        mark = next(marks_on(view), None) or _mark_on_dispatch(view)
        by_method = dict(_marks_of_class(view))
        if mark is not None and not mark.declared:
            return Found(view, count, mark, by_method)
        declaration = self._nearest(endpoint)
        declared = self._methods(endpoint) & declaration.mark.keywords.methods if declaration is not None else set()
        if declaration is None or not declared - by_method.keys():
            return Found(view, count, None, by_method)
        if mark is not declaration.mark:
            if not declaration.guarded_by_hooks:
                _require_bare(endpoint, view, declared - by_method.keys())
            view = protect_view(view, declaration.mark)
            self._app.view_functions[endpoint] = view
        return Found(view, count, declaration.mark, by_method)

    def _nearest(self, endpoint: str) -> Declaration | None:
        """The last declaration of the endpoint, else of its innermost blueprint, else of the app."""
        name = endpoint
        targets: list[object] = [endpoint]
        while "." in name:
            name = name.rpartition(".")[0]
            targets += [self._app.blueprints.get(name), name]
        targets.append(self._app)
        for target in targets:
            for declaration in reversed(self._declarations):
                if declaration.target is target or (
                    isinstance(target, str) and isinstance(declaration.target, str) and declaration.target == target
                ):
                    return declaration
        return None

    def _methods(self, endpoint: str) -> set[str]:
        return {method for rule in self._app.url_map.iter_rules(endpoint) for method in rule.methods or ()}

    def _idle(self, served: dict[Mark, set[str]]) -> list[str]:
        """Declarations by name that protect nothing here: a slip of the pen would leave a view unprotected."""
        known = {*self._app.view_functions, *self._app.blueprints}
        return [
            f"protect({declaration.target!r}): this app has no such endpoint or blueprint. Its endpoints are listed by "
            "`flask routes`"
            for declaration in self._declarations
            if isinstance(declaration.target, str)
            and declaration.target not in known
            and declaration.mark not in served
        ]


def _marks_of_class(view: Callable[..., Any]) -> Iterator[tuple[str, Mark]]:
    """The marks on the methods of a class-based view."""
    view_class = _view_class(view)
    for method in getattr(view_class, "methods", None) or ():
        handler = getattr(view_class, method.lower(), None)
        mark = next(marks_on(handler), None) if handler is not None else None
        if mark is not None:
            yield method.upper(), mark


def _mark_on_dispatch(view: Callable[..., Any]) -> Mark | None:
    """The mark on the one method of a class-based view that answers all HTTP methods."""
    return next(marks_on(getattr(_view_class(view), "dispatch_request", None)), None)


def _view_class(view: Callable[..., Any] | None) -> type | None:
    for function in chain_of(view):
        view_class = getattr(function, "view_class", None)
        if isinstance(view_class, type):
            return view_class
    return None


def _reach(found: Found, methods: set[str]) -> Iterator[tuple[Mark, set[str]]]:
    """Each mark of an endpoint, with the methods that reach it."""
    if found.mark is not None:
        yield found.mark, methods - found.by_method.keys()
    for method, mark in found.by_method.items():
        yield mark, {method} & methods


def _require_bare(endpoint: str, view: Callable[..., Any], methods: set[str]) -> None:
    """A declared protection stands around all that was registered: a guard inside would be asked too late."""
    view_class = _view_class(view)
    if getattr(view_class, "decorators", None) or _decorators(view, view_class, methods):
        raise ConfigurationError(
            f"view {endpoint!r} is decorated, and protect() would stand outside of its decorators: a replay would come "
            "before a guard among them. Put @idempotent on the view itself, below its guards; or, if all its guards "
            "are hooks, say so with protect(..., guards='hooks')"
        )


def _decorators(
    view: Callable[..., Any], view_class: type | None, methods: Iterable[str], *, above: Mark | None = None
) -> list[Callable[..., Any]]:
    """What stands around the work that a view does: on the view, or on what a class-based view runs for these methods.

    :param above: leave out what carries this mark, and so stands around it.
    """
    found: list[Callable[..., Any]] = []
    parts = [view]
    if view_class is not None:
        around = getattr(view_class, "method_decorators", None) or ()  # of Flask-RESTful and Flask-RESTX
        found += chain.from_iterable(around.values()) if isinstance(around, Mapping) else around
        handlers = [getattr(view_class, name, None) for name in ("dispatch_request", *map(str.lower, methods))]
        parts += [handler for handler in handlers if handler is not None and above not in set(marks_on(handler))]
    for part in parts:
        found += list(chain_of(part))[:-1]
    return found


def _unsettled(endpoint: str, policy: Policy, mark: Mark) -> list[str]:
    """An ``intent`` route must say who finds out about an attempt that ended without an answer."""
    reconciler = mark.reconciler or mark.keywords.reconcile
    if policy.durable != "intent":
        stated = {"a reconciler": reconciler is not None, "settle_after=": mark.keywords.settle_after is not UNSET}
        return [
            f"view {endpoint!r} has {what}, but is not durable='intent': after a crash it would run again unasked. Set "
            "durable='intent', or take it away"
            for what, is_there in stated.items()
            if is_there
        ]
    if policy.saga is not None:
        if mark.reconciler is None:
            return []
        return [f"view {endpoint!r} has a reconciler and saga=, whose recovery is to resume: take the reconciler away"]
    if reconciler or policy.recovery in ("manual", "abandon"):
        return []
    return [
        f"view {endpoint!r}: durable='intent' needs a reconciler, which finds out what became of an attempt that ended "
        "without an answer: register one with @view.reconciler or reconcile=, or state recovery='manual' or 'abandon', "
        "or saga="
    ]


def _unreached(served: dict[Mark, set[str]]) -> list[str]:
    problems = []
    for mark, methods in served.items():
        wanted = mark.keywords.methods
        if not mark.declared and not methods & wanted:
            problems.append(
                f"the view {mark.name} is marked with @idempotent, but its routes have none of the protected methods "
                f"({', '.join(sorted(wanted))}): add methods=[...] to the route or to @idempotent, or take the mark "
                "away"
            )
    return problems


def _above_the_route(hidden: dict[Mark, tuple[str, set[str]]], served: dict[Mark, set[str]]) -> list[str]:
    return [
        f"the view {endpoint!r} is not protected: @idempotent stands above its route. Put it directly on the view, "
        "below the route and below every guard"
        for mark, (endpoint, methods) in hidden.items()
        if mark not in served and methods & mark.keywords.methods
    ]


def _below(mark: Mark, view_class: type | None, methods: set[str]) -> tuple[list[str], list[str]]:
    """Decorators between a mark and its view. A guard there would be asked after a replay was given.

    :param view_class: the class behind the view that carries the mark.
    :param methods: those that reach the mark.
    """
    wrong: list[str] = []
    doubtful: list[str] = []
    decorators = [] if mark.view is None else _decorators(mark.view, view_class, methods, above=mark)
    if mark.declared or not decorators:
        return wrong, doubtful
    modules = [getattr(function, "__globals__", {}).get("__name__", "") for function in decorators]
    guards = sorted({guard for guard in GUARDS for module in modules if f"{module}.".startswith(f"{guard}.")})
    if guards:
        wrong.append(
            f"the view {mark.name}: @idempotent stands above a decorator of {', '.join(guards)}, so a replay would be "
            "given before that is asked. Put @idempotent directly on the view, below every guard"
        )
    else:
        doubtful.append(
            f"the view {mark.name}: @idempotent stands above another decorator. If that one refuses callers, a "
            "replay is given before it is asked: put @idempotent directly on the view, below every guard"
        )
    return wrong, doubtful
