"""`python -m migrator.hooks DIR` copies the hooks into a directory."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from migrator.errors import SettingsError
from migrator.hooks import SCRIPTS, copy_to


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 1 with the reason on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m migrator.hooks", description=f"Copies {' and '.join(SCRIPTS)} into a directory."
    )
    parser.add_argument("directory", metavar="DIR", help="where the pod will look for them, e.g. /hooks")
    try:
        copied = copy_to(parser.parse_args(arguments).directory)
    except SettingsError as error:
        print(f"migrator.hooks: {error}", file=sys.stderr)
        return 1
    for path in copied:
        print(f"copied {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
