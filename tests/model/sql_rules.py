"""The rules of the durable stores as switches: each takes one rule out of their source, and nothing else.

It is done as the tests of the scripts do it: a passage of a method is replaced, and must be there exactly once.
"""

import inspect
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from flask_idempotent import settling
from flask_idempotent.errors import IdempotencyError
from flask_idempotent.stores import durable, intent, redis, rows, sql, statements, steps, transaction
from flask_idempotent.stores.base import NotCommitted
from tests.contract.lua_tools import replace_once

ALL = ("postgresql", "mariadb", "sqlite")
#: MariaDB with the statements that MySQL gets.
MYSQL = "as mysql"


@dataclass(frozen=True)
class Edit:
    """Another text for one passage of a method, or of a module's function."""

    owner: Any
    name: str
    old: str
    new: str


@dataclass(frozen=True)
class Switch:
    """A rule, taken out.

    :param databases: where the scenario is played: everywhere, unless the rule's code is that of some only.
    :param errors: what its absence may raise, besides a failed assertion.
    """

    edits: tuple[Edit, ...]
    databases: tuple[str, ...] = ALL
    errors: tuple[type[Exception], ...] = field(default=())


def edited(owner: Any, name: str, edits: list[Edit]) -> Callable[..., Any]:
    """A function of the same name, with other passages."""
    function = inspect.unwrap(vars(owner)[name])
    source = textwrap.dedent(inspect.getsource(function))
    for edit in edits:
        source = replace_once(source, edit.old, edit.new)
    # Made within a function whose argument is what `super()` asks for.
    text = "from __future__ import annotations\n\ndef make(__class__):\n"
    text += textwrap.indent(source, "    ") + f"\n    return {name}\n"
    made: dict[str, Any] = {}
    exec(compile(text, f"<{name} without a rule>", "exec"), vars(sys.modules[function.__module__]), made)
    changed: Callable[..., Any] = made["make"](owner if inspect.isclass(owner) else None)
    return changed


def switch_off(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Take one rule out, until the test ends. Stores that are made from now on are without."""
    together: dict[tuple[Any, str], list[Edit]] = {}
    for edit in SWITCHES[name].edits:
        together.setdefault((edit.owner, edit.name), []).append(edit)
    for (owner, function), edits in together.items():
        monkeypatch.setattr(owner, function, edited(owner, function, edits))


def _off(owner: Any, name: str, old: str, new: str, *more: Edit, **options: Any) -> Switch:
    return Switch((Edit(owner, name, old, new), *more), **options)


_STATEMENTS = statements.Statements
_LEASED = (_STATEMENTS, "_lease_statements")
_TOKEN = 'bindparam("p_token", type_=keys.c.claim_token.type) != ""'
_TO_TAKE = "lapsed = keys.c.locked_until + "
_SKEW = 'bindparam("skew_ms", type_=keys.c.locked_until.type)'
_FINISH_ATTEMPT = "where(*this, token, attempt, keys.c.status.in_(unfinished)).values(ended)"
_RELEASE = ".where(*this, token, attempt, keys.c.status.in_(unfinished[:2]))"
_BY_HOLDER = ".where(*seen, unknown, mine)"
_HELD = "(keys.c.claim_token.in_(tokens) & open_)"
_SCREEN = "if not (_equal(row.principal, claim.principal) and _equal(row.binding, claim.binding)):"

SWITCHES: dict[str, Switch] = {
    # -- every write -------------------------------------------------------------------------------------------------
    "the end compares the token": _off(
        _STATEMENTS,
        "__init__",
        "ours = (*this, token, func.coalesce(keys.c.status",
        f"ours = (*this, {_TOKEN}, func.coalesce(keys.c.status",
    ),
    "the end compares the state": _off(
        _STATEMENTS,
        "__init__",
        'ours = (*this, token, func.coalesce(keys.c.status, "") == State.IN_PROGRESS.value)',
        "ours = (*this, token)",
        errors=(NotCommitted,),
    ),
    "the end of an attempt compares the token": _off(
        *_LEASED, _FINISH_ATTEMPT, _FINISH_ATTEMPT.replace("token,", f"{_TOKEN},")
    ),
    "the end of an attempt compares the state": _off(
        *_LEASED, _FINISH_ATTEMPT, "where(*this, token, attempt).values(ended)", errors=(NotCommitted,)
    ),
    "a release compares the token": _off(*_LEASED, _RELEASE, _RELEASE.replace("token,", f"{_TOKEN},")),
    "a release compares the state": _off(*_LEASED, _RELEASE, ".where(*this, token, attempt)"),
    "suspending compares the token": _off(
        *_LEASED, ".where(*this, token, attempt, open_)", f".where(*this, {_TOKEN}, attempt, open_)"
    ),
    "suspending compares the state": _off(
        *_LEASED, ".where(*this, token, attempt, open_)", ".where(*this, token, attempt)"
    ),
    "a note compares the token": _off(
        *_LEASED, "update(keys).where(*this, token, open_)", f"update(keys).where(*this, {_TOKEN}, open_)"
    ),
    "a saga's row compares the token": _off(
        steps.StepRows, "__init__", 'keys.c.claim_token == bindparam("p_token"),', _TOKEN + ","
    ),
    "a saga's row compares the state": _off(
        steps.StepRows, "__init__", "keys.c.status == State.IN_PROGRESS.value,", ""
    ),
    "a renewal compares the token": _off(
        *_LEASED, _HELD, "open_", Edit(intent.IntentStore, "_prolong", "if claim.token in prolonged", "if prolonged")
    ),
    "a renewal compares the state": _off(
        *_LEASED,
        _HELD,
        "keys.c.claim_token.in_(tokens)",
        Edit(*_LEASED, "case((open_, keys.c.claim_token), else_=keys.c.settle_token)", "keys.c.claim_token"),
    ),
    "a completion succeeds on its own finished row": _off(
        intent.IntentStore,
        "_finish",
        "if row.claim_token == claim.token and State(row.status) in FINISHED:",
        "if False:",
    ),
    "a completion returns what is stored": _off(
        intent.IntentStore,
        "_finish",
        "return CompletionReply(Completed.STORED, expires_at=record.expires_at, record=record)",
        "return CompletionReply(Completed.STORED, expires_at=record.expires_at)",
    ),
    "a claim recognises its own token": _off(
        intent.IntentStore,
        "_meet",
        "if row.claim_token == claim.token:  # our own: the reply",
        "if False:  # the reply",
    ),
    "a look-up recognises its own token": _off(
        intent.IntentStore, "_meet", "if row.settle_token == claim.token:  # our own", "if False:  # our own"
    ),
    "a token given back is over": _off(intent.IntentStore, "_meet", "return ClaimReply(Verdict.OVER), None", "pass"),
    # -- takeover ----------------------------------------------------------------------------------------------------
    "replacing compares token and number": _off(
        _STATEMENTS,
        "__init__",
        '*this, token, keys.c.lock_version == bindparam("p_version"), keys.c.status == bindparam("p_status")',
        '*this, keys.c.status == bindparam("p_status")',
        errors=(NotCommitted,),
    ),
    "a takeover compares the number": _off(
        *_LEASED,
        'seen = (*this, keys.c.lock_version == bindparam("p_version"))',
        'seen = (*this, bindparam("p_version", type_=keys.c.lock_version.type) > 0)',
    ),
    "a verdict compares the number": _off(
        *_LEASED,
        'seen = (*this, keys.c.lock_version == bindparam("p_version"))',
        'seen = (*this, bindparam("p_version", type_=keys.c.lock_version.type) > 0)',
    ),
    "a verdict that it happened compares its holder": _off(
        *_LEASED, f"{_BY_HOLDER}.values(ended)", f"{_BY_HOLDER.replace('mine', _TOKEN)}.values(ended)"
    ),
    "a verdict that it did not happen compares its holder": _off(
        *_LEASED, f"{_BY_HOLDER}.values(running)", f"{_BY_HOLDER.replace('mine', _TOKEN)}.values(running)"
    ),
    "putting a look-up off compares its holder": _off(
        *_LEASED, f"{_BY_HOLDER}\n", f"{_BY_HOLDER.replace('mine', _TOKEN)}\n"
    ),
    "a re-claim compares the state": _off(
        *_LEASED,
        "where(*seen, keys.c.status == State.RELEASED.value).values(running)",
        "where(*seen).values(running)",
        errors=(NotCommitted,),
    ),
    "a look-up compares the state": _off(
        *_LEASED,
        'where(*seen, unknown, (keys.c.settle_token == "") | lapsed)',
        'where(*seen, (keys.c.settle_token == "") | lapsed)',
    ),
    "a takeover waits for the lease": _off(
        *_LEASED,
        f"{_TO_TAKE}{_SKEW} <= now_ms()",
        f"{_TO_TAKE}{_SKEW} >= 0",
        Edit(intent.IntentStore, "_meet", "if wait_ms > 0:", "if False:"),
    ),
    "a takeover compares the lease": _off(*_LEASED, f"{_TO_TAKE}{_SKEW} <= now_ms()", f"{_TO_TAKE}{_SKEW} >= 0"),
    "a takeover adds the skew": _off(
        *_LEASED,
        f"{_TO_TAKE}{_SKEW} <= now_ms()",
        f"{_TO_TAKE}{_SKEW} * 0 <= now_ms()",
        Edit(
            intent.IntentStore,
            "_meet",
            "(row.locked_until or 0) + claim.skew_ms - row.now",
            "row.locked_until - row.now",
        ),
    ),
    "a takeover adds the skew in its statement": _off(
        *_LEASED, f"{_TO_TAKE}{_SKEW} <= now_ms()", f"{_TO_TAKE}{_SKEW} * 0 <= now_ms()"
    ),
    "a renewal moves the lease": _off(
        *_LEASED, "keys.c.locked_until), else_=lease)", "keys.c.locked_until), else_=keys.c.locked_until)"
    ),
    "a takeover keeps the token": _off(
        *_LEASED,
        "*{**lapse, **settling}.items()",
        '*{**lapse, **settling, "claim_token": bindparam("p_token")}.items()',
    ),
    "the number is over the old one": _off(
        *_LEASED,
        "risen = case((keys.c.lock_version + 1 > now_ms(), keys.c.lock_version + 1), else_=now_ms())",
        "risen = now_ms()",
    ),
    "the number is over an expired one": _off(
        _STATEMENTS,
        "_build_insert",
        "case((least > now_ms(), least), else_=now_ms())",
        "case((least < 0, least), else_=now_ms())",
    ),
    "the number begins with the clock": _off(
        _STATEMENTS,
        "_build_insert",
        "case((least > now_ms(), least), else_=now_ms())",
        "case((least > 1, least), else_=1)",
    ),
    # -- identity and expiry -----------------------------------------------------------------------------------------
    "the principal comes before the fingerprint": _off(
        rows.Rows, "screen", _SCREEN, f"{_SCREEN[:-1]} and claim.fingerprints[0].value == row.request_hash:"
    ),
    "the principal comes before the state": _off(
        rows.Rows, "screen", _SCREEN, f"{_SCREEN[:-1]} and State(row.status) not in FINISHED:"
    ),
    "the fingerprint comes before the state": _off(
        rows.Rows,
        "screen",
        "if known and not _equal(known[0], row.request_hash):",
        "if known and not _equal(known[0], row.request_hash) and State(row.status) is not State.RELEASED:",
    ),
    "only what is finished expires": _off(rows, "_expired", "State(row.status) in FINISHED and ", ""),
    "a released row does not expire": _off(rows, "_expired", " in FINISHED and", " in {*FINISHED, State.RELEASED} and"),
    "a released row lives for its time": _off(
        *_LEASED,
        'expires_at=now_ms() + bindparam("ttl_ms", type_=keys.c.expires_at.type)',
        'expires_at=now_ms() + 0 * bindparam("ttl_ms", type_=keys.c.expires_at.type)',
    ),
    "another format is refused": _off(rows, "_require_format", "if str(row.format) != FORMAT:", "if False:"),
    "the old answer goes, in one transaction": _off(
        sql.SqlStore, "_insert_now", "connection.execute(self._sql.drop_answer, key)", "pass", errors=(NotCommitted,)
    ),
    "the old answer goes, on its own": _off(
        intent.IntentStore, "_insert", "connection.execute(self._sql.drop_answer, key)", "pass", errors=(NotCommitted,)
    ),
    # -- waiting -----------------------------------------------------------------------------------------------------
    "an open row is not waited for": _off(
        _STATEMENTS,
        "_build_insert",
        ".where(self.try_lock)",
        "",
        Edit(_STATEMENTS, "direct", '"SET STATEMENT innodb_lock_wait_timeout = 0 FOR "', '""'),
        Edit(sql.SqlStore, "_insert_in_turn", "connection.execute(self._sql.row_alone, key_of(claim.scope))", "None"),
        Edit(sql.SqlStore, "_insert_in_turn", "found = None.one_or_none()", "found = None"),
        databases=("postgresql", "mariadb", MYSQL),
    ),
    "who inserts has the turn": _off(
        sql.SqlStore, "_insert_in_turn", ".scalar_one() != 1:", ".scalar_one() is None:", databases=(MYSQL,)
    ),
    "a turn ends with the insert": _off(
        sql.SqlStore,
        "_insert_in_turn",
        "connection.execute(select(func.release_lock(turn)))",
        "pass",
        databases=(MYSQL,),
    ),
    "a row that stays locked is not waited for": _off(
        _STATEMENTS,
        "__init__",
        "self.row.with_for_update(nowait=True)",
        "self.row.with_for_update()",
        databases=("postgresql", "mariadb"),
    ),
    # -- transaction -------------------------------------------------------------------------------------------------
    "the row is inserted in the view's transaction": _off(
        sql.SqlStore,
        "_try_claim",
        "transaction.claimed(fence",
        "transaction.commit(); transaction.begin(); transaction.claimed(fence",
    ),
    "an error at COMMIT is read back": _off(
        sql.SqlStore, "_read_back", "record = self._read_alone(claim.scope)", "record = None", errors=(NotCommitted,)
    ),
    "a COMMIT under way is waited for": _off(
        sql.SqlStore,
        "_read_alone",
        "if not connection.execute(select(self._sql.try_lock)",
        "if False and not connection.execute(select(self._sql.try_lock)",
        Edit(sql.SqlStore, "_read_alone", "elif is_innodb(connection.dialect):", "elif False:"),
        databases=("postgresql", "mariadb"),
    ),
    "the end is in the row's own transaction, by its number": _off(
        _STATEMENTS,
        "__init__",
        '.where(*ours, func.txid_current() == bindparam("p_number", type_=keys.c.lock_version.type))',
        ".where(*ours)",
        databases=("postgresql",),
    ),
    "the end is in the row's own transaction, by a savepoint": _off(
        transaction.Transaction,
        "check",
        'self.connection.exec_driver_sql(f"RELEASE SAVEPOINT {_SAVEPOINT}")',
        "pass",
        databases=("mariadb", "sqlite"),
    ),
    "a row that a rollback left is seen": _off(
        sql.SqlStore, "_left_behind", "return found is not None", "return False"
    ),
    "a row that its view committed does not run again": _off(
        sql.SqlStore, "_verdict", "return ClaimReply(Verdict.INDETERMINATE)", "return None"
    ),
    # -- intent ------------------------------------------------------------------------------------------------------
    "a late completion counts from indeterminate": _off(
        *_LEASED, _FINISH_ATTEMPT, _FINISH_ATTEMPT.replace("(unfinished)", "(unfinished[::2])")
    ),
    "a late completion counts from released": _off(
        *_LEASED, _FINISH_ATTEMPT, _FINISH_ATTEMPT.replace("(unfinished)", "(unfinished[:2])")
    ),
    "a takeover looks up first": _off(
        intent.IntentStore,
        "_meet",
        '{**seen, "v_reason": "the lease lapsed"}).rowcount',
        '{**seen, "v_reason": "the lease lapsed"}).rowcount; return self._claimed(connection, claim), None',
    ),
    "one reconciler at a time": _off(
        *_LEASED,
        '(keys.c.settle_token == "") | lapsed',
        '(keys.c.settle_token != "-") | lapsed',
        Edit(intent.IntentStore, "_meet", "if early or busy:", "if early:"),
    ),
    "an unknown outcome rests first": _off(intent.IntentStore, "_meet", "if early or busy:", "if busy:"),
    "past the deadline no key goes out": _off(
        settling.IntentEngine, "held", "call.lost or call.settled or lease(claim).is_over", "call.lost or call.settled"
    ),
    "no key goes out outside of its window": _off(
        settling.IntentEngine, "_may_be_forgotten", "return since_ms > provider.window_ms", "return False"
    ),
    "not found is believed late": _off(
        settling.IntentEngine,
        "_doubt",
        "if orphan.read_at < orphan.unknown_since + claim.settle_after_ms:",
        "if False:",
    ),
    "a look-up that began early is not believed": _off(
        settling.IntentEngine, "_doubt", "if orphan.read_at <", "if self._settling.read(claim.scope).read_at <"
    ),
    "not found is not believed outside of the window": _off(
        settling.IntentEngine, "_doubt", "if since_ms is not None and since_ms > provider.window_ms:", "if False:"
    ),
    # -- Redis in front ----------------------------------------------------------------------------------------------
    "what is new in Redis is asked of SQL": _off(
        durable.DurableStore, "claim", "reply = self.back.claim(claim)", "reply = said or self.back.claim(claim)"
    ),
    "a refusal by an unconfirmed record is asked of SQL": _off(
        durable.DurableStore,
        "_refused",
        "return said if said.confirmed else None",
        "return said",
        Edit(durable.DurableTransactionStore, "_refused", "if said.confirmed:", "if True:"),
    ),
    "a refusal by a holder whose transaction is not open does not stand": _off(
        durable.DurableTransactionStore,
        "_refused",
        "return said if self.back.is_open(claim, said.holder) else ",
        "return said if True else ",
    ),
    "a refusal by the holder of an open transaction stands": _off(
        sql.SqlStore,
        "is_open",
        "READ UNCOMMITTED",
        "READ COMMITTED",
        Edit(sql.SqlStore, "is_open", "return not free.scalar_one()", "return False"),
        Edit(sql.SqlStore, "is_open", "return (os.getpid(), token) in self._running", "return False"),
    ),
    "who asks for a holder is none": _off(
        _STATEMENTS,
        "__init__",
        "pg_try_advisory_xact_lock_shared",
        "pg_try_advisory_xact_lock",
        databases=("postgresql",),
    ),
    "a transaction that ends refuses nobody any more": _off(
        sql.SqlStore, "_ends", "self._running.discard((os.getpid(), claim.token))", "pass", databases=("sqlite",)
    ),
    "a lost claim is given back in front": _off(
        durable.DurableStore,
        "complete",
        "# Its row is another's by now, and duplicates are to hear of that.\n        self._give_back(completion.claim)",
        "pass",
    ),
    "giving back in front leaves nothing": _off(durable.DurableStore, "_give_back", "forget=True", "forget=False"),
    "a completion asks SQL first": _off(
        durable.DurableStore,
        "complete",
        "reply = self.back.complete(completion)",
        'self._copy(completion.claim, completion.state, completion.response, "", 0); '
        "reply = self.back.complete(completion)",
    ),
    "what SQL did not keep is not copied": _off(
        durable.DurableStore,
        "complete",
        "except NotCommitted as error:",
        "except NotCommitted as error:\n"
        '        self._copy(completion.claim, completion.state, completion.response, "", 0)',
    ),
    "a copy expires with its row": _off(
        durable.DurableStore, "_write_back", "record.reason, record.expires_at)", "record.reason, 0)"
    ),
    "a renewal in Redis masks nothing": _off(
        durable.DurableStore, "renew", "return held", "return [True for _ in held]"
    ),
    "a full Redis takes what ends work": _off(
        redis._Script,
        "__init__",
        "if name in ALLOWED_OOM else",
        "if False else",
        databases=("sqlite",),
        errors=(IdempotencyError,),
    ),
}
