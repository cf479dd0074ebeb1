"""Which texts name a root of ckpts: a directory, or a URL of a store that keeps the promises.

Everything else is refused here, with what to do instead. Nothing is imported and nothing is asked: the clients are
made in `listening()`, by `storage/locate.py`.
"""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from urllib.parse import unquote, urlparse


def local_path(text: str) -> Path | None:
    """The absolute path; None if the text is not a path: empty, with a NUL byte, or not encodable."""
    try:
        return Path(text).expanduser().absolute() if text.strip() and b"\0" not in os.fsencode(text) else None
    except (UnicodeEncodeError, RuntimeError):  # RuntimeError: `~name` of an unknown user
        return None


_BUCKET = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9!_.*'()=+@,-]+)*/?")
_ROOT = "a directory, or a URL: file:///directory, s3://bucket/prefix, gs://bucket/prefix or abfs://container/prefix"

STORES = {
    "gs": ("gcsfs", "migrator[gs]"),
    "gcs": ("gcsfs", "migrator[gs]"),
    "abfs": ("adlfs", "migrator[azure]"),
    "az": ("adlfs", "migrator[azure]"),
    "memory": ("fsspec", "fsspec"),
}
"""Other schemes of URLs: the module that has to be there, and what installs it."""
_PLACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9_.=+,-]+)*/?")

_SPEAKS_S3 = "use the store's S3 endpoint: s3://bucket/prefix and AWS_ENDPOINT_URL"
_SHOWS_PARTS = "a file is seen there while it is written; mount it as a volume and name the directory"
_READ_ONLY = "nothing can be written there as an object"
_WRAPPER = "name the store itself"
_NO_STORE = {
    **dict.fromkeys(("s3a", "s3n"), "write s3://bucket/prefix"),
    "abfss": "write abfs://container/prefix; AZURE_STORAGE_ACCOUNT_NAME says the account, and TLS is always used",
    **dict.fromkeys(("oss", "oci", "ocilake", "tos", "tosfs", "cos", "obs", "r2", "b2", "minio"), _SPEAKS_S3),
    **dict.fromkeys(("ftp", "ftps", "sftp", "ssh", "smb", "webdav", "webhdfs", "hdfs", "root", "dbfs"), _SHOWS_PARTS),
    **dict.fromkeys(("http", "https", "data", "zip", "tar", "libarchive", "reference", "git", "github"), _READ_ONLY),
    **dict.fromkeys(("cached", "blockcache", "filecache", "simplecache", "dir", "generic"), _WRAPPER),
    "local": "write file:///directory",
}
"""Why, or what to do instead."""


_TYPO = re.compile(r"(s3|gs|gcs|abfs|az|memory|file)(:(?!//)|//)")
"""The beginning of a URL with a letter too few. As a directory it would lie on the container's own disk."""


def root(text: str) -> Path | str:
    if text != text.strip():
        raise ValueError(f"{_ROOT}, without blanks before and behind it")
    if _TYPO.match(text):
        raise ValueError(f"{_ROOT}; a URL has a colon and two slashes; a directory of such a name begins with ./")
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", text)
    if scheme and scheme.group(1) == "s3":
        if not _BUCKET.fullmatch(text) or "/../" in f"{text}/" or "/./" in f"{text}/":
            raise ValueError(
                "s3://bucket/prefix, with no key, no user and no query in it; credentials are found as "
                "the AWS tools find them"
            )
        return text.rstrip("/")
    if scheme and scheme.group(1) in STORES:
        return _in_store(scheme.group(1), text)
    if not scheme and re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", text):
        raise ValueError(f"{_ROOT}; a URL has a colon and two slashes")
    if not scheme and re.match(r"[A-Za-z][A-Za-z0-9+.-]+::", text):
        raise ValueError(f"{_ROOT}; no chain of URLs: {_WRAPPER}")
    if scheme and scheme.group(1) != "file":
        why = _NO_STORE.get(scheme.group(1).lower())
        no_storage = f"this version has no storage for {scheme.group(1)}://"
        raise ValueError(f"{_ROOT}; {no_storage}{f': {why}' if why else ''}")
    if scheme:
        try:
            url = urlparse(text)
            text = unquote(url.path)
        except ValueError:
            raise ValueError(_ROOT) from None
        if url.netloc not in ("", "localhost") or url.query or url.fragment:
            raise ValueError(f"{_ROOT}; behind file:// comes the whole path (file:///directory), without ? and #")
    path = local_path(text)
    if path is None:
        raise ValueError(_ROOT)
    return path


def _in_store(scheme: str, text: str) -> str:
    place = text.removeprefix(f"{scheme}://")
    if not _PLACE.fullmatch(place) or {"..", "."} & set(place.split("/")):
        raise ValueError(
            f"{scheme}://name/prefix of letters, digits and the signs _.=+,- with no user, no account and no query in "
            "it; credentials are found in the environment (docs/s3.md)"
        )
    module, install = STORES[scheme]
    # Only looked for: the import takes seconds, and `listening()` makes it.
    if importlib.util.find_spec(module) is None:
        raise ValueError(f"{scheme}:// if the package {module} is installed; it is not: pip install '{install}'")
    return text.rstrip("/")
