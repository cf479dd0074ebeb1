"""The tests of `migrator/ranks/`."""
