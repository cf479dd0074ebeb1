"""A stand-in for kubelet: prove that your script survives its pod, without a cluster.

    from migrator.testing import Kubelet

    with Kubelet(directory) as kubelet:
        pod = kubelet.run(["python", "train.py"])
        pod.wait_for_log("step 20")
        stop = pod.delete()  # preStop, then SIGTERM, and SIGKILL at the end of the grace
        assert stop.exit_code == 143

For pytest: `pytest_plugins = ["migrator.testing.fixtures"]` gives the fixture
`kubelet`. Real processes, real hooks, real signals; what a pod has beyond that
(images, limits, networks) it does not have. What it does as a genuine kubelet
does, and what not, is in docs/testing.md.
"""

from __future__ import annotations

from migrator.testing.container import isolation
from migrator.testing.controllers import Job, PyTorchJob
from migrator.testing.errors import StandInError
from migrator.testing.kubelet import Kubelet
from migrator.testing.pod import HookRun, Pod, Stop

__all__ = ["HookRun", "Job", "Kubelet", "Pod", "PyTorchJob", "StandInError", "Stop", "isolation"]
