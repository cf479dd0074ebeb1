"""The tests of `migrator/data/`."""
