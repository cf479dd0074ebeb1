"""From a notice to the end of the process: deadline, outcome of the last save, exit code, who stays for an agent.

Entry: `leaving.Leaving`.
Imports: the leaves, `platform`, `notice`.
Never here: how a save is made. `save` reads the deadline here and hands over the outcome.
Next of its kind: another reason to delay the exit is a method of `Leaving`; `script_end.py` notes how the script ended.
"""
