"""What a ckpt is on storage: names, formats, digests, which ckpts are ours and which may be deleted.

Entry: `manifest.Manifest` (one ckpt), `generations` (the lives of a job), `retention.retire`.
Imports: the leaves, `platform`, and of `storage` the interface.
Never here: registered objects, the training loop, ranks, threads of a save.
Next of its kind: a field of the manifest in `manifest.py`, a kind of value in `codec.py`.
"""
