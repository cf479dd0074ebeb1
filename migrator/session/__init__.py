"""One life of a job, from `listening()` to the end of the process: it connects the other rooms.

Entry: `session.begin()`.
Imports: the leaves, and all rooms but `nodecheck`, `hooks` and `testing`.
Never here: what another room can do alone.
Next of its kind: another part of a session is a module that `session.py` makes and `end.py` closes.
"""
