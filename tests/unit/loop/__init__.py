"""The tests of `migrator/loop/`."""
