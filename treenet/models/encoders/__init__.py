"""Encoders: sentences to states. Each file says what its encoder reads, and what it asks of a data set."""
