"""The hidden field that catches a person's double-click, without JavaScript."""

from __future__ import annotations

import uuid

from markupsafe import Markup

__all__ = ["key_field"]


def key_field(name: str) -> Markup:
    """A hidden form field with a fresh key: ``{{ idempotent_key_field() }}`` inside a form.

    Each time that the page is rendered it is another key, so a form that is fetched anew is a new intent.

    :param name: of the field, ``IDEMPOTENT_FORM_FIELD``.
    """
    return Markup('<input type="hidden" name="{}" value="{}">').format(name, uuid.uuid4())
