"""The tests of `migrator/ckpt/`."""
