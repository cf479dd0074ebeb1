"""Reads what other libraries left on the volume, so that their jobs can be continued.

Entry: `pytorchjob_migration.load()`.
Imports: the leaves, `ckpt`, `state`.
Never here: writing in a foreign format.
Next of its kind: a module for each foreign format.
"""
