"""What is known of payment providers: how long they remember a key, and what a key may look like."""

from .base import Provider

__all__ = ["Provider"]
