"""Where this process runs and what started it: container, launcher, other processes, the frames of the script.

Entry: `launcher.agent()`, `container.pod_name()`, `process_identity.mine()`.
Imports: nothing else of the package.
Never here: decisions. These modules only read; other rooms decide what follows.
Next of its kind: another launcher goes to `launcher.py`, another kind of host to `container.py`.
"""
