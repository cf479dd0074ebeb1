"""Ranged GETs over plain HTTP, straight into the memory where the bytes belong.

Libraries for S3 hand over bytes of their own, which are copied then: with large states that takes
as long as the way of the bytes. A store in the cluster is often reached by `http://`, and there
`http.client` fills our memory itself. botocore signs a URL for each object.

Only what goes as it should is done here: one answer, of the range that was asked for, of the
version that was asked for. Everything else is left to the library, with its retries and its errors.

The price: a second way to read. Not over TLS, where the interpreter would have to decrypt in small
pieces, and not by a proxy.
"""

from __future__ import annotations

import http.client
import threading
import time
import urllib.parse
import urllib.request
from contextlib import suppress
from typing import Any

_SIGNED_S = 3600
"""Seconds for which a URL is signed."""
_KEPT_S = 300.0
"""Seconds for which it is used: the credentials may be older ones then, and expire."""


class PlainHttp:
    """The objects of one bucket."""

    def __init__(self, endpoint: str, region: str, bucket: str, silence_s: float) -> None:
        import botocore.config
        import botocore.session

        session = botocore.session.get_session()
        config = botocore.config.Config(signature_version="s3v4", s3={"addressing_style": "path"})
        self._client: Any = session.create_client("s3", endpoint_url=endpoint, region_name=region, config=config)
        self._host = urllib.parse.urlsplit(endpoint).netloc
        self._bucket = bucket
        self._silence_s = silence_s
        self._lock = threading.Lock()
        self._targets: dict[str, tuple[str, float]] = {}
        """Of an object, the signed path, and when it was signed."""
        self._idle: list[http.client.HTTPConnection] = []

    def fill(self, key: str, buffer: memoryview, offset: int, *, etag: str | None) -> bool:
        """Whether the buffer holds what lies from `offset` on. If not, it may hold some of it."""
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is None:
            connection = http.client.HTTPConnection(self._host, timeout=self._silence_s)
        is_filled = False
        try:
            # Whatever is raised here, the library names it or gets over it. The URL is a secret.
            with suppress(Exception):
                is_filled = self._asked(connection, key, buffer, offset, etag)
        finally:
            if is_filled:
                with self._lock:
                    self._idle.append(connection)
            else:
                connection.close()
        return is_filled

    def _asked(
        self, connection: http.client.HTTPConnection, key: str, buffer: memoryview, offset: int, etag: str | None
    ) -> bool:
        span = f"{offset}-{offset + len(buffer) - 1}"
        headers = {"Range": f"bytes={span}", **({} if etag is None else {"If-Match": etag})}
        connection.request("GET", self._target(key), headers=headers)
        answer = connection.getresponse()
        said = answer.getheader("Content-Range", "").partition("/")[0]
        if answer.status != 206 or said != f"bytes {span}" or answer.length != len(buffer):
            return False
        filled = 0
        while filled < len(buffer) and (some := answer.readinto(buffer[filled:])):
            filled += some
        return filled == len(buffer)

    def close(self) -> None:
        """End the connections that nobody uses. The next range makes a new one."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    __del__ = close

    def _target(self, key: str) -> str:
        now_s = time.monotonic()
        with self._lock:
            target, signed_s = self._targets.get(key, ("", 0.0))
            if target and now_s - signed_s < _KEPT_S:
                return target
        url = urllib.parse.urlsplit(
            self._client.generate_presigned_url(
                "get_object", Params={"Bucket": self._bucket, "Key": key}, ExpiresIn=_SIGNED_S
            )
        )
        target = f"{url.path}?{url.query}"
        with self._lock:
            self._targets = (
                {key: (target, now_s)} if len(self._targets) > 64 else {**self._targets, key: (target, now_s)}
            )
        return target


def plain_http(endpoint: str | None, region: str, bucket: str, silence_s: float) -> PlainHttp | None:
    """For a store that is reached so; None for all others."""
    if endpoint is None or not endpoint.startswith("http://"):
        return None
    host = urllib.parse.urlsplit(endpoint).netloc
    if "http" in urllib.request.getproxies() and not urllib.request.proxy_bypass(host):
        return None
    with suppress(Exception):  # no credentials, for instance: the library says so
        return PlainHttp(endpoint, region, bucket, silence_s)
    return None
