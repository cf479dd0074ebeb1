"""Where a training loop can start again: safe points, the gate before the next step, the place in the loop.

Entry: `safe_points.SafePoints`, which makes the loops (`batches.Loops`) and uses the gate (`gate.Gate`).
Imports: the leaves, `platform`, `data`, `ckpt`, `state`.
Never here: files, notices, other ranks, the order in which a save does its work.
Next of its kind: another iterator that scripts wrap around `batches()` in `wrapping_iterators.py`.
"""
