"""The stand-in kubelet: starts pods from yaml or from plain arguments, and ends them with the test."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import migrator.hooks
from migrator.testing.controllers import Controller, Job
from migrator.testing.errors import StandInError
from migrator.testing.gangs import IndexedJob, PyTorchJob, StatefulSet
from migrator.testing.pod import Pod
from migrator.testing.spec import DEFAULT_GRACE_S, ContainerSpec, Mount, PodSpec, Reader, config_in, documents

HOOKS = "/hooks"
"""The directory of the hooks in the image: `python -m migrator.hooks /hooks`."""
PRE_STOP = ("sh", f"{HOOKS}/preStop.sh")
CKPTS = "/ckpts"

Source = str | Path | Mapping[str, Any]
Started = TypeVar("Started", bound=Controller)


class Kubelet:
    """All pods of one test, with volumes that outlive them, in one directory.

    `image` maps paths of the image to directories of this machine: `{"/app": "examples"}`. `/hooks` is mapped to the
    hooks of this package by default.
    """

    def __init__(self, directory: str | Path, *, image: Mapping[str, str | Path] | None = None) -> None:
        self.directory = Path(directory).resolve()
        self.directory.mkdir(parents=True, exist_ok=True)
        self.pods: list[Pod] = []
        """All pods that were started so far."""
        self._image = {HOOKS: Path(migrator.hooks.__file__).parent, **_directories(image or {})}
        self._controllers: list[Controller] = []
        self._lock = threading.Lock()
        self._is_closed = False

    def __enter__(self) -> Kubelet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def volume(self, claim: str) -> Path:
        """The directory of a claim. All pods that mount the claim share it."""
        host = re.sub(r"^host:/*", "host/", claim)
        path = self.directory / "volumes" / host
        path.mkdir(parents=True, exist_ok=True)
        return path

    def run(
        self,
        argv: Sequence[str | Path],
        *,
        name: str = "pod",
        env: Mapping[str, str] | None = None,
        volumes: Mapping[str, str | Path] | None = None,
        pre_stop: Sequence[str] | None = PRE_STOP,
        post_start: Sequence[str] | None = None,
        grace_s: float = DEFAULT_GRACE_S,
        restart_policy: str = "Never",
        cwd: str | Path | None = None,
    ) -> Pod:
        """Start a pod from plain arguments. By default it has ckpts on a claim and our preStop, as in the README.

        `volumes` maps each path to a claim (text) or a directory (`Path`); the default is `{"/ckpts": "ckpts"}`.
        """
        volumes = {CKPTS: "ckpts"} if volumes is None else {path.rstrip("/"): to for path, to in volumes.items()}
        given = {path: Path(place).resolve() for path, place in volumes.items() if isinstance(place, Path)}
        claims = {path: str(place) for path, place in volumes.items() if path not in given}
        usual = {"MIGRATOR_GRACE_S": f"{grace_s:g}", **({"MIGRATOR_CKPT": CKPTS} if CKPTS in volumes else {})}
        spec = PodSpec(
            container=ContainerSpec(
                name="main",
                argv=tuple(map(str, argv)),
                env={**usual, **(env or {})},
                pre_stop=None if pre_stop is None else tuple(pre_stop),
                post_start=None if post_start is None else tuple(post_start),
                mounts=tuple(Mount(path, path) for path in claims),
                working_dir=None if cwd is None else str(Path(cwd).resolve()),
            ),
            grace_s=grace_s,
            restart_policy=restart_policy,
            claims=claims,
        )
        pod = self._pod(name, spec, paths={**self._image, **given})
        pod.start()
        return pod

    def apply(
        self,
        source: Source,
        *,
        image: Mapping[str, str | Path] | None = None,
        env: Mapping[str, str] | None = None,
        args: Sequence[str] | None = None,
        grace_s: float | None = None,
        volumes: Mapping[str, str | Path] | None = None,
        container: str | None = None,
        workers: int | None = None,
    ) -> Any:
        """As `kubectl apply -f`: start the one Pod, Job, StatefulSet or PyTorchJob of a yaml file.

        `env` is added to the container's environment. `args` and `grace_s` replace those of the yaml (`grace_s` also
        sets `MIGRATOR_GRACE_S`). `volumes` maps names of volumes to directories. `workers` replaces the number of
        worker replicas, or of pods of an indexed Job or a StatefulSet.
        """
        known = {
            "Pod": self._apply_pod,
            "Job": self._apply_job,
            "StatefulSet": self._apply_stateful_set,
            "PyTorchJob": self._apply_pytorchjob,
        }
        applied = documents(source)
        found = [one for one in applied if one.get("kind") in known]
        if len(found) != 1:
            kinds = [str(one.get("kind")) for one in applied]
            raise StandInError(f"{source} has {', '.join(kinds)}; expected one {', '.join(known)}")
        document = found[0]
        given = _directories(volumes or {})
        config = config_in(applied)
        for (kind, name), files in config.items():
            for key, text in files.items():
                (self.volume(f"{kind}/{name}") / key).write_text(text)

        def read(spec: Mapping[str, Any]) -> PodSpec:
            paths = {*self._image, *_directories(image or {})}
            reader = Reader(f"{document['kind']} {_name(document)}", config=config, image=paths)
            pod = reader.pod(spec, container=container, given=given)
            reader.check()
            assert pod is not None
            return _changed(pod, args=args, grace_s=grace_s)

        def make(name: str, spec: PodSpec, **more: Any) -> Pod:
            paths = {**self._image, **_directories(image or {})}
            return self._pod(name, spec, paths=paths, env=env or {}, given=given, **more)

        return known[document["kind"]](document, read, make, workers)

    def _apply_pod(self, document: Any, read: Callable[..., PodSpec], make: Callable[..., Pod], _: object) -> Pod:
        pod = make(_name(document), read(document.get("spec") or {}))
        pod.start()
        return pod

    def _apply_job(
        self, document: Any, read: Callable[..., PodSpec], make: Callable[..., Pod], pods: int | None
    ) -> Job | IndexedJob:
        spec = document.get("spec") or {}
        if spec.get("completionMode") == "Indexed":
            return self._started(IndexedJob(_name(document), spec, read, make, pods=pods))
        return self._started(Job(_name(document), spec, read, make))

    def _apply_stateful_set(
        self, document: Any, read: Callable[..., PodSpec], make: Callable[..., Pod], pods: int | None
    ) -> StatefulSet:
        return self._started(StatefulSet(_name(document), document.get("spec") or {}, read, make, pods=pods))

    def _apply_pytorchjob(
        self, document: Any, read: Callable[..., PodSpec], make: Callable[..., Pod], workers: int | None
    ) -> PyTorchJob:
        return self._started(PyTorchJob(_name(document), document.get("spec") or {}, read, make, workers=workers))

    def _started(self, controller: Started) -> Started:
        self._controllers.append(controller)
        controller.start()
        return controller

    def _pod(
        self,
        name: str,
        spec: PodSpec,
        *,
        paths: Mapping[str, Path],
        env: Mapping[str, str] | None = None,
        given: Mapping[str, Path] | None = None,
        **more: Any,
    ) -> Pod:
        def volume(claim: str) -> Path:
            return (given or {}).get(claim) or self.volume(claim)

        with self._lock:
            if self._is_closed:
                raise StandInError(f"pod {name}: the kubelet is closed")
            directory = self.directory / "pods" / f"{len(self.pods) + 1:02d}-{name}"
            pod = Pod(name, spec, directory, paths=paths, volume=volume, env=env or {}, **more)
            self.pods.append(pod)
        return pod

    def lose_node(self) -> None:
        """End all pods at once, without a hook, as when the machine is lost."""
        for pod in list(self.pods):
            if not pod.is_over.is_set():
                pod.lose()

    def close(self) -> None:
        """End all that was started here, and wait for it. May be called twice."""
        # Controllers first: they would make a new pod for each pod that ends.
        for controller in list(self._controllers):
            controller.close()
        with self._lock:
            self._is_closed = True
        for pod in list(self.pods):
            pod.close()


def _changed(spec: PodSpec, *, args: Sequence[str] | None, grace_s: float | None) -> PodSpec:
    container = spec.container
    if args is not None:
        container = replace(container, argv=(*container.command, *args))
    if grace_s is not None:
        container = replace(container, env={**container.env, "MIGRATOR_GRACE_S": f"{grace_s:g}"})
        spec = replace(spec, grace_s=grace_s)
    return replace(spec, container=container)


def _directories(paths: Mapping[str, str | Path]) -> dict[str, Path]:
    found = {path.rstrip("/"): Path(place).resolve() for path, place in paths.items()}
    for path, place in found.items():
        if not place.exists():
            raise StandInError(f"{place}, which is to stand for {path}, does not exist")
    return found


def _name(document: Mapping[str, Any]) -> str:
    metadata = document.get("metadata") or {}
    return str(metadata.get("name") or metadata.get("generateName", "pod-").rstrip("-"))
