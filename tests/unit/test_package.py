"""What the package shows to the outside, and the rules its source keeps inside."""

from __future__ import annotations

import ast
import inspect
import re
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import migrator
from migrator import errors, events
from tests.support.harness import ROOT

PACKAGE = ROOT / "migrator"
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
TREES = {name: ast.parse(path.read_text(), str(path)) for name, path in FILES.items()}

FORWARDED = {
    "batches",
    "check_nodes",
    "close",
    "epochs",
    "is_leaving",
    "listening",
    "load_ckpt",
    "meter",
    "progress",
    "register",
    "restore_random",
    "resume",
    "safe_point",
    "save_ckpt",
    "watch",
}
ENDS = {"Migrated", "NodeFault"}
"""They end the process; `except Exception` must not catch them."""
PROPERTIES = {"is_leaving", "resume"}

LEAVES = {"errors", "events", "roots", "settings"}
"""Modules outside of rooms, which every room may use."""

ROOMS: dict[str, set[str]] = {
    "platform": set(),
    "data": set(),
    "storage": set(),
    "notice": {"platform"},
    "leaving": {"platform", "notice"},
    "ckpt": {"platform", "storage"},
    "state": {"data", "ckpt"},
    "ranks": {"platform", "storage", "ckpt"},
    "loop": {"platform", "data", "ckpt", "state"},
    "compat": {"ckpt", "state"},
    "save": {"platform", "storage", "ckpt", "state", "loop", "notice", "leaving", "ranks"},
    "session": {
        *("platform", "data", "storage", "ckpt", "state", "loop", "notice", "leaving", "ranks", "save", "compat"),
    },
    "nodecheck": {"platform", "notice"},
    "hooks": set(),
    "testing": {"hooks"},
}
"""Which rooms a room may import from, beside itself and the leaves."""

WORDS = ("Entry", "Imports", "Never here", "Next of its kind")
"""What the docstring of a room says, after its first line."""

TOP = {"api", "grace", "__init__"}
"""What the script talks to, and a command. They may use every room, and nobody uses them."""


# What can be imported.


def test_all_is_sorted_and_is_what_can_be_imported() -> None:
    """`__all__` lists exactly the names a user may write behind `from migrator import`."""
    assert migrator.__all__ == sorted(migrator.__all__)
    found: dict[str, object] = {}
    exec("from migrator import *", found)
    del found["__builtins__"]

    assert sorted(found) == migrator.__all__
    assert all(found[name] is getattr(migrator, name) for name in migrator.__all__)


def test_dir_shows_all_and_the_forwarded_names() -> None:
    """Completion in a shell finds what exists, and every name it finds exists."""
    assert dir(migrator) == sorted({*migrator.__all__, *FORWARDED})
    for name in set(dir(migrator)) - PROPERTIES:
        assert getattr(migrator, name) is not None


def test_all_errors_are_public() -> None:
    """Whatever the package raises on purpose can be caught by name, and by one common parent."""
    defined = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, BaseException) and value.__module__ == errors.__name__
    }

    assert defined <= set(migrator.__all__)
    assert all(
        issubclass(getattr(errors, name), SystemExit if name in ENDS else errors.MigratorError) for name in defined
    )
    assert not any(issubclass(getattr(errors, name), Exception) for name in ENDS)


def test_the_module_forwards_to_the_one_instance() -> None:
    """`import migrator; migrator.register(...)` reaches the object that `from migrator import migrator` gives."""
    public = {name for name in vars(migrator.Migrator) if not name.startswith("_")}

    assert public == FORWARDED
    for name in public - PROPERTIES:
        assert getattr(migrator, name) == getattr(migrator.migrator, name)
    with pytest.raises(migrator.UsageError, match=r"resume before listening\(\)"):
        _ = migrator.resume  # a property: the question reaches the instance


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    """A typo is told at once, as Python tells it."""
    with pytest.raises(AttributeError, match="module 'migrator' has no attribute 'load_checkpoint'"):
        _ = migrator.load_checkpoint
    with pytest.raises(ImportError, match="cannot import name 'Sampler'"):
        exec("from migrator import Sampler")


def test_no_module_is_named_like_a_public_name() -> None:
    """Importing a submodule sets an attribute of the package: it must not hide a verb."""
    modules = {name.split(".")[1] for name in FILES if "." in name}

    assert not modules & {*migrator.__all__, *FORWARDED}


def test_everything_public_says_what_it_is() -> None:
    """Each public name, and each method of the instance, has a docstring; each module opens with why."""
    for name in set(migrator.__all__) - {"migrator"}:
        assert inspect.getdoc(getattr(migrator, name)), name
    for name in FORWARDED:
        assert inspect.getdoc(inspect.getattr_static(migrator.Migrator, name)), name
    for name, tree in TREES.items():
        assert ast.get_docstring(tree), name


def test_the_typed_usage_file_uses_all_that_is_public() -> None:
    """A name that is added must be shown to the type checker too."""
    tree = ast.parse((ROOT / "tests" / "docs" / "typed_usage.py").read_text())
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    called = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "migrator"
    }

    assert set(migrator.__all__) <= used
    assert called >= FORWARDED


# Imports run one way.


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when the module is imported, those for the type checker included."""
    for node in body:
        yield node
        for field in ("body", "orelse", "finalbody", "handlers"):
            inner = getattr(node, field, None)
            if inner and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                yield from _top_level(inner)


def _imported(nodes: Iterator[ast.stmt] | Iterator[ast.AST]) -> Iterator[str]:
    """Full names of the modules that these import, or import from."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name the package"
            for alias in node.names:
                deeper = f"{node.module}.{alias.name}"
                yield deeper if deeper in FILES else str(node.module)


GRAPH = {name: {other for other in _imported(_top_level(tree.body)) if other in FILES} for name, tree in TREES.items()}


def test_imports_have_no_cycle() -> None:
    """Modules can be read from the lowest up: each needs only what was read before."""
    left = {name: set(needs) for name, needs in GRAPH.items()}
    while left:
        free = {name for name, needs in left.items() if not needs & left.keys()}
        assert free, f"these import one another: {sorted(left)}"
        left = {name: needs for name, needs in left.items() if name not in free}


def _room(module: str) -> str:
    """The room of a module, or the module itself if it is in none."""
    return module.split(".")[1] if "." in module else "__init__"


def test_every_module_is_in_a_room() -> None:
    """A new module finds its room, or a new room its place among the others."""
    assert {_room(module) for module in FILES} == ROOMS.keys() | LEAVES | TOP


def test_rooms_are_used_one_way() -> None:
    """A room can be read, tested and exchanged without those above it."""
    wrong = [
        f"{module} imports {other}"
        for module, needs in GRAPH.items()
        for other in needs
        if (room := _room(module)) != _room(other) and room not in TOP
        if _room(other) not in LEAVES | ROOMS.get(room, set())
    ]

    assert not wrong


def test_rooms_say_what_they_are_for() -> None:
    """Its job, its entry, what it imports, what does not belong there, and where the next of its kind goes."""
    for room in ROOMS.keys() - {"hooks", "testing"}:
        doc = ast.get_docstring(TREES[f"migrator.{room}"]) or ""
        lines = [line for line in doc.splitlines() if line]
        assert [line.partition(":")[0] for line in lines[1:]] == [
            "Entry",
            "Imports",
            "Never here",
            "Next of its kind",
        ], room
        imports = lines[2]
        named = {name for name in re.findall(r"`(\w+)`", imports) if name in ROOMS}
        if "all rooms but" in imports:
            named = ROOMS.keys() - named - {room}
        assert named == ROOMS[room], room


def test_nobody_imports_the_package_from_inside() -> None:
    """The package's own `__init__` is the top: only what is not known earlier, its version, is asked of it."""
    users = {name for name, tree in TREES.items() if "migrator" in _imported(ast.walk(tree))}

    assert users <= {"migrator.save.attempt"}


# Storage is behind its interface.

SYSTEM_CALLS = {
    *("open", "fsync", "fdatasync", "read", "write", "pread", "pwrite", "preadv", "pwritev", "link", "rename"),
    *("replace", "unlink", "remove", "mkdir", "makedirs", "rmdir", "listdir", "scandir", "stat", "lstat", "fstat"),
}
ABOVE_STORAGE = {"ckpt", "state", "loop", "ranks", "save", "session", "compat"}
"""Rooms that know the place for ckpts only as `migrator.storage.base.Storage`."""
LOCAL_FILES = {"migrator.save.progress"}
"""Modules in them that write files of this pod, which are not on that place: what the hook shows."""
NAME_PARTS = ("manifest.json", "generations/", ".leaving", "rank-", "part-", "own-of-")
"""What makes a text the name of a file of a job, or of a part of one."""


def _above_storage() -> Iterator[tuple[str, ast.AST]]:
    for module, tree in TREES.items():
        if _room(module) in ABOVE_STORAGE:
            yield from ((f"{module}, line {getattr(node, 'lineno', 0)}", node) for node in ast.walk(tree))


def test_above_storage_nobody_knows_what_a_volume_is() -> None:
    """No error number, no descriptor, no call of the kernel: an object store has none of them."""
    for where, node in _above_storage():
        if isinstance(node, ast.Import | ast.ImportFrom):
            assert "errno" not in _imported(iter([node])), where
        if isinstance(node, ast.Attribute):
            assert node.attr != "errno", where
            if ast.unparse(node.value) == "os" and where.split(",")[0] not in LOCAL_FILES:
                assert node.attr not in SYSTEM_CALLS, where


def test_above_storage_nobody_knows_which_one_it_is() -> None:
    """One is chosen where a job begins; everything else is written against the interface."""
    kinds = {name for name in FILES if _room(name) == "storage"} - {"migrator.storage", "migrator.storage.base"}
    users = {module for module, needs in GRAPH.items() if needs & kinds and _room(module) != "storage"}

    assert users == {"migrator.grace", "migrator.session.session"}


def test_names_of_files_are_made_in_one_place() -> None:
    """What a file is called stands in `ckpt.names`; nobody else puts such a name together."""
    for where, node in _above_storage():
        if isinstance(node, ast.JoinedStr) and not where.startswith("migrator.ckpt.names,"):
            text = "".join(part.value for part in node.values if isinstance(part, ast.Constant))
            assert not text.startswith(NAME_PARTS), where
            assert not any(f"/{part}" in text for part in NAME_PARTS), where


# Events.


def _event_names() -> Counter[str]:
    """How often each name is logged; a name that is not spelled out fails the test."""
    found: Counter[str] = Counter()
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or module == "migrator.events":
                continue
            called = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            if called not in ("log", "Progress"):
                continue
            name = node.args[0] if node.args else None
            if isinstance(name, ast.Constant):
                found[str(name.value)] += 1
            else:
                assert module == "migrator.save.progress", f"{module}, line {node.lineno}: not spelled out"
    return found


def test_events_used_and_events_listed_are_the_same() -> None:
    """The list in `events.py` is complete and holds nothing that is never said."""
    used = _event_names().keys()

    assert used - events.EVENTS.keys() == set()
    assert events.EVENTS.keys() - used == set()
    assert all(meaning for meaning in events.EVENTS.values())


def test_an_event_that_is_not_listed_is_a_bug() -> None:
    """It raises, whatever the log level."""
    with pytest.raises(KeyError, match="no_such_event"):
        events.log("no_such_event", level=0)


def test_no_event_looks_like_another_systems_progress() -> None:
    """Training operators split our lines at TABs and take those that begin with `Epoch` for progress."""
    assert all(name.isidentifier() and name == name.lower() for name in events.EVENTS)
    assert events.line("loaded", {"why": "Epoch\t1\nloss 2", "no": ""}) == r'loaded why="E\poch 1 loss 2" no=""'


# What is never there.

FORBIDDEN = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "copyreg"}


def test_no_pickle() -> None:
    """No module imports a pickle, anywhere in its code, and nothing of torch or numpy is asked to use one."""
    for module, tree in TREES.items():
        roots = {name.split(".")[0] for name in _imported(ast.walk(tree))}
        assert not roots & FORBIDDEN, module
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                _check_call(module, node, ast.unparse(node.func))


def _check_call(module: str, node: ast.Call, called: str) -> None:
    where = f"{module}, line {node.lineno}: {called}"
    keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    assert called not in ("torch.save", "np.load", "np.save", "numpy.load", "numpy.save"), where
    if called == "torch.load":
        assert module == "migrator.compat.pytorchjob_migration", where
        assert keywords["weights_only"] == "True", where
    assert "allow_pickle" not in keywords, where


def test_the_package_is_what_is_tested() -> None:
    """These tests read the source that they import."""
    assert isinstance(migrator, types.ModuleType)
    assert Path(str(migrator.__file__)).samefile(FILES["migrator"])
