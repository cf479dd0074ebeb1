"""Writes what the benchmarks found into `docs/benchmarks.md`, and bars into `docs/images`.

    python benchmarks/report.py [--page docs/benchmarks.md] [JSON ...]

The page has places for it, `<!-- results: time_to_safety.save -->` to `<!-- end -->`: all tables of which the id begins
so. `<!-- picture: stall.1000 -->` is one table's bars, `<!-- results: machine -->` is where all this was measured. What
is between them is replaced; a place for which there are no numbers is left as it is.

Without arguments, all of `benchmarks/results` is taken, where the benchmarks leave their numbers.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from html import escape
from pathlib import Path
from typing import Any

from suite import RESULTS, ROOT, Table, number

PLACE = re.compile(r"<!-- (results|picture): ([\w.]+) -->\n.*?<!-- end -->", re.S)
WIDTH, LINE, LABELS = 720, 26, 270
"""Pixels of a picture: its width, the height of a bar with its gap, and the room for the labels."""


def machine(found: list[dict[str, Any]]) -> str:
    """A line for each script; they may have run on different days."""
    lines = []
    for one in found:
        its = one["machine"]
        options = ", ".join(f"{name} {value}" for name, value in one["options"].items())
        lines.append(
            f"- `{one['name']}.py`: {its['cores']} cores ({its['architecture']}), {its['memory_gb']} GB, Linux "
            f"{its['kernel']}, {its['filesystem']}, Python {its['python']}, torch {its['torch']}; {its['date']}, load "
            f"{its['load_before']:.1f} before it began; {options}"
        )
    return "\n".join(lines)


def results(prefix: str, tables: list[Table], found: list[dict[str, Any]]) -> str:
    mine = [table for table in tables if table.id.startswith(f"{prefix}.")]
    texts = [f"**{table.title}**\n\n{table.markdown()}" for table in mine]
    script = prefix.partition(".")[0]
    skipped = [
        f"- not run: {row}: {why}" for one in found if one["name"] == script for row, why in one["skipped"].items()
    ]
    return "\n\n".join([*texts, *(["\n".join(skipped)] if mine and skipped else [])])


def picture(table: Table, images: Path) -> str:
    """Draw the bars; the line of Markdown that shows them."""
    most = max((value for _, value in table.bars), default=0.0) or 1.0
    room = WIDTH - LABELS - 90
    size = f'width="{WIDTH}" height="{LINE * len(table.bars) + 34}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="8" y="19" font-weight="bold">{escape(table.title)}, {escape(table.unit)}</text>',
    ]
    for i, (label, value) in enumerate(table.bars):
        top, width = 30 + i * LINE, max(1.0, room * max(0.0, value) / most)
        color = "#2b6cb0" if label.startswith("migrator") else "#a0aec0"
        lines += [
            f'<text x="{LABELS - 8}" y="{top + 15}" text-anchor="end">{escape(label)}</text>',
            f'<rect x="{LABELS}" y="{top}" width="{width:.0f}" height="{LINE - 6}" fill="{color}"/>',
            f'<text x="{LABELS + width + 6:.0f}" y="{top + 15}">{number(value)}</text>',
        ]
    images.mkdir(parents=True, exist_ok=True)
    (images / f"{table.id}.svg").write_text("\n".join([*lines, "</svg>"]) + "\n")
    return f"![{table.title}]({images.name}/{table.id}.svg)"


def fill(page: Path, found: list[dict[str, Any]]) -> list[str]:
    """Replace what is in the places; the names of those that have no numbers."""
    tables = [
        Table(**{**table, "bars": [tuple(bar) for bar in table["bars"]]}) for one in found for table in one["tables"]
    ]
    empty = []

    def one(place: re.Match[str]) -> str:
        kind, name = place[1], place[2]
        if kind == "picture":
            text = "".join(picture(table, page.parent / "images") for table in tables if table.id == name)
        else:
            text = machine(found) if name == "machine" else results(name, tables, found)
        if not text:
            empty.append(name)
            return place[0]
        return f"<!-- {kind}: {name} -->\n\n{text}\n\n<!-- end -->"

    page.write_text(PLACE.sub(one, page.read_text()))
    return empty


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", nargs="*", type=Path, help="what the benchmarks wrote (all of benchmarks/results)")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "benchmarks.md")
    options = parser.parse_args()
    paths = options.json or sorted(RESULTS.glob("*.json"))
    if not paths:
        sys.exit(f"there are no numbers in {RESULTS}; run the benchmarks first: make bench-full")
    empty = fill(options.page, [json.loads(path.read_text()) for path in paths])
    print(f"{options.page}: written from {', '.join(path.name for path in paths)}")
    if empty:
        print(f"no numbers for: {', '.join(empty)}")


if __name__ == "__main__":
    main()
