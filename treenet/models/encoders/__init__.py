"""Encoders: sentences to states. The file of an encoder registers its name and states its input kind and its needs."""
