"""The protocol as a model, explored to its end: `python -m tests.model` runs it, `docs/model.md` says what it shows."""
