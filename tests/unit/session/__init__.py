"""The tests of `migrator/session/`."""
