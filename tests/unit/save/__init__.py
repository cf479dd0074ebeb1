"""The tests of `migrator/save/`."""
