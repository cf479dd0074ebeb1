"""Several ranks save together: one safe point on all of them.

Entry: `group.Group`, a strategy of the saving thread.
Imports: what `save` may import, and of `save` all but `engine` and `solo`.
Never here: how one rank writes its state. That is `save/attempt.py`, for one process and for several ranks.
Next of its kind: a new rule goes to `ranks/protocol.py`, and the act that it asks for to `last_save.py`.
"""
