"""Values of any size in the job's store, in pieces: the store closes a connection that sends more than 8 MiB at
once."""

from __future__ import annotations

from typing import Any

PIECE_BYTES = 4 << 20
"""Maximum size of one piece, in bytes."""


def put(store: Any, key: str, data: bytes) -> bool:
    """Write the value. The key itself is set last, so a reader that finds it finds all pieces."""
    count = -(-len(data) // PIECE_BYTES)
    for number in range(count):
        store.set(_piece(key, number), data[number * PIECE_BYTES : (number + 1) * PIECE_BYTES])
    store.set(key, str(count))
    return True


def get(store: Any, key: str) -> bytes:
    """Read the value. Waits for the key, as the store's own `get` does."""
    count = int(store.get(key))
    return b"".join(bytes(store.get(_piece(key, number))) for number in range(count))


def delete(store: Any, key: str) -> None:
    if store.check([key]):
        for number in range(int(store.get(key))):
            store.delete_key(_piece(key, number))
        store.delete_key(key)


def _piece(key: str, number: int) -> str:
    return f"{key}/{number}"
