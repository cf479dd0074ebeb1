"""What a process can find out about the container it runs in."""

from __future__ import annotations

from pathlib import Path

import pytest

from migrator.platform.container import container, container_life


def proc(directory: Path, *, boot: str = "b-1", start: int = 500, program: str = "python", mount: int = 7) -> Path:
    """As the kernel shows it in one container."""
    for name in ("sys/kernel/random", "1", "self/ns"):
        (directory / name).mkdir(parents=True)
    (directory / "sys/kernel/random/boot_id").write_text(f"{boot}\n")
    fields = " ".join(str(number) for number in range(4, 22))
    (directory / "1/stat").write_text(f"1 ({program}) S {fields} {start} 23 24\n")
    (directory / "self/ns/mnt").symlink_to(f"mnt:[{mount}]")
    (directory / "self/ns/pid").symlink_to("pid:[8]")
    return directory


@pytest.mark.parametrize("other", [{"boot": "b-2"}, {"start": 501}, {"mount": 9}])
def test_containers_that_share_their_node_s_name_are_told_apart(tmp_path: Path, other: dict[str, str | int]) -> None:
    """Another node, another life of the same container, another container that shares the process ids."""
    here = container(proc(tmp_path / "here"))
    assert here == container(proc(tmp_path / "again"))
    assert here != container(proc(tmp_path / "other", **other))  # type: ignore[arg-type]


def test_the_name_of_process_1_may_be_anything(tmp_path: Path) -> None:
    """The kernel shows it in parentheses, with whatever is in it."""
    assert container_life(proc(tmp_path, start=77, program="a) b (c 1 2 3")) == "b-1/77"


def test_a_machine_that_shows_nothing_is_no_error(tmp_path: Path) -> None:
    """Then the life is not known, and the host's name has to do."""
    assert container_life(tmp_path) == ""
    assert container(tmp_path) == container(tmp_path / "none")


def test_this_process_has_a_container() -> None:
    """On a real kernel all of it can be read."""
    boot, start = container_life().split("/")
    assert len(boot) == 36
    assert int(start) >= 0
    assert "mnt:[" in container()
