"""Who may call: three demo customers, by HTTP Basic."""

from __future__ import annotations

import secrets

from flask_httpauth import HTTPBasicAuth

__all__ = ["CUSTOMERS", "PASSWORD", "auth"]

CUSTOMERS = ("ada", "grace", "linus")
PASSWORD = "demo"

auth = HTTPBasicAuth(realm="shop")


@auth.verify_password
def verify(name: str, password: str) -> str | None:
    """The customer's name where the password is right."""
    return name if name in CUSTOMERS and secrets.compare_digest(password.encode(), PASSWORD.encode()) else None
