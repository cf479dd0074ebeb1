"""Where this process runs and what started it: container, memory, launcher, other processes, the script's frames.

Entry: `launcher.agent()`, `container.pod_name()`, `process_identity.mine()`.
Imports: nothing else of the package.
Never here: decisions. These modules only read; other rooms decide what follows.
Next of its kind: a launcher goes to `launcher.py`, a kind of host to `container.py`, a kind of limit to `memory.py`.
"""
