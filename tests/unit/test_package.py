"""What the package shows to the outside, and the rules its source keeps inside."""

from __future__ import annotations

import ast
import inspect
import shutil
import subprocess
import sys
import types
import zipfile
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
    "close",
    "epochs",
    "is_leaving",
    "listening",
    "load_ckpt",
    "meter",
    "register",
    "restore_random",
    "resume",
    "safe_point",
    "save_ckpt",
    "watch",
}
PROPERTIES = {"is_leaving", "resume"}

LAYERS = [
    {"errors", "events", "environment", "sigaction", "frames", "iteration"},
    {"launcher", "buckets", "pace", "shared_log", "bell", "large_values"},
    {
        "settings",
        "agreement",
        "permutation",
        "tree",
        "blocks",
        "signal_file",
        "signal_owner",
        "ending",
        "counters",
    },
    {"sigterm", "randomness", "progress", "identity"},
    {"hooks", "last_word", "sampler", "storage", "kinds", "storable", "canary", "watcher", "ranks", "testing.errors"},
    {"between", "place", "meeting", "comm_hooks"},
    {"parts", "leaving", "replay", "unfollowed", "uneven", "regroup", "lookout", "hooks.__main__"},
    {"manifest"},
    {"registry"},
    {"capture", "legacy", "loop"},
    {"lineage", "gate", "sharing"},
    {"retention", "loading", "saving", "heartbeat"},
    {"saver", "together"},
    {"joint"},
    {"team"},
    {"life"},
    {"instance"},
    # A package of its own, which nothing above uses.
    {"testing._shim", "testing.container", "testing.spec"},
    {"testing.pod"},
    {"testing.controllers"},
    {"testing.kubelet"},
    {"testing", "testing.fixtures"},
]
"""Lowest first. A module imports from lines above its own only."""


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


@pytest.mark.processes
def test_what_a_bare_import_shows_is_public() -> None:
    """Nothing else lies around in the package's namespace but its own submodules and what typing needs."""
    code = (
        "import migrator, types; from migrator import ElasticSampler, Migrated, migrator as m;"
        "print(*(n for n, v in vars(migrator).items() if n[0] != '_' and not isinstance(v, types.ModuleType)))"
    )
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert set(shown.split()) - set(migrator.__all__) <= {"annotations", "Any", "TYPE_CHECKING"}


def test_all_errors_are_public() -> None:
    """Whatever the package raises on purpose can be caught by name, and by one common parent."""
    defined = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, BaseException) and value.__module__ == errors.__name__
    }

    assert defined <= set(migrator.__all__)
    assert all(
        issubclass(getattr(errors, name), SystemExit if name == "Migrated" else errors.MigratorError)
        for name in defined
    )
    assert not issubclass(errors.Migrated, Exception)


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


# Types.


@pytest.mark.processes
def test_the_package_ships_its_types(tmp_path: Path) -> None:
    """`py.typed` and every module are in the wheel, and nothing else is."""
    source = tmp_path / "source"
    shutil.copytree(PACKAGE, source / "migrator", symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "hooks", source / "hooks")
    shutil.copy(ROOT / "pyproject.toml", source)
    for name in ("README.md", "LICENSE"):
        (source / name).touch()
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, check=True, timeout=100)

    (wheel,) = tmp_path.glob("*.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    scripts = {f"migrator/hooks/{path.name}" for path in (ROOT / "hooks").glob("*.sh")}
    assert held == {str(path.relative_to(ROOT)) for path in FILES.values()} | {"migrator/py.typed"} | scripts


@pytest.mark.processes
def test_the_typed_usage_file_passes_mypy_strict() -> None:
    """What a user writes is accepted by `mypy --strict`, and what is wrong is refused."""
    command = [sys.executable, "-m", "mypy", "--strict", "tests/docs/typed_usage.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=110)

    assert done.returncode == 0, done.stdout + done.stderr


def test_the_typed_usage_file_uses_all_that_is_public() -> None:
    """A name that is added must be shown to the type checker too."""
    tree = ast.parse((ROOT / "tests" / "typed_usage.py").read_text())
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


def test_low_layers_do_not_import_high_ones() -> None:
    """The order of the modules is the way of the data, and a new module has to find its place in it."""
    level = {f"migrator.{name}": number for number, layer in enumerate(LAYERS) for name in layer}
    level["migrator"] = len(LAYERS)

    assert level.keys() == FILES.keys()
    assert not [
        f"{name} imports {other}" for name, needs in GRAPH.items() for other in needs if level[other] >= level[name]
    ]


def test_nobody_imports_the_package_from_inside() -> None:
    """The package's own `__init__` is the top: only what is not known earlier, its version, is asked of it."""
    users = {name for name, tree in TREES.items() if "migrator" in _imported(ast.walk(tree))}

    assert users <= {"migrator.save.attempt"}


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
    assert events.line("loaded", {"why": "Epoch\t1\nloss 2", "no": ""}) == 'loaded why="Epoch 1 loss 2" no=""'


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
