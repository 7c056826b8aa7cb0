"""Tools for tests of the Redis scripts: a clock that the test moves, and scripts with one rule taken out."""

from collections.abc import Mapping
from dataclasses import dataclass

import redis

from flask_idempotent.stores.redis import read_script

Sources = Mapping[str, str]

CLOCK_KEY = "the-tests-clock"


def replace_once(text: str, old: str, new: str) -> str:
    """Replace a passage that must be there exactly once; an edit that finds nothing would test nothing."""
    assert text.count(old) == 1, f"{text.count(old)} times in the script: {old!r}"
    return text.replace(old, new)


def script_text(name: str, sources: Sources | None = None) -> str:
    """The text that the loader sends for a script, without its flags."""
    return "\n".join((sources or {}).get(each) or read_script(each) for each in ("common", name))


class ScriptedClock:
    """A server clock that only the test moves: the scripts read a key where they would ask TIME.

    What the server does by its own clock (PEXPIRE) goes on by itself; so use long durations.
    """

    keys: tuple[str, ...] = (CLOCK_KEY,)
    read = f"redis.call('GET', '{CLOCK_KEY}')"

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        seconds, micros = client.time()
        self.now_ms = int(seconds) * 1000 + int(micros) // 1000
        self.advance(0)

    def advance(self, ms: int) -> None:
        """Forward, or back with a negative number."""
        self.now_ms += ms
        with self._client.pipeline(transaction=False) as pipeline:
            for key in self.keys:
                pipeline.set(key, self.now_ms)
            pipeline.execute()

    def sources(self, sources: Sources | None = None) -> Sources:
        """The scripts (or the given ones), reading this clock."""
        common = (sources or {}).get("common") or read_script("common")
        scripted = replace_once(
            common,
            "local t = redis.call('TIME')\n",
            f"local scripted = assert({self.read}, 'no clock: somebody emptied this server') + 0\n"
            "  local t = { math.floor(scripted / 1000), scripted % 1000 * 1000 }\n",
        )
        return {**(sources or {}), "common": scripted}


class ClusterClock(ScriptedClock):
    """The same on a cluster, where a script reads in its own slot only: one key for each bucket of records."""

    keys = tuple(f"{{b{bucket:03d}}}{CLOCK_KEY}" for bucket in range(256))
    read = f"redis.call('GET', string.match(KEYS[1], '{{.-}}') .. '{CLOCK_KEY}')"


@dataclass(frozen=True)
class Rule:
    """A rule of the design, and the edits of one script that take just this rule out."""

    script: str
    edits: tuple[tuple[str, str], ...]


def _rule(script: str, old: str, new: str, *more: tuple[str, str]) -> Rule:
    return Rule(script, ((old, new), *more))


RULES: dict[str, Rule] = {
    # a write is compare-and-swap on token and state
    "complete compares the token": _rule(
        "complete", "if old.token ~= token or old.state ~= 'in_progress' then", "if old.state ~= 'in_progress' then"
    ),
    "complete compares the state": _rule(
        "complete", "if old.token ~= token or old.state ~= 'in_progress' then", "if old.token ~= token then"
    ),
    "complete overwrites nothing finished": _rule(
        "complete",
        "if old.token == token and FINISHED[old.state] then",
        "if false then",
        ("if old.token ~= token or old.state ~= 'in_progress' then", "if old.token ~= token then"),
    ),
    "complete succeeds on its own finished record": _rule(
        "complete", "if old.token == token and FINISHED[old.state] then", "if false then"
    ),
    "complete returns what is stored": _rule(
        "complete",
        "return { 'stored', tonumber(old.expires_at), redis.call('HGETALL', KEYS[1]) }",
        "return { 'stored', tonumber(old.expires_at) }",
    ),
    "release compares the token": _rule("release", "if old.token ~= token then return 'lost' end", ""),
    "release overwrites nothing finished": _rule(
        "release",
        "if FINISHED[old.state] then return 'finished' end",
        "",
        ("if old.state ~= 'in_progress' then return 'lost' end", ""),
    ),
    "release compares the state": _rule("release", "if old.state ~= 'in_progress' then return 'lost' end", ""),
    "renew compares the token": _rule("renew", "and held[3] == token then", "then"),
    "renew compares the state": _rule("renew", "and held[2] == 'in_progress' and", "and"),
    # every transition is harmless when sent twice
    "claim is harmless when sent twice": _rule("claim", "elseif old.token == token then", "elseif false then"),
    "release is harmless when sent twice": _rule(
        "release", "if old.state == 'released' then return 'released' end", ""
    ),
    "a token given back is over": _rule("claim", "if old.token == token then return { 'over' } end", ""),
    # takeover
    "takeover compares the state": _rule(
        "claim", "if FINISHED[old.state] then return { 'replay', ", "if false then return { 'replay', "
    ),
    "an unknown outcome is not taken over": _rule(
        "claim", "if old.state == 'indeterminate' then return { 'indeterminate' } end", ""
    ),
    "takeover waits for the lease": _rule(
        "claim", "if wait > 0 then return { 'in_progress', wait, comparable, old.token } end", ""
    ),
    "takeover adds the skew": _rule(
        "claim", "tonumber(old.locked_until) + skew - now", "tonumber(old.locked_until) - now"
    ),
    "a renewal moves the lease": _rule("renew", "'locked_until', text(until_ms)", "'locked_until', held[4]"),
    # fence, attempt, created_at
    "the fence is over the old one": _rule(
        "claim", "fence, attempt = math.max(tonumber(old.fence) + 1, now), ", "fence, attempt = now, "
    ),
    "the fence is over an expired one": _rule(
        "claim", "fence = math.max(tonumber(old.fence) + 1, now)\n    old = nil", "old = nil"
    ),
    "the fence begins with the clock": _rule("claim", "comparable = 'new', now, 1,", "comparable = 'new', 1, 1,"),
    "an attempt counts": _rule("claim", ", tonumber(old.attempt) + 1\n", ", 1\n"),
    "created_at outlives a claim": _rule(
        "claim", "created, context = tonumber(old.created_at), old.context", "context = old.context"
    ),
    # fingerprints, principals
    "another fingerprint is a mismatch": _rule(
        "common", "if ARGV[i + 1] == record.fingerprint then return 'same' end", "if true then return 'same' end"
    ),
    "another fingerprint never takes over": _rule(
        "claim",
        "if likeness == 'foreign' or likeness == 'mismatch' then\n",
        "if likeness == 'foreign' or (likeness == 'mismatch' and old.state ~= 'in_progress') then\n",
    ),
    "another fingerprint never follows a release": _rule(
        "claim",
        "if likeness == 'foreign' or likeness == 'mismatch' then\n",
        "if likeness == 'foreign' or (likeness == 'mismatch' and old.state ~= 'released') then\n",
    ),
    "a record is compared under its own recipe": _rule(
        "common", "if ARGV[i] == record.recipe then", "if i == first then"
    ),
    "the principal is compared": _rule(
        "common",
        "if record.principal ~= principal or record.binding ~= binding then",
        "if record.binding ~= binding then",
    ),
    "the binding is compared": _rule(
        "common",
        "if record.principal ~= principal or record.binding ~= binding then",
        "if record.principal ~= principal then",
    ),
    "the principal comes before the state": _rule(
        "claim",
        "if likeness == 'foreign' or likeness == 'mismatch' then\n",
        "if (likeness == 'foreign' and not FINISHED[old.state]) or likeness == 'mismatch' then\n",
    ),
    "the principal comes before the fingerprint": _rule(
        "common",
        "  if record.principal ~= principal or record.binding ~= binding then return 'foreign' end\n",
        "",
        (
            "      if ARGV[i + 1] == record.fingerprint then return 'same' end\n",
            "      if ARGV[i + 1] == record.fingerprint then\n"
            "        if record.principal ~= principal or record.binding ~= binding then return 'foreign' end\n"
            "        return 'same'\n      end\n",
        ),
    ),
    # what was committed, and who holds what wasn't
    "a refusal names its holder": _rule("claim", "wait, old.token }", "wait, token }"),
    "a refusal tells what was committed": _rule("claim", "{ likeness, tonumber(old.confirmed),", "{ likeness, 1,"),
    "a new claim is not committed yet": _rule(
        "claim", "'reason', '', 'confirmed', '0',", "'reason', '', 'confirmed', '1',"
    ),
    "a winner's answer is for its principal": _rule("complete", " and likeness ~= 'foreign'", ""),
    "a winner's answer is for its request": _rule("complete", " and likeness ~= 'mismatch'", ""),
    # expiry
    "only what is over expires": _rule(
        "claim",
        "if (FINISHED[old.state] or old.state == 'released') and tonumber(old.expires_at) <= now then",
        "if tonumber(old.expires_at) <= now then",
    ),
    "what is over expires": _rule("claim", "and tonumber(old.expires_at) <= now then", "and false then"),
    "expiry comes before every check": _rule(
        "claim",
        "local how, fence, attempt, created, context, comparable = 'new', now, 1, now, '', 1\n",
        "local how, fence, attempt, created, context, comparable = 'new', now, 1, now, '', 1\n"
        "if old and readable(old) then\n"
        "  local early = compare(old, principal, binding, PAIRS)\n"
        "  if early == 'foreign' or early == 'mismatch' then return { early, 1, 0, old.token } end\n"
        "end\n",
    ),
    "a tombstone refuses": _rule("claim", "if tonumber(old.tombstone_until) > now then", "if false then"),
    "a tombstone tells strangers nothing": _rule(
        "claim", "if compare(old, principal, binding, PAIRS) == 'foreign' then return { 'foreign', 1, 0 } end", ""
    ),
    "a winner's answer expires": _rule("complete", " and tonumber(old.expires_at) > now", ""),
    "a copy ends with its row": _rule("complete", "if expires == 0 then expires", "if true then expires"),
    "a copy of an expired row is not made": _rule("complete", "if expires <= now then", "if false then"),
    # how long the server keeps it
    "an open record keeps its rest": _rule(
        "claim", "text(math.max(rest, lease + skew, max_processing))", "text(math.max(lease + skew, max_processing))"
    ),
    "an open record lives for lease and skew": _rule(
        "claim", "text(math.max(rest, lease + skew, max_processing))", "text(math.max(rest, max_processing))"
    ),
    "an open record lives for its work": _rule(
        "claim", "text(math.max(rest, lease + skew, max_processing))", "text(math.max(rest, lease + skew))"
    ),
    "a renewed record lives on": _rule("renew", "keep(record, life)", ""),
    "a renewal does not shorten a life": _rule("renew", "keep(record, life)", "redis.call('PEXPIRE', record, life)"),
    "a finished record lives for its time": _rule(
        "complete", "redis.call('PEXPIREAT', KEYS[1], text(expires + tombstone))", ""
    ),
    "a released record lives for its time": _rule("release", "redis.call('PEXPIRE', KEYS[1], text(ttl))", ""),
    "the index has an end": _rule("claim", "keep(KEYS[2], math.max(lease + skew, max_processing))", ""),
    "a counter has an end": _rule(
        "common", "if redis.call('PTTL', key) < 0 then redis.call('PEXPIRE', key, text(window_ms)) end", ""
    ),
    # what can't be read is not absent
    "the format is compared": _rule("common", "if record.format ~= FORMAT or not STATES[", "if not STATES["),
    "an unknown state is refused": _rule(
        "common", "if record.format ~= FORMAT or not STATES[record.state] then", "if record.format ~= FORMAT then"
    ),
    "renew compares the format": _rule("renew", "held[1] == FORMAT and ", ""),
    "an unreadable record is not absent": _rule(
        "claim",
        "if old then\n  if not readable(old) then return { 'unreadable', old.format or '' } end\n",
        "if old and not readable(old) then old = nil end\nif old then\n",
    ),
    "a record without our fields is not absent": _rule(
        "common", "if redis.call('EXISTS', key) == 1 then return {} end", ""
    ),
    # the limit
    "new keys are limited": _rule("common", "if rest > 0 then return rest end", ""),
    "old keys are not counted": _rule(
        "claim",
        "elseif KEYS[3] and limit > 0 then",
        "end\nif KEYS[3] and limit > 0 then",
    ),
}


def break_rule(name: str) -> Sources:
    """The scripts' texts without one rule, for ``RedisStore(sources=...)``."""
    rule = RULES[name]
    text = read_script(rule.script)
    for old, new in rule.edits:
        text = replace_once(text, old, new)
    return {rule.script: text}
