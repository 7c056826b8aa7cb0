"""Flask: the decorator, the hooks, and what they do at each turn of a request."""
