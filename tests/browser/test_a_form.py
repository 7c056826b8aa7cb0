"""A form with ``{{ idempotent_key_field() }}``, in a real browser and without any script: one intent, one order. 1.5"""

import pytest
from flask import render_template_string, request

from flask_idempotent import errors, idempotent

from ..web import kit

PAGE = """<!doctype html>
<title>Shop</title>
<form action="{{ action }}" method="post" {%- if upload %} enctype="multipart/form-data" {%- endif %}>
  {% if key %}{{ idempotent_key_field() }}{% endif %}
  <input name="item" value="tea">
  <input name="count" value="1">
  <button>Order</button>
</form>
"""


class Shop:
    """``/`` and ``/upload`` have the form with the key, ``/bare`` has it without, and nobody protects that one."""

    def __init__(self, app, serve, effects):
        self.app, self.effects = app, effects
        self.gate = kit.Gate()
        self.gate.open()

        def page(action, *, key=True, upload=False):
            return lambda: render_template_string(PAGE, action=action, key=key, upload=upload)

        def order():
            number = effects.add(request.form.to_dict())
            self.gate.hold()
            return "", 303, {"Location": f"/orders/{number}"}

        app.add_url_rule("/", "form", page("/orders"))
        app.add_url_rule("/upload", "upload", page("/orders", upload=True))
        app.add_url_rule("/bare", "bare form", page("/bare", key=False))
        protected = idempotent(on_in_progress="wait", wait_timeout=kit.WAIT_S)(order)
        app.add_url_rule("/orders", "order", protected, methods=["POST"])
        app.add_url_rule("/bare", "bare", lambda: order(), methods=["POST"])

        @app.get("/orders/<int:number>")
        def confirmation(number):
            line = effects.lines[number - 1]
            return f"Thank you! Order number {number}: {line['count']} x {line['item']}"

        @app.errorhandler(errors.Mismatch)
        def changed(error):
            return 'This was ordered already, with other items. <a href="/">A new order</a>', error.code

        self.site = serve(app)

    def holding(self):
        """From now on orders take until the gate is opened."""
        self.gate = kit.Gate()
        return self.gate

    def open(self, person, path="/"):
        person.open(self.site.url + path)


@pytest.fixture
def shop(make_app, serve, effects):
    return Shop(make_app(), serve, effects)


@pytest.fixture(params=["somebody", "without_javascript"])
def person(request):
    return request.getfixturevalue(request.param)


#: What is done, and how many requests Chromium makes of it: where no time is between them it sends the last one alone.
CLICKS = {
    "a double click in no time": (lambda person: person.double_click("button"), 1),
    "a person's double click": (lambda person: person.click_twice("button", 0.1), 2),
    "two slow clicks": (lambda person: person.click_twice("button", 0.7), 2),
}


@pytest.mark.parametrize(("clicks", "sent"), CLICKS.values(), ids=CLICKS)
@pytest.mark.parametrize("path", ["/", "/upload"])
def test_two_clicks(shop, person, effects, crowd, clicks, sent, path):
    """Both are sent while the first one works. One order is made, and its confirmation is what the person sees."""
    gate = shop.holding()
    crowd.gates.append(gate)
    shop.open(person, path)
    both = crowd.start(clicks, person)
    gate.wait_inside()
    shop.site.wait_for("POST /orders", sent)
    gate.open()
    both.result(kit.WAIT_S)
    person.reads("Thank you! Order number 1: 1 x tea")
    assert person.url.endswith("/orders/1")
    assert shop.site.arrivals.count("POST /orders") >= sent
    assert effects.runs == 1


def test_two_clicks_without_a_key(shop, person, effects, crowd):
    """What it is good for: without the key the same clicks order twice."""
    gate = shop.holding()
    crowd.gates.append(gate)
    shop.open(person, "/bare")
    clicks, sent = CLICKS["a person's double click"]
    both = crowd.start(clicks, person)
    for _ in range(sent):
        gate.wait_inside()
    gate.open()
    both.result(kit.WAIT_S)
    person.reads("Thank you! Order number 2")
    assert effects.runs == 2


def test_the_second_click_after_the_answer(shop, person, effects):
    """The order is done before the second click, and the page isn't there yet."""
    shop.open(person)
    key = person.value("[name=idempotency_key]")
    shop.app.test_client().post("/orders", data={"item": "tea", "count": "1", "idempotency_key": key})
    person.click("button")
    person.reads("Thank you! Order number 1: 1 x tea")
    assert effects.runs == 1


def test_back_and_once_more(shop, person, effects):
    """The page that was left comes back with its key: sending it again shows the same confirmation."""
    shop.open(person)
    key = person.value("[name=idempotency_key]")
    for _ in range(3):
        person.click("button")
        person.reads("Thank you! Order number 1: 1 x tea")
        person.back()
        assert person.value("[name=idempotency_key]") == key
    assert shop.site.arrivals.count("POST /orders") == 3
    assert shop.site.arrivals.count("GET /") == 1
    assert effects.runs == 1


def test_back_and_another_order(shop, person, effects):
    """Other fields under the old key are told apart, with a page that leads on; a fresh form is a fresh order."""
    shop.open(person)
    person.click("button")
    person.reads("Thank you! Order number 1: 1 x tea")
    person.back()
    person.fill("[name=count]", "3")
    person.click("button")
    person.reads("This was ordered already, with other items.")
    assert effects.runs == 1
    person.click("a")
    person.fill("[name=count]", "3")
    person.click("button")
    person.reads("Thank you! Order number 2: 3 x tea")
    assert effects.runs == 2


def test_each_form_has_its_key(shop, person, effects):
    """Two equal orders that were meant: the form was fetched twice."""
    for number in (1, 2):
        shop.open(person)
        person.click("button")
        person.reads(f"Thank you! Order number {number}: 1 x tea")
    assert effects.runs == 2


def test_a_reload_of_the_form_is_a_new_intent(shop, somebody, effects):
    shop.open(somebody)
    key = somebody.value("[name=idempotency_key]")
    somebody.chrome.refresh()
    assert somebody.value("[name=idempotency_key]") not in ("", key)


def test_without_javascript_nothing_runs(shop, without_javascript):
    """The second browser does what its name says."""
    without_javascript.open('data:text/html,<p>plain</p><script>document.write("script")</script>')
    assert without_javascript.text == "plain"
