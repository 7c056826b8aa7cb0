"""Every script, called as the store calls it but by hand: each branch, and each reply that its header lists."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import redis

from flask_idempotent.stores.redis import SCRIPTS, read_script
from tests.contract.lua_tools import ScriptedClock, script_text

DIGEST = "ab" * 32
RECORD, INDEX, COUNTER = "raw:{b171}:r:" + DIGEST, "raw:{b171}:inflight", "raw:rate:bucket"
LEASE, SKEW, WORK, TTL, TOMBSTONE, WINDOW = 30_000, 5_000, 120_000, 3_600_000, 7_200_000, 60_000


class Raw:
    """The scripts' KEYS and ARGV, by name."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        self.clock = ScriptedClock(client)

    @property
    def now(self) -> int:
        return self.clock.now_ms

    def run(self, name: str, keys: list[str], arguments: list[Any]) -> Any:
        text = script_text(name, self.clock.sources())
        return self.client.eval(text, len(keys), *keys, *arguments)

    def claim(
        self,
        token: str = "t1",
        *,
        principal: str = "p1",
        binding: str = "b1",
        lease: int = LEASE,
        skew: int = SKEW,
        work: int = WORK,
        limit: int = 0,
        counter: bool = True,
        pairs: tuple[str, ...] = ("r1", "A"),
    ) -> Any:
        keys = [RECORD, INDEX, *([COUNTER] if counter else [])]
        return self.run("claim", keys, [DIGEST, token, principal, binding, lease, skew, work, limit, WINDOW, *pairs])

    def complete(
        self,
        token: str = "t1",
        *,
        principal: str = "p1",
        binding: str = "b1",
        state: str = "succeeded",
        body: bytes = b"\x00\xff",
        tombstone: int = 0,
        expires_at: int = 0,
        pairs: tuple[str, ...] = ("r1", "A"),
    ) -> Any:
        answer = ["201", b"\x80h", body, "full", "key-1", "view", 1]
        return self.run(
            "complete",
            [RECORD, INDEX],
            [DIGEST, token, principal, binding, state, *answer, TTL, tombstone, expires_at, *pairs],
        )

    def release(self, token: str = "t1", mode: str = "keep", ttl: int = TTL) -> Any:
        return self.run("release", [RECORD, INDEX], [DIGEST, token, mode, "status-503", ttl])

    def renew(self, *tokens: str, lease: int = LEASE, life: int = WORK) -> Any:
        return self.run(
            "renew",
            [RECORD, INDEX] * len(tokens),
            [x for token in tokens for x in (DIGEST, token, lease, life)],
        )

    def limit(self, most: int) -> Any:
        return self.run("limit", [COUNTER], [most, WINDOW])

    def record(self) -> dict[str, bytes]:
        return {name.decode(): value for name, value in self.client.hgetall(RECORD).items()}

    def set(self, **fields: object) -> None:
        self.client.hset(RECORD, mapping=fields)  # type: ignore[arg-type]

    def flat(self) -> dict[bytes, bytes]:
        return dict(self.client.hgetall(RECORD))

    def lapse(self) -> None:
        self.clock.advance(LEASE + SKEW)


def pairs_of(flat: list[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


@dataclass(frozen=True)
class Case:
    script: str
    word: str
    play: Callable[[Raw], Any]

    @property
    def name(self) -> str:
        return f"{self.script}: {self.play.__name__}"


CASES: list[Case] = []


def case(script: str, word: str) -> Callable[[Callable[[Raw], Any]], Callable[[Raw], Any]]:
    """A case: what leads to a reply, and the word that stands first in it (for ``claimed`` the second, too)."""

    def register(play: Callable[[Raw], Any]) -> Callable[[Raw], Any]:
        CASES.append(Case(script, word, play))
        return play

    return register


# -- claim -----------------------------------------------------------------------------------------------------------


@case("claim", "claimed new")
def a_new_key(raw: Raw) -> Any:
    reply = raw.claim()
    assert reply == [b"claimed", b"new", raw.now, 1, raw.now, 1]
    assert raw.record() == {
        "format": b"1",
        "state": b"in_progress",
        "token": b"t1",
        "fence": b"%d" % raw.now,
        "attempt": b"1",
        "created_at": b"%d" % raw.now,
        "locked_until": b"%d" % (raw.now + LEASE),
        "recipe": b"r1",
        "fingerprint": b"A",
        "principal": b"p1",
        "binding": b"b1",
        **dict.fromkeys(("status", "headers", "body", "kind", "cipher", "context", "reason"), b""),
        **dict.fromkeys(("confirmed", "completed_at", "expires_at", "tombstone_until"), b"0"),
    }
    assert raw.client.zscore(INDEX, DIGEST) == raw.now + LEASE
    assert 0 < raw.client.pttl(RECORD) <= WORK
    assert 0 < raw.client.pttl(INDEX) <= WORK
    assert not raw.client.exists(COUNTER)
    return reply


@case("claim", "claimed new")
def a_new_key_without_a_counter(raw: Raw) -> Any:
    return raw.claim(limit=1, counter=False)


@case("claim", "claimed new")
def a_new_key_that_counts(raw: Raw) -> Any:
    reply = raw.claim(limit=1)
    assert raw.client.get(COUNTER) == b"1"
    assert 0 < raw.client.pttl(COUNTER) <= WINDOW
    return reply


@case("claim", "claimed new")
def a_key_whose_answer_expired(raw: Raw) -> Any:
    raw.claim()
    raw.complete()
    raw.clock.advance(TTL)
    reply = raw.claim("t2", principal="p2", pairs=("r1", "B"))
    assert reply == [b"claimed", b"new", raw.now, 1, raw.now, 1]
    assert (raw.record()["body"], raw.record()["headers"], raw.record()["principal"]) == (b"", b"", b"p2")
    return reply


@case("claim", "claimed new")
def a_key_that_was_given_back_and_expired(raw: Raw) -> Any:
    raw.claim()
    raw.release()
    raw.clock.advance(TTL)
    return raw.claim()  # even by the same token: nothing of it is known any more


@case("claim", "claimed new")
def a_key_whose_tombstone_is_over(raw: Raw) -> Any:
    raw.claim()
    raw.complete(tombstone=TOMBSTONE)
    raw.clock.advance(TTL + TOMBSTONE)
    return raw.claim("t2")


@case("claim", "claimed new")
def an_expired_key_with_a_fence_ahead(raw: Raw) -> Any:
    raw.claim()
    raw.complete()
    raw.clock.advance(TTL)
    raw.set(fence=raw.now + 500)
    reply = raw.claim("t2")
    assert reply[2] == raw.now + 501
    return reply


@case("claim", "claimed same")
def the_same_token(raw: Raw) -> Any:
    first = raw.claim()
    raw.clock.advance(10)
    reply = raw.claim()
    assert reply == [b"claimed", b"same", *first[2:]]
    assert raw.record()["locked_until"] == b"%d" % (raw.now + LEASE)
    return reply


@case("claim", "claimed same")
def the_same_token_after_its_lease(raw: Raw) -> Any:
    first = raw.claim()
    raw.lapse()
    reply = raw.claim()
    assert reply[2:] == first[2:]
    return reply


@case("claim", "claimed reclaimed")
def a_lapsed_claim(raw: Raw) -> Any:
    first = raw.claim()
    raw.set(context=b"\x00noted")
    raw.lapse()
    reply = raw.claim("t2")
    assert reply == [b"claimed", b"reclaimed", raw.now, 2, first[4], 1]
    assert raw.record()["context"] == b"\x00noted"
    return reply


@case("claim", "claimed reclaimed")
def a_lapsed_claim_of_an_unknown_recipe(raw: Raw) -> Any:
    raw.claim()
    raw.lapse()
    reply = raw.claim("t2", pairs=("r2", "A"))
    assert reply[5] == 0
    return reply


@case("claim", "claimed again")
def a_claim_given_back(raw: Raw) -> Any:
    first = raw.claim()
    raw.release()
    reply = raw.claim("t2")
    assert reply == [b"claimed", b"again", max(raw.now, first[2] + 1), 2, first[4], 1]
    assert raw.record()["reason"] == b""
    return reply


@case("claim", "claimed again")
def a_claim_given_back_by_an_earlier_holder(raw: Raw) -> Any:
    raw.claim()
    raw.release()
    raw.claim("t2")
    raw.release("t2")
    reply = raw.claim("t1")  # the record remembers its last token; the lease bounds a copy of an older one
    assert reply[3] == 3
    return reply


@case("claim", "replay")
def an_answer(raw: Raw) -> Any:
    raw.claim()
    raw.complete()
    before = raw.flat()
    for token in ("t1", "t2"):
        reply = raw.claim(token, limit=1)
        assert reply[1] == 1
        assert pairs_of(reply[2]) == raw.flat() == before
    assert not raw.client.exists(COUNTER)
    return reply


@case("claim", "replay")
def a_failure_of_an_unknown_recipe(raw: Raw) -> Any:
    raw.claim()
    raw.complete(state="failed")
    reply = raw.claim("t2", pairs=("r2", "B"))
    assert reply[1] == 0
    return reply


@case("claim", "in_progress")
def a_running_claim(raw: Raw) -> Any:
    raw.claim()
    before = raw.flat()
    raw.clock.advance(LEASE + SKEW - 1)
    assert raw.claim("t2", pairs=("r2", "B")) == [b"in_progress", 1, 0, b"t1"]
    reply = raw.claim("t2", limit=1)
    assert reply == [b"in_progress", 1, 1, b"t1"]
    assert raw.flat() == before
    return reply


@case("claim", "over")
def a_token_given_back(raw: Raw) -> Any:
    raw.claim()
    raw.release()
    before = raw.flat()
    reply = raw.claim()
    assert raw.flat() == before
    return reply


@case("claim", "indeterminate")
def an_unknown_outcome(raw: Raw) -> Any:
    raw.claim()
    raw.set(state="indeterminate", locked_until=0)
    raw.clock.advance(10 * TTL)
    return raw.claim("t2")


@case("claim", "foreign")
def another_principal(raw: Raw) -> Any:
    raw.claim()
    reply = raw.claim("t2", principal="p2", pairs=("r1", "B"))
    assert reply == [b"foreign", 0, LEASE + SKEW, b"t1"]
    raw.clock.advance(LEASE + SKEW)
    assert raw.claim("t2", principal="p2") == [b"foreign", 0, 0, b"t1"]
    raw.complete()
    assert raw.claim("t2", principal="p2") == [b"foreign", 1, 0, b"t1"]
    return reply


@case("claim", "foreign")
def another_binding(raw: Raw) -> Any:
    raw.claim()
    return raw.claim("t2", binding="")


@case("claim", "foreign")
def a_tombstone_for_a_stranger(raw: Raw) -> Any:
    raw.claim()
    raw.complete(tombstone=TOMBSTONE)
    raw.clock.advance(TTL)
    return raw.claim("t2", principal="p2")


@case("claim", "mismatch")
def another_fingerprint(raw: Raw) -> Any:
    raw.claim()
    raw.lapse()
    reply = raw.claim("t2", pairs=("r2", "A", "r1", "B"))
    assert reply == [b"mismatch", 0, 0, b"t1"]
    raw.complete()
    assert raw.claim("t2", pairs=("r1", "B")) == [b"mismatch", 1, 0, b"t1"]
    return reply


@case("claim", "expired")
def a_tombstone(raw: Raw) -> Any:
    raw.claim()
    raw.complete(tombstone=TOMBSTONE)
    raw.clock.advance(TTL)
    before = raw.flat()
    reply = raw.claim("t2", limit=1)
    assert raw.flat() == before
    assert not raw.client.exists(COUNTER)
    return reply


@case("claim", "limited")
def one_key_too_many(raw: Raw) -> Any:
    raw.client.set(COUNTER, 3, px=WINDOW)
    reply = raw.claim(limit=3)
    assert 0 < reply[1] <= WINDOW
    assert raw.client.get(COUNTER) == b"3"
    assert not raw.client.exists(RECORD, INDEX)
    return reply


@case("claim", "unreadable")
def a_later_format(raw: Raw) -> Any:
    raw.claim()
    raw.set(format="2")
    reply = raw.claim()
    assert reply == [b"unreadable", b"2"]
    return reply


@case("claim", "unreadable")
def a_claim_of_a_string(raw: Raw) -> Any:
    raw.client.set(RECORD, "theirs")
    reply = raw.claim()
    assert reply == [b"unreadable", b""]
    assert raw.client.get(RECORD) == b"theirs"
    return reply


# -- complete --------------------------------------------------------------------------------------------------------


@case("complete", "stored")
def an_own_claim(raw: Raw) -> Any:
    raw.claim()
    before = raw.record()
    raw.clock.advance(7)
    reply = raw.complete(tombstone=TOMBSTONE)
    assert reply == [b"stored", raw.now + TTL]
    changed = {
        "state": b"succeeded",
        "status": b"201",
        "headers": b"\x80h",
        "body": b"\x00\xff",
        "kind": b"full",
        "cipher": b"key-1",
        "reason": b"view",
        "confirmed": b"1",
        "locked_until": b"0",
        "completed_at": b"%d" % raw.now,
        "expires_at": b"%d" % (raw.now + TTL),
        "tombstone_until": b"%d" % (raw.now + TTL + TOMBSTONE),
    }
    assert raw.record() == {**before, **changed}
    assert raw.client.zscore(INDEX, DIGEST) is None
    assert TTL < raw.client.pttl(RECORD) <= TTL + TOMBSTONE + 7  # the scripts' clock is ahead of the server's
    return reply


@case("complete", "stored")
def an_own_claim_that_lapsed(raw: Raw) -> Any:
    raw.claim()
    raw.lapse()
    reply = raw.complete(state="failed")
    assert (raw.record()["state"], raw.record()["tombstone_until"]) == (b"failed", b"0")
    return reply


@case("complete", "stored")
def an_own_answer(raw: Raw) -> Any:
    raw.claim()
    first = raw.complete()
    before = raw.flat()
    raw.clock.advance(7)
    reply = raw.complete(state="failed", body=b"other")
    assert reply[:2] == first
    assert pairs_of(reply[2]) == raw.flat() == before
    return reply


@case("complete", "stored")
def a_copy_of_a_row(raw: Raw) -> Any:
    raw.claim()
    reply = raw.complete(expires_at=raw.now + 600_000)
    assert reply == [b"stored", raw.now + 600_000]
    assert 0 < raw.client.pttl(RECORD) <= 600_000
    return reply


@case("complete", "lost")
def a_claim_that_another_holds(raw: Raw) -> Any:
    raw.claim()
    raw.lapse()
    raw.claim("t2")
    raw.clock.advance(10)
    before = raw.flat()
    reply = raw.complete()
    assert reply[1] == LEASE - 10
    assert not reply[2:] or reply[2] is None
    assert raw.flat() == before
    return reply


@case("complete", "lost")
def a_winners_answer(raw: Raw) -> Any:
    raw.claim("t2")
    raw.complete("t2")
    before = raw.flat()
    reply = raw.complete("t1", body=b"other", pairs=("r2", "X", "r1", "A"))
    assert reply[1] == 0
    assert pairs_of(reply[2]) == raw.flat() == before
    for other in ({"principal": "p2"}, {"binding": "b2"}, {"pairs": ("r1", "B")}):
        withheld = raw.complete("t1", **other)  # type: ignore[arg-type]
        assert withheld[:2] == [b"lost", 0]
        assert not withheld[2:] or withheld[2] is None
    return reply


@case("complete", "lost")
def a_winners_answer_that_expired(raw: Raw) -> Any:
    raw.claim("t2")
    raw.complete("t2")
    raw.clock.advance(TTL)
    reply = raw.complete("t1")
    assert not reply[2:] or reply[2] is None
    return reply


@case("complete", "lost")
def an_own_claim_given_back(raw: Raw) -> Any:
    raw.claim()
    raw.release()
    reply = raw.complete()
    assert reply[1] == 0
    assert raw.record()["state"] == b"released"
    return reply


@case("complete", "lost")
def an_own_unknown_outcome(raw: Raw) -> Any:
    raw.claim()
    raw.set(state="indeterminate", locked_until=0)
    return raw.complete()


@case("complete", "gone")
def a_claim_that_the_server_lost(raw: Raw) -> Any:
    reply = raw.complete()
    assert not raw.client.exists(RECORD)
    return reply


@case("complete", "gone")
def a_copy_of_an_expired_row(raw: Raw) -> Any:
    raw.claim()
    reply = raw.complete(expires_at=raw.now)
    assert not raw.client.exists(RECORD)
    assert raw.client.zscore(INDEX, DIGEST) is None
    return reply


@case("complete", "unreadable")
def a_completion_of_a_later_format(raw: Raw) -> Any:
    raw.claim()
    raw.set(format="2")
    before = raw.flat()
    reply = raw.complete()
    assert reply == [b"unreadable", b"2"]
    assert raw.flat() == before
    return reply


# -- release ---------------------------------------------------------------------------------------------------------


@case("release", "released")
def a_claim_to_keep(raw: Raw) -> Any:
    raw.claim()
    before = raw.record()
    reply = raw.release()
    changed = {
        "state": b"released",
        "reason": b"status-503",
        "locked_until": b"0",
        "expires_at": b"%d" % (raw.now + TTL),
    }
    assert raw.record() == {**before, **changed}
    assert raw.client.zscore(INDEX, DIGEST) is None
    assert WORK < raw.client.pttl(RECORD) <= TTL
    return reply


@case("release", "released")
def a_claim_to_forget(raw: Raw) -> Any:
    raw.claim()
    reply = raw.release(mode="forget")
    assert not raw.client.exists(RECORD, INDEX)
    return reply


@case("release", "released")
def a_claim_that_was_given_back(raw: Raw) -> Any:
    raw.claim()
    raw.release()
    before = raw.flat()
    raw.clock.advance(5)
    assert raw.release(mode="forget") == b"released"
    reply = raw.release()
    assert raw.flat() == before
    return reply


@case("release", "finished")
def an_own_finished_claim(raw: Raw) -> Any:
    raw.claim()
    raw.complete()
    before = raw.flat()
    assert raw.release(mode="forget") == b"finished"
    reply = raw.release()
    assert raw.flat() == before
    return reply


@case("release", "lost")
def a_claim_of_another(raw: Raw) -> Any:
    raw.claim("t2")
    before = raw.flat()
    reply = raw.release("t1", mode="forget")
    assert raw.flat() == before
    return reply


@case("release", "lost")
def an_own_claim_of_unknown_outcome(raw: Raw) -> Any:
    raw.claim()
    raw.set(state="indeterminate", locked_until=0)
    return raw.release()


@case("release", "gone")
def nothing_to_give_back(raw: Raw) -> Any:
    reply = raw.release()
    assert not raw.client.exists(RECORD)
    return reply


@case("release", "unreadable")
def a_later_format_to_give_back(raw: Raw) -> Any:
    raw.claim()
    raw.set(format="2")
    return raw.release(mode="forget")


# -- renew -----------------------------------------------------------------------------------------------------------


@case("renew", "1")
def a_claim_of_ours(raw: Raw) -> Any:
    raw.claim()
    raw.client.pexpire(RECORD, 1_000)
    raw.client.pexpire(INDEX, 1_000)
    raw.clock.advance(LEASE)
    reply = raw.renew("t1")
    assert raw.record()["locked_until"] == b"%d" % (raw.now + LEASE)
    assert raw.client.zscore(INDEX, DIGEST) == raw.now + LEASE
    assert 1_000 < raw.client.pttl(RECORD) <= WORK
    assert 1_000 < raw.client.pttl(INDEX) <= WORK
    assert raw.renew("t1", lease=1) == [1]
    assert raw.record()["locked_until"] == b"%d" % (raw.now + LEASE)
    return reply


@case("renew", "0")
def claims_that_are_not_ours(raw: Raw) -> Any:
    assert raw.renew("t1") == [0]  # absent
    assert not raw.client.exists(RECORD, INDEX)
    raw.claim("t2")
    assert raw.renew("t1", "t2", "t1") == [0, 1, 0]
    for fields in ({"state": "released"}, {"state": "succeeded"}, {"state": "in_progress", "format": "2"}):
        raw.set(**fields)
        before = raw.flat()
        assert raw.renew("t2") == [0]
        assert raw.flat() == before
    raw.client.set(RECORD, "theirs")
    return raw.renew("t2")


@case("renew", "")
def nothing_to_renew(raw: Raw) -> Any:
    return raw.renew()


# -- limit -----------------------------------------------------------------------------------------------------------


@case("limit", "0")
def room_in_the_window(raw: Raw) -> Any:
    assert raw.limit(2) == 0
    reply = raw.limit(2)
    assert raw.client.get(COUNTER) == b"2"
    assert 0 < raw.client.pttl(COUNTER) <= WINDOW
    return reply


@case("limit", "n")
def no_room_in_the_window(raw: Raw) -> Any:
    raw.limit(1)
    for _ in range(3):
        reply = raw.limit(1)
        assert 0 < reply <= WINDOW
    assert raw.client.get(COUNTER) == b"1"
    return "n"


@case("limit", "0")
def a_counter_without_an_end(raw: Raw) -> Any:
    raw.client.set(COUNTER, 5)
    reply = raw.limit(1)
    assert raw.client.get(COUNTER) == b"1"
    assert 0 < raw.client.pttl(COUNTER) <= WINDOW
    assert raw.limit(1) > 0
    return reply


# -- refund ----------------------------------------------------------------------------------------------------------


@case("refund", "n")
def a_count_is_taken_back(raw: Raw) -> Any:
    raw.limit(2)
    raw.limit(2)
    assert raw.limit(2) > 0
    assert raw.run("refund", [COUNTER], []) == 1
    assert 0 < raw.client.pttl(COUNTER) <= WINDOW
    assert raw.limit(2) == 0
    return "n"


@case("refund", "0")
def nothing_to_take_back(raw: Raw) -> Any:
    reply = raw.run("refund", [COUNTER], [])
    assert not raw.client.exists(COUNTER)
    return reply


# --------------------------------------------------------------------------------------------------------------------


def word_of(reply: Any) -> str:
    if isinstance(reply, list):
        reply = b" ".join(reply[:2]) if reply[:1] == [b"claimed"] else reply[0] if reply else ""
    return reply.decode() if isinstance(reply, bytes) else str(reply)


@pytest.mark.parametrize("each", CASES, ids=[each.name for each in CASES])
def test_reply(redis_client: redis.Redis, each: Case) -> None:
    assert word_of(each.play(Raw(redis_client))) == each.word


def words_in(script: str) -> set[str]:
    """The words that a script's text can reply."""
    text = re.sub(r"--.*", "", read_script(script))
    words = set(re.findall(r"return (?:\{ )?'(\w+)'", text))
    for name in re.findall(r"return \{ (\w+),", text):  # a word in a variable, set from `compare`
        words |= set(re.findall(rf"{name} == '(\w+)'", text))
    return words


def test_every_word_has_a_case() -> None:
    hows = set(re.findall(r"how = '(\w+)'|comparable = '(\w+)'|how, fence, attempt = '(\w+)'", read_script("claim")))
    claimed = {f"claimed {word}" for groups in hows for word in groups if word}
    assert len(claimed) == 4
    expected = {
        "claim": words_in("claim") - {"claimed", "unknown"} | claimed,
        "complete": words_in("complete"),
        "release": words_in("release"),
        "renew": {"0", "1", ""},
        "limit": {"0", "n"},
        "refund": {"0", "n"},
    }
    for script in SCRIPTS:
        assert {each.word for each in CASES if each.script == script} == expected[script], script


@pytest.mark.parametrize("script", ["claim", "complete", "release"])
def test_every_word_is_in_the_header(script: str) -> None:
    header = "".join(line for line in read_script(script).splitlines(True) if line.startswith("--"))
    for word in words_in(script) - {"unknown"}:
        assert re.search(rf"\b{word}\b", header.split("Repl", 1)[1]), word
