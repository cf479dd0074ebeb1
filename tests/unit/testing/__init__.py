"""The tests of `migrator/testing/`."""
