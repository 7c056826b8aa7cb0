"""One app's protection: what happens to a marked request, from its opening to its end."""

from __future__ import annotations

import dataclasses
import logging
import sys
import threading
from collections.abc import Callable, Mapping
from typing import cast

from flask import Flask, after_this_request, current_app, request
from flask.typing import ResponseReturnValue
from werkzeug.exceptions import InternalServerError
from werkzeug.wrappers import Response

from ..call import ENVIRON_KEY, Call
from ..engine import Engine, Replay, unavailable
from ..errors import ConfigurationError, IdempotencyError, StoreUnavailable, UnreadableRecord
from ..policy import Policy, finished_state
from ..records import BodyKind, StoredResponse
from ..response.snapshot import (
    EXPIRES_HEADER,
    STATUS_HEADER,
    http_expires,
    kept_headers,
    reduce,
    reference_of,
    restore,
    snapshot,
)
from ..settings import Settings
from ..settling import IntentEngine
from ..stores.backing import Lease
from .claims import Loaders, header_key, make_claim
from .intent import equip
from .outcome import Fate, Outcome, decide, end_state, unanswered, without_answer
from .problems import own_handler, problem_response
from .routes import Declaration, Routes
from .session import SharedSession
from .views import Deliver, Mark, chain_of

__all__ = ["Protection"]

log = logging.getLogger("flask_idempotent")


class Protection:
    """The state of the extension in one app.

    :param engines: the protocol for each ``durable`` of a route: ``False``, and in an app with ``db`` the others.
    """

    def __init__(
        self,
        app: Flask,
        settings: Settings,
        engines: Mapping[str | bool, Engine],
        loaders: Loaders,
        *,
        declarations: list[Declaration],
        shared_session: SharedSession | None = None,
    ) -> None:
        self.settings = settings
        self.engines = engines
        self.routes = Routes(app, settings, declarations, self._engine_for)
        #: Held here for the signal that calls it.
        self.on_command: Callable[..., None] | None = None
        self._app = app
        self._loaders = loaders
        self._shared_session = shared_session
        self._verified = False
        # Reentrant: checking the database pushes an app context, which asks for verification in a command.
        self._verifying = threading.RLock()
        self._checking = False

    # -- opening ---------------------------------------------------------------------------------------------------

    def open_request(self, endpoint: str | None, values: object) -> None:
        """Before every other hook: opens the call of a marked endpoint, and refuses a malformed key."""
        if endpoint is None:
            return
        mark = self.routes.mark_of(endpoint, request.method)
        if mark is not None:
            self._open(mark)

    def _open(self, mark: Mark) -> Call | None:
        bound = self.routes.bind(mark, request.endpoint or "")
        policy = bound.policy
        if request.method not in policy.methods or policy.mode == "off":
            return None
        call = Call(mark, policy, bound.endpoint, bound.engine, bound.fingerprinter, bound.counter)
        request.environ[ENVIRON_KEY] = call
        after_this_request(self.complete)
        if policy.key is None:
            try:
                call.header_key = header_key(policy)
            except IdempotencyError as error:
                raise self._refuse(call, error) from None
        return call

    def _engine_for(self, policy: Policy, endpoint: str) -> Engine:
        engine = self.engines.get(policy.durable)
        if engine is None:
            raise ConfigurationError(
                f"view {endpoint!r}: durable={policy.durable!r} needs the app's database: give Flask-SQLAlchemy's "
                "object to init_app(app, db=db)"
            )
        return engine

    # -- around the view -------------------------------------------------------------------------------------------

    def begin(self, mark: Mark) -> Call | Response | None:
        """Where the guards have let the request through to a marked view.

        :returns: the call for which the view runs; or a response, and it doesn't; or ``None``, and it runs unwatched:
            for a method that isn't protected, and inside of another protected view.
        :raises Deliver: carries a kept answer past the decorators above.
        :raises IdempotencyError: the refusal; nothing is held then.
        """
        call: Call | None = request.environ.get(ENVIRON_KEY)
        if call is not None and call.mark is not mark and not call.entered:
            if mark.declared or mark is self.routes.class_mark(request.endpoint or ""):
                return None  # a nearer mark is inside, and stands below the guards
            call = None  # another view's, which was never reached
        if call is None:
            call = self._open(mark)  # also where a decorator without `wraps` hid the mark from the hook
        if call is None:
            return None
        if call.entered:
            self._forbid_two_keys(call, mark)
            return None
        returned = self._takes_errors_for_its_own() or self._needs_a_returned_answer()
        try:
            replay = self._enter(call)
        except IdempotencyError as error:
            if not returned:
                raise
            call.replay = self._refusal_response(error)
            return call.replay
        if replay is None:
            return call
        call.replay = replay
        deliver = Deliver(replay)
        if returned or current_app.trap_http_exception(deliver):
            return replay
        raise deliver

    def _enter(self, call: Call) -> Response | None:
        """``None``: run the view; else the answer that takes its place."""
        try:
            claim = make_claim(self._app, call, self._loaders, prefix=self.settings.key_prefix)
        except IdempotencyError as error:
            raise self._refuse(call, error) from None
        if claim is None:
            self._run_unprotected(call)
            return None
        if call.policy.durable == "transaction" and self._shared_session is not None:
            claim = dataclasses.replace(claim, backing=self._shared_session.prepare())
        elif call.policy.durable == "intent":
            claim = dataclasses.replace(claim, backing=Lease(), settle_after_ms=call.policy.settle_after_ms)
            equip(self._app, self.settings, call, cast("Mark", call.mark), claim)
        try:
            replay = call.engine.claim(call, claim)
            if replay is not None:
                return self._replayed(call, replay)
        except StoreUnavailable as error:
            if call.policy.on_store_error == "open" and not isinstance(error, UnreadableRecord):
                log.warning("the store is away, and %s runs without protection", call.endpoint)
                self._run_unprotected(call)
                return None
            raise self._refuse(call, error) from None
        except IdempotencyError as error:
            call.refusal = error
            raise
        call.entered = True
        return None

    def _run_unprotected(self, call: Call) -> None:
        call.entered = call.unprotected = True

    def _refuse(self, call: Call, error: IdempotencyError) -> IdempotencyError:
        """A refusal that the store has no part in."""
        call.refusal = error
        return call.engine.refuse(call, error)

    def _forbid_two_keys(self, call: Call, mark: Mark) -> None:
        if call.policy.durable == "transaction" and not call.unprotected:
            raise ConfigurationError(
                f"the view {mark.name} is protected, and was called by a durable='transaction' view: two keys can't "
                "share one transaction. Move the common work into a function of its own"
            )

    def _takes_errors_for_its_own(self) -> bool:
        """Whether the view is a Flask-RESTX resource: that makes answers of its own of all that is raised."""
        view = self._app.view_functions.get(request.endpoint or "")
        bases = getattr(getattr(view, "view_class", None), "__mro__", ())
        return any(base.__module__.partition(".")[0] in ("flask_restx", "flask_restful") for base in bases)

    def _needs_a_returned_answer(self) -> bool:
        """Whether ``@cross_origin`` stands above: Flask-CORS adds its headers to what is returned, and to no error."""
        view = self._app.view_functions.get(request.endpoint or "")
        handler = getattr(getattr(view, "view_class", None), request.method.lower(), None)
        functions = (*chain_of(view), *chain_of(handler))
        return any(getattr(each, "__globals__", {}).get("__name__") == "flask_cors.decorator" for each in functions)

    # -- the end ---------------------------------------------------------------------------------------------------

    def complete(self, response: Response) -> Response:
        """Before all other after-request work: keeps the answer, or gives the claim back. Never raises an error."""
        call: Call | None = request.environ.get(ENVIRON_KEY)
        if call is None:
            return response
        if call.replay is not None:
            return self._unless_refused(response, call.replay)
        if call.refusal is not None:
            return self._restored_refusal(call.refusal, response)
        if not call.entered or call.settled:
            return response
        if call.unprotected:
            response.headers[STATUS_HEADER] = "unprotected"
            return response
        try:
            answer = self._settle(call, response)
        except Exception as error:
            answer = self._answer_error(error)
        except BaseException:
            self._close(response)
            raise
        if answer is not response:
            self._close(response)  # nobody else will
        return answer

    def settle_open(self, call: Call) -> None:
        """The net, behind everything: ends what an exception, or an exit, carried past the completion."""
        if call.claim is None or call.settled:
            return
        own = call.own_status
        try:
            if call.returned and own is not None and call.policy.keeps(own):
                self._end(call, without_answer(call, own, "no answer reached the client"))
            elif call.entered:
                self._end(call, unanswered(call, 0, call.unfinished or "the request ended without an answer"))
            else:
                call.engine.release(call, reason="the view was not reached")
        except IdempotencyError:
            # Another request holds the key by now; there is nobody left to tell.
            call.settled = True

    def _settle(self, call: Call, response: Response) -> Response:
        outcome = decide(call, response)
        if outcome.fate is not Fate.KEEP:
            winner = self._end(call, outcome)
            return response if winner is None else self._replayed(call, winner)
        policy = call.policy
        try:
            stored = snapshot(response, bound=policy.max_body, replay_header=policy.replay_header)
        except Exception:
            headers = kept_headers(response.headers, policy.replay_header)
            self._end(call, without_answer(call, outcome.status, "the body broke off"), headers)
            raise
        if policy.store != "full" and not call.rolled_back:
            stored = reduce(stored, policy.store, call.reference)
        # A handler's answer to an exception is kept; what the view did until then is not, where that can be helped.
        undo = not call.returned and call.own_status is None
        state = end_state(call, outcome.status)
        settled = call.engine.complete(call, state, stored, reason=outcome.reason, undo=undo)
        if settled.replay is not None:
            return self._replayed(call, settled.replay, marked=not settled.ours)
        if settled.expires_at is not None:
            response.headers[EXPIRES_HEADER] = http_expires(settled.expires_at)
        return response

    def _end(self, call: Call, outcome: Outcome, headers: tuple[tuple[str, str], ...] = ()) -> Replay | None:
        """An end without an answer to keep: given back, or kept that the work was done.

        :returns: the answer of another request that took this one's place meanwhile.
        """
        if outcome.fate is Fate.RELEASE:
            return call.engine.release(call, reason=outcome.reason)
        if outcome.fate is Fate.SUSPEND:
            cast("IntentEngine", call.engine).suspend(call, reason=outcome.reason)
        else:
            done = StoredResponse(outcome.status, headers, None, BodyKind.NONE)
            call.engine.complete(call, finished_state(outcome.status), done, reason=outcome.reason)
        return None

    def _replayed(self, call: Call, replay: Replay, *, marked: bool = True) -> Response:
        """The response of a kept answer.

        :raises ResponseUnavailable: it is to be made again, and can't be.
        """
        stored = replay.response
        if stored.kind is BodyKind.REFERENCE:
            response = self._rebuilt(call, replay)
        else:
            response = restore(stored, self._app.response_class)
        if marked:
            response.headers[self.settings.replay_header] = "true"
        response.headers[EXPIRES_HEADER] = http_expires(replay.expires_at)
        return response

    def _rebuilt(self, call: Call, replay: Replay) -> Response:
        rebuild, stored = call.policy.rebuild, replay.response
        try:
            if rebuild is None:
                raise LookupError("this route has no rebuild=")
            made = cast("ResponseReturnValue", self._app.ensure_sync(rebuild)(reference_of(stored)))
            response: Response = self._app.make_response(made)
        except Exception as error:
            log.error("the answer of %s could not be made again: %s", call.endpoint, type(error).__name__)
            raise call.engine.refuse(call, unavailable(stored, replay.expires_at)) from None
        response.status_code = stored.status
        return response

    def _unless_refused(self, response: Response, answer: Response) -> Response:
        """Our answer, whatever the layers above the view made of it; but not where one of them refuses the caller."""
        refused = response.status_code in (401, 403, 429) and response.status_code != answer.status_code
        return response if refused else answer

    def _restored_refusal(self, error: IdempotencyError, response: Response) -> Response:
        """Our refusal, where no handler of ours or of the app's answered it: some frameworks make an answer of their
        own of every error, and a decorator may swallow it."""
        if response.mimetype == "application/problem+json":
            return response
        if own_handler(self._app, error) and _reached_flask(error) and not self._takes_errors_for_its_own():
            return response
        return self._unless_refused(response, self._refusal_response(error))

    def _refusal_response(self, error: IdempotencyError) -> Response:
        """The app's own answer to a refusal, where it has one; else ours."""
        handler = own_handler(self._app, error)
        if handler is None:
            return problem_response(error, self.settings.docs_url)
        return self._app.make_response(self._app.ensure_sync(handler)(error))

    def _close(self, response: Response) -> None:
        try:
            response.close()
        except Exception:
            self._app.log_exception(sys.exc_info())

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
            if self._verified or self._checking:
                return
            self._checking = True
            try:
                self.verify()
            finally:
                self._checking = False

    def verify(self) -> None:
        """Check every marked view against the settings and its route.

        :raises ConfigurationError: naming each view that would not be protected, and the fix.
        """
        problems, policies = self.routes.check()
        if self._shared_session is not None and any(policy.durable for policy in policies):
            try:
                self._shared_session.verify()
            except ConfigurationError as error:
                problems.append(str(error))
        if problems:
            raise ConfigurationError("\n".join(problems))
        if policies and self._loaders.principal is None and not hasattr(self._app, "login_manager"):
            log.warning(
                "no principal_loader is set: HTTP Basic's user, X-API-Key, or as a last resort a digest of the bearer "
                "token stand for the caller, and a client with a refreshed token gets 404 for its own key. "
                "Name the caller with @idem.principal_loader"
            )
        self._verified = True


def _reached_flask(error: IdempotencyError) -> bool:
    """Whether the error came as far as Flask's own error handling: a decorator that swallowed it ends its traceback."""
    trace = error.__traceback__
    return trace is not None and trace.tb_frame.f_globals.get("__name__") == "flask.app"
