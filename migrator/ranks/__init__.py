"""How the ranks of a job exchange lines and agree on the safe point that all of them save.

Entry: `joining.join()` returns `peers.Peers`, the other ranks; `protocol.next_act` decides, a pure function.
Imports: the leaves, `platform`, `storage`, `ckpt`.
Never here: tensors, the registry, the training loop.
Next of its kind: a rule of the agreement in `protocol.py` (and in its model), a time limit in `timing.py`.
"""
