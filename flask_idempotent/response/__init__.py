"""What is kept of an answer, and how it is read back."""
