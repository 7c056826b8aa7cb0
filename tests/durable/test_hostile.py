"""Views that are careless with the transaction that they share."""

import logging
import threading

from flask import copy_current_request_context

from tests.durable import kit


def test_a_thread_with_a_copy_of_the_request_does_not_share_the_transaction(make_shop, database_url):
    shop = make_shop(database_url, engine_options=kit.MANY)
    began, over = threading.Event(), threading.Event()

    @shop.view
    def view():
        shop.runs += 1

        @copy_current_request_context
        def audit():
            shop.db.session.execute(kit.sa.text("select 1"))
            began.set()
            over.wait(5)
            shop.db.session.rollback()

        thread = threading.Thread(target=audit)
        thread.start()
        assert began.wait(5)
        shop.order("a")
        shop.db.session.commit()
        over.set()
        thread.join()
        return "made", 201

    post = shop.poster()
    first = post()
    assert first.status_code == 201
    shop.assert_done("a")
    shop.assert_replays(first, post)


def test_work_that_was_not_even_flushed_is_not_committed_behind_the_key(shop, caplog):
    @shop.view
    def view():
        shop.runs += 1
        shop.db.session.add(shop.Order(item="a"))
        return "made", 201

    @shop.app.after_request
    def commit(response):
        shop.db.session.commit()
        return response

    post = shop.poster()
    with caplog.at_level(logging.WARNING, "flask_idempotent"):
        first = post()
    assert first.status_code == 201
    shop.assert_done()
    assert any("never committed" in message for message in caplog.messages)
    shop.assert_replays(first, post)


def test_a_view_that_closes_the_connection_leaves_nothing_behind(shop):
    @shop.view
    def view():
        shop.runs += 1
        shop.order("a")
        if shop.runs == 1:
            with shop.db.session.connection():
                pass
        shop.db.session.commit()
        return "made", 201

    post = shop.poster()
    first = post()
    assert first.status_code >= 500
    shop.assert_nothing()
    assert post().status_code == 201
    shop.assert_done("a")
