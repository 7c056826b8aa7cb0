"""D. Key scope, identity and key format.

F36: ``tests/web/test_guards.py``, for each guard, registered before and after. F38: ``tests/web/test_apps.py``; its
sweep and its SQL belong to the durable routes. F39: types of loaders and keys are in ``tests/web/test_identity.py`` and
``test_keys.py``; here is the part about two processes. F42: ``tests/web/test_keys.py``.
"""

import os
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.web import kit
from tests.web.kit import KEY, keyed

PROCESS = """
import sys, uuid
from flask_idempotent import Idempotent
from tests.web import kit
url, key, kind, value = sys.argv[1:]
idem, effects = Idempotent(), kit.Effects()
idem.principal_loader(lambda: {"str": str, "uuid": uuid.UUID}[kind](value))
client = kit.add_orders(kit.make_app(url, idem=idem), effects).test_client()
print(client.post("/orders", headers={kit.KEY: key}).status_code, effects.runs)
"""


def test_processes_agree_on_who_calls(redis_url):
    """F39: a UUID and its text are one caller, in every process."""
    key, said = kit.new_key(), []
    for seed, kind in enumerate(("uuid", "str")):
        command = [sys.executable, "-c", PROCESS, redis_url, key, kind, "1b4e28ba-2fa1-11d2-883f-0016d3cca427"]
        env = {**os.environ, "PYTHONHASHSEED": str(seed)}
        said.append(subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.split())
    assert said == [["201", "1"], ["201", "0"]]


def spell(key: str) -> str:
    escaped = key.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


PRINTABLE = "".join(map(chr, range(0x20, 0x7F))).replace(",", "")


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(key=st.text(PRINTABLE, min_size=1, max_size=255))
@example(key="x")
@example(key=" ")
@example(key="a b")
@example(key='quo"te and back\\slash')
@example(key="\\" * 255)
@example(key="~" * 255)
@example(key="{b001}:r:*")
def test_every_key_that_is_taken_protects(make_app, key):
    """F41: whatever the key is, its retry is a replay, and the neighbouring key is another one."""
    effects = kit.Effects()
    client = kit.add_orders(
        make_app(MIN_KEY_BITS=0, RATE_LIMIT=None, KEY_PREFIX=f"p{kit.new_key()}"), effects
    ).test_client()
    first = client.post("/orders", headers={KEY: spell(key)})
    kit.assert_kept(first)
    kit.assert_replay(first, client.post("/orders", headers={KEY: spell(key)}))
    other = key[:-1] + ("y" if key[-1] == "x" else "x")
    kit.assert_kept(client.post("/orders", headers={KEY: spell(other)}))
    assert effects.runs == 2


@pytest.mark.parametrize("length", [256, 5_000, 1_048_576])
@pytest.mark.parametrize("quoted", [True, False])
@pytest.mark.parametrize("required", [True, False])
def test_a_key_that_is_too_long(effects, length, quoted, required):
    """F41: refused before any store is asked; there is none here."""
    client = kit.add_orders(kit.make_app("redis://127.0.0.1:1"), effects, required=required).test_client()
    key = "0123456789abcdef" * (length // 16)
    answer = client.post("/orders", headers={KEY: f'"{key}"' if quoted else key + "x" * (length % 16)})
    kit.assert_problem(answer, "invalid-key")
    assert effects.runs == 0


def test_the_longest_key(make_app, effects):
    """F41: 255 characters without the quotes."""
    client = kit.add_orders(make_app(), effects).test_client()
    key = ("0123456789abcdef" * 16)[:255]
    first = client.post("/orders", headers={KEY: key})
    kit.assert_replay(first, client.post("/orders", headers={KEY: f'"{key}"'}))
    assert effects.runs == 1


def test_no_key_is_minted(make_app, effects, store):
    """F43"""
    client = kit.add_orders(make_app(), effects).test_client()
    for _ in range(2):
        answer = client.post("/orders", json={"a": 1})
        kit.assert_problem(answer, "missing-key")
        assert KEY not in answer.headers
    assert effects.runs == 0
    assert kit.our_keys(store) == []


def test_two_spellings_of_one_key(make_app, effects, store):
    """F44: bare or quoted, with spaces around; case counts."""
    client = kit.add_orders(make_app(), effects).test_client()
    key = "Key-6c3f9c2e83a14c52b7a5b6d9f0a4f5f3"
    first = client.post("/orders", headers={KEY: key})
    for spelling in (f'"{key}"', f"  {key} ", f'\t"{key}"  '):
        kit.assert_replay(first, client.post("/orders", headers={KEY: spelling}))
    for other in (key.lower(), key.upper()):
        kit.assert_kept(client.post("/orders", headers={KEY: other}))
    assert effects.runs == 3
    assert len(kit.records(store)) == 3


@pytest.mark.parametrize("second", ["the same", "another"])
def test_two_keys_are_none(make_app, effects, store, second):
    """F44: two fields, or two joined by a comma, which is what a server makes of them."""
    client = kit.add_orders(make_app(), effects).test_client()
    one = kit.new_key()
    other = one if second == "the same" else kit.new_key()
    for headers in ([(KEY, one), (KEY, other)], [(KEY, f"{one}, {other}")], [(KEY, f'"{one}", "{other}"')]):
        kit.assert_problem(client.post("/orders", headers=headers), "invalid-key")
    assert effects.runs == 0
    assert kit.our_keys(store) == []
    kit.assert_kept(client.post("/orders", headers=keyed(one)))
