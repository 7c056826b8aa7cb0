"""Sagas: several effects outside under one key, each remembered by itself, and undone together."""

from .definition import Saga, resume

__all__ = ["Saga", "resume"]
