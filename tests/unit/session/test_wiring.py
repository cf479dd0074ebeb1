"""How the parts of a session are put together."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import migrator
from migrator.ckpt.generations import Generation
from migrator.session.start import StartingPoint
from migrator.settings import Every

PACKAGE = Path(str(migrator.__file__)).parent
EXPECTED = {"_sampler_iter"}
"""Of an iterator of torch, which has an iterator there and no function."""


def assigned_callbacks(tree: ast.AST) -> Iterator[str]:
    """Attributes of an object's parts that it assigns a method of its own to, or a lambda."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign):
            continue
        methods = isinstance(node.value, ast.Attribute) and ast.unparse(node.value.value) == "self"
        if not (methods or isinstance(node.value, ast.Lambda)):
            continue
        for target in node.targets:
            if isinstance(target, ast.Attribute) and ast.unparse(target.value).startswith("self."):
                yield f"{target.attr} (line {node.lineno})"


def test_no_part_gets_a_callback_after_it_was_made() -> None:
    """What a part calls is known from its constructor, or from the method that starts it."""
    found = [
        f"{room}/{path.name}: {name}"
        for room in ("session", "loop", "save")
        for path in sorted((PACKAGE / room).glob("*.py"))
        for name in assigned_callbacks(ast.parse(path.read_text()))
        if name.split()[0] not in EXPECTED
    ]

    assert not found
    assert list(assigned_callbacks(ast.parse("self.gate.leave = self._leave\nself.saver.tell = lambda _: None"))) == [
        "leave (line 1)",
        "tell (line 2)",
    ]


def test_all_ranks_start_from_what_rank_0_found() -> None:
    """The generation, the ckpts in their order and the time between saves reach the other ranks as they are."""
    generation = Generation(4, 3, (4, 3, 1), frozenset({3, 1}), is_claimed=True)
    found = StartingPoint(
        generation, ("000003-000000000007", "000001-000000000009"), Every(seconds=2.5), is_warned=True
    )

    assert StartingPoint.from_json(json.loads(json.dumps(found.to_json()))) == found
