"""The docs say what the code does: links, tables, names and numbers in them are compared with it."""

from __future__ import annotations

import ast
import functools
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from migrator import errors, events, settings
from tests.support.harness import ROOT

DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [*sorted(ROOT.glob("README.md")), *sorted(ROOT.glob("CONTRIBUTING.md")), *DOCS]
PACKAGE = ROOT / "migrator"
HOOK = ROOT / "hooks" / "preStop.sh"
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def doc(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def without_code(text: str) -> str:
    """The prose: no fenced blocks, no inline code."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))


def anchors(page: Path) -> set[str]:
    """What a `#...` may name, as GitHub makes it of the headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *$", text, flags=re.M):
        slug = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()).replace(" ", "-")
        number = 0
        while (f"{slug}-{number}" if number else slug) in found:
            number += 1
        found.add(f"{slug}-{number}" if number else slug)
    return found


def table(text: str, *header: str) -> list[list[str]]:
    """The cells of all tables with this header, blanks and backticks taken off."""
    rows: list[list[str]] = []
    is_ours = False
    for line in text.splitlines():
        # A `|` in a cell has to be written `\|`.
        cells = [cell.strip().strip("`").replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if not line.startswith("|"):
            is_ours = False
        elif tuple(cells) == header:
            is_ours = True
        elif is_ours and not set("".join(cells)) <= set("-: "):
            rows.append(cells)
    return rows


@functools.cache
def logged() -> dict[str, set[str]]:
    """Each event that the package logs with a name written out, and the levels it may have."""
    found: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "log"):
                continue
            if isinstance(node.args[0], ast.Constant):
                level = next((word.value for word in node.keywords if word.arg == "level"), None)
                found.setdefault(node.args[0].value, set()).update(_levels(level))
    return found


def _levels(level: Any) -> set[str]:
    if level is None:
        return {"info"}
    # A variable: it was set to one of two levels.
    return {level.attr.lower()} if isinstance(level, ast.Attribute) else {"info", "error"}


def test_there_are_docs() -> None:
    """The tests below compare something."""
    assert {"events.md", "files.md", "guarantees.md", "settings.md", "troubleshooting.md"} <= {p.name for p in DOCS}


@each_page
def test_each_relative_link_leads_somewhere(page: Path) -> None:
    """To a file that exists, and to a heading in it."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)(?: +\"[^\"]*\")?\)", without_code(page.read_text())):
        if re.match(r"[a-z][a-z0-9+.-]*:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@each_page
def test_each_file_of_the_repository_that_is_named_exists(page: Path) -> None:
    """A promise names the test that shows it, a list of what to change names files; they must be there."""
    folders = r"tests|benchmarks|examples|hooks|migrator|docs|yamls|\.ci|\.github"
    named = set(re.findall(rf"(?<![\w/])(?:{folders})/[\w./-]*\w", page.read_text()))
    assert sorted(name for name in named if not (ROOT / name).exists()) == []


@each_page
def test_each_make_target_that_is_named_exists(page: Path) -> None:
    """In a sentence, or as a line to copy."""
    text = page.read_text()
    copied = "".join(re.findall(r"^```sh$.*?^```$", text, flags=re.M | re.S))
    named = {*re.findall(r"`make ([a-z][\w-]*)", text), *re.findall(r"^make ([a-z][\w-]*)", copied, flags=re.M)}
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    assert sorted(named - targets) == []


@each_page
def test_no_page_mentions_a_path_of_some_machine(page: Path) -> None:
    """Paths are those of a container anybody may have."""
    path = re.compile(r"(?<![\w.<>/-])(?:/work|/home|/root|/Users|/tmp(?=/(?!migrator/)))(?:/|\b)")
    assert [line for line in page.read_text().splitlines() if path.search(line)] == []


def test_the_table_of_settings_is_that_of_the_code() -> None:
    """Variable, default, argument and meaning, in the same order, and none missing."""
    ours = [f for f in fields(settings.Settings) if f.metadata]
    expected = [[f.metadata["variable"], f.metadata["default"], f.name, f.metadata["doc"]] for f in ours]
    assert table(doc("settings.md"), "variable", "default", "argument", "means") == expected


@pytest.mark.parametrize("page", sorted(ROOT.glob("README.md")), ids=lambda page: page.name)
def test_the_short_table_of_settings_has_the_same_defaults(page: Path) -> None:
    """Nobody learns another default from the first page than from the second."""
    ours = [(f.metadata["variable"], f.metadata["default"]) for f in fields(settings.Settings) if f.metadata]
    assert [(row[0], row[1]) for row in table(page.read_text(), "variable", "default", "means")] == ours


def test_the_aliases_are_those_of_the_code() -> None:
    """Each name of the predecessor, with what it stands for."""
    rows = table(doc("settings.md"), "variable", "stands for", "difference")
    assert {row[0]: row[1] for row in rows} == settings.ALIASES


def test_the_variables_of_the_hooks_are_those_they_read() -> None:
    """What the hooks' own comment lists, and what the settings let pass."""
    listed = set(re.findall(r"^# (MIGRATOR_\w+)  ", HOOK.read_text(), flags=re.M))
    assert {row[0] for row in table(doc("settings.md"), "variable", "default", "means")} == listed
    assert listed >= settings.HOOK_VARIABLES


def test_no_page_names_a_variable_that_does_not_exist() -> None:
    """A reader would copy it, and the start would refuse it."""
    known = {f.metadata["variable"] for f in fields(settings.Settings) if f.metadata}
    known |= settings.HOOK_VARIABLES | settings.POD_VARIABLES
    # Kubernetes makes these of a Service's name.
    known |= {"MIGRATOR_SERVICE_HOST", "MIGRATOR_PORT"}
    named = {name for page in PAGES for name in re.findall(r"\bMIGRATOR_[A-Z_]+\b", page.read_text())}
    assert named - known == set()


def test_the_table_of_events_is_that_of_the_code() -> None:
    """Each event once, with its meaning."""
    rows = table(doc("events.md"), "event", "level", "meaning")
    assert [(row[0], row[2]) for row in rows] == list(events.EVENTS.items())


def test_the_levels_of_events_are_those_they_are_logged_with() -> None:
    """Whoever filters by level knows what is left."""
    # Those two are logged under a name that is handed in.
    said = {"saving": {"info"}, "loading": {"info"}} | logged()
    rows = table(doc("events.md"), "event", "level", "meaning")
    assert {row[0]: set(row[1].split(" or ")) for row in rows} == said


def test_what_to_do_about_each_warning_is_told() -> None:
    """Every event that is a warning or an error has a place in the page of symptoms."""
    loud = {name for name, levels in logged().items() if levels & {"warning", "error"}} - {"leaving"}
    assert sorted(name for name in loud if name not in doc("troubleshooting.md")) == []


def test_what_to_do_about_each_error_is_told() -> None:
    """Every error class is a name a user searches for."""
    names = {
        name for name, kind in vars(errors).items() if isinstance(kind, type) and kind.__module__ == errors.__name__
    }
    assert len(names) > 5
    assert sorted(name for name in names if not re.search(rf"\b{name}\b", doc("troubleshooting.md"))) == []


def test_the_exit_codes_of_the_hook_are_those_of_the_script() -> None:
    """What the script's head lists, what its lines do, and what both pages say are the same."""
    head = HOOK.read_text().split("set -u")[0]
    listed = dict(re.findall(r"^# +(?:exit )?(\d+) {3}(\S.*)$", head, flags=re.M))
    made = set(re.findall(r"\bfinish (\d+) ", HOOK.read_text()))
    rows = table(doc("settings.md"), "code", "means", "more")

    assert {row[0]: row[1] for row in rows} == listed
    assert made == set(listed)
    assert set(re.findall(r"^### preStop: exit code (\d+)$", doc("troubleshooting.md"), flags=re.M)) == made - {"0"}


THEIRS = (
    "No space left on device",
    "Permission denied",
    "Read-only file system",
    "Connection closed by peer",
    "kubectl describe pod",
    "Last State",
    "accelerate launch",
    "py-spy dump --native",
)
"""Messages and commands of other programs on the page of symptoms."""


def written() -> str:
    """All text in the package and the hooks that may become a message, a gap where a value is filled in."""
    texts = [re.sub(r"\$\{?\w+[^\s}]*\}?", "\0", path.read_text()) for path in sorted((ROOT / "hooks").glob("*.sh"))]
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                texts.append("".join(str(v.value) if isinstance(v, ast.Constant) else "\0" for v in node.values))
    return "\n".join(" ".join(text.split()) for text in texts)


def phrases(quote: str) -> list[str]:
    """Each three words in a row of a quoted message, or two if it is short; nothing across a value."""
    for text in THEIRS:
        quote = quote.replace(text, "...")
    found = []
    for part in re.split(r"\.\.\.|<[^>]*>|\S+\.py, line \d+|\S*[\d=]\S*(?: \S+\")?", quote):
        words = part.split()
        size = 3 if len(words) > 3 else 2
        found += [" ".join(words[i : i + size]) for i in range(len(words) - size + 1)]
    return found


def test_a_message_that_is_quoted_as_a_symptom_is_one_of_ours() -> None:
    """A user searches the page for the words on the screen. Half of the phrases may differ: values are filled in."""
    page, ours = doc("troubleshooting.md"), written()
    symptoms = re.findall(r"^\*\*Symptom\.\*\*(.*?)^\*\*Cause", page, flags=re.M | re.S)
    quotes = [quote for text in symptoms for quote in re.findall(r"`([^`]+)`", text.replace("\n", " "))]
    quotes += re.findall(r"^\| `([^`]+)` \|", page, flags=re.M)

    assert len([quote for quote in quotes if phrases(quote)]) > 80
    wrong = [q for q in quotes if sum(phrase in ours for phrase in phrases(q)) < len(phrases(q)) / 2]
    assert wrong == []
