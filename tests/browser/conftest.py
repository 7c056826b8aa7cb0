from tests.browser.fixtures import *  # noqa: F403
from tests.web.fixtures import *  # noqa: F403
