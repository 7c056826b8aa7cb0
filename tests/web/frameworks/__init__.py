"""The extension beside its neighbours: real packages, counted effects."""
