"""What a pod of the stand-in gets from ConfigMaps and Secrets, and its directory for temporary files."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
import yaml

from migrator.testing import Kubelet, StandInError
from tests.pods.test_kubelet import STAYS, a_pod, mounted, up
from tests.support.harness import ROOT

MAP = {"kind": "ConfigMap", "metadata": {"name": "m"}, "data": {"run.sh": "echo from the map\n", "COLOUR": "red"}}
SECRET = {"kind": "Secret", "metadata": {"name": "s"}, "data": {"KEY": base64.b64encode(b"opens").decode()}}


def file_of(directory: Path, *documents: dict[str, Any]) -> Path:
    path = directory / "all.yaml"
    path.write_text(yaml.safe_dump_all(documents))
    return path


def test_a_configmap_of_the_same_file_is_mounted(kubelet: Kubelet, tmp_path: Path) -> None:
    """Each key is a file. It comes before what the image has at that place."""
    document = a_pod("sh /hooks/run.sh; ls /hooks", **mounted({"name": "v", "configMap": {"name": "m"}}, "/hooks"))

    pod = kubelet.apply(file_of(tmp_path, MAP, document))

    assert pod.wait().exit_code == 0
    assert pod.log.split("\n") == ["from the map", "COLOUR", "run.sh", ""]


def test_variables_come_from_configmaps_and_secrets_of_the_same_file(kubelet: Kubelet, tmp_path: Path) -> None:
    """All of them with a prefix, or one by its key; what the container says itself comes first; args may name them."""
    document = a_pod(
        'echo "$COLOUR $MY_KEY $ONE" "$@"',
        env=[
            {"name": "ONE", "valueFrom": {"secretKeyRef": {"name": "s", "key": "KEY"}}},
            {"name": "NONE", "valueFrom": {"secretKeyRef": {"name": "s", "key": "OTHER", "optional": True}}},
            {"name": "COLOUR", "value": "blue"},
        ],
    )
    (container,) = document["spec"]["containers"]
    container["envFrom"] = [
        {"configMapRef": {"name": "m"}},
        {"prefix": "MY_", "secretRef": {"name": "s"}},
        {"secretRef": {"name": "elsewhere", "optional": True}},
    ]
    container["args"] = ["$0", "$(MY_KEY)"]

    pod = kubelet.apply(file_of(tmp_path, MAP, SECRET, document))

    assert pod.wait().exit_code == 0
    assert pod.log == "blue opens opens opens\n"


def test_a_configmap_that_is_not_in_the_file_is_what_the_image_has_there(kubelet: Kubelet, tmp_path: Path) -> None:
    """So the hooks of the package stand for the ConfigMap of the hooks. Anywhere else it is refused by name."""
    volume = {"name": "v", "configMap": {"name": "migrator-hooks"}}

    pod = kubelet.apply(a_pod("cat /hooks/preStop.sh", **mounted(volume, "/hooks", readOnly=True)))

    pod.wait()
    assert pod.log == (ROOT / "hooks" / "preStop.sh").read_text()
    assert pod.path("/hooks/preStop.sh").samefile(ROOT / "hooks" / "preStop.sh")
    with pytest.raises(StandInError, match="volume 'v' is a configMap; give a directory for it"):
        kubelet.apply(a_pod("true", **mounted(volume, "/config")))
    (tmp_path / "config").mkdir()
    ours = kubelet.apply(a_pod("ls -d /config", **mounted(volume, "/config")), image={"/config": tmp_path / "config"})
    ours.wait()
    assert ours.log.strip() == str(tmp_path / "config")


def test_a_volume_at_tmp_is_the_directory_for_temporary_files(kubelet: Kubelet, tmp_path: Path) -> None:
    """Paths of this machine that begin with it stay as they are: a test gives them in arguments and variables."""
    mount = mounted({"name": "t", "emptyDir": {}}, "/tmp")
    env = [{"name": "HOME", "value": "/tmp"}]
    main = f'echo $TMPDIR $HOME $MIGRATOR_SIGNAL $GIVEN "$@"; touch $TMPDIR/here; {STAYS}'
    document = a_pod(main, env=env, **mount)
    document["spec"]["restartPolicy"] = "Always"
    document["spec"]["containers"][0]["args"] = ["$0", "/tmp/argument"]

    pod = up(kubelet.apply(document, env={"GIVEN": str(tmp_path)}))

    tmp, home, signal, given, argument = pod.log.splitlines()[0].split()
    assert tmp == home == str(pod.empty_dir("t"))
    assert signal == f"{tmp}/migrator/signal"
    assert (given, argument) == (str(tmp_path), "/tmp/argument")
    assert pod.path("/tmp/here").exists()
    assert pod.path("/tmp/migrator/signal") == Path(signal)

    pod.crash()
    pod.wait_for_log("^up$", count=2)
    assert pod.log.splitlines()[0] == pod.log.splitlines()[2], "the pod's volume outlives the container"
