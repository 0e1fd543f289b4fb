"""Encoders: sentences to states. A file says what its encoder reads, what it asks of a data set, and its name."""
