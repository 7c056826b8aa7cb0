"""A person with a browser, against a real server: Chromium, without its window.

Debian's packages ``chromium`` and ``chromium-driver`` bring it. Where it isn't there, these tests skip; with ``CI`` set
they fail.
"""

import pytest

pytest.register_assert_rewrite("tests.browser.person")
