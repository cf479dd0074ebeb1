"""Every setting: where its value comes from, what is allowed, and what is said about the rest."""

from __future__ import annotations

import importlib.util
import inspect
import logging
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from migrator import settings
from migrator.api import Migrator
from migrator.errors import SettingsError
from migrator.settings import Every, Settings, read

DEFAULTS: dict[str, Any] = {
    "ckpt": Path.cwd() / "ckpts",
    "job": "default",
    "signal": Path("/tmp/migrator/signal"),
    "grace_s": 30.0,
    "every": Every(seconds=600.0),
    "keep": 2,
    "exit_code": 143,
    "keep_exit_code": False,
    "resume": "auto",
    "loops": "continue",
    "ranks": "auto",
}

# (setting, its variable, a text, what it means, another text, what that means)
VALUES: list[tuple[str, str, str, Any, str, Any]] = [
    ("ckpt", "MIGRATOR_CKPT", "/pvc/one", Path("/pvc/one"), "file:///pvc/two%20two", Path("/pvc/two two")),
    ("job", "MIGRATOR_JOB", "mnist-1.b_c", "mnist-1.b_c", "_", "_"),
    ("signal", "MIGRATOR_SIGNAL", "/run/a b/signal", Path("/run/a b/signal"), "s", Path.cwd() / "s"),
    ("grace_s", "MIGRATOR_GRACE_S", "45", 45.0, "1.5", 1.5),
    ("every", "MIGRATOR_EVERY", "500", Every(steps=500), "off", Every()),
    ("keep", "MIGRATOR_KEEP", "1", 1, "1000000", 1_000_000),
    ("exit_code", "MIGRATOR_EXIT_CODE", "0", 0, "255", 255),
    ("keep_exit_code", "MIGRATOR_KEEP_EXIT_CODE", "on", True, "off", False),
    ("resume", "MIGRATOR_RESUME", "never", "never", "require", "require"),
    ("loops", "MIGRATOR_LOOPS", "anew", "anew", "continue", "continue"),
    ("ranks", "MIGRATOR_RANKS", "1", "1", "auto", "auto"),
]

BAD = [
    ("MIGRATOR_CKPT", "", "a directory, or a URL"),
    ("MIGRATOR_CKPT", "weird://bucket/prefix", "no storage for weird://"),
    ("MIGRATOR_CKPT", "file://", "a directory, or a URL"),
    ("MIGRATOR_CKPT", "file://data/ckpts", "the whole path"),
    ("MIGRATOR_CKPT", "file:///data#a", "without"),
    ("MIGRATOR_CKPT", "s3://", "s3://bucket/prefix"),
    ("MIGRATOR_CKPT", "s3:/bucket/prefix", "two slashes"),
    ("MIGRATOR_CKPT", "nfs:/bucket/prefix", "two slashes"),
    ("MIGRATOR_CKPT", "s3:bucket/prefix", "two slashes"),
    ("MIGRATOR_CKPT", "s3//bucket/prefix", "two slashes"),
    ("MIGRATOR_CKPT", "gs:bucket", "two slashes"),
    ("MIGRATOR_CKPT", " s3://bucket/prefix", "without blanks"),
    ("MIGRATOR_CKPT", "/mnt/ckpts ", "without blanks"),
    ("MIGRATOR_CKPT", "s3://Bucket/prefix", "s3://bucket/prefix"),
    ("MIGRATOR_CKPT", "s3://bucket/a/../b", "s3://bucket/prefix"),
    ("MIGRATOR_CKPT", "s3://bucket/a#1", "no query"),
    ("MIGRATOR_JOB", "", "1 to 128 letters"),
    ("MIGRATOR_JOB", "a/b", "1 to 128 letters"),
    ("MIGRATOR_JOB", "..", "no dot or dash in front"),
    ("MIGRATOR_JOB", "-rf", "no dot or dash in front"),
    ("MIGRATOR_JOB", "x" * 129, "1 to 128 letters"),
    ("MIGRATOR_SIGNAL", " ", "the path of a file"),
    ("MIGRATOR_SIGNAL", "/tmp/migrator/", "the path of a file"),
    ("MIGRATOR_GRACE_S", "", "seconds between 1 and 86400"),
    ("MIGRATOR_GRACE_S", "30s", "seconds between 1 and 86400"),
    ("MIGRATOR_GRACE_S", "0", "seconds between 1 and 86400"),
    ("MIGRATOR_GRACE_S", "-30", "seconds between 1 and 86400"),
    ("MIGRATOR_GRACE_S", "nan", "seconds between 1 and 86400"),
    ("MIGRATOR_GRACE_S", "inf", "seconds between 1 and 86400"),
    ("MIGRATOR_EVERY", "", "a number of steps (500), a time (30s, 10m, 2h) or off"),
    ("MIGRATOR_EVERY", "0", "a number of steps"),
    ("MIGRATOR_EVERY", "0s", "a number of steps"),
    ("MIGRATOR_EVERY", "-5", "a number of steps"),
    ("MIGRATOR_EVERY", "1.5", "a number of steps"),
    ("MIGRATOR_EVERY", "10 minutes", "a time (30s, 10m, 2h)"),
    ("MIGRATOR_EVERY", "never", "or off"),
    ("MIGRATOR_KEEP", "0", "a whole number from 1"),
    ("MIGRATOR_KEEP", "two", "a whole number from 1"),
    ("MIGRATOR_KEEP", "2.0", "a whole number from 1"),
    ("MIGRATOR_EXIT_CODE", "256", "from 0 to 255"),
    ("MIGRATOR_EXIT_CODE", "-15", "from 0 to 255"),
    ("MIGRATOR_KEEP_EXIT_CODE", "1", "on or off"),
    ("MIGRATOR_RESUME", "no", "auto, never or require"),
    ("MIGRATOR_LOOPS", "Anew", "continue or anew"),
    ("MIGRATOR_RANKS", "2", "auto or 1"),
    ("MIGRATOR_RESUME", "Never", "auto, never or require"),
]


def _said(arguments: Mapping[str, Any], environ: Mapping[str, str]) -> str:
    with pytest.raises(SettingsError) as caught:
        read(arguments, environ)
    return str(caught.value)


def test_without_anything_set_the_defaults_hold() -> None:
    """An empty environment gives the documented defaults, and no file of the predecessor."""
    found = read({}, {})

    assert found == Settings(**DEFAULTS, legacy_file=None)


def test_every_setting_is_tested_here() -> None:
    """A setting that is added must get its values in these tables."""
    ours = [f for f in fields(Settings) if f.metadata]

    assert [f.name for f in ours] == list(DEFAULTS) == [row[0] for row in VALUES]
    assert [f.metadata["variable"] for f in ours] == [row[1] for row in VALUES]
    assert {f.metadata["variable"] for f in ours} == {row[0] for row in BAD}
    assert all(f.metadata["doc"] for f in ours)


def test_listening_has_an_argument_for_every_setting() -> None:
    """What a variable can say an argument can say too, by keyword only, and None means "not given"."""
    parameters = dict(inspect.signature(Migrator.listening).parameters)
    del parameters["self"]

    assert list(parameters) == list(DEFAULTS)
    assert {p.kind for p in parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}
    assert {p.default for p in parameters.values()} == {None}


@pytest.mark.parametrize(("name", "variable", "text", "value", "other", "other_value"), VALUES)
def test_argument_beats_environment_beats_default(
    *, name: str, variable: str, text: str, value: Any, other: str, other_value: Any
) -> None:
    """The nearer word counts: what the script says, then what the pod says, then what we say."""
    assert getattr(read({}, {variable: text}), name) == value
    assert getattr(read({name: other}, {variable: text}), name) == other_value
    assert getattr(read({name: None}, {variable: text}), name) == value
    assert getattr(read({name: text}, {}), name) == value


def test_an_argument_need_not_be_text() -> None:
    """Numbers and paths are as good as the texts that environment variables are confined to."""
    found = read({"ckpt": Path("/pvc"), "grace_s": 12, "every": 500, "keep": 3, "exit_code": 0}, {})

    assert (found.ckpt, found.grace_s, found.every, found.keep, found.exit_code) == (
        Path("/pvc"),
        12.0,
        Every(steps=500),
        3,
        0,
    )


@pytest.mark.parametrize(
    ("text", "value", "shown"),
    [
        ("500", Every(steps=500), "500 steps"),
        ("30s", Every(seconds=30.0), "30 s"),
        ("10m", Every(seconds=600.0), "600 s"),
        ("1.5h", Every(seconds=5400.0), "5400 s"),
        (" OFF ", Every(), "off"),
    ],
)
def test_every_counts_steps_or_seconds(text: str, value: Every, shown: str) -> None:
    """A bare number is steps, a unit makes it a time."""
    assert read({}, {"MIGRATOR_EVERY": text}).every == value
    assert str(value) == shown


def test_a_query_of_a_file_is_refused() -> None:
    """It would be dropped without a word. It may be a credential, so it is not shown."""
    with pytest.raises(SettingsError, match="without") as refused:
        read({}, {"MIGRATOR_CKPT": "file:///data?secret"})
    assert "secret" not in str(refused.value)
    assert read({}, {"MIGRATOR_CKPT": "file://localhost/data;a"}).ckpt == Path("/data;a")


@pytest.mark.parametrize(
    ("text", "root"),
    [
        ("s3://bucket", "s3://bucket"),
        ("s3://my.bucket-1/jobs/mnist_2/", "s3://my.bucket-1/jobs/mnist_2"),
    ],
)
def test_a_bucket_is_a_root(text: str, root: str) -> None:
    """With a prefix or without; a slash at the end says nothing."""
    assert read({}, {"MIGRATOR_CKPT": text}).ckpt == root


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages of the names that other stores need. An import of one of them fails."""
    for name in ("gcsfs", "adlfs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    ("text", "root"),
    [
        ("gs://bucket", "gs://bucket"),
        ("gs://my_bucket.example-1/jobs/mnist_2/", "gs://my_bucket.example-1/jobs/mnist_2"),
        ("gcs://bucket/a=1/b+c", "gcs://bucket/a=1/b+c"),
        ("abfs://container/prefix", "abfs://container/prefix"),
        ("az://container/prefix/", "az://container/prefix"),
        ("memory://trial", "memory://trial"),
        ("memory://trial/deeper", "memory://trial/deeper"),
    ],
)
@pytest.mark.usefixtures("packages")
def test_a_place_in_another_store_is_a_root(text: str, root: str) -> None:
    """Its package is looked for and not imported."""
    assert read({}, {"MIGRATOR_CKPT": text}).ckpt == root


@pytest.mark.parametrize(
    "text",
    [
        "gs://",
        "gs:///prefix",
        "gs://bucket//prefix",
        "gs://bucket/../other",
        "gs://bucket/a/./b",
        "gs://bucket/a b",
        "gs://bucket/a*",
        "gs://bucket/a#12",
        "gs://bucket/a?generation=1",
        "gs://user:password@bucket/a",
        "abfs://container@account.dfs.core.windows.net/a",
        "az://container/a?sig=abc",
        "memory://",
        "memory:///a",
    ],
)
@pytest.mark.usefixtures("packages")
def test_a_url_of_another_store_is_a_name_and_a_prefix(text: str) -> None:
    """What a filesystem would read as a pattern, a version, an account or a credential is refused."""
    assert "://name/prefix of letters" in _said({}, {"MIGRATOR_CKPT": text})


@pytest.mark.parametrize(
    ("text", "module", "install"),
    [
        ("gs://bucket/a", "gcsfs", "pip install 'migrator[gs]'"),
        ("gcs://bucket/a", "gcsfs", "pip install 'migrator[gs]'"),
        ("abfs://container/a", "adlfs", "pip install 'migrator[azure]'"),
        ("az://container/a", "adlfs", "pip install 'migrator[azure]'"),
        ("memory://a", "fsspec", "pip install 'fsspec'"),
    ],
)
def test_a_store_whose_package_is_missing_is_refused_with_what_installs_it(
    text: str, module: str, install: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In `listening()`, and not when the first ckpt is due."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == module else find(name))
    said = _said({}, {"MIGRATOR_CKPT": text})
    assert install in said
    assert module in said


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("s3a://bucket/a", "write s3://"),
        ("abfss://container/a", "write abfs://"),
        ("oss://bucket/a", "AWS_ENDPOINT_URL"),
        ("oci://bucket/a", "AWS_ENDPOINT_URL"),
        ("tos://bucket/a", "AWS_ENDPOINT_URL"),
        ("ftp://host/a", "mount it as a volume"),
        ("sftp://host/a", "mount it as a volume"),
        ("hdfs://host/a", "mount it as a volume"),
        ("http://host/a", "nothing can be written"),
        ("https://host/a", "nothing can be written"),
        ("zip://a.zip", "nothing can be written"),
        ("github://a:b@main/c", "nothing can be written"),
        ("simplecache://a", "name the store itself"),
        ("simplecache::gs://bucket/a", "name the store itself"),
        ("local:///a", "write file://"),
        ("GS://bucket/a", "no storage for GS://"),
        ("hf://datasets/a", "no storage for hf://"),
    ],
)
def test_what_cannot_keep_the_promises_is_refused_by_name(text: str, why: str) -> None:
    """With the reason, or with what to do instead; no directory of that name is made."""
    said = _said({}, {"MIGRATOR_CKPT": text})
    assert why in said
    assert "a directory, or a URL" in said


@pytest.mark.parametrize(
    "text",
    [
        "gs://user:c2VjcmV0@bucket/a",
        "gs://user:c2/VjcmV0@bucket/a",
        "weird://user:c2VjcmV0@bucket/a",
        "az://container/a?sv=2024&sig=c2VjcmV0&se=1",
        "https://account.blob.core.windows.net/container?sig=c2VjcmV0",
        "s3://bucket/a?versionId=1&X-Amz-Security-Token=c2VjcmV0",
        "gs:/bucket?access_token=c2VjcmV0",
    ],
)
def test_no_credential_of_any_url_is_repeated(text: str) -> None:
    """Wherever it stands in it."""
    said = _said({}, {"MIGRATOR_CKPT": text})
    assert "***" in said
    assert "VjcmV0" not in said


def test_credentials_in_a_url_are_not_repeated() -> None:
    """They do not belong there, and an error ends in logs that many can read."""
    said = _said({}, {"MIGRATOR_CKPT": "s3://AKIDEXAMPLE:c2VjcmV0@bucket/prefix"})

    assert "MIGRATOR_CKPT is 's3://***@bucket/prefix'; allowed: " in said
    assert "AKIDEXAMPLE" not in said
    assert "c2VjcmV0" not in said


def test_a_relative_root_is_that_of_listening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that changes its directory later does not move its ckpts."""
    monkeypatch.chdir(tmp_path)
    found = read({"ckpt": "here/ckpts", "signal": "signal"}, {})
    monkeypatch.chdir("/")

    assert found.ckpt == tmp_path / "here" / "ckpts"
    assert found.signal == tmp_path / "signal"


@pytest.mark.parametrize(("variable", "text", "allowed"), BAD)
def test_a_bad_value_is_named_with_what_is_allowed(variable: str, text: str, allowed: str) -> None:
    """Variable, value and what is allowed stand in one line."""
    said = _said({}, {variable: text})

    assert f"{variable} is {text!r}; allowed: " in said
    assert allowed in said.split("; allowed: ")[1]


def test_a_bad_argument_is_named_as_an_argument() -> None:
    """It was not the environment, so the environment is not blamed; a good variable does not help."""
    said = _said({"keep": True}, {"MIGRATOR_KEEP": "3"})

    assert "listening(keep=...) is 'True'; allowed: a whole number from 1" in said
    assert "MIGRATOR_KEEP" not in said


def test_all_that_is_wrong_is_named_at_once() -> None:
    """One start shows every mistake: bad values and unknown arguments."""
    worst = {variable: text for variable, text, _ in BAD}
    said = _said({"grace": 30}, worst)

    lines = said.splitlines()[1:]
    assert len(lines) == len(worst) + 1
    assert all(any(line.strip().startswith(f"{name} is ") for line in lines) for name in worst)
    assert "listening(grace=...): there is no such setting; there are ckpt, job, signal, grace_s" in said


def test_an_unknown_variable_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """A typo would be a setting that silently does nothing; but it may be somebody else's, so the run goes on."""
    with caplog.at_level(logging.INFO, "migrator"):
        read({}, {"MIGRATOR_GRACE": "60", "MIGRATORX": "1", "OTHER": "2"})

    assert "setting_unknown variable=MIGRATOR_GRACE known=" in caplog.text
    assert "MIGRATOR_GRACE_S" in caplog.text
    assert caplog.text.count("setting_unknown") == 1


def test_variables_of_a_kubernetes_service_called_migrator_are_nobodys_typo(caplog: pytest.LogCaptureFixture) -> None:
    """A Service named `migrator` or `migrator-mnist` puts such variables into every pod of the namespace."""
    service = ["SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT", "PORT_80_TCP", "PORT_80_TCP_ADDR"]
    with caplog.at_level(logging.INFO, "migrator"):
        read({}, {f"MIGRATOR_{name}": "x" for name in service} | {"MIGRATOR_MNIST_0_SERVICE_HOST": "10.0.0.1"})

    assert caplog.text == ""


def test_the_variable_of_the_hooks_is_known() -> None:
    """A pod sets its variables for trainer and hooks alike."""
    assert read({}, {"MIGRATOR_HOOK_LOGS": "/pvc/logs"}).keep == 2


def test_the_predecessors_variables_are_aliases(caplog: pytest.LogCaptureFixture) -> None:
    """`MIGRATION_CKPT_PATH` names a file: its directory is our root. Their use is told."""
    with caplog.at_level(logging.INFO, "migrator"):
        found = read({}, {"MIGRATION_CKPT_PATH": "/pvc/job/migration.pth", "MIGRATION_SIGNAL_PATH": "/run/signal"})

    assert found.ckpt == Path("/pvc/job")
    assert found.legacy_file == Path("/pvc/job/migration.pth")
    assert found.signal == Path("/run/signal")
    assert "setting_alias alias=MIGRATION_CKPT_PATH variable=MIGRATOR_CKPT value=/pvc/job/migration.pth" in caplog.text
    assert "setting_alias alias=MIGRATION_SIGNAL_PATH variable=MIGRATOR_SIGNAL value=/run/signal" in caplog.text


def test_our_own_names_beat_the_aliases() -> None:
    """Whoever sets both means ours."""
    theirs = {"MIGRATION_CKPT_PATH": "/old/migration.pth", "MIGRATION_SIGNAL_PATH": "/old/signal"}
    by_variable = read({}, {**theirs, "MIGRATOR_CKPT": "/new", "MIGRATOR_SIGNAL": "/new/signal"})
    by_argument = read({"ckpt": "/new", "signal": "/new/signal"}, theirs)

    for found in (by_variable, by_argument):
        assert (found.ckpt, found.signal) == (Path("/new"), Path("/new/signal"))


def test_an_empty_alias_says_nothing() -> None:
    """The predecessor's yamls set its variables to nothing where they are not used."""
    found = read({}, dict.fromkeys(settings.ALIASES, ""))

    assert found == Settings(**DEFAULTS, legacy_file=None)


def test_a_bad_alias_is_named_by_its_own_name() -> None:
    """The user set that variable and no other."""
    assert "MIGRATION_SIGNAL_PATH is '/run/'; allowed: the path of a file" in _said(
        {}, {"MIGRATION_SIGNAL_PATH": "/run/"}
    )
