"""Finds nodes at fault and slow nodes before the training, without a master: `python -m migrator.nodecheck`.

Entry: `check.run()` checks and returns a `check.Verdict`; `decision.py` has the rules, as pure functions.
Imports: the leaves, `platform`, `notice`.
Never here: ckpts, registered objects. The check runs before there are any.
Next of its kind: another measurement goes to `measurement.py`, another rule to `decision.py`.
"""
