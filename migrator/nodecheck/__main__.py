"""`python -m migrator.nodecheck -- COMMAND`: checks the nodes, then becomes the command if they are good.

It reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun and the training
operators set them. The command replaces this process (`exec`), so it has the same pid and
gets the signals of the container, and nothing of the check is left in it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from migrator import settings
from migrator.errors import RanksError, SettingsError
from migrator.nodecheck import check
from migrator.nodecheck.check import Options
from migrator.nodecheck.exchange import AGENT, Place
from migrator.nodecheck.script import end_hard
from migrator.notice import termination_message

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_FIRST_FD = 3
"""The descriptors below are stdin, stdout and stderr."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code; does not return if the command takes over."""
    parser = _parser()
    given = parser.parse_args(arguments)
    command = given.command[1:] if given.command[:1] == ["--"] else given.command
    options = Options(
        timeout_s=given.timeout,
        arrive_s=given.arrive,
        repeat=given.repeat,
        exclude_stragglers=given.exclude_stragglers,
    )
    try:
        options.validate("python -m migrator.nodecheck")
        place = place_of(os.environ)
    except SettingsError as error:
        parser.error(str(error))
    # Process 1 of a container ignores a SIGTERM for which it has no handler.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(settings.exit_code(os.environ)))
    before = _descriptors()
    try:
        verdict = check.run(place, options)
    except RanksError as error:
        termination_message.write(f"migrator: RanksError: {error}", settings.places(os.environ).termination_log)
        print(f"migrator.nodecheck: {error}", file=sys.stderr)
        return 1
    code = check.prepare_end(verdict) if verdict.replaced else 0
    if command and not verdict.replaced:
        _become(command, _descriptors() - before)
    if verdict.must_end_hard:
        end_hard(code)
    return code


def place_of(environ: Mapping[str, str]) -> Place:
    """This rank and the job's store, as init_process_group() would find them."""
    if "RANK" not in environ and environ.get("WORLD_SIZE", "1") == "1":
        return Place(0, 1)
    missing = [name for name in _NEEDED if not environ.get(name)]
    if missing:
        raise SettingsError(
            f"{', '.join(missing)} missing in the environment. torchrun and the training operators set "
            f"{', '.join(_NEEDED)}; otherwise set them as for init_process_group()"
        )
    wrong = [name for name in _NEEDED if name != "MASTER_ADDR" and not environ[name].isdecimal()]
    if wrong:
        raise SettingsError("; ".join(f"{name} is {environ[name]!r}; allowed: a whole number" for name in wrong))
    rank, size, port = (int(environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    if not rank < size:
        raise SettingsError(f"RANK is {rank} and WORLD_SIZE is {size}; allowed: ranks from 0 to {size - 1}")
    is_agents = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Place(
        rank,
        size,
        environ["MASTER_ADDR"],
        port,
        server=AGENT if is_agents else Place.server,
        serves=rank == 0 and not is_agents,
        ends_with_check=not is_agents,
    )


def _parser() -> argparse.ArgumentParser:
    default = Options()
    parser = argparse.ArgumentParser(
        prog="python -m migrator.nodecheck",
        description="Checks the nodes of a job, then runs the command if no node is at fault.",
        epilog=f"Exit codes: 0 good, {check.EXIT_AT_FAULT} this node is at fault, MIGRATOR_EXIT_CODE (143) another "
        "one is, 2 wrong arguments. See docs/nodecheck.md.",
    )
    parser.add_argument(
        "--timeout", type=float, default=default.timeout_s, metavar="S", help="deadline of each round (%(default)g s)"
    )
    parser.add_argument(
        "--arrive", type=float, default=default.arrive_s, metavar="S", help="wait for all ranks (%(default)g s)"
    )
    parser.add_argument(
        "--repeat",
        type=int,
        default=default.repeat,
        metavar="N",
        help="matmuls and all-reduces per round (%(default)d)",
    )
    parser.add_argument(
        "--exclude-stragglers", action="store_true", help="a slow node ends like one at fault; else it is reported only"
    )
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="what to run then: a program, or a script.py"
    )
    return parser


def _become(command: Sequence[str], opened: set[int]) -> NoReturn:
    for fd in opened:
        # A socket of the check that stays open would keep its port from the command.
        with contextlib.suppress(OSError):
            os.set_inheritable(fd, False)
    words = [sys.executable, "-u", *command] if command[0].endswith(".py") else [*command]
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvp(words[0], words)
    except OSError as error:
        sys.exit(f"migrator.nodecheck: the nodes are good, but {words[0]} cannot be run: {error.strerror or error}")


def _descriptors() -> set[int]:
    return {int(entry.name) for entry in Path("/proc/self/fd").iterdir() if int(entry.name) >= _FIRST_FD}


if __name__ == "__main__":
    sys.exit(main())
