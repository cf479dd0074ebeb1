"""Names of ckpts: what they say, and what is none."""

from __future__ import annotations

import pytest

from migrator.ckpt.names import ckpt_name, own_name, parse_ckpt_name, part_name


@pytest.mark.parametrize(
    ("place", "name"), [((7, 412), "000007-000000000412"), ((10**7, 10**13), "10000000-10000000000000")]
)
def test_names_of_ckpts(place: tuple[int, int], name: str) -> None:
    """Generation and step, and back, also beyond the usual width."""
    assert ckpt_name(*place) == name
    assert parse_ckpt_name(name) == place


@pytest.mark.parametrize(
    "name",
    [
        *("", "generations", "7-412", "000007-412", "0000007-000000000412", "000007-000000000412 "),
        *("000007-000000000412\n", "000007-00000000041\u0662", "-00007-000000000412", ".000007-000000000412"),
    ],
)
def test_other_names_are_no_ckpts(name: str) -> None:
    """One ckpt has one name."""
    assert parse_ckpt_name(name) is None


def test_a_name_with_numbers_that_no_manifest_holds_is_that_of_no_ckpt() -> None:
    """It could never be loaded; so it is not listed either, whichever of the two is too large."""
    last = (1 << 62) - 1
    assert parse_ckpt_name(ckpt_name(1, last)) == (1, last)
    assert parse_ckpt_name(ckpt_name(last, 1)) == (last, 1)
    assert parse_ckpt_name(ckpt_name(1, last + 1)) is None
    assert parse_ckpt_name(ckpt_name(last + 1, 1)) is None


def test_only_a_second_try_has_a_number() -> None:
    """Almost all parts are of a first one."""
    assert own_name(3) == "own-of-rank-00003.safetensors"
    assert own_name(3, 2) == "own-of-rank-00003-2.safetensors"
    assert part_name(0, 2, rank=1) == "part-00000-of-00002-rank-00001.safetensors"
    assert part_name(0, 2, rank=1, attempt=2) == "part-00000-of-00002-rank-00001-2.safetensors"
