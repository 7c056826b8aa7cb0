"""Sphinx configuration: MyST pages, warnings are errors in CI."""

project = "flask-idempotent-redis"
author = "flask-idempotent contributors"
copyright = author

extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = "flask-idempotent-redis"
