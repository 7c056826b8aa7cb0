"""Flask-Limiter: what it refuses leaves nothing. A replay counts for it, unless it is told not to count those."""

import pytest
from flask_limiter import Limiter
from flask_limiter.util import get_remote_address

from flask_idempotent import Idempotent, idempotent
from flask_idempotent.errors import ConfigurationError
from tests.web import kit
from tests.web.kit import keyed


def build(redis_url, effects, how, when="after", **limits):
    app = kit.bare_app(redis_url)
    limiter = Limiter(
        get_remote_address,
        storage_uri="memory://",
        headers_enabled=True,
        default_limits=["2/hour"] if how == "default" else [],
        **({f"default_limits_{name}": value for name, value in limits.items()} if how == "default" else {}),
    )
    if when == "before":
        Idempotent(app)
    limiter.init_app(app)
    if when == "after":
        Idempotent(app)
    view = idempotent(kit.answering(effects, ("made", 201)))
    if how == "decorator":
        view = limiter.limit("2/hour", **limits)(view)
    app.post("/orders", endpoint="orders")(view)
    return app, limiter


hows = pytest.mark.parametrize("how", ["default", "decorator"])


@hows
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_limit(redis_url, store, effects, how, when):
    """A replay was a request and is counted. Its 429 is told ahead of a replay, is not kept, and can't be mistaken."""
    app, limiter = build(redis_url, effects, how, when)
    client, headers, late = app.test_client(), keyed(), keyed()
    first = client.post("/orders", headers=headers)
    replay = client.post("/orders", headers=headers)
    assert (replay.get_data(), replay.headers[kit.REPLAYED]) == (b"made", "true")
    # The limiter's own headers are those of the moment, once.
    assert [answer.headers.getlist("X-RateLimit-Remaining") for answer in (first, replay)] == [["1"], ["0"]]
    for each in (headers, late):
        limited = client.post("/orders", headers=each)
        assert limited.status_code == 429
        assert "Retry-After" in limited.headers
        assert limited.mimetype != "application/problem+json"
        kit.assert_not_kept(limited)
    assert len(kit.records(store)) == 1
    with app.app_context():
        limiter.reset()
    kit.assert_kept(client.post("/orders", headers=late))
    again = client.post("/orders", headers=headers)
    assert again.headers[kit.REPLAYED] == "true"
    assert effects.runs == 2


@hows
def test_replays_can_be_free(redis_url, effects, how):
    """``deduct_when`` sees the answer that goes out, so it can tell a replay."""
    app, _ = build(redis_url, effects, how, deduct_when=lambda response: kit.REPLAYED not in response.headers)
    client, headers = app.test_client(), keyed()
    client.post("/orders", headers=headers)
    for _ in range(5):
        assert client.post("/orders", headers=headers).headers[kit.REPLAYED] == "true"
    kit.assert_kept(client.post("/orders", headers=keyed()))
    assert client.post("/orders", headers=keyed()).status_code == 429
    assert effects.runs == 2


def test_our_own_limit_is_another_one(redis_url, effects):
    app = kit.bare_app(redis_url, RATE_LIMIT="1/minute")
    Limiter(get_remote_address, app=app, storage_uri="memory://", default_limits=["100/hour"])
    Idempotent(app)
    client = kit.add_orders(app, effects).test_client()
    kit.assert_kept(client.post("/orders", headers=keyed()))
    kit.assert_problem(client.post("/orders", headers=keyed()), "rate-limited")


def test_the_mark_above_a_limit_is_refused(redis_url, effects):
    app = kit.bare_app(redis_url)
    limiter = Limiter(get_remote_address, app=app, storage_uri="memory://")
    Idempotent(app)
    app.post("/orders", endpoint="orders")(idempotent(limiter.limit("2/hour")(kit.answering(effects, "made"))))
    with pytest.raises(ConfigurationError, match="flask_limiter"):
        app.test_client().post("/orders", headers=keyed())
