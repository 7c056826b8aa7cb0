"""Where records are kept: the protocol and its implementations."""
