"""What a new contributor reads and uses first: CONTRIBUTING.md, the templates on GitHub, the hooks before a commit."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from migrator import settings
from tests.docs.test_pages import table
from tests.support.harness import ROOT
from tests.unit.test_package import LEAVES, ROOMS

CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
FORMS.remove(ROOT / ".github" / "ISSUE_TEMPLATE" / "config.yml")
PROGRAMS = Path(sys.executable).parent
"""Where this environment has its programs: `.venv/bin`."""


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def rooms() -> dict[str, list[str]]:
    """Job, entry and imports, by room."""
    return {row[0]: row[1:] for row in table(CONTRIBUTING, "room", "job", "entry", "imports")}


def recipe(heading: str) -> str:
    """What to change for this, as the page has it."""
    (found,) = re.findall(rf"^### {re.escape(heading)}\n(.*?)^##", CONTRIBUTING + "\n##", re.M | re.S)
    return str(found)


# The page.


def test_the_table_of_rooms_names_every_room_and_what_it_imports() -> None:
    """A reader who picks a room from the table may import from it what the table says."""
    found = rooms()

    assert found.keys() == ROOMS.keys()
    for room, (_, _, imports) in found.items():
        if imports == "all rooms above":
            above = [*found][: [*found].index(room)]
            assert set(above) == ROOMS[room], room
        else:
            assert set(re.findall(r"\w+", imports)) - {"nothing"} == ROOMS[room], room


def test_each_entry_in_the_table_of_rooms_exists() -> None:
    """The first name to look up in a room can be looked up."""
    for room, (_, entries, _) in rooms().items():
        for entry in re.findall(r"[\w.]+", entries):
            module, _, name = f"migrator.{room}.{entry}".rpartition(".")
            assert hasattr(import_module(module), name), entry


def test_the_page_names_the_modules_that_are_in_no_room() -> None:
    """Every room may import these."""
    sentence = re.search(r"Each room may also import the leaves: (.*?)\.\n?", CONTRIBUTING, re.S)

    assert sentence is not None
    assert set(re.findall(r"`(\w+)`", sentence[1])) == LEAVES


def test_the_page_says_what_each_directory_of_tests_contains() -> None:
    """A new test finds its place, or a new directory its row."""
    rows = {row[0] for row in table(CONTRIBUTING, "tests", "contain")}
    there = {f"tests/{path.parent.name}" for path in (ROOT / "tests").glob("*/__init__.py")}

    # What old versions wrote is data, beside the script that makes it.
    assert rows == there - {"tests/golden"}


@pytest.mark.parametrize(
    "heading",
    [
        "an adapter for a new kind of object",
        "a storage",
        "a notice source",
        "an event",
        "a setting",
        "a field of the manifest",
        "a rule of the ranks' agreement",
        "the exit code, or which process stays under an agent",
        "how ranks wait for one another",
        "the interval of periodic saves",
        "a row of the fault table",
        "a documentation page",
    ],
)
def test_the_page_says_which_files_to_change_in_which_order(heading: str) -> None:
    """Source, tests and documentation: a list with none of these would be half of it."""
    text = recipe(heading)
    steps = [int(number) for number in re.findall(r"^(\d+)\. ", text, re.M)]

    assert steps == [*range(1, len(steps) + 1)]
    assert len(steps) >= 3
    assert "tests" in text
    assert "docs" in text


def test_the_readme_leads_to_every_page() -> None:
    """A page that nothing links to is not read."""
    readme = (ROOT / "README.md").read_text()
    pages = [*(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")), "CONTRIBUTING.md", "CHANGELOG.md"]

    assert [page for page in pages if f"]({page}" not in readme] == []


# The hooks before a commit.


def hooks() -> list[dict[str, Any]]:
    (repository,) = read(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"  # nothing is downloaded, and versions are pinned in one place
    found: list[dict[str, Any]] = repository["hooks"]
    return found


def test_each_hook_before_a_commit_runs_a_program_of_the_environment() -> None:
    """One that `make` has installed."""
    for hook in hooks():
        program = hook["entry"].split()[0]
        assert hook["language"] == "system"
        assert program.startswith(".venv/bin/")
        assert (PROGRAMS / Path(program).name).is_file(), program


def test_the_hooks_before_a_commit_are_those_of_make() -> None:
    """What passes there passes `make lint` and `make types`."""
    makefile = (ROOT / "Makefile").read_text().replace("$(BIN)", ".venv/bin")
    lines = re.findall(r"^\t(\.venv/bin/(?:ruff|shellcheck|mypy)\b.*)$", makefile, re.M)
    ours = {" ".join(hook["entry"].replace(" --force-exclude", "").split()) for hook in hooks()}

    assert ours == {re.sub(r" (\.|hooks/.*)$", "", line) for line in lines}


def test_the_hooks_before_a_commit_look_at_files_that_are_there() -> None:
    """A pattern that matches nothing checks nothing."""
    files = [path.relative_to(ROOT).as_posix() for path in ROOT.glob("*/**/*") if ".venv" not in path.parts]
    for hook in hooks():
        assert any(re.search(hook.get("files", ""), name) for name in files), hook["id"]
    (shell,) = [re.compile(hook["files"]) for hook in hooks() if hook["id"] == "shellcheck"]
    assert {name for name in files if shell.search(name)} == {"hooks/preStop.sh", "hooks/postStart.sh", ".ci/run"}


# The templates.


def test_the_forms_are_those_for_a_bug_a_feature_and_a_question() -> None:
    """And nobody gets past them with an empty page."""
    assert [form.stem for form in FORMS] == ["bug", "feature", "question"]
    assert read(ROOT / ".github" / "ISSUE_TEMPLATE" / "config.yml") == {"blank_issues_enabled": False}


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_a_form_is_what_github_reads(form: Path) -> None:
    """Name, description and body; of each field its type, its label and an id of its own."""
    content = read(form)
    fields = [field for field in content["body"] if field["type"] != "markdown"]
    ids = [field["id"] for field in fields]

    assert content.keys() == {"name", "description", "body"}
    assert {field["type"] for field in content["body"]} <= {"markdown", "input", "textarea", "dropdown", "checkboxes"}
    assert all(field["attributes"]["label"] for field in fields)
    assert len(set(ids)) == len(ids)
    assert any(field.get("validations", {}).get("required") for field in fields)


def test_the_form_for_a_bug_asks_for_what_an_answer_needs() -> None:
    """The exact log lines, the hook's log, what lies on the volume, the launcher, the versions."""
    fields = {field["id"]: field for field in read(FORMS[0])["body"] if "id" in field}

    assert fields.keys() >= {"log", "hook", "volume", "launcher", "versions"}
    assert fields["hook"]["attributes"]["label"] == "preStop.log"
    for name in ("log", "volume", "launcher", "versions"):
        assert fields[name]["validations"]["required"], name


@pytest.mark.processes
def test_the_command_that_prints_the_versions_works() -> None:
    """A reporter copies it from the form."""
    fields = {field["id"]: field for field in read(FORMS[0])["body"] if "id" in field}
    command = fields["versions"]["attributes"]["value"]
    match = re.fullmatch(r'python -c "(.+)"\n', command)
    assert match is not None

    said = subprocess.run([sys.executable, "-c", match[1]], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert re.match(r"\d+\.\d+\.\d+ 3\.\d+", said)


@pytest.mark.parametrize("path", [*FORMS, ROOT / ".github" / "pull_request_template.md"], ids=lambda path: path.stem)
def test_a_template_names_files_variables_and_targets_that_exist(path: Path) -> None:
    """What a form sends somebody to is there."""
    text = path.read_text()
    known = {name for name in vars(settings).values() if isinstance(name, str)} | settings.HOOK_VARIABLES
    known |= {field.metadata["variable"] for field in settings.Settings.__dataclass_fields__.values() if field.metadata}

    for name in re.findall(r"`((?:docs/)?[\w-]+\.md)`", text):
        assert (ROOT / name).is_file(), name
    for name in re.findall(r"\bMIGRATOR_[A-Z][A-Z_]*\b", text):
        assert name in known, name
    for target in re.findall(r"`make (\w+)`", text):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M), target
