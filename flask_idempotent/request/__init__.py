"""What comes in: the key, whose it is, and what the request asks for."""
