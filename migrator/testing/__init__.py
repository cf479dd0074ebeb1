"""A stand-in for kubelet: test without a cluster that your script survives the end of its pod.

    from migrator.testing import Kubelet

    with Kubelet(directory) as kubelet:
        pod = kubelet.run(["python", "train.py"])
        pod.wait_for_log("step 20")
        stop = pod.delete()  # preStop, then SIGTERM, and SIGKILL at the end of the grace
        assert stop.exit_code == 143

For pytest: `pytest_plugins = ["migrator.testing.fixtures"]` provides the fixture
`kubelet`. Processes, hooks and signals are real. Images, limits and networks of pods
are not supported. docs/testing.md lists what works as in a genuine kubelet, and what
does not.

`migrator.testing.s3_server` starts a real S3 server for tests.
"""

from __future__ import annotations

from migrator.testing.container import isolation
from migrator.testing.controllers import Job
from migrator.testing.errors import StandInError
from migrator.testing.gangs import IndexedJob, PyTorchJob, StatefulSet
from migrator.testing.kubelet import Kubelet
from migrator.testing.pod import HookRun, Pod, Stop

__all__ = [
    "HookRun",
    "IndexedJob",
    "Job",
    "Kubelet",
    "Pod",
    "PyTorchJob",
    "StandInError",
    "StatefulSet",
    "Stop",
    "isolation",
]
