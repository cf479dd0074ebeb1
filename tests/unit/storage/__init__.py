"""The tests of `migrator/storage/`."""

import pytest

pytest.register_assert_rewrite("tests.unit.storage.contract")
