"""What S3 calls an error, and what we make of it: one table for all clients.

A library tells of an error in ways of its own. What counts is the code that the store sent, and the
request: from both follow the class of the error and what to do.
"""

from __future__ import annotations

import re

from migrator.errors import (
    StorageAccessError,
    StorageCredentialsError,
    StorageError,
    StorageExistsError,
    StorageFullError,
    StorageNotFoundError,
    StorageTransientError,
)
from migrator.storage.object_client import ConditionRefusedError, scrubbed

_NOT_FOUND = {"NoSuchKey", "404", "NoSuchUpload", "NotFound"}
EXISTS = {"PreconditionFailed", "412", "ConditionalRequestConflict"}
_NO_RIGHT = {
    *("AccessDenied", "403", "Forbidden", "SignatureDoesNotMatch", "RequestTimeTooSkewed", "AllAccessDisabled"),
    "AuthorizationHeaderMalformed",
}
_REFUSED = {"NotImplemented", "501"}
_FULL = {"QuotaExceeded", "507", "InsufficientStorage", "XMinioStorageFull"}

_RIGHTS = {
    "put_object": "s3:PutObject",
    "get_object": "s3:GetObject",
    "head_object": "s3:GetObject",
    "head_bucket": "s3:ListBucket",
    "list_objects_v2": "s3:ListBucket",
    "delete_object": "s3:DeleteObject",
    "create_multipart_upload": "s3:PutObject",
    "upload_part": "s3:PutObject",
    "complete_multipart_upload": "s3:PutObject",
    "list_multipart_uploads": "s3:ListBucketMultipartUploads",
    "abort_multipart_upload": "s3:AbortMultipartUpload",
}
"""The right that each request needs."""

_TO_DO = {
    "NoSuchBucket": "Make the bucket, or name another one (MIGRATOR_CKPT)",
    "InvalidBucketName": "A bucket has 3 to 63 small letters, digits, dots and hyphens (MIGRATOR_CKPT)",
    "InvalidAccessKeyId": "The store does not know this access key; see AWS_ACCESS_KEY_ID or the role of the pod",
    "SignatureDoesNotMatch": "The secret key does not fit the access key; see AWS_SECRET_ACCESS_KEY",
    "ExpiredToken": "The credentials have expired; give the pod credentials that are renewed (a role), or new ones",
    "InvalidToken": "The store does not take the session token; see AWS_SESSION_TOKEN or the role of the pod",
    "TokenRefreshRequired": "The credentials have expired; give the pod credentials that are renewed (a role)",
    "ExpiredTokenException": "The credentials have expired; give the pod credentials that are renewed (a role)",
    "AuthorizationHeaderMalformed": "The bucket is in another region; set AWS_REGION to its region",
    "RequestTimeTooSkewed": "The node's clock differs from the store's; set it (NTP)",
}
"""By S3's name of an error: what helps."""
_RENEWED = {"InvalidAccessKeyId", "ExpiredToken", "InvalidToken", "TokenRefreshRequired", "ExpiredTokenException"}
"""Errors that credentials which somebody renews put an end to."""
NO_CREDENTIALS = "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the pod a role"
_NO_CREDENTIALS = {
    *("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "TokenRetrievalError"),
    *("SSOTokenLoadError", "UnauthorizedSSOTokenError"),
}
SEE = "See whether the store answers (AWS_ENDPOINT_URL)."


def by_code(code: str, text: str, method: str) -> StorageError | None:
    """The error that this code means, behind a request of this kind; None if it says nothing."""
    if code in ("NoSuchBucket", "InvalidBucketName"):
        return StorageAccessError(f"{text}. {_TO_DO[code]}.")
    if code in _RENEWED:
        return StorageCredentialsError(f"{text}. {_TO_DO[code]}.")
    if code in _NO_RIGHT:
        return StorageAccessError(f"{text}. {_TO_DO.get(code, lacking(method))}.")
    if code in EXISTS:
        return StorageExistsError(text)
    if code in _NOT_FOUND:
        return StorageNotFoundError(text)
    if code in _REFUSED:
        return ConditionRefusedError(text)
    if code in _FULL:
        return StorageFullError(text)
    return None


def lacking(method: str) -> str:
    """For an error: the right that a request needs."""
    return f"The job needs the right {_RIGHTS[method]} there (docs/s3.md)"


def code_of(error: BaseException) -> str:
    """The code in an error of botocore, of whatever kind s3fs made of it."""
    found: BaseException | None = error
    while found is not None:
        response = getattr(found, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code", ""))
        found = found.__cause__ or found.__context__
    return ""


def code_in(error: BaseException) -> str:
    """The code in the store's own words, which obstore repeats."""
    found = re.search(r"<Code>(\w+)</Code>", str(error))
    return found[1] if found else ""


def as_storage_error(error: BaseException, doing: str, method: str) -> StorageError:
    """What s3fs, botocore or aiohttp raised, as an error of ours."""
    text = f"cannot {doing}: {scrubbed(error)}"
    known = by_code(code_of(error), text, method)
    if known is not None:
        return known
    if isinstance(error, PermissionError):
        return StorageAccessError(f"{text}. {lacking(method)}.")
    if isinstance(error, FileNotFoundError):
        return StorageNotFoundError(text)
    if isinstance(error, NotImplementedError):
        return ConditionRefusedError(text)
    if type(error).__name__ in _NO_CREDENTIALS:
        return StorageCredentialsError(f"{text}. {NO_CREDENTIALS}.")
    return StorageTransientError(f"{text}. {SEE}")
