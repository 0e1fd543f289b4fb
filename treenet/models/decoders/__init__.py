"""Decoders: from the memory of a source and the pieces so far to the next piece."""
