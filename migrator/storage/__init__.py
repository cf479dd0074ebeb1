"""Bytes under names, durable and exclusive where the caller says so.

Entry: `base.Storage`, what everything above relies on; `locate.storage_at` makes one for a directory or a URL.
Imports: `errors`.
Never here: what the bytes mean. No ckpt, manifest, generation or tensor is known here.
Next of its kind: a client beside `s3_client.py` or a line in `fsspec_client.py`; `tests/unit/storage/contract.py`.
"""
