"""The tests of `migrator/state/`."""
