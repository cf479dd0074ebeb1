"""Making a ckpt: from a safe point to the commit, alone or together with the other ranks.

Entry: `engine.alone`, `engine.in_group`.
Imports: the leaves, `platform`, `storage`, `ckpt`, `state`, `loop`, `notice`, `leaving`, `ranks`.
Never here: loading, the end of the process, what the script calls.
Next of its kind: a strategy beside `solo.py` and `group/`; a step of an attempt in `attempt.py`.
"""
