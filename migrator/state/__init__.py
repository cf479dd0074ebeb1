"""The registered objects: how the state of each kind of object is copied, read and restored.

Entry: `registry.Registry`; `capture.Capturer` copies the small state at a safe point.
Imports: the leaves, `data`, `ckpt`.
Never here: when to save, files, other ranks.
Next of its kind: an adapter for another kind of object in `adapters/`, and a line in the registry's list.
"""
