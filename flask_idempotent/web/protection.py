"""One app's protection: what happens to a marked request, from its opening to its end."""

from __future__ import annotations

import dataclasses
import logging
import secrets
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from flask import Flask, after_this_request, request
from werkzeug.exceptions import InternalServerError
from werkzeug.wrappers import Response

from ..call import ENVIRON_KEY, Call
from ..engine import Engine, Replay
from ..errors import (
    ConfigurationError,
    IdempotencyError,
    MissingKey,
    PrincipalRequired,
    StoreUnavailable,
    UnreadableRecord,
)
from ..keywords import UNSET
from ..policy import Policy, bind_policy, finished_state, policy_warnings
from ..records import BodyKind, Claim, RateLimit, StoredResponse
from ..request import key as keys
from ..request import scope as scopes
from ..request.fingerprint import Fingerprinter
from ..response.snapshot import EXPIRES_HEADER, STATUS_HEADER, http_expires, restore, snapshot
from ..settings import Settings
from .outcome import Fate, Outcome, decide, without_answer
from .session import SharedSession
from .views import Mark, marks_below, marks_on

__all__ = ["Loaders", "Protection"]

log = logging.getLogger("flask_idempotent")

Loader = Callable[[], object]

#: What werkzeug's own converters make of a part of a path.
PLAIN = (str, int, float, uuid.UUID)


@dataclass(slots=True)
class Loaders:
    """Who calls. Shared by the apps of one extension object, and read at each request: it may be told late."""

    principal: Loader | None = None
    tenant: Loader | None = None


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
    """The marks of an endpoint, valid while the view function is the same. ``by_method`` is for class-based views."""

    view: Callable[..., Any] | None
    mark: Mark | None = None
    by_method: dict[str, Mark] = field(default_factory=dict)


class Protection:
    """The state of the extension in one app."""

    def __init__(
        self,
        app: Flask,
        settings: Settings,
        engine: Engine,
        loaders: Loaders,
        *,
        durable_engine: Engine | None = None,
        shared_session: SharedSession | None = None,
    ) -> None:
        self.settings = settings
        self.engine = engine
        self._durable_engine = durable_engine
        self._shared_session = shared_session
        self._app = app
        self._loaders = loaders
        self._found: dict[str, Found] = {}
        self._bound: dict[tuple[Mark, str], Bound] = {}
        #: Held here for the signal that calls it.
        self.on_command: Callable[..., None] | None = None
        self._verified = False
        self._verifying = threading.Lock()

    # -- opening ---------------------------------------------------------------------------------------------------

    def open_request(self, endpoint: str | None, values: object) -> None:
        """Before every other hook: opens the call of a marked endpoint, and refuses a malformed key."""
        if endpoint is None:
            return
        found = self._find(endpoint)
        mark = found.by_method.get(request.method) if found.by_method else found.mark
        if mark is not None:
            self._open(mark)

    def call_for(self, mark: Mark) -> Call | None:
        """The call that a wrapper works for; opened late where a decorator hid the mark from the hook."""
        call: Call | None = request.environ.get(ENVIRON_KEY)
        return call if call is not None else self._open(mark)

    def _find(self, endpoint: str) -> Found:
        view = self._app.view_functions.get(endpoint)
        found = self._found.get(endpoint)
        if found is None or found.view is not view:
            found = self._found[endpoint] = _find_marks(view)
        return found

    def _open(self, mark: Mark) -> Call | None:
        bound = self._bind(mark, request.endpoint or "")
        policy = bound.policy
        if request.method not in policy.methods or policy.mode == "off":
            return None
        call = Call(policy, bound.endpoint, bound.engine, bound.fingerprinter, bound.counter)
        request.environ[ENVIRON_KEY] = call
        after_this_request(self.complete)
        if policy.key is None:
            try:
                call.header_key = keys.parse_header(request.headers.getlist(policy.header))
                if call.header_key is not None:
                    keys.check_strength(call.header_key, policy.min_key_bits)
            except IdempotencyError as error:
                raise call.engine.refuse(call, error) from None
        return call

    def _bind(self, mark: Mark, endpoint: str) -> Bound:
        bound = self._bound.get((mark, endpoint))
        if bound is None:
            policy = bind_policy(mark.keywords, self.settings, where=f"view {endpoint!r}")
            fingerprinter = Fingerprinter(
                policy.fields,
                hmac_keys=self.settings.fingerprint_keys or (),
                form_field=policy.form_field,
                form_ignore=policy.form_ignore,
            )
            bound = self._bound[mark, endpoint] = Bound(
                policy,
                policy.scope or endpoint,
                self._engine_for(policy, endpoint),
                fingerprinter,
                counter="" if mark.keywords.rate_limit is UNSET else policy.scope or endpoint,
            )
        return bound

    def _engine_for(self, policy: Policy, endpoint: str) -> Engine:
        if not policy.durable:
            return self.engine
        if self._durable_engine is None:
            raise ConfigurationError(
                f"view {endpoint!r}: durable={policy.durable!r} needs the app's database: give Flask-SQLAlchemy's object "
                "to init_app(app, db=db)"
            )
        return self._durable_engine

    # -- around the view -------------------------------------------------------------------------------------------

    def enter(self, call: Call) -> Response | None:
        """Runs where the guards have let the request through. ``None``: run the view; else the answer it was given.

        :raises IdempotencyError: the refusal; nothing is held then.
        """
        try:
            claim = self._make_claim(call)
        except IdempotencyError as error:
            raise call.engine.refuse(call, error) from None
        if claim is None:
            self._unprotected(call)
            return None
        if call.policy.durable == "transaction" and self._shared_session is not None:
            claim = dataclasses.replace(claim, transaction=self._shared_session.prepare())
        try:
            replay = call.engine.claim(call, claim)
        except UnreadableRecord as error:
            raise call.engine.refuse(call, error, claim) from None
        except StoreUnavailable as error:
            if call.policy.on_store_error == "open":
                log.warning("the store is away, and %s runs without protection", call.endpoint)
                self._unprotected(call)
                return None
            raise call.engine.refuse(call, error, claim) from None
        if replay is None:
            call.entered = True
            return None
        call.replay = self._replayed(replay)
        return call.replay

    def _unprotected(self, call: Call) -> None:
        call.entered = call.unprotected = True

    def _make_claim(self, call: Call) -> Claim | None:
        """Who asks for what; ``None`` where no key came and none is needed. Computed once a request."""
        policy, settings, loaders = call.policy, self.settings, self._loaders
        if policy.key is not None:
            key: str | None = keys.check_derived(policy.key(request))
        else:
            key = call.header_key
        if key is None:
            if policy.required:
                raise MissingKey()
            return None
        principal = scopes.identify(
            request, loader=loaders.principal, login_manager=hasattr(self._app, "login_manager")
        )
        tenant = scopes.text_of(loaders.tenant(), what="the tenant loader") if loaders.tenant else None
        prefix = settings.key_prefix
        binding = ""
        if policy.bind is not None:
            bound_to = scopes.text_of(policy.bind(request), what="the bind callable")
            if bound_to is None:
                raise PrincipalRequired("There is no session or token that this request could be bound to.")
            binding = scopes.binding_digest(prefix, tenant, bound_to)
        if principal is None and policy.anonymous == "refuse":
            raise PrincipalRequired()
        isolate = principal if policy.isolate else None
        return Claim(
            scope=scopes.make_scope(prefix, tenant, call.endpoint, key, isolate_principal=isolate),
            token=secrets.token_hex(16),
            fingerprints=call.fingerprinter.compute(
                request, endpoint_scope=call.endpoint, path_variables=self._path_variables()
            ),
            principal=scopes.principal_digest(prefix, tenant, principal),
            binding=binding,
            lease_ms=policy.lease_ms,
            skew_ms=policy.skew_ms,
            max_processing_ms=policy.max_processing_ms,
            ttl_ms=policy.ttl_ms,
            tombstone_ms=policy.tombstone_ms,
            rate=policy.rate
            and RateLimit(
                policy.rate.limit,
                policy.rate.window_ms,
                scopes.bucket_digest(prefix, tenant, principal, request.remote_addr, counter=call.counter),
            ),
        )

    def _path_variables(self) -> Mapping[str, object]:
        """What the URL says, also where a hook took a part of it (a language, a tenant) out of the view's arguments, or
        put an object in its place."""
        found: dict[str, object] = request.view_args or {}
        rule = request.url_rule
        if rule is None or (rule.arguments == found.keys() and all(isinstance(v, PLAIN) for v in found.values())):
            return found
        adapter = self._app.create_url_adapter(request)
        return found if adapter is None else adapter.match()[1]

    # -- the end ---------------------------------------------------------------------------------------------------

    def complete(self, response: Response) -> Response:
        """Before all other after-request work: keeps the answer, or gives the claim back. Never raises an error."""
        call: Call | None = request.environ.get(ENVIRON_KEY)
        if call is None:
            return response
        if call.replay is not None:
            # A decorator above may have made something else of it, but not where it refuses.
            refused = response.status_code in (401, 403, 429) and response.status_code != call.replay.status_code
            return response if refused else call.replay
        if not call.entered or call.settled:
            return response
        if call.unprotected:
            response.headers[STATUS_HEADER] = "unprotected"
            return response
        try:
            return self._settle(call, response)
        except Exception as error:
            return self._answer_error(error)

    def settle_open(self, call: Call) -> None:
        """The net, behind everything: ends what an exception, or an exit, carried past the completion."""
        if not call.entered or call.settled or call.claim is None:
            return
        own = call.own_status
        try:
            if call.returned and own is not None and call.policy.keeps(own):
                self._end(call, without_answer(call, own, "no answer reached the client"))
            else:
                call.engine.release(call, reason="the request ended without an answer")
        except IdempotencyError:
            # Another request holds the key by now; there is nobody left to tell.
            call.settled = True

    def _settle(self, call: Call, response: Response) -> Response:
        outcome = decide(call, response)
        if outcome.fate is not Fate.KEEP:
            self._end(call, outcome)
            return response
        try:
            stored = snapshot(response, bound=call.policy.max_body, replay_header=call.policy.replay_header)
        except Exception:
            self._end(call, without_answer(call, outcome.status, "the body broke off"))
            raise
        # A handler's answer to an exception is kept; what the view did until then is not, where that can be helped.
        undo = not call.returned and call.own_status is None
        settled = call.engine.complete(call, finished_state(outcome.status), stored, undo=undo)
        if settled.replay is not None:
            return self._replayed(settled.replay, marked=not settled.ours)
        if settled.expires_at is not None:
            response.headers[EXPIRES_HEADER] = http_expires(settled.expires_at)
        return response

    def _end(self, call: Call, outcome: Outcome) -> None:
        """An end without an answer to keep: given back, or kept that the work was done."""
        if outcome.fate is Fate.RELEASE:
            call.engine.release(call, reason=outcome.reason)
        else:
            done = StoredResponse(outcome.status, (), None, BodyKind.NONE)
            call.engine.complete(call, finished_state(outcome.status), done, reason=outcome.reason)

    def _replayed(self, replay: Replay, *, marked: bool = True) -> Response:
        response = restore(replay.response, self._app.response_class)
        if marked:
            response.headers[self.settings.replay_header] = "true"
        response.headers[EXPIRES_HEADER] = http_expires(replay.expires_at)
        return response

    def _answer_error(self, error: Exception) -> Response:
        """What completion answers instead of raising: a raised error would run every after-request hook twice."""
        if not isinstance(error, IdempotencyError):
            self._app.log_exception(sys.exc_info())
            error = InternalServerError(original_exception=error)
        return self._app.make_response(self._app.handle_user_exception(error))

    # -- verification ----------------------------------------------------------------------------------------------

    def verify_once(self) -> None:
        """By the first call of the app: see :meth:`verify`. A failure is told to every call, until it is mended."""
        if self._verified:
            return
        with self._verifying:
            if not self._verified:
                self.verify()

    def verify(self) -> None:
        """Check every marked view against the settings and its route.

        :raises ConfigurationError: naming each view that would not be protected, and the fix.
        """
        problems: list[str] = []
        warnings: list[str] = []
        served: dict[Mark, set[str]] = {}
        hidden: dict[Mark, tuple[str, set[str]]] = {}
        for endpoint, view in self._app.view_functions.items():
            methods = {method for rule in self._app.url_map.iter_rules(endpoint) for method in rule.methods or ()}
            for mark, reached in _reach(view, methods):
                served.setdefault(mark, set()).update(reached)
                try:
                    policy = self._bind(mark, endpoint).policy
                except ConfigurationError as error:
                    problems.append(str(error))
                else:
                    warnings.extend(policy_warnings(policy, self.settings, where=f"view {endpoint!r}"))
            if not any(marks_on(view)):
                hidden.update((mark, (endpoint, methods)) for mark in marks_below(view))
        for mark, methods in served.items():
            if not methods & mark.keywords.methods:
                problems.append(
                    f"the view {mark.name} is marked with @idempotent, but its routes have none of the protected "
                    f"methods ({', '.join(sorted(mark.keywords.methods))}): add methods=[...] to the route or to "
                    "@idempotent, or take the mark away"
                )
        for mark, (endpoint, methods) in hidden.items():
            if mark not in served and methods & mark.keywords.methods:
                problems.append(
                    f"the view {endpoint!r} is not protected: @idempotent stands above its route. Put it directly on "
                    "the view, below the route and below every guard"
                )
        if self._shared_session is not None and any(bound.policy.durable for bound in self._bound.values()):
            try:
                self._shared_session.verify()
            except ConfigurationError as error:
                problems.append(str(error))
        if problems:
            raise ConfigurationError("\n".join(problems))
        if served and self._loaders.principal is None and not hasattr(self._app, "login_manager"):
            warnings.append(
                "no principal_loader is set: HTTP Basic's user, X-API-Key, or as a last resort a digest of the bearer "
                "token stand for the caller, and a client with a refreshed token gets 404 for its own key. "
                "Name the caller with @idem.principal_loader"
            )
        for warning in warnings:
            log.warning("%s", warning)
        self._verified = True


def _find_marks(view: Callable[..., Any] | None) -> Found:
    if view is None:
        return Found(view)
    mark = next(marks_on(view), None)
    if mark is not None:
        return Found(view, mark)
    return Found(view, None, dict(_marks_of_class(view)))


def _marks_of_class(view: Callable[..., Any]) -> Iterator[tuple[str, Mark]]:
    """The marks on the methods of a class-based view."""
    view_class = getattr(view, "view_class", None)
    for method in getattr(view_class, "methods", None) or ():
        handler = getattr(view_class, method.lower(), None)
        mark = next(marks_on(handler), None) if handler is not None else None
        if mark is not None:
            yield method.upper(), mark


def _reach(view: Callable[..., Any], methods: set[str]) -> Iterator[tuple[Mark, set[str]]]:
    """Each mark of a registered view, with the methods that reach it."""
    for mark in marks_on(view):
        yield mark, methods
    for method, mark in _marks_of_class(view):
        yield mark, {method} & methods
