"""Encoders: from sentences to states. The file of an encoder registers its name, its input kind and its requirements."""
