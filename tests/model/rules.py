"""The rules of the protocol, each a switch of the model: what it says, and where the product holds it."""

from typing import NamedTuple

#: No code of the product does this yet.
NOT_BUILT = "not built yet"


class Rule(NamedTuple):
    """One rule.

    :param text: what it says.
    :param place: the code that holds it, or `NOT_BUILT`.
    :param lua: rules of the scripts that are part of it; each has a scenario that fails without.
    :param sql: switches of the database's stores that are part of it; each has a scenario that fails without.
    :param why: why no real store can notice its absence, where none does.
    """

    text: str
    place: str
    lua: tuple[str, ...] = ()
    sql: tuple[str, ...] = ()
    why: str = ""


RULES: dict[str, Rule] = {
    # -- every write -------------------------------------------------------------------------------------------------
    "cas_token": Rule(
        "A write is compare-and-swap on the token.",
        "complete.lua, release.lua, renew.lua, stores/statements.py",
        lua=("complete compares the token", "release compares the token", "renew compares the token"),
        sql=(
            "the end compares the token",
            "the end of an attempt compares the token",
            "a release compares the token",
            "suspending compares the token",
            "a renewal compares the token",
            "a note compares the token",
            "a saga's row compares the token",
        ),
    ),
    "cas_state": Rule(
        "A write is compare-and-swap on the state: a finished record is overwritten by nothing.",
        "complete.lua, release.lua, renew.lua, stores/statements.py",
        lua=(
            "complete compares the state",
            "complete overwrites nothing finished",
            "release compares the state",
            "release overwrites nothing finished",
            "renew compares the state",
        ),
        sql=(
            "the end compares the state",
            "the end of an attempt compares the state",
            "a release compares the state",
            "suspending compares the state",
            "a renewal compares the state",
            "a saga's row compares the state",
        ),
    ),
    "complete_own": Rule(
        "A completion with the own token on a finished record is success.",
        "complete.lua, stores/intent.py",
        lua=("complete succeeds on its own finished record",),
        sql=("a completion succeeds on its own finished row",),
    ),
    "stored_bytes": Rule(
        "Then what is stored is answered: a reconciler may have finished it.",
        "complete.lua, stores/intent.py",
        lua=("complete returns what is stored",),
        sql=("a completion returns what is stored",),
    ),
    "claim_twice": Rule(
        "A claim that is sent twice with one token is one claim.",
        "claim.lua, stores/intent.py",
        lua=("claim is harmless when sent twice", "release is harmless when sent twice"),
        sql=("a claim recognises its own token", "a look-up recognises its own token"),
    ),
    "dead_token": Rule(
        "A token whose claim was given back is over.",
        "claim.lua, stores/intent.py",
        lua=("a token given back is over",),
        sql=("a token given back is over",),
    ),
    # -- takeover ----------------------------------------------------------------------------------------------------
    "take_version": Rule(
        "A takeover compares the row's number (`lock_version`); replacing the row, its token as well.",
        "stores/statements.py",
        sql=("a takeover compares the number", "a verdict compares the number", "replacing compares token and number"),
    ),
    "take_state": Rule(
        "A takeover compares the state.",
        "claim.lua, stores/statements.py",
        lua=("takeover compares the state", "an unknown outcome is not taken over"),
        sql=("a re-claim compares the state", "a look-up compares the state"),
    ),
    "take_lease": Rule(
        "A takeover compares the lease.",
        "claim.lua, stores/statements.py",
        lua=("takeover waits for the lease", "a renewal moves the lease"),
        sql=("a takeover waits for the lease", "a takeover compares the lease", "a renewal moves the lease"),
    ),
    "take_keeps": Rule(
        "A takeover makes the outcome unknown, and keeps the old token and attempt until the verdict.",
        "stores/statements.py",
        sql=("a takeover keeps the token",),
    ),
    "skew": Rule(
        "The skew is added before a lease counts as lapsed.",
        "claim.lua, stores/statements.py, stores/intent.py",
        lua=("takeover adds the skew",),
        sql=("a takeover adds the skew", "a takeover adds the skew in its statement"),
    ),
    "version_rises": Rule(
        "The number is `max(old + 1, the server's milliseconds)`: it rises over flush, expiry and forgetting.",
        "claim.lua, stores/statements.py",
        lua=("the fence is over the old one", "the fence is over an expired one", "the fence begins with the clock"),
        sql=("the number is over the old one", "the number is over an expired one", "the number begins with the clock"),
    ),
    # -- identity and expiry -----------------------------------------------------------------------------------------
    "principal_first": Rule(
        "The principal is compared before fingerprint and state: a stranger learns nothing.",
        "common.lua, claim.lua, stores/rows.py",
        lua=(
            "the principal is compared",
            "the binding is compared",
            "the principal comes before the fingerprint",
            "the principal comes before the state",
        ),
        sql=("the principal comes before the fingerprint", "the principal comes before the state"),
    ),
    "fp_bound": Rule(
        "Another fingerprint never takes over, and never follows a release: it comes before the state.",
        "common.lua, claim.lua, stores/rows.py",
        lua=(
            "another fingerprint is a mismatch",
            "another fingerprint never takes over",
            "another fingerprint never follows a release",
        ),
        sql=("the fingerprint comes before the state",),
    ),
    "expiry_final": Rule(
        "Only what is over expires; an open or unknown outcome never does.",
        "claim.lua, stores/rows.py",
        lua=("only what is over expires",),
        sql=("only what is finished expires",),
    ),
    "rel_no_expiry": Rule(
        "On `intent` a released row never expires in a claim: it becomes the next attempt.",
        "stores/rows.py",
        sql=("a released row does not expire",),
    ),
    "open_ttl": Rule(
        "While it is open, a record in Redis lives at least for lease and skew, its work, and its rest.",
        "claim.lua, renew.lua",
        lua=(
            "an open record keeps its rest",
            "an open record lives for lease and skew",
            "an open record lives for its work",
            "a renewed record lives on",
            "a renewal does not shorten a life",
        ),
    ),
    "release_ttl": Rule(
        "A release and a verdict begin a full life.",
        "release.lua, stores/statements.py",
        lua=("a released record lives for its time",),
        sql=("a released row lives for its time",),
    ),
    "unreadable": Rule(
        "What can't be read is not absent.",
        "common.lua, claim.lua, renew.lua, stores/rows.py",
        lua=(
            "the format is compared",
            "an unknown state is refused",
            "renew compares the format",
            "an unreadable record is not absent",
            "a record without our fields is not absent",
        ),
        sql=("another format is refused",),
    ),
    "old_body": Rule(
        "A row that is claimed anew after its life loses its old answer first.",
        "stores/sql.py, stores/intent.py",
        sql=("the old answer goes, in one transaction", "the old answer goes, on its own"),
    ),
    # -- Python around the stores ------------------------------------------------------------------------------------
    "kept": Rule(
        "Once the view returned an answer that is kept, nothing releases it.",
        "web/outcome.py, web/protection.py, engine.py",
        why="it is about which call is made; `tests/web/test_outcome.py`, `tests/durable/test_one_transaction.py`",
    ),
    "after_guards": Rule(
        "The claim is made behind the guards: a request that one refuses leaves nothing.",
        "web/views.py",
        why="it is about when a store is called; `tests/web/test_guards.py`",
    ),
    "allow_oom": Rule(
        "complete, renew and release work on a full Redis.",
        "stores/redis.py",
        sql=("a full Redis takes what ends work",),
    ),
    # -- Redis in front of SQL ---------------------------------------------------------------------------------------
    "sql_decides": Rule(
        '"New" in Redis is for SQL to decide.',
        "stores/durable.py",
        sql=("what is new in Redis is asked of SQL",),
    ),
    "confirmed": Rule(
        "A 404 or 422 by a record in Redis that SQL did not confirm is for SQL to decide.",
        "stores/durable.py, complete.lua",
        sql=("a refusal by an unconfirmed record is asked of SQL",),
    ),
    "open_holder": Rule(
        "Where no row is committed, a refusal stands only if SQL says that it is the claim in Redis whose transaction "
        "is open; else the duplicate is told `in-progress`, and with a lapsed one SQL decides.",
        "stores/durable.py, stores/sql.py, claim.lua",
        lua=("a refusal names its holder", "a refusal tells what was committed", "a new claim is not committed yet"),
        sql=(
            "a refusal by a holder whose transaction is not open does not stand",
            "a refusal by the holder of an open transaction stands",
            "a transaction that ends refuses nobody any more",
            "who asks for a holder is none",
        ),
    ),
    "giveback_deletes": Rule(
        "Giving back a claim in Redis that SQL did not agree to deletes it.",
        "stores/durable.py, release.lua",
        sql=("giving back in front leaves nothing",),
    ),
    "lost_gives_back": Rule(
        "A claim that SQL says is lost is given back in Redis, so that duplicates get the winner's answer from SQL.",
        "stores/durable.py",
        sql=("a lost claim is given back in front",),
    ),
    "sql_first": Rule(
        "A completion writes SQL first, then Redis.",
        "stores/durable.py",
        sql=("a completion asks SQL first",),
    ),
    "outage": Rule(
        "Where SQL is away at completion nothing is told to Redis, and the client learns that nobody knows.",
        "stores/durable.py, stores/intent.py",
        sql=("what SQL did not keep is not copied",),
    ),
    "copy_ttl": Rule(
        "A copy in Redis does not outlive its row.",
        "complete.lua, stores/durable.py",
        lua=("a copy ends with its row", "a finished record lives for its time"),
        sql=("a copy expires with its row",),
    ),
    "copy_until": Rule(
        "A copy carries the row's own `expires_at`, however late it is written; past it there is none.",
        "complete.lua",
        lua=("a copy of an expired row is not made",),
    ),
    "forget_order": Rule("Forgetting: SQL, then Redis.", NOT_BUILT),
    # -- transaction -------------------------------------------------------------------------------------------------
    "insert_in_tx": Rule(
        "`transaction`: the row is inserted in the view's own transaction.",
        "stores/sql.py",
        sql=("the row is inserted in the view's transaction",),
    ),
    "readback": Rule(
        "`transaction`: an error at COMMIT is read back by token.",
        "stores/sql.py",
        sql=("an error at COMMIT is read back",),
    ),
    "readback_waits": Rule(
        "`transaction`: a COMMIT that the server is still at is not taken for one that was not applied.",
        "stores/sql.py",
        sql=("a COMMIT under way is waited for",),
    ),
    "never_rerun": Rule(
        "`transaction`: the view is never run again for an error at COMMIT.",
        "engine.py",
        why="no store runs views; `tests/durable/test_fence_and_commit.py`",
    ),
    # -- intent ------------------------------------------------------------------------------------------------------
    "sql_is_lease": Rule(
        "`intent`: the lease in SQL is the lease; a renewal in Redis never masks a lost one.",
        "stores/durable.py",
        sql=("a renewal in Redis masks nothing",),
    ),
    "local_deadline": Rule(
        "`intent`: past the local deadline `provider_key()`, `remember()` and steps raise.",
        "settling.py",
        sql=("past the deadline no key goes out",),
    ),
    "late_ind": Rule(
        "`intent`: a late completion by the same attempt is taken from `indeterminate`.",
        "stores/statements.py",
        sql=("a late completion counts from indeterminate",),
    ),
    "late_rel": Rule(
        "`intent`: and from `released`, while no newer attempt claimed.",
        "stores/statements.py",
        sql=("a late completion counts from released",),
    ),
    "inline": Rule(
        "`intent`: a takeover looks up before it runs again.",
        "stores/intent.py, settling.py",
        sql=("a takeover looks up first",),
    ),
    "one_reconciler": Rule(
        "`intent`: one reconciler at a time; its lease is the row's.",
        "stores/statements.py, stores/intent.py",
        sql=(
            "one reconciler at a time",
            "a verdict that it happened compares its holder",
            "a verdict that it did not happen compares its holder",
            "putting a look-up off compares its holder",
        ),
    ),
    "transient_ind": Rule(
        "`intent`: once the view has started, an answer that is not kept makes the outcome unknown.",
        "web/outcome.py, web/intent.py, settling.py",
        why="it is about which call is made; `tests/intent/test_outcomes.py` has each case",
    ),
    "settle_after": Rule(
        '`intent`: an outcome is settled, and "it did not happen" believed, only after `settle_after`.',
        "stores/intent.py, settling.py",
        sql=("an unknown outcome rests first", "not found is believed late"),
    ),
    "look_after": Rule(
        "`intent`: the look-up itself must have started after `settle_after`.",
        "settling.py",
        sql=("a look-up that began early is not believed",),
    ),
    "window": Rule(
        "`intent`: sending again is allowed only inside the provider's window, counted from the first use.",
        "settling.py",
        sql=("no key goes out outside of its window", "not found is not believed outside of the window"),
    ),
    "job": Rule("`intent`: a job settles without traffic.", NOT_BUILT),
    # -- sweep -------------------------------------------------------------------------------------------------------
    "recheck": Rule("`intent`: a released row is looked up once more before it is swept.", NOT_BUILT),
    "sweep_recheck": Rule("The sweep checks state and expiry again as it deletes.", NOT_BUILT),
    # -- sagas -------------------------------------------------------------------------------------------------------
    "saga_commit": Rule(
        "Saga: every step is committed on its own.",
        "sagas/course.py, stores/steps.py",
        why="it is about which calls are made; `tests/sagas/test_resume.py`, `tests/sagas/test_rows.py`",
    ),
    "saga_hold": Rule(
        "Saga: while it is compensated, nobody claims it.",
        "sagas/course.py, web/views.py",
        why="whoever compensates holds the claim, and every store keeps that; `tests/sagas/test_back.py`",
    ),
    "saga_failed": Rule(
        "Saga: rolled back is `failed`: a retry needs a new key.",
        "web/outcome.py",
        why="it is about which state is kept; `tests/sagas/test_back.py`",
    ),
    "comp_commit": Rule(
        "Saga: an undo runs once, under a key of its own.",
        "sagas/course.py",
        why="it is about which calls are made; `tests/sagas/test_back.py`",
    ),
}
