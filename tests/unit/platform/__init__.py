"""The tests of `migrator/platform/`."""
