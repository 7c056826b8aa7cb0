"""What every store promises, and what the Redis scripts in particular do."""

import pytest

pytest.register_assert_rewrite("tests.contract.store_suite", "tests.contract.lua_tools")
