"""Controllers that start pods again: what they have in common, and a Job.

In a Job each pod has a new name, so the replacement is made as soon as a pod is
being deleted: it starts while the old pod still saves. Controllers of several
pods that train together are in `gangs.py`.
"""

from __future__ import annotations

import abc
import contextlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

from migrator.testing.errors import StandInError
from migrator.testing.pod import WAIT_S, Pod, Stop
from migrator.testing.spec import PodSpec

Read = Callable[[Mapping[str, Any]], PodSpec]
Make = Callable[..., Pod]


class Controller(abc.ABC):
    """Starts pods and replaces those that end. Made by `Kubelet.apply`."""

    _ends_all = False
    """When the job is over, pods that still run are deleted."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.pods: list[Pod] = []
        """All pods so far, oldest first."""
        self.is_complete = False
        self.failed: str | None = None
        """Why the job has failed."""
        self._is_deleted = False
        self._changed = threading.Condition(threading.RLock())

    @abc.abstractmethod
    def start(self) -> None:
        """Make the first pods."""

    def wait(self, timeout_s: float = WAIT_S) -> None:
        """Wait until the job is complete. If it fails, the error contains the output of its pods."""
        with self._changed:
            is_over = self._changed.wait_for(self._is_over, timeout_s)
        if self.is_complete:
            return
        why = self.failed if is_over else f"it is not complete after {timeout_s:.0f} s"
        stories = "\n".join(f"--- {pod.name}: {pod.stops}\n{pod.log}" for pod in self.pods)
        raise StandInError(f"job {self.name}: {why}\n{stories}")

    def delete(self, *, grace_s: float | None = None) -> list[Stop]:
        """As `kubectl delete -f`: delete all pods and make none again. Returns how the running pods have ended."""
        with self._changed:
            self._is_deleted = True
            running = [pod for pod in self.pods if not pod.is_over.is_set()]
        stops: dict[int, Stop] = {}

        def one(number: int, pod: Pod) -> None:
            stops[number] = pod.delete(grace_s=grace_s)

        threads = [threading.Thread(target=one, args=pair, daemon=True) for pair in enumerate(running)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if len(stops) != len(running):
            raise StandInError(f"job {self.name}: not all pods ended: {[pod.name for pod in running]}")
        return [stops[number] for number in range(len(running))]

    def close(self) -> None:
        """Make no further pods."""
        with self._changed:
            self._is_deleted = True

    def _add(self, pod: Pod) -> None:
        with self._changed:
            self.pods.append(pod)
            self._changed.notify_all()
        pod.start()

    def _is_over(self) -> bool:
        return self.is_complete or self.failed is not None

    def _why_not(self) -> str:
        return self.failed or ("it is complete" if self.is_complete else "it still runs")

    def _conclude(self, ended: Pod, *, failed: str | None = None) -> None:
        with self._changed:
            self.is_complete, self.failed = failed is None, failed
            self._changed.notify_all()
            others = [pod for pod in self.pods if pod is not ended and not pod.is_over.is_set()]
        if self._ends_all:
            for pod in others:
                threading.Thread(target=_delete, args=(pod,), daemon=True).start()


def _delete(pod: Pod) -> None:
    with contextlib.suppress(StandInError):
        pod.delete()


class Job(Controller):
    """A batch/v1 Job with one pod at a time."""

    _ends_all = True

    def __init__(self, name: str, spec: Mapping[str, Any], read: Read, make: Make) -> None:
        super().__init__(name)
        for key in ("completions", "parallelism"):
            if spec.get(key, 1) != 1:
                raise StandInError(f"Job {name}: {key} is {spec[key]}; Jobs of one pod at a time are run here")
        self._template = read((spec.get("template") or {}).get("spec") or {})
        if self._template.restart_policy == "Always":
            raise StandInError(f"Job {name}: restartPolicy Always is not allowed in a Job; take Never or OnFailure")
        self._make = make
        self._policy_of_failures = FailurePolicy(spec)
        self._at_once = spec.get("podReplacementPolicy", "TerminatingOrFailed") == "TerminatingOrFailed"
        self._replaced: set[str] = set()

    @property
    def pod(self) -> Pod:
        """The newest pod."""
        with self._changed:
            return self.pods[-1]

    def wait_for_pod(self, number: int, timeout_s: float = WAIT_S) -> Pod:
        """Wait for the pod with this number, counted from 1."""
        with self._changed:
            self._changed.wait_for(lambda: len(self.pods) >= number or self._is_over(), timeout_s)
            if len(self.pods) < number:
                raise StandInError(f"job {self.name} has {len(self.pods)} pods, expected {number}: {self._why_not()}")
            return self.pods[number - 1]

    def start(self) -> None:
        name = f"{self.name}-{len(self.pods) + 1:05d}"
        self._add(self._make(name, self._template, on_delete=self._on_delete, on_end=self._on_end))

    def _on_delete(self, pod: Pod) -> None:
        if self._at_once:
            self._replace(pod)

    def _on_end(self, pod: Pod) -> None:
        stop = pod.stops[-1] if pod.stops else None
        if stop is not None and stop.exit_code == 0:
            # Also if it was deleted: exit code 0 means that there is nothing more to do.
            self._conclude(pod)
            return
        if not self._is_deleted and (why := self._policy_of_failures.ends_with(pod)):
            self._conclude(pod, failed=why)
            return
        self._replace(pod)

    def _replace(self, pod: Pod) -> None:
        with self._changed:
            if self._is_deleted or self.is_complete or self.failed is not None or pod.name in self._replaced:
                return
            self._replaced.add(pod.name)
            self.start()


class FailurePolicy:
    """`podFailurePolicy` and `backoffLimit` of a Job: which end of a pod is the end of the Job."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._limit = int(spec.get("backoffLimit", 6))
        self._rules = (spec.get("podFailurePolicy") or {}).get("rules") or []
        self._count = 0

    def ends_with(self, pod: Pod) -> str | None:
        """Counts the failed pod; why the Job has failed with it."""
        action = next((str(rule.get("action")) for rule in self._rules if _is_meant(rule, pod)), "Count")
        if action == "FailJob":
            return f"{pod.name} ended in a way that podFailurePolicy does not restart: {pod.stops[-1:]}"
        self._count += action == "Count"
        return f"more than {self._limit} pods failed (backoffLimit)" if self._count > self._limit else None


def _is_meant(rule: Mapping[str, Any], pod: Pod) -> bool:
    """Whether this rule of a `podFailurePolicy` applies to the end of the pod."""
    codes, conditions = rule.get("onExitCodes"), rule.get("onPodConditions") or []
    if codes and pod.stops:
        is_named = codes.get("containerName") in (None, pod.spec.container.name)
        return is_named and (pod.stops[-1].exit_code in codes["values"]) == (codes["operator"] == "In")
    return pod.is_disrupted and any(one.get("type") == "DisruptionTarget" for one in conditions)
