"""Processes that die at every point where one can, and what a retry makes of it."""
