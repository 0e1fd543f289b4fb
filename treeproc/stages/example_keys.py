"""Keys of examples and texts, 16 bytes of blake2b each, and sorted sets of them as arrays."""

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

KEY_BYTES = 16
# Arrays of keys as bytes: NumPy leaves out zeros at the end of such values, which changes neither order nor equality.
KEY_TYPE = f"S{KEY_BYTES}"
_EMPTY_KEY = hashlib.blake2b(digest_size=KEY_BYTES)


def key_of(text: str) -> bytes:
    """Return the key of a text."""
    state = _EMPTY_KEY.copy()  # far cheaper than a new one
    state.update(text.encode())
    return state.digest()


def example_key(row: Mapping) -> bytes:
    """Return the key of what a model sees and answers: both sides, or text and label."""
    return key_of(f"{row['source']}\n{row.get('target', '')}\n{row.get('label', '')}")


def sorted_keys(keys: bytes) -> np.ndarray:
    """Return keys that lie one after the other as an ascending array of KEY_TYPE, each once."""
    return np.unique(np.frombuffer(keys, KEY_TYPE))


def places_in(keys: Sequence[bytes], known: np.ndarray) -> list[int]:
    """Return the places of the keys that stand in `known`, which is ascending."""
    if not len(known) or not keys:
        return []
    asked = np.frombuffer(b"".join(keys), KEY_TYPE)
    at = np.minimum(np.searchsorted(known, asked), len(known) - 1)
    return np.flatnonzero(known[at] == asked).tolist()
