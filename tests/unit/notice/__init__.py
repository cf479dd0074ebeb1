"""The tests of `migrator/notice/`."""
