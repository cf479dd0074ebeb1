"""All settings, in one place.

An argument of `listening()` overrides the environment, and the environment overrides
the default. Settings are read once, in `listening()`; one error lists all values that
are not allowed, each with the variable, the value and what is allowed.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, cast

from migrator.errors import SettingsError
from migrator.events import log
from migrator.roots import local_path, root

Resume = Literal["auto", "never", "require"]
LoopsOnResume = Literal["continue", "anew"]
Ranks = Literal["auto", "1"]


@dataclass(frozen=True)
class Every:
    """The interval of periodic saves: a number of steps, or of seconds, or never."""

    steps: int | None = None
    seconds: float | None = None

    def __str__(self) -> str:
        if self.steps is not None:
            return f"{self.steps} steps"
        return "off" if self.seconds is None else f"{self.seconds:g} s"


def _variable(name: str, default: str, doc: str, parse: Callable[[str], Any]) -> Any:
    return field(metadata={"variable": name, "default": default, "doc": doc, "parse": parse})


def _file(text: str) -> Path:
    # No `~`: the hook gets the same text and does not expand it.
    path = None if text.endswith("/") or text.startswith("~") else local_path(text)
    if path is None or path.name in ("", ".."):
        raise ValueError("the path of a file, written out")
    return path


def _legacy_file(text: str) -> Path:
    path = local_path(text)
    if path is None:
        raise ValueError("the path of a file")
    return path


def _job(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", text):
        raise ValueError("1 to 128 letters, digits, dots, dashes and underscores, no dot or dash in front")
    return text


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 1 <= value <= 86400:
        raise ValueError("seconds between 1 and 86400")
    return value


def _every(text: str) -> Every:
    if text.strip().lower() == "off":
        return Every()
    match = re.fullmatch(r"(\d{1,12}(?:\.\d+)?)(s|m|h)?", text.strip())
    if match is None or float(match.group(1)) <= 0 or (match.group(2) is None and "." in match.group(1)):
        raise ValueError("a number of steps (500), a time (30s, 10m, 2h) or off")
    if match.group(2) is None:
        return Every(steps=int(match.group(1)))
    return Every(seconds=float(match.group(1)) * {"s": 1, "m": 60, "h": 3600}[match.group(2)])


def _whole(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"\d{1,9}", text.strip()) or not low <= int(text) <= high:
            raise ValueError(f"a whole number from {low} to {high}")
        return int(text)

    return parse


def _switch(text: str) -> bool:
    found = {"on": True, "true": True, "off": False, "false": False}.get(text.strip().lower())
    if found is None:
        raise ValueError("on or off")
    return found


def _resume(text: str) -> Resume:
    if text not in ("auto", "never", "require"):
        raise ValueError("auto, never or require")
    return cast(Resume, text)


def _ranks(text: str) -> Ranks:
    if text not in ("auto", "1"):
        raise ValueError("auto or 1")
    return cast(Ranks, text)


def _loops(text: str) -> LoopsOnResume:
    if text not in ("continue", "anew"):
        raise ValueError("continue or anew")
    return cast(LoopsOnResume, text)


_SIGNAL = "/tmp/migrator/signal"
"""Default of the signal file; the hooks have the same."""


@dataclass(frozen=True)
class Settings:
    """All settings of one life; `docs/settings.md` holds the same table, and a test compares them."""

    ckpt: Path | str = _variable(
        "MIGRATOR_CKPT", "./ckpts", "root of the ckpts: a directory, or a URL as s3://bucket/prefix", root
    )
    job: str = _variable("MIGRATOR_JOB", "default", "name of the job under the root", _job)
    signal: Path = _variable("MIGRATOR_SIGNAL", _SIGNAL, "the signal file, the same default in the hooks", _file)
    grace_s: float = _variable("MIGRATOR_GRACE_S", "30", "the pod's terminationGracePeriodSeconds", _seconds)
    every: Every = _variable("MIGRATOR_EVERY", "10m", "save and go on: 500 (steps), 10m (or s, h), off", _every)
    keep: int = _variable("MIGRATOR_KEEP", "2", "ckpts to keep", _whole(1, 1_000_000))
    exit_code: int = _variable("MIGRATOR_EXIT_CODE", "143", "exit code after leaving", _whole(0, 255))
    keep_exit_code: bool = _variable(
        "MIGRATOR_KEEP_EXIT_CODE",
        "off",
        "on: a script that receives the notice itself and ends with 0 keeps its 0",
        _switch,
    )
    resume: Resume = _variable("MIGRATOR_RESUME", "auto", "auto, never (start afresh), require", _resume)
    loops: LoopsOnResume = _variable(
        "MIGRATOR_LOOPS", "continue", "an interrupted epoch: continue, or begin it anew (anew)", _loops
    )
    ranks: Ranks = _variable(
        "MIGRATOR_RANKS", "auto", "auto: those of the process group; 1: this process is a job by itself", _ranks
    )
    termination_log: Path = Path("/dev/termination-log")
    """The file of the termination message. The pod spec defines its path, so it is not an argument of `listening()`."""
    legacy_file: Path | None = None
    """The `migration.pth` of pytorchjob-migration, if its variable is set."""
    measure: Path | None = None
    """Nothing is loaded or saved: behind its first step the process notes here how much it would save, and ends."""


ALIASES = {"MIGRATION_CKPT_PATH": "MIGRATOR_CKPT", "MIGRATION_SIGNAL_PATH": "MIGRATOR_SIGNAL"}
"""Variables of pytorchjob-migration. `MIGRATION_CKPT_PATH` is the path of a file; the root is its directory."""


def read(arguments: Mapping[str, Any], environ: Mapping[str, str]) -> Settings:
    """Settings from arguments, environment and defaults; one `SettingsError` lists all problems."""
    known = {f.name: f.metadata for f in fields(Settings) if f.metadata}
    wrong = [
        f"listening({name}=...): there is no such setting; there are {', '.join(known)}"
        for name in arguments
        if name not in known
    ]
    values: dict[str, Any] = {}
    legacy = None
    for name, meta in known.items():
        given, where = arguments.get(name), f"listening({name}=...)"
        if given is None:
            given, where = _from_environment(meta["variable"], meta["default"], environ)
        try:
            if where == "MIGRATION_CKPT_PATH":
                legacy = _legacy_file(given)
                given = legacy.parent
            values[name] = meta["parse"](_text(given))
        except ValueError as error:
            wrong.append(f"{where} is {_shown(given)!r}; allowed: {error}")
    try:
        values["termination_log"] = _file(environ.get(TERMINATION_LOG, str(Settings.termination_log)))
    except ValueError as error:
        wrong.append(f"{TERMINATION_LOG} is {environ[TERMINATION_LOG]!r}; allowed: {error}")
    _name_unknown_variables(environ, {meta["variable"] for meta in known.values()} | POD_VARIABLES)
    if wrong:
        raise SettingsError("settings that cannot be used:\n  " + "\n  ".join(wrong))
    found = Settings(**values, legacy_file=legacy)
    return found if not environ.get(MEASURE) else _measuring(found, Path(environ[MEASURE]))


def _measuring(found: Settings, file: Path) -> Settings:
    """These settings, with all that is read or written beside the file: whatever the script asks for, its ckpts stay
    as they are."""
    return replace(
        found,
        ckpt=file.with_name("ckpts"),
        signal=file.with_name("signal"),
        resume="never",
        termination_log=file.with_name("termination-log"),
        legacy_file=None,
        measure=file,
    )


@dataclass(frozen=True)
class Places:
    """Paths that are also known if other settings are wrong."""

    signal: Path = Path(_SIGNAL)
    termination_log: Path = Settings.termination_log


def places(environ: Mapping[str, str]) -> Places:
    """Read these paths without raising an error: they are needed to report that other settings are wrong."""
    found: dict[str, Path] = {}
    for name, variables in (
        ("signal", ("MIGRATOR_SIGNAL", "MIGRATION_SIGNAL_PATH")),
        ("termination_log", (TERMINATION_LOG,)),
    ):
        with contextlib.suppress(ValueError):
            given = next((environ[variable] for variable in variables if environ.get(variable)), "")
            found |= {name: _file(given)} if given else {}
    return Places(**found)


def signal_and_grace(environ: Mapping[str, str]) -> tuple[Path, float]:
    """Signal file and grace alone, which `watch()` needs before `listening()`."""
    known = {f.name: f.metadata for f in fields(Settings) if f.metadata}
    found, wrong = {}, []
    for name in ("signal", "grace_s"):
        given, where = _from_environment(known[name]["variable"], known[name]["default"], environ)
        try:
            found[name] = known[name]["parse"](given)
        except ValueError as error:
            wrong.append(f"{where} is {given!r}; allowed: {error}")
    if wrong:
        raise SettingsError("settings that cannot be used:\n  " + "\n  ".join(wrong))
    return found["signal"], found["grace_s"]


def exit_code(environ: Mapping[str, str]) -> int:
    """The exit code that requests a restart, for what ends before `listening()`. Never 0: that would mean success."""
    meta = next(f.metadata for f in fields(Settings) if f.name == "exit_code")
    found = 0
    with contextlib.suppress(ValueError):  # `listening()` reports a value that is not allowed
        found = meta["parse"](environ.get(meta["variable"], meta["default"]))
    return found or int(meta["default"])


_SECRET_FIELD = re.compile(r"(?i)((?:key|sig|signature|secret|token|password)=)[^&;\s]+")


def _shown(given: object) -> str:
    """For an error: without credentials that somebody has put into a URL."""
    text = _text(given)
    if "//" in text:
        # A password may have a slash, and a query is no part of any root.
        text = re.sub(r"\?.*", "?***", re.sub(r"//.*@", "//***@", text, flags=re.DOTALL), flags=re.DOTALL)
    return _SECRET_FIELD.sub(r"\1***", text)


def _text(given: object) -> str:
    try:
        return str(given)
    except ValueError:  # an integer with more digits than Python converts to text
        return f"a {type(given).__name__} without end"


def _from_environment(variable: str, default: str, environ: Mapping[str, str]) -> tuple[str, str]:
    if variable in environ:
        return environ[variable], variable
    for alias, real in ALIASES.items():
        if real == variable and environ.get(alias):
            log("setting_alias", alias=alias, variable=variable, value=environ[alias])
            return environ[alias], alias
    return default, "the default"


TERMINATION_LOG = "MIGRATOR_TERMINATION_LOG"
MEASURE = "MIGRATOR_MEASURE"
HOOK_VARIABLES = {"MIGRATOR_HOOK_LOGS"}
"""Variables that only the hooks read."""
POD_VARIABLES = {TERMINATION_LOG, MEASURE}
"""Variables that the trainer reads from its environment, and that are not arguments."""

_OF_A_SERVICE = re.compile(r".*_(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT(_[0-9]+_[A-Z]+(_[A-Z]+)?)?)")
"""Variables that Kubernetes adds to each pod for a Service whose name begins with `migrator`."""


def _name_unknown_variables(environ: Mapping[str, str], known: set[str]) -> None:
    """Log unknown variables: a typo would silently have no effect. No error, as the variable may belong to other
    software."""
    for name in sorted(environ):
        if not name.startswith("MIGRATOR_") or name in known | HOOK_VARIABLES or _OF_A_SERVICE.fullmatch(name):
            continue
        log("setting_unknown", level=logging.WARNING, variable=name, known=",".join(sorted(known)))
