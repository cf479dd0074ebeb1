"""What is a node, what may be set, and which environment is refused."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import TCPStore

from migrator.errors import SettingsError, UsageError
from migrator.nodecheck import check, script
from migrator.nodecheck.__main__ import main, place_of
from migrator.nodecheck.check import Check, Node, Options, nodes_of
from migrator.nodecheck.decision import Result
from migrator.nodecheck.exchange import AGENT, Place

PLAIN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "pod-0", "MASTER_PORT": "29500"}


def notes(*of: tuple[str, str]) -> dict[int, dict[str, Any]]:
    return {rank: {"node": node, "host": host} for rank, (node, host) in enumerate(of)}


def test_the_ranks_of_an_agent_are_a_node() -> None:
    """They are replaced together. Ten nodes are in the order of their numbers."""
    found = nodes_of(notes(("10", "c"), ("2", "b"), ("2", "b"), ("0", "a")))

    assert found == [Node((3,), "a", "0"), Node((1, 2), "b", "2"), Node((0,), "c", "10")]
    assert found[1].name == "node 2 (ranks 1-2, b)"


@pytest.mark.parametrize("node", ["", "0"], ids=["without an agent", "of one agent"])
def test_otherwise_each_rank_is_a_node(node: str) -> None:
    """Without an agent, or if there is only one: the ranks are what can be compared."""
    found = nodes_of(notes((node, "a"), (node, "b")))

    assert found == [Node((0,), "a"), Node((1,), "b")]
    assert found[1].name == "rank 1 (b)"


def test_the_place_is_that_of_the_environment() -> None:
    """With plain `env://` rank 0 serves the store, under torchrun its agent does, unless it is told otherwise."""
    assert place_of({}) == Place(0, 1)
    assert place_of(PLAIN) == Place(1, 4, "pod-0", 29500, ends_with_check=True)
    assert place_of({**PLAIN, "RANK": "0"}) == Place(0, 4, "pod-0", 29500, serves=True, ends_with_check=True)
    assert place_of({**PLAIN, "RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"}) == Place(
        0, 4, "pod-0", 29500, server=AGENT
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"MASTER_ADDR": ""}, "MASTER_ADDR missing in the environment"),
        ({"RANK": ""}, "RANK missing in the environment"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT is 'http'; allowed: a whole number"),
        ({"RANK": "4"}, "RANK is 4 and WORLD_SIZE is 4; allowed: ranks from 0 to 3"),
    ],
)
def test_an_environment_that_does_not_fit_is_refused(changes: dict[str, str], message: str) -> None:
    """With what was found and what is allowed."""
    with pytest.raises(SettingsError, match=message):
        place_of({**PLAIN, **changes})


def test_options_that_are_not_allowed_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """All at once, and the command ends with 2."""
    with pytest.raises(SettingsError, match=r"timeout is 0; allowed: .*; repeat is 0; allowed: a whole number from 1"):
        Options(timeout_s=0, repeat=0).validate("check_nodes()")
    with pytest.raises(SystemExit) as left:
        main(["--arrive", "0", "train.py"])
    assert left.value.code == 2
    assert "arrive is 0.0; allowed: seconds between 1 and 86400" in capsys.readouterr().err


def test_several_ranks_without_a_process_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them would find itself good."""
    monkeypatch.setenv("WORLD_SIZE", "4")

    with pytest.raises(UsageError, match=r"check_nodes\(\): WORLD_SIZE=4, but there is no process group"):
        script.check_nodes(Options())


def test_a_round_that_is_over_is_not_measured(caplog: pytest.LogCaptureFixture) -> None:
    """A rank that stood still reads what the others have decided, and waits for no partner."""
    caplog.set_level("INFO", logger="migrator")
    store = TCPStore("127.0.0.1", 0, None, True, timeout=timedelta(seconds=20), wait_for_workers=False)
    late, other = (Check(Place(rank, 2, "127.0.0.1", store.port), Options(timeout_s=30, repeat=1)) for rank in (1, 0))
    for one in (late, other):
        one._exchange.connect(10)
        one._nodes = [Node((0,)), Node((1,))]
    other._exchange.gather("round 1", {"failed": "connect to rank 1"}, 0.1)

    outcomes = late._round(1, [(0, 1)]).outcomes

    assert [one.result for one in outcomes] == [Result.UNCLEAR, Result.SILENT]
    assert "node_round" not in caplog.text


def test_a_single_process_checks_itself(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing to compare with, and no process group needed."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    caplog.set_level("INFO", logger="migrator")

    verdict = script.check_nodes(Options(repeat=1))

    assert not verdict.replaced
    assert [vars(record)["migrator_event"] for record in caplog.records] == ["node_check", "node_times", "nodes_good"]
    assert check.EXIT_AT_FAULT == 138
