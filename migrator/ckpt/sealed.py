"""JSON with its digest in front: the form of a manifest, of the record of a life and of that of a rank.

    {"digest":"<32 hex digits>","manifest":{"format":2,...}}

This envelope never changes: one line, the digest of the bytes after it, JSON in the
form that `seal` writes, an integer `format`. So every version can tell a damaged file
from one of a newer version.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import xxhash

from migrator.errors import CkptCorrupt, CkptMismatch


def check_format(found: Any, known: Collection[int], what: str, way_out: str) -> int:
    """The number of the format, if this version reads it; `CkptMismatch` if it is a newer one, else `CkptCorrupt`."""
    if type(found) is int and found > max(known):
        raise CkptMismatch(
            f"{what} was written by a newer migrator: format {found!s:.80}, this one reads {max(known)}. "
            f"Update the package, or {way_out}."
        )
    if type(found) is not int or found not in known:
        raise CkptCorrupt(f"{what} has the format {found!r:.80}; expected one of {sorted(known)}")
    return found


def seal(kind: str, payload: Mapping[str, Any]) -> bytes:
    """JSON with its digest in front."""
    body = _compact(payload)
    return b'{"digest":"%s","%s":%s}\n' % (_digest(body), kind.encode("ascii"), body)


def unseal(kind: str, data: bytes) -> dict[str, Any]:
    """The payload, if these are exactly the bytes that `seal` makes of it; else `CkptCorrupt`."""
    head, middle, tail = b'{"digest":"', b'","%s":' % kind.encode("ascii"), b"}\n"
    start = len(head) + 32 + len(middle)
    body = data[start : -len(tail)]
    if data != head + data[len(head) : len(head) + 32] + middle + body + tail:
        raise CkptCorrupt(f"the {kind} does not have the form of one ({len(data)} bytes)")
    if data[len(head) : len(head) + 32] != _digest(body):
        raise CkptCorrupt(f"the {kind} does not have the digest it claims")
    try:
        payload = json.loads(body)
        # We never write double keys, other blanks or other forms of numbers.
        is_ours = isinstance(payload, dict) and _compact(payload) == body
    except (ValueError, RecursionError) as error:
        raise CkptCorrupt(f"the {kind} is no JSON: {error!r:.200}") from error
    if not is_ours:
        raise CkptCorrupt(f"the {kind} is JSON of another form than ours")
    return dict(payload)


def _compact(payload: Mapping[str, Any]) -> bytes:
    return json.dumps(payload, separators=(",", ":"), allow_nan=False).encode("ascii")


def _digest(body: bytes) -> bytes:
    return xxhash.xxh3_128(body).hexdigest().encode("ascii")
