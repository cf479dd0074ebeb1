"""The tests of `migrator/nodecheck/`."""
