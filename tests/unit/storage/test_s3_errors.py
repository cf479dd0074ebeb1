"""An error of the store means the same, whichever library tells of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from botocore.exceptions import ClientError, NoCredentialsError
from obstore.exceptions import GenericError, PermissionDeniedError

from migrator.errors import (
    StorageAccessError,
    StorageCredentialsError,
    StorageError,
    StorageExistsError,
    StorageFullError,
    StorageNotFoundError,
    StorageTransientError,
)
from migrator.storage import obstore_client, s3_errors


def by_botocore(code: str) -> StorageError:
    error = OSError("as s3fs wraps it")
    error.__cause__ = ClientError({"Error": {"Code": code, "Message": "no"}}, "UploadPart")
    return s3_errors.as_storage_error(error, "write s3://bucket/key", "upload_part")


def by_obstore(code: str) -> StorageError:
    said = GenericError(f"Client error with status 400: <Error><Code>{code}</Code><Message>no</Message></Error>")
    return obstore_client.as_storage_error(said, "write s3://bucket/key", "upload_part")


MEANINGS: dict[str, tuple[type[StorageError], str]] = {
    "AccessDenied": (StorageAccessError, "the right s3:PutObject there"),
    "NoSuchBucket": (StorageAccessError, "Make the bucket"),
    "SignatureDoesNotMatch": (StorageAccessError, "AWS_SECRET_ACCESS_KEY"),
    "AuthorizationHeaderMalformed": (StorageAccessError, "set AWS_REGION"),
    "RequestTimeTooSkewed": (StorageAccessError, "NTP"),
    "InvalidAccessKeyId": (StorageCredentialsError, "does not know this access key"),
    "ExpiredToken": (StorageCredentialsError, "have expired"),
    "ExpiredTokenException": (StorageCredentialsError, "have expired"),
    "TokenRefreshRequired": (StorageCredentialsError, "have expired"),
    "InvalidToken": (StorageCredentialsError, "session token"),
    "PreconditionFailed": (StorageExistsError, "cannot write s3://bucket/key"),
    "NoSuchUpload": (StorageNotFoundError, "cannot write s3://bucket/key"),
    "XMinioStorageFull": (StorageFullError, "cannot write s3://bucket/key"),
    "SlowDown": (StorageTransientError, "AWS_ENDPOINT_URL"),
}


@pytest.mark.parametrize("made", [by_botocore, by_obstore])
@pytest.mark.parametrize("code", MEANINGS)
def test_a_code_has_one_meaning(code: str, made: Callable[[str], StorageError]) -> None:
    kind, text = MEANINGS[code]
    error = made(code)
    assert type(error) is kind
    assert text in str(error)
    assert error.transient == (kind in (StorageCredentialsError, StorageFullError, StorageTransientError))


def test_what_has_no_code_is_told_by_its_kind() -> None:
    refused = obstore_client.as_storage_error(PermissionDeniedError("403"), "read s3://bucket/key", "get_object")
    assert type(refused) is StorageAccessError
    assert "s3:GetObject" in str(refused)
    nobody = s3_errors.as_storage_error(NoCredentialsError(), "list s3://bucket/", "list_objects_v2")
    assert type(nobody) is StorageCredentialsError
    assert "AWS_ACCESS_KEY_ID" in str(nobody)
