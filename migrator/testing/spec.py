"""The specification of a pod, read from yaml.

Only fields that change how a training process starts, stops and restarts are read;
images, resources and the like are ignored. Fields that would change it but are not
supported (a second container, an HTTP hook) are refused by name; one error lists all
of them.

There is no image: programs and files are those of this machine. A path of the image
or of a mount is mapped to a directory of this machine, and is replaced in the command,
its arguments, the environment and the hooks; but not inside of the script.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from migrator.testing.errors import StandInError

DEFAULT_GRACE_S = 30.0
Config = Mapping[tuple[str, str], Mapping[str, str]]
FIELDS = {
    "metadata.name": "",
    "metadata.namespace": "default",
    "spec.nodeName": "stand-in",
    "status.hostIP": "127.0.0.1",
    "status.podIP": "127.0.0.1",
}
"""Fields of the pod that a variable may refer to. The name is replaced by that of each pod."""
_OURS = {"emptyDir", "persistentVolumeClaim", "hostPath"}
_CONFIG = {"configMap": "ConfigMap", "secret": "Secret"}
"""A kind of volume -> the kind of document that it takes its files from."""
# In Kubernetes everything in the brackets is a name, also a shell's `$(command)`; an unknown name stays as it is.
_REFERENCE = re.compile(r"\$\$|\$\(([^)]*)\)")


@dataclass(frozen=True)
class Mount:
    """The mount of a volume in the container."""

    path: str
    volume: str
    sub_path: str = ""


@dataclass(frozen=True)
class ContainerSpec:
    """One container of a pod."""

    name: str
    argv: tuple[str, ...]
    """Command and arguments."""
    env: Mapping[str, str]
    pre_stop: tuple[str, ...] | None = None
    post_start: tuple[str, ...] | None = None
    mounts: tuple[Mount, ...] = ()
    working_dir: str | None = None
    fields: tuple[tuple[str, str], ...] = ()
    """Variables with a value from a field of the pod: (variable, field path)."""
    command: tuple[str, ...] = ()
    """The command without its arguments."""
    falls_back_to_logs: bool = False
    """If the container fails with an empty termination message, the end of its output is used."""


@dataclass(frozen=True)
class PodSpec:
    """A pod, or the template of one."""

    container: ContainerSpec
    init: tuple[ContainerSpec, ...] = ()
    grace_s: float = DEFAULT_GRACE_S
    restart_policy: str = "Always"
    claims: Mapping[str, str] = field(default_factory=dict)
    """Volume name -> claim, or `host:PATH`."""
    empty_dirs: frozenset[str] = frozenset()


class Reader:
    """Reads specifications and collects problems, so that one error lists all of them.

    `config` has the values of the ConfigMaps and Secrets that are in the same file, by kind and name. `image` has the
    paths for which there is a directory here: a ConfigMap that is mounted at one of them is that directory.
    """

    def __init__(self, what: str, *, config: Config | None = None, image: Collection[str] = ()) -> None:
        self._what = what
        self._config: Config = config or {}
        self._image = set(image)
        self.wrong: list[str] = []

    def check(self) -> None:
        if self.wrong:
            raise StandInError("\n  ".join([f"{self._what} cannot be run here:", *self.wrong]))

    def pod(
        self, spec: Mapping[str, Any], *, container: str | None = None, given: Mapping[str, Path] = {}
    ) -> PodSpec | None:
        """The pod of this `spec:`; None if there are problems."""
        main = self._main(spec.get("containers") or [], container)
        init_containers = spec.get("initContainers") or []
        run = [*init_containers, *([main] if main else [])]
        mounted = [mount for one in run for mount in one.get("volumeMounts") or []]
        claims, empty_dirs, in_image = self._volumes(spec.get("volumes") or [], given, mounted)
        known = {*claims, *empty_dirs, *given}
        init = [self._container(one, known, in_image) for one in init_containers]
        read = self._container(main, known, in_image) if main else None
        grace = spec.get("terminationGracePeriodSeconds", DEFAULT_GRACE_S)
        if not isinstance(grace, int | float) or isinstance(grace, bool) or grace < 0:
            self.wrong.append(f"terminationGracePeriodSeconds is {grace!r}; expected a number of seconds, 0 or more")
            grace = DEFAULT_GRACE_S
        policy = spec.get("restartPolicy", "Always")
        if policy not in ("Always", "OnFailure", "Never"):
            self.wrong.append(f"restartPolicy is {policy!r}; expected Always, OnFailure or Never")
        if read is None or self.wrong:
            return None
        return PodSpec(
            container=read,
            init=tuple(one for one in init if one is not None),
            grace_s=float(grace),
            restart_policy=policy,
            claims=claims,
            empty_dirs=frozenset(empty_dirs),
        )

    def _main(self, containers: Sequence[Mapping[str, Any]], wanted: str | None) -> Mapping[str, Any] | None:
        names = [str(one.get("name")) for one in containers]
        if wanted is not None:
            if wanted not in names:
                self.wrong.append(f"there is no container {wanted!r}; there are: {', '.join(names)}")
                return None
            return containers[names.index(wanted)]
        if len(containers) != 1:
            self.wrong.append(
                f"the pod has {len(containers)} containers ({', '.join(names)}) and one is run here; "
                "say which: container=NAME"
            )
            return None
        return containers[0]

    def _volumes(
        self, volumes: Sequence[Mapping[str, Any]], given: Mapping[str, Path], mounted: Sequence[Mapping[str, Any]]
    ) -> tuple[dict[str, str], set[str], set[str]]:
        """Claims, emptyDirs, and the volumes that stand for a directory of the image."""
        claims, empty_dirs, in_image = {}, set(), set()
        for volume in volumes:
            name = str(volume.get("name"))
            kind = next((key for key in volume if key != "name"), "nothing")
            paths = {str(mount.get("mountPath")).rstrip("/") for mount in mounted if mount.get("name") == name}
            if name in given:
                continue
            if kind in _CONFIG and not volume[kind].get("items") and config_of(volume[kind], kind) in self._config:
                claims[name] = "/".join(config_of(volume[kind], kind))
            elif kind in _CONFIG and paths and paths <= self._image:
                in_image.add(name)
            elif kind not in _OURS:
                self.wrong.append(f"volume {name!r} is a {kind}; give a directory for it: volumes={{{name!r}: PATH}}")
            elif kind == "emptyDir":
                empty_dirs.add(name)
            elif kind == "persistentVolumeClaim":
                claims[name] = str(volume[kind].get("claimName"))
            else:
                claims[name] = f"host:{volume[kind].get('path')}"
        return claims, empty_dirs, in_image

    def _container(self, spec: Mapping[str, Any], volumes: set[str], in_image: set[str]) -> ContainerSpec | None:
        name = str(spec.get("name"))
        parts = {key: spec.get(key) or [] for key in ("command", "args")}
        for key, words in parts.items():
            if not isinstance(words, list):
                self.wrong.append(f"container {name!r}: {key} is {words!r}; Kubernetes wants a list of words")
                parts[key] = [words]
        command = [*parts["command"], *parts["args"]]
        if not parts["command"]:
            self.wrong.append(f"container {name!r} has no command, and there is no image here that has one")
        if spec.get("volumeDevices"):
            self.wrong.append(f"container {name!r}: volumeDevices is not read here; take a volume with files")
        env, fields = self._env(name, spec.get("env") or [])
        env = {**self._env_from(name, spec.get("envFrom") or []), **env}
        mounts = []
        for mount in spec.get("volumeMounts") or []:
            if mount.get("name") in in_image:
                continue
            if mount.get("name") not in volumes:
                self.wrong.append(
                    f"container {name!r} mounts the volume {mount.get('name')!r}, which the pod does not have"
                )
            mounts.append(
                Mount(str(mount.get("mountPath")).rstrip("/"), str(mount.get("name")), mount.get("subPath", ""))
            )
        lifecycle = spec.get("lifecycle") or {}
        hooks = {key: self._hook(name, key, lifecycle.get(key)) for key in ("preStop", "postStart")}
        return ContainerSpec(
            name=name,
            argv=tuple(map(str, command)),
            env=env,
            pre_stop=hooks["preStop"],
            post_start=hooks["postStart"],
            mounts=tuple(mounts),
            working_dir=spec.get("workingDir"),
            fields=tuple(fields),
            command=tuple(map(str, parts["command"])),
            falls_back_to_logs=spec.get("terminationMessagePolicy") == "FallbackToLogsOnError",
        )

    def _env(self, name: str, variables: Sequence[Mapping[str, Any]]) -> tuple[dict[str, str], list[tuple[str, str]]]:
        env: dict[str, str] = {}
        fields = []
        for variable in variables:
            key, source = str(variable.get("name")), variable.get("valueFrom")
            if source is None:
                value = variable.get("value", "")
                if not isinstance(value, str):
                    self.wrong.append(f"container {name!r}: the value of {key} is {value!r}; Kubernetes wants a string")
                env[key] = str(value)
            elif "fieldRef" in source:
                path = str(source["fieldRef"].get("fieldPath"))
                env[key] = ""
                fields.append((key, path))
                if path not in FIELDS:
                    self.wrong.append(
                        f"container {name!r}: {key} is to be {path}, which is not known here; give it by env="
                    )
            elif (value := self._value(source)) is not None:
                env[key] = value
            elif not next(iter(source.values())).get("optional"):
                self.wrong.append(f"container {name!r}: {key} comes from a {next(iter(source))}; give it by env=")
        return env, fields

    def _value(self, source: Mapping[str, Any]) -> str | None:
        """The value of a `configMapKeyRef` or `secretKeyRef`, if the ConfigMap or Secret is in the file."""
        for key, kind in (("configMapKeyRef", "ConfigMap"), ("secretKeyRef", "Secret")):
            if key in source:
                return self._config.get((kind, str(source[key].get("name"))), {}).get(str(source[key].get("key")))
        return None

    def _env_from(self, name: str, sources: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        env: dict[str, str] = {}
        for source in sources:
            for key, kind in (("configMapRef", "ConfigMap"), ("secretRef", "Secret")):
                if key not in source:
                    continue
                values = self._config.get((kind, str(source[key].get("name"))))
                if values is not None:
                    env |= {f"{source.get('prefix', '')}{one}": value for one, value in values.items()}
                elif not source[key].get("optional"):
                    self.wrong.append(
                        f"container {name!r}: envFrom names the {kind} {source[key].get('name')!r}, which is not in "
                        "this file; add it, or give the values by env="
                    )
        return env

    def _hook(self, name: str, key: str, hook: Mapping[str, Any] | None) -> tuple[str, ...] | None:
        if not hook:
            return None
        seconds = (hook.get("sleep") or {}).get("seconds")
        if isinstance(seconds, int):
            return ("sleep", str(seconds))
        if "exec" not in hook or not isinstance(hook["exec"].get("command"), list) or not hook["exec"]["command"]:
            self.wrong.append(f"container {name!r}: {key} is no exec; only commands and sleep are run here")
            return None
        return tuple(map(str, hook["exec"]["command"]))


def config_of(source: Mapping[str, Any], kind: str) -> tuple[str, str]:
    """Kind and name of the document that this volume takes its files from."""
    return _CONFIG[kind], str(source.get("name") or source.get("secretName"))


def config_in(found: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], dict[str, str]]:
    """The values of all ConfigMaps and Secrets among these documents, by kind and name."""
    config = {}
    for one in found:
        if one.get("kind") in _CONFIG.values():
            name = str((one.get("metadata") or {}).get("name"))
            values = {key: str(value) for key, value in (one.get("data") or {}).items()}
            if one["kind"] == "Secret":
                values = {key: base64.b64decode(value).decode(errors="replace") for key, value in values.items()}
            config[one["kind"], name] = {**values, **(one.get("stringData") or {})}
    return config


def documents(source: str | Path | Mapping[str, Any]) -> list[dict[str, Any]]:
    """The documents of a yaml file, or the given document."""
    if isinstance(source, Mapping):
        return [dict(source)]
    try:
        import yaml
    except ImportError:
        raise StandInError(f"reading {source} takes PyYAML: pip install 'migrator[testing]'") from None
    path = Path(source)
    try:
        found = [one for one in yaml.safe_load_all(path.read_text()) if one is not None]
    except OSError as error:
        raise StandInError(f"{path} cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise StandInError(f"{path} is no yaml: {error}") from error
    if not all(isinstance(one, dict) and "kind" in one for one in found) or not found:
        raise StandInError(f"{path} has no document with a kind; expected a Pod, a Job, a StatefulSet or a PyTorchJob")
    return found


def expand(text: str, env: Mapping[str, str]) -> str:
    """Expand `$(NAME)` as Kubernetes does: `$$` becomes a dollar, and an unknown name stays as it is."""

    def value(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else env.get(match[1], match[0])

    return _REFERENCE.sub(value, text)


def replacer(paths: Mapping[str, Path]) -> Callable[[str], str]:
    """A function that replaces the container's paths in a text by directories of this machine, longest path first."""
    if not paths:
        return lambda text: text
    names = "|".join(re.escape(path) for path in sorted(paths, key=len, reverse=True))
    pattern = re.compile(rf"(?<![\w./$~*)}}-])({names})(?![\w.-])")
    return lambda text: pattern.sub(lambda match: str(paths[match[1]]), text)
