"""A stampede: the same request a thousand times at once, over four processes of eight threads.

``STAMPEDE_ROUNDS`` and ``STAMPEDE_SIZE`` set how often and how many; the acceptance is 50 rounds of 1,000.
"""

import os
import time
import urllib.parse
from collections import Counter

import pytest

from tests.web import kit

from .shop import Shop, job_body
from .swarm import Kind, Swarm, request_bytes

ROUNDS = int(os.environ.get("STAMPEDE_ROUNDS", "15"))
SIZE = int(os.environ.get("STAMPEDE_SIZE", "1000"))


@pytest.fixture
def shop(redis_url):
    # A worker takes no more connections than its share, so that all four are at it.
    options = ["--keep-alive=120", f"--worker-connections={SIZE // 4 + 50}", "--backlog=4096"]
    with Shop(redis_url, workers=4, threads=8, options=options) as shop:
        yield shop


@pytest.fixture
def swarm(shop):
    parts = urllib.parse.urlsplit(shop.url)
    with Swarm((parts.hostname, parts.port), SIZE) as swarm:
        yield swarm


@pytest.mark.timeout(600)
def test_one_run_a_round(shop, swarm):
    """F09"""
    # Without protection every request runs: this crowd would show what it is here to show.
    swarm.fire(request_bytes("/bare", kit.new_key(), job_body("bare")))
    assert shop.runs("bare") == SIZE

    kinds: Counter[str] = Counter()
    begin = time.monotonic()
    for number in range(ROUNDS):
        name = f"round {number}"
        # Work of 0 to 50 ms: the crowd meets it finished, or running.
        request = request_bytes("/work", kit.new_key(), job_body(name, seconds=0.01 * (number % 6)))
        answers = swarm.fire(request)
        assert shop.runs(name) == 1
        assert sum(answers.values()) == SIZE
        (winner,) = (kind for kind in answers if kind.status == 201 and not kind.replayed)
        assert answers[winner] == 1
        replay = winner._replace(replayed=True)
        refused = Kind(409, replayed=False, retry_after=True, code="in-progress", body="")
        assert set(answers) <= {winner, replay, refused}
        kinds += Counter(replayed=answers[replay], refused=answers[refused])
    print(f"{ROUNDS} rounds of {SIZE} in {time.monotonic() - begin:.1f} s: {dict(kinds)}")
    if ROUNDS > 6:
        assert kinds["replayed"]
        assert kinds["refused"]
    kit.assert_all_end(shop.store)
    pids = {pid for number in range(ROUNDS) for pid in shop.store.lrange(f"runs:round {number}", 0, -1)}
    assert ROUNDS < 10 or len(pids) > 1
