"""Bytes under names, durable and exclusive where the caller says so.

Entry: `base.Storage`, what everything above relies on; `posix.PosixStorage` keeps it in a directory.
Imports: `errors`.
Never here: what the bytes mean. No ckpt, manifest, generation or tensor is known here.
Next of its kind: an object store is a module beside `posix.py`, and passes `tests/unit/storage/contract.py`.
"""
