"""The storm: sends every request more than once, the ways it happens in production, and counts what really ran."""
