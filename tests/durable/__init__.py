"""Routes whose key, effect and answer are one transaction of the app's own database."""

import pytest

pytest.register_assert_rewrite("tests.durable.kit")
