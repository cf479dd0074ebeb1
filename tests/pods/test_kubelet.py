"""The stand-in for kubelet, against what a genuine one did: real processes, real namespaces, real signals.

Containers are small shells, so a test costs some tens of milliseconds. Where a grace must be used up it takes its
seconds; times are never early, and late by no more than a busy machine makes them.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import migrator.testing.container
from migrator.testing import Job, Kubelet, Pod, PyTorchJob, StandInError, isolation
from migrator.testing.container import Container
from migrator.testing.pod import MIN_GRACE_S
from tests.support.harness import ROOT, until
from tests.support.rank_processes import is_running

LATE_S = 0.7
"""How late a busy machine may make what is due at a moment."""
STAYS = 'trap "echo heard; exit 143" TERM; echo up; sleep 60 & wait'
IGNORES = 'trap "" TERM; echo up; exec sleep 60'
DEAF = "echo up; sleep 60; echo after"
"""No handler: process 1 does not hear SIGTERM."""
DAEMON = "setsid sh -c 'sh -c \"echo daemon; exec sleep 60\" &' "
"""A grandchild in a session of its own whose parent has ended."""


TELLS_PID = "echo pid $$$$"
"""A command's `$$` is one dollar to Kubernetes."""


def sh(script: str) -> list[str]:
    return ["sh", "-c", script]


def container(script: str, **more: Any) -> dict[str, Any]:
    return {"name": "main", "command": sh(script), **more}


def spec(script: str, **more: Any) -> dict[str, Any]:
    """A pod's spec; what is no key of a container is one of the pod."""
    of_container = {"env", "volumeMounts", "lifecycle", "workingDir", "terminationMessagePolicy"}
    inner = {key: more.pop(key) for key in of_container & more.keys()}
    return {"restartPolicy": "Never", "containers": [container(script, **inner)], **more}


def a_pod(script: str, **more: Any) -> dict[str, Any]:
    return {"kind": "Pod", "metadata": {"name": "a-pod"}, "spec": spec(script, **more)}


def a_job(script: str, *, job: Mapping[str, Any] = {}, **more: Any) -> dict[str, Any]:
    return {"kind": "Job", "metadata": {"name": "a-job"}, "spec": {**job, "template": {"spec": spec(script, **more)}}}


def a_pytorchjob(master: str, worker: str | None = None, *, policy: str = "ExitCode", **more: Any) -> dict[str, Any]:
    def replica(script: str) -> dict[str, Any]:
        return {"replicas": 1, "restartPolicy": policy, "template": {"spec": spec(script, **more)}}

    replicas = {"Master": replica(master), **({} if worker is None else {"Worker": replica(worker)})}
    return {"kind": "PyTorchJob", "metadata": {"name": "ranks"}, "spec": {"pytorchReplicaSpecs": replicas}}


def mounted(volume: dict[str, Any], path: str, **more: Any) -> dict[str, Any]:
    """The two places in which a spec names a volume."""
    name = volume["name"]
    return {"volumes": [volume], "volumeMounts": [{"name": name, "mountPath": path, **more}]}


def claim(path: str = "/shared", **more: Any) -> dict[str, Any]:
    return mounted({"name": "v", "persistentVolumeClaim": {"claimName": "shared"}}, path, **more)


def pre_stop(script: str) -> dict[str, Any]:
    return {"lifecycle": {"preStop": {"exec": {"command": sh(script)}}}}


def processes_of(directory: Path) -> list[int]:
    """The running processes whose working directory is below this one, wherever they were forked."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "cwd").readlink().is_relative_to(directory):
                found.append(int(entry.name))
        except OSError:  # it has ended meanwhile
            continue
    return [pid for pid in found if is_running(pid)]


def up(pod: Pod) -> Pod:
    pod.wait_for_log("^up$")
    return pod


def up_again(pod: Pod) -> None:
    until(lambda: "up\n" in pod.container.text, "the newest container to be up")


@pytest.fixture
def kubelet(tmp_path: Path) -> Iterator[Kubelet]:
    """One of which nothing may be left, whatever the test did to it."""
    with Kubelet(tmp_path / "kubelet") as made:
        yield made
    assert processes_of(tmp_path) == []


@pytest.fixture
def has_namespaces() -> None:
    if isolation() is not None:
        pytest.skip(f"LOUD: process 1 is not tested: {isolation()}")


@pytest.fixture(params=["namespace", "none"])
def rules(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The rules of process 1, kept by the kernel and kept from outside."""
    if request.param == "namespace":
        request.getfixturevalue("has_namespaces")
    else:
        monkeypatch.setattr(migrator.testing.container, "isolation", lambda: "this test wants none")
    return str(request.param)


@pytest.fixture
def aside() -> Iterator[Callable[..., Any]]:
    """Calls in a thread, for what a test does while a stop goes on."""
    with ThreadPoolExecutor() as pool:
        yield pool.submit


# Process 1.


@pytest.mark.usefixtures("has_namespaces")
def test_the_process_is_process_1_and_hooks_run_beside_it(kubelet: Kubelet) -> None:
    """In the container's own namespace: a hook sees its processes, and no others."""
    hook = "echo me $$; echo all /proc/[0-9]*; tr '\\0' ' ' </proc/1/cmdline"
    pod = up(kubelet.run(sh(f"{TELLS_PID}; {STAYS}"), pre_stop=sh(hook)))

    stop = pod.delete()

    assert "pid 1\n" in pod.log
    assert pod.container.is_pid_1
    me, everything, first = stop.hook.text.splitlines()
    pids = [int(path.removeprefix("/proc/")) for path in everything.split()[1:]]
    assert int(me.split()[1]) in pids
    assert len(pids) == 3  # process 1, its sleep, the hook
    assert first.startswith("sh -c echo pid")


def test_where_there_are_no_namespaces_the_container_says_so(kubelet: Kubelet, rules: str) -> None:
    """`is_pid_1` tells under which rules a test has run."""
    pod = up(kubelet.run(sh(f"{TELLS_PID}; {STAYS}"), pre_stop=None))

    assert pod.container.is_pid_1 == (rules == "namespace")
    assert ("pid 1\n" in pod.log) == pod.container.is_pid_1


def test_sigterm_is_heard_by_a_handler(kubelet: Kubelet, rules: str) -> None:
    """The script decides how it leaves, and with which code."""
    pod = up(kubelet.run(sh('trap "echo bye; exit 9" TERM; echo up; sleep 60 & wait'), pre_stop=None))

    stop = pod.delete()

    assert (stop.is_term_heard, stop.exit_code, stop.kill_s) == (True, 9, None)
    assert "bye\n" in pod.log


def test_sigterm_is_not_heard_through_a_shell(kubelet: Kubelet, rules: str) -> None:
    """Process 1 has no handler, and its child, which has one, is not process 1: both run until SIGKILL."""
    child = 'trap "echo heard; exit 0" TERM; echo up; sleep 60 & wait'
    pod = up(kubelet.run(sh(f"sh -c {shlex.quote(child)}; echo after"), pre_stop=None, grace_s=1))

    stop = pod.delete()

    assert stop.term_s is not None
    assert (stop.is_term_heard, stop.exit_code, stop.reason) == (False, 137, "Error")
    assert pod.log == "up\n"
    # Kubelet leaves no container less than two seconds.
    assert stop.kill_s is not None
    assert MIN_GRACE_S <= stop.kill_s < MIN_GRACE_S + LATE_S


def test_the_end_of_process_1_is_the_end_of_all(kubelet: Kubelet, rules: str) -> None:
    """Its children, a daemon that left its session, and a hook that still runs."""
    main = f"sleep 60 & {DAEMON}; echo up; until [ -e asked ]; do sleep 0.01; done; exit 7"
    pod = up(kubelet.run(sh(main), pre_stop=sh("echo hook; touch asked; exec sleep 60")))
    pod.wait_for_log("^daemon$")
    assert len(processes_of(kubelet.directory)) >= 3

    stop = pod.delete()

    assert processes_of(kubelet.directory) == []
    assert (stop.exit_code, stop.kill_s) == (7, None)
    assert (stop.hook.code, stop.hook.text) == (137, "hook\n")
    assert stop.took_s < 20


@pytest.mark.parametrize("act", [Pod.crash, Pod.oom, Pod.close])
def test_nothing_of_a_killed_container_is_left(kubelet: Kubelet, rules: str, act: Callable[[Pod], object]) -> None:
    """Also not a daemon that left its session and whose parent has ended."""
    pod = up(kubelet.run(sh(f"{DAEMON}; {STAYS}"), pre_stop=None))
    pod.wait_for_log("^daemon$")

    act(pod)

    pod.wait()
    assert processes_of(kubelet.directory) == []


SAYS_WHY = """
import sys
from migrator.testing import Kubelet, isolation
print(isolation())
with Kubelet(sys.argv[1]) as kubelet:
    pod = kubelet.run(["sh", "-c", "echo pid $$$$"], pre_stop=None)
    pod.wait()
    print(pod.container.is_pid_1, pod.log == "pid 1\\n")
"""


def as_another(tmp_path: Path, *flags: str, before: str) -> list[str]:
    """The lines of `SAYS_WHY`, by another user, after a command that this machine must allow."""
    prefix = ["unshare", "-U", *flags]
    if subprocess.run([*prefix, "sh", "-c", before], check=False, capture_output=True).returncode != 0:
        pytest.skip(f"LOUD: this machine does not allow {' '.join(prefix)} {before}")
    script = f'{before} && exec "$@"'
    command = [*prefix, "sh", "-c", script, "sh", sys.executable, "-c", SAYS_WHY, str(tmp_path / "kubelet")]
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT, timeout=60).stdout.splitlines()


@pytest.mark.processes
def test_a_machine_without_namespaces_says_why(tmp_path: Path) -> None:
    """The kernel's own words; containers run all the same."""
    why, is_pid_1 = as_another(tmp_path, "-r", before="echo 0 >/proc/sys/user/max_pid_namespaces")

    assert why.startswith("the container's process cannot be started: ")
    assert why.endswith("unshare: No space left on device")
    assert is_pid_1 == "False False"


@pytest.mark.processes
def test_an_ordinary_user_has_namespaces(tmp_path: Path) -> None:
    """Who is not root makes a user namespace first."""
    can = "unshare -U -r -p -f --mount-proc true"

    lines = as_another(tmp_path, "--map-user=1000", "--map-group=1000", before=can)

    assert lines == ["None", "True True"]


# A delete and its times.


def test_sigterm_waits_for_the_hook_and_the_countdown_does_not(kubelet: Kubelet) -> None:
    """preStop begins with the delete, SIGTERM follows its end, SIGKILL comes at the end of the grace as a whole."""
    pod = up(kubelet.run(sh(IGNORES), pre_stop=sh("sleep 0.8; echo saved"), grace_s=2.9))

    stop = pod.delete()

    hook_end_s = stop.hook.began_s + stop.hook.took_s
    assert 0 <= stop.hook.began_s < LATE_S
    assert 0.8 <= stop.hook.took_s < 0.8 + LATE_S
    assert (stop.hook.code, stop.hook.text) == (0, "saved\n")
    assert stop.term_s is not None
    assert hook_end_s <= stop.term_s < hook_end_s + LATE_S
    assert stop.kill_s is not None
    assert 2.9 <= stop.kill_s < 2.9 + LATE_S
    assert stop.kill_s <= stop.took_s < stop.kill_s + LATE_S
    assert (stop.exit_code, stop.is_term_heard, pod.log) == (137, False, "up\n")


def test_a_hook_that_never_ends_leaves_two_seconds(kubelet: Kubelet) -> None:
    """SIGTERM at the end of the grace, SIGKILL two seconds later; the hook ends with the container."""
    pod = up(kubelet.run(sh(IGNORES), pre_stop=sh("echo saving; exec sleep 60"), grace_s=1))

    stop = pod.delete()

    assert stop.term_s is not None
    assert 1 <= stop.term_s < 1 + LATE_S
    assert stop.kill_s is not None
    assert 2 <= stop.kill_s - stop.term_s < 2 + LATE_S
    assert (stop.exit_code, stop.hook.code, stop.hook.text) == (137, 137, "saving\n")


def test_after_a_hook_that_never_ends_sigterm_is_heard(kubelet: Kubelet) -> None:
    """The two seconds are the script's to leave in."""
    pod = up(kubelet.run(sh(STAYS), pre_stop=sh("exec sleep 60"), grace_s=0.5))

    stop = pod.delete()

    assert stop.term_s is not None
    assert 0.5 <= stop.term_s < 0.5 + LATE_S
    assert (stop.exit_code, stop.kill_s, stop.hook.code) == (143, None, 137)


def test_without_a_hook_sigterm_comes_at_once(kubelet: Kubelet) -> None:
    """And the grace is not used up by who leaves."""
    stop = up(kubelet.run(sh(STAYS), pre_stop=None)).delete()

    assert stop.term_s is not None
    assert 0 <= stop.term_s < LATE_S
    assert (stop.hooks, stop.exit_code, stop.reason, stop.kill_s) == ((), 143, "Error", None)


def test_a_container_that_ends_at_once_has_heard_sigterm(kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch) -> None:
    """However far the thread that sent it has come when the report is made."""
    tell = Container._send

    def tell_and_wait(self: Container, **words: object) -> None:
        tell(self, **words)
        if "signal" in words:
            until(lambda: kubelet.pods[0].stops, "the report")

    monkeypatch.setattr(Container, "_send", tell_and_wait)

    assert up(kubelet.run(sh(STAYS))).delete().is_term_heard


def test_a_hook_that_ends_its_container_at_once_is_in_the_report(
    kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However far the thread that started it has come when the report is made."""
    tell = Container._send

    def tell_and_wait(self: Container, **words: object) -> None:
        tell(self, **words)
        if "exec" in words:
            until(lambda: kubelet.pods[0].stops, "the report")

    monkeypatch.setattr(Container, "_send", tell_and_wait)
    pod = up(kubelet.run(sh("echo up; until [ -e asked ]; do sleep 0.01; done"), pre_stop=sh("touch asked; sleep 60")))

    assert pod.delete().hook.code == 137


@pytest.mark.parametrize(
    ("hook", "code", "text"),
    [
        (sh("echo one; echo two >&2; exit 3"), 3, "one\ntwo\n"),
        (sh("kill -9 $$"), 137, ""),
        (["no-such-program"], None, "no-such-program: No such file or directory"),
    ],
    ids=["fails", "is killed", "is not there"],
)
def test_what_becomes_of_the_hook_changes_nothing(
    kubelet: Kubelet, hook: list[str], code: int | None, text: str
) -> None:
    """SIGTERM follows; the report has the hook's exit code and what it wrote."""
    stop = up(kubelet.run(sh(STAYS), pre_stop=hook)).delete()

    assert (stop.hook.code, stop.hook.text) == (code, text)
    assert (stop.exit_code, stop.is_term_heard) == (143, True)


def test_the_grace_of_a_delete_beats_that_of_the_pod(kubelet: Kubelet) -> None:
    """As `kubectl delete --grace-period`."""
    stop = up(kubelet.run(sh(IGNORES), pre_stop=None, grace_s=30)).delete(grace_s=2.2)

    assert stop.kill_s is not None
    assert 2.2 <= stop.kill_s < 2.2 + LATE_S


@pytest.mark.parametrize(("of_pod", "of_delete"), [(30.0, 0.0), (0.0, None)])
def test_no_grace_is_sigkill_at_once(kubelet: Kubelet, of_pod: float, of_delete: float | None) -> None:
    """No hook, no SIGTERM."""
    pod = up(kubelet.run(sh(STAYS), pre_stop=sh("touch /ckpts/hook"), grace_s=of_pod))

    stop = pod.delete(grace_s=of_delete)

    assert (stop.hooks, stop.term_s, stop.exit_code) == ((), None, 137)
    assert stop.kill_s is not None
    assert stop.kill_s < LATE_S
    assert not pod.path("/ckpts/hook").exists()


def test_a_hook_may_sleep(kubelet: Kubelet) -> None:
    """The kind of hook that has no command."""
    pod = up(kubelet.apply(a_pod(STAYS, lifecycle={"preStop": {"sleep": {"seconds": 1}}})))

    stop = pod.delete()

    assert stop.hook.code == 0
    assert 1 <= stop.hook.took_s < 1 + LATE_S
    assert stop.exit_code == 143


def test_a_hook_may_run_twice(kubelet: Kubelet) -> None:
    """One after the other, SIGTERM after both."""
    pod = up(
        kubelet.run(sh(STAYS), pre_stop=sh("echo run >>runs; sleep 0.1; grep -c run runs; exit $(grep -c run runs)"))
    )

    stop = pod.delete(hooks=2)

    first, second = stop.hooks
    assert [(run.code, run.text) for run in stop.hooks] == [(1, "1\n"), (2, "2\n")]
    assert second.began_s >= first.began_s + first.took_s
    assert stop.term_s is not None
    assert stop.term_s >= second.began_s + second.took_s
    with pytest.raises(StandInError, match="preStop ran 2 times, not once"):
        _ = stop.hook


def test_a_hook_may_run_twice_at_once(kubelet: Kubelet) -> None:
    """Each waits for the other, so both end only if they run beside each other."""
    hook = "echo run >>runs; until [ $(grep -c run runs) = 2 ]; do sleep 0.01; done"
    pod = up(kubelet.run(sh(STAYS), pre_stop=sh(hook)))

    stop = pod.delete(hooks=2, at_once=True)

    assert [run.code for run in stop.hooks] == [0, 0]
    assert stop.term_s is not None
    assert stop.term_s >= max(run.began_s + run.took_s for run in stop.hooks)


def test_a_hook_that_uses_the_grace_up_is_not_followed_by_another(kubelet: Kubelet) -> None:
    """Two that never end take one grace, not two."""
    stop = up(kubelet.run(sh(STAYS), pre_stop=sh("exec sleep 60"), grace_s=0.8)).delete(hooks=2)

    assert stop.term_s is not None
    assert 0.8 <= stop.term_s < 0.8 + LATE_S


@pytest.mark.parametrize("how", ["delete at once", "crash"])
def test_a_stop_may_be_cut_short(kubelet: Kubelet, aside: Callable[..., Any], how: str) -> None:
    """A forced delete after a patient one, or a crash while the hook runs: one end, with all that led to it."""
    pod = up(kubelet.run(sh(STAYS), pre_stop=sh("touch /ckpts/hook; exec sleep 60"), grace_s=50))
    deleted = aside(pod.delete)
    until(pod.path("/ckpts/hook").exists, "the hook to run")

    cut = pod.crash() if how == "crash" else pod.delete(grace_s=0)

    assert deleted.result(20) == cut
    assert (cut.exit_code, cut.hook.code) == (137, 137)
    assert cut.kill_s is not None
    assert cut.kill_s < 20
    assert pod.restarts == 0


# What runs no hook.


@pytest.mark.parametrize(
    ("act", "code", "reason"),
    [
        (Pod.crash, 137, "Error"),
        (Pod.oom, 137, "OOMKilled"),
        (Pod.lose, 137, "NodeLost"),
        (lambda pod: pod.delete(grace_s=0), 137, "Error"),
        (lambda pod: pod.path("/ckpts/go").touch() or pod.wait(), 0, "Completed"),
    ],
    ids=["crash", "oom", "node loss", "force", "completion"],
)
def test_no_hook_without_a_delete(
    kubelet: Kubelet, rules: str, act: Callable[[Pod], Any], code: int, reason: str
) -> None:
    """A crash, a loss or an end of its own comes unannounced."""
    pod = up(kubelet.run(sh("echo up; until [ -e /ckpts/go ]; do sleep 0.01; done"), pre_stop=sh("touch /ckpts/hook")))

    stop = act(pod)

    assert (stop.exit_code, stop.reason) == (code, reason)
    assert (stop.hooks, stop.term_s) == ((), None)
    assert pod.wait() == stop
    assert not pod.path("/ckpts/hook").exists()


def test_exit_codes_are_those_of_a_shell(kubelet: Kubelet, rules: str) -> None:
    """What the process returned, or 128 and the number of the signal that ended it."""
    returned = kubelet.run(sh("exit 3"), pre_stop=None).wait()
    segfault = "import ctypes; ctypes.string_at(0)"
    crashed = kubelet.run(sh(f"ulimit -c 0; exec python -ISc {segfault!r}"), pre_stop=None).wait()

    assert (returned.exit_code, returned.reason, returned.took_s) == (3, "Error", 0)
    assert (crashed.exit_code, crashed.reason) == (139, "Error")


# postStart.


def test_post_start_runs_beside_the_process(kubelet: Kubelet, rules: str) -> None:
    """Each waits for the other, so neither comes first."""
    main = "touch main; until [ -e hook ]; do sleep 0.01; done; echo up; until [ -e last ]; do sleep 0.01; done"
    hook = "touch hook; until [ -e main ]; do sleep 0.01; done; touch last"

    pod = kubelet.run(sh(main), pre_stop=None, post_start=sh(hook))

    assert pod.wait().exit_code == 0


@pytest.mark.parametrize("hook", [sh("exit 3"), ["no-such-program"]], ids=["fails", "is not there"])
def test_a_container_whose_post_start_fails_is_killed(kubelet: Kubelet, hook: list[str]) -> None:
    """As any failed container, it is started again if the policy says so."""
    pod = kubelet.run(sh(STAYS), pre_stop=None, post_start=hook)

    assert pod.wait().exit_code != 0
    assert pod.restarts == 0


def test_a_container_whose_post_start_fails_is_asked_first(kubelet: Kubelet) -> None:
    """It is stopped as any container is: preStop, then SIGTERM."""
    fails_later = sh("until [ -e up ]; do sleep 0.01; done; exit 3")
    pod = kubelet.run(sh(f"touch up; {STAYS}"), pre_stop=sh("echo asked"), post_start=fails_later)

    stop = pod.wait()

    assert (stop.hook.text, stop.kill_s) == ("asked\n", None)


def test_a_container_that_ends_at_once_is_not_started_in_a_tight_loop(kubelet: Kubelet) -> None:
    """The pause grows, and a delete ends it."""
    pod = kubelet.run(sh("exit 1"), pre_stop=None, restart_policy="Always")
    until(lambda: pod.restarts >= 3, "the third restart")

    began = [container.began_s for container in pod.containers]
    pod.delete()

    assert began[3] - began[2] > 0.3


# In place.


@pytest.mark.parametrize("act", [Pod.crash, Pod.oom, Pod.fail_liveness], ids=["crash", "oom", "liveness"])
def test_in_place_empty_dirs_stay_and_files_of_the_container_do_not(
    kubelet: Kubelet, act: Callable[[Pod], Any]
) -> None:
    """With the pod, not with the container."""
    main = (
        "echo >>/cache/lines; echo cache $(wc -l </cache/lines) own $(ls) $(ls /tmp/migrator); touch x /tmp/migrator/y"
    )
    cache = mounted({"name": "c", "emptyDir": {}}, "/cache")
    pod = kubelet.apply(a_pod(f"{main}; {STAYS}", restartPolicy="Always", **cache, **pre_stop("touch /cache/hook")))
    up(pod)

    stop = act(pod)

    pod.wait_for_log("^up$", count=2)
    starts = [line for line in pod.log.splitlines() if line.startswith("cache")]
    assert starts == ["cache 1 own run", "cache 2 own run"]
    assert (pod.restarts, pod.stops, pod.is_over.is_set()) == (1, [stop], False)
    is_stopped = act is Pod.fail_liveness
    assert len(stop.hooks) == is_stopped
    assert pod.path("/cache/hook").exists() == is_stopped
    assert stop.exit_code == (143 if is_stopped else 137)


@pytest.mark.parametrize(
    ("policy", "code", "is_restarted"),
    [
        ("Always", 0, True),
        ("Always", 3, True),
        ("OnFailure", 0, False),
        ("OnFailure", 3, True),
        ("Never", 0, False),
        ("Never", 3, False),
    ],
)
def test_the_policy_says_what_is_started_again(kubelet: Kubelet, policy: str, code: int, is_restarted: bool) -> None:
    """In place, after an end of its own."""
    main = f"echo up; [ -e /ckpts/been ] && exec sleep 60; touch /ckpts/been; exit {code}"
    pod = kubelet.run(sh(main), pre_stop=None, restart_policy=policy)

    if is_restarted:
        pod.wait_for_log("^up$", count=2)
    else:
        pod.wait()

    assert (pod.restarts, [stop.exit_code for stop in pod.stops]) == (int(is_restarted), [code])
    assert pod.is_over.is_set() == (not is_restarted)


def test_who_must_not_be_started_again_ends_with_its_liveness(kubelet: Kubelet) -> None:
    """The hook runs, as for a delete; the pod is over."""
    pod = up(kubelet.run(sh(STAYS), pre_stop=sh("true"), restart_policy="Never"))

    stop = pod.fail_liveness()

    assert pod.wait() == stop
    assert (stop.hook.code, stop.exit_code, pod.restarts) == (0, 143, 0)


def test_a_deleted_pod_is_not_started_again(kubelet: Kubelet) -> None:
    """Whatever its policy."""
    pod = up(kubelet.run(sh(STAYS), pre_stop=None, restart_policy="Always"))

    pod.delete()

    assert (pod.is_over.is_set(), pod.restarts, len(pod.stops)) == (True, 0, 1)


def test_a_delete_while_it_is_started_again_ends_it(kubelet: Kubelet) -> None:
    """A container that was on its way is killed, none follows, and nobody waits for it."""
    for _ in range(5):
        pod = up(kubelet.run(sh(STAYS), pre_stop=sh("true"), restart_policy="Always"))
        pod.crash()

        pod.delete(timeout_s=20)

        assert pod.restarts <= 1
        assert all((stop.exit_code, stop.hooks) == (137, ()) for stop in pod.stops[1:])
        assert processes_of(kubelet.directory) == []


def test_crash_after_crash(kubelet: Kubelet) -> None:
    """Each is one of a container that runs; each start is counted."""
    pod = kubelet.run(sh(STAYS), pre_stop=sh("true"), restart_policy="Always")

    stops = [pod.crash(), pod.oom(), pod.crash()]
    up_again(pod)
    stops.append(pod.fail_liveness())

    assert pod.stops == stops
    assert [stop.reason for stop in stops] == ["Error", "OOMKilled", "Error", "Error"]
    assert [len(stop.hooks) for stop in stops] == [0, 0, 0, 1]
    up_again(pod)
    assert pod.restarts == 4
    assert pod.delete().reason == "Error"


def test_a_lost_node_takes_the_empty_dirs(kubelet: Kubelet) -> None:
    """And nothing of the claims; its pods are not started again."""
    cache = {"name": "c", "emptyDir": {}}
    both = claim()
    both["volumes"].append(cache)
    both["volumeMounts"].append({"name": "c", "mountPath": "/cache"})
    main = f"touch /cache/file /shared/file; {STAYS}"
    pods = [up(kubelet.apply(a_pod(main, restartPolicy="Always", **both))) for _ in range(2)]
    waits = kubelet.apply(a_pod("true", initContainers=[container("echo up; sleep 60")]))

    kubelet.lose_node()

    assert [pod.wait().reason for pod in pods] == ["NodeLost", "NodeLost"]
    assert not any(pod.empty_dir("c").exists() for pod in pods)
    assert (kubelet.volume("shared") / "file").exists()
    assert waits.wait().exit_code == 137
    assert [pod.restarts for pod in (*pods, waits)] == [0, 0, 0]


def test_a_pod_may_be_deleted_before_it_runs(kubelet: Kubelet) -> None:
    """While it is prepared, and when it could not be."""
    waits = kubelet.apply(a_pod(STAYS, initContainers=[container("touch /tmp/migrator/up; sleep 60")]))
    until((waits.directory / "container-0" / "run" / "up").exists, "the init container to run")

    assert waits.delete().exit_code == 137
    assert waits.containers == []

    cannot = kubelet.apply(a_pod(STAYS, initContainers=[container("exit 3")]))
    assert cannot.wait() == cannot.delete()
    assert kubelet.run(sh(STAYS), pre_stop=None).delete(timeout_s=20).exit_code in (137, 143)


# A Job.


def test_a_job_makes_the_replacement_before_the_hook(kubelet: Kubelet) -> None:
    """The old pod's preStop waits for the new pod, which runs beside it on the same volume."""
    hook = "until [ -e /shared/a-job-00002 ]; do sleep 0.01; done; echo met"
    job: Job = kubelet.apply(a_job(f"touch /shared/$HOSTNAME; {STAYS}", **claim(), **pre_stop(hook)))
    old = up(job.pod)

    stop = old.delete()

    new = up(job.pod)
    assert (stop.hook.text, stop.exit_code) == ("met\n", 143)
    assert [pod.name for pod in job.pods] == ["a-job-00001", "a-job-00002"]
    assert old.container.ended_s is not None
    assert new.container.began_s < old.container.ended_s
    assert not job.is_complete


def test_a_job_may_wait_for_the_old_pod(kubelet: Kubelet) -> None:
    """`podReplacementPolicy: Failed`."""
    job: Job = kubelet.apply(a_job(STAYS, job={"podReplacementPolicy": "Failed"}, **pre_stop("sleep 0.3")))
    old = up(job.pod)

    old.delete()

    new = up(job.wait_for_pod(2))
    assert old.container.ended_s is not None
    assert new.container.began_s >= old.container.ended_s


@pytest.mark.parametrize("policy", ["TerminatingOrFailed", "Failed"])
def test_exit_code_0_completes_a_job_even_after_a_preemption(kubelet: Kubelet, policy: str) -> None:
    """Who saves and leaves with 0 has told that there is nothing more to do."""
    job: Job = kubelet.apply(a_job(STAYS.replace("143", "0"), job={"podReplacementPolicy": policy}))

    assert up(job.pod).delete().exit_code == 0

    job.wait(20)
    assert job.is_complete
    assert len(job.pods) == (1 if policy == "Failed" else 2)
    # A replacement that runs already has nothing to do any more.
    job.pods[-1].wait()


def test_a_job_that_was_stopped_goes_on(kubelet: Kubelet) -> None:
    """143 is no end of the work: the next pod does the rest."""
    job: Job = kubelet.apply(a_job(f"[ -e /shared/been ] && exit 0; touch /shared/been; {STAYS}", **claim()))

    assert up(job.pod).delete().exit_code == 143

    job.wait()
    assert [pod.wait().exit_code for pod in job.pods] == [143, 0]


def test_a_job_gives_up(kubelet: Kubelet) -> None:
    """After `backoffLimit` failures and one, with what the pods wrote."""
    job: Job = kubelet.apply(a_job("echo broken; exit 3", job={"backoffLimit": 2}))

    with pytest.raises(StandInError, match=r"more than 2 pods failed \(backoffLimit\)(?s:.*)a-job-00003: .*\nbroken"):
        job.wait()

    assert [pod.wait().exit_code for pod in job.pods] == [3, 3, 3]
    with pytest.raises(StandInError, match="has 3 pods, expected 4: more than 2 pods failed"):
        job.wait_for_pod(4)


def test_a_job_that_is_not_over_says_so(kubelet: Kubelet) -> None:
    """A wait has an end."""
    job: Job = kubelet.apply(a_job(STAYS))
    up(job.pod)

    with pytest.raises(StandInError, match=r"job a-job: it is not complete after 0 s(?s:.*)up"):
        job.wait(0.01)


def test_a_job_that_is_deleted_makes_no_pods(kubelet: Kubelet) -> None:
    """As `kubectl delete -f`: a stop like any other, and no replacement."""
    job: Job = kubelet.apply(a_job(STAYS, **pre_stop("echo saved")))
    up(job.pod)

    (stop,) = job.delete()

    assert (stop.exit_code, stop.hook.text, len(job.pods)) == (143, "saved\n", 1)
    assert job.delete() == []


def test_a_job_may_ignore_what_the_cluster_did(kubelet: Kubelet) -> None:
    """`podFailurePolicy` sees evictions and lost nodes; a plain delete is a failure like any other."""
    rules = [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}]
    limits = {"backoffLimit": 0, "podFailurePolicy": {"rules": rules}, "podReplacementPolicy": "Failed"}
    job: Job = kubelet.apply(a_job(STAYS, job=limits))

    up(job.pod).evict()
    up(job.wait_for_pod(2)).lose()
    up(job.wait_for_pod(3))
    assert job.failed is None

    job.pod.delete()
    with pytest.raises(StandInError, match="more than 0 pods failed"):
        job.wait()


def test_a_job_may_fail_for_an_exit_code(kubelet: Kubelet) -> None:
    """`FailJob` by a rule on exit codes: nothing is tried again."""
    rules = [{"action": "FailJob", "onExitCodes": {"operator": "In", "values": [42]}}]
    job: Job = kubelet.apply(a_job("exit 42", job={"podFailurePolicy": {"rules": rules}}))

    with pytest.raises(StandInError, match="podFailurePolicy"):
        job.wait()
    assert len(job.pods) == 1


@pytest.mark.parametrize(
    ("job", "policy", "why"),
    [
        ({"completions": 2}, "Never", "Job a-job: completions is 2; Jobs of one pod at a time are run here"),
        ({"parallelism": 3}, "Never", "Job a-job: parallelism is 3"),
        ({}, "Always", "Job a-job: restartPolicy Always is not allowed in a Job"),
    ],
)
def test_jobs_that_are_not_run_here(kubelet: Kubelet, job: dict[str, Any], policy: str, why: str) -> None:
    """Refused when they are applied."""
    with pytest.raises(StandInError, match=why):
        kubelet.apply(a_job("true", job=job, restartPolicy=policy))


# A PyTorchJob.

VARIABLES = "RANK WORLD_SIZE MASTER_ADDR MASTER_PORT PET_NNODES PET_NODE_RANK PET_NPROC_PER_NODE PET_MASTER_PORT"
TELLS = f'for name in {VARIABLES}; do eval "echo $name=\\$$$name"; done; {STAYS}'


def told(pod: Pod) -> dict[str, str]:
    return dict(re.findall(r"^(\w+)=(.*)$", up(pod).log, re.M))


def test_ranks_are_told_their_place_and_meet_at_one_port(kubelet: Kubelet) -> None:
    """What the operator gives; `workers` beats the yaml's number. The next round meets at a port of its own."""
    document = a_pytorchjob(TELLS, TELLS)
    document["spec"]["nprocPerNode"] = "2"
    job: PyTorchJob = kubelet.apply(document, workers=2)

    first = [told(pod) for pod in job.wait_for_start(1)]

    assert [pod.name for pod in job.pods] == ["ranks-master-0", "ranks-worker-0", "ranks-worker-1"]
    assert [(one["RANK"], one["PET_NODE_RANK"]) for one in first] == [("0", "0"), ("1", "1"), ("2", "2")]
    same = {name: {one[name] for one in first} for name in VARIABLES.split()}
    assert [same[name] for name in ("WORLD_SIZE", "PET_NNODES", "PET_NPROC_PER_NODE")] == [{"3"}, {"3"}, {"2"}]
    assert same["MASTER_ADDR"] == {"127.0.0.1"}
    assert len(same["MASTER_PORT"]) == 1
    assert same["MASTER_PORT"] == same["PET_MASTER_PORT"]

    for pod in [job.master, *job.workers]:
        pod.crash()
    second = [told(pod) for pod in job.wait_for_start(2)]

    assert [one["RANK"] for one in second] == ["0", "1", "2"]
    ports = {one["MASTER_PORT"] for one in second}
    assert len(ports) == 1
    assert ports != same["MASTER_PORT"]


def test_a_rank_is_made_again_when_the_old_one_is_gone(kubelet: Kubelet) -> None:
    """Its name is taken until then."""
    job: PyTorchJob = kubelet.apply(a_pytorchjob(STAYS, STAYS, **pre_stop("sleep 0.3")))
    (old,) = map(up, job.workers)

    old.delete()

    until(lambda: len(job.pods) == 3, "the next worker")
    new = up(job.workers[0])
    assert (new.name, new is old) == (old.name, False)
    assert old.container.ended_s is not None
    assert new.container.began_s >= old.container.ended_s


@pytest.mark.parametrize(
    ("policy", "code", "is_tried_again"),
    [("ExitCode", 143, True), ("ExitCode", 1, False), ("Never", 143, False), ("OnFailure", 1, True)],
)
def test_the_policy_of_a_rank_says_what_is_tried_again(
    kubelet: Kubelet, policy: str, code: int, is_tried_again: bool
) -> None:
    """What a signal ended, but not an error of the script."""
    main = f"[ -e /shared/been ] && exit 0; touch /shared/been; exit {code}"
    job: PyTorchJob = kubelet.apply(a_pytorchjob(main, policy=policy, **claim()))

    if is_tried_again:
        job.wait()
    else:
        with pytest.raises(StandInError, match=f"ranks-master-0 ended with {code}.*restartPolicy {policy}"):
            job.wait()
    assert job.is_complete == is_tried_again


def test_a_pytorchjob_is_complete_with_its_master(kubelet: Kubelet) -> None:
    """A worker that ends well is not made again, and does not end the job."""
    wait = "echo up; until [ -e /shared/go ]; do sleep 0.01; done"
    job: PyTorchJob = kubelet.apply(a_pytorchjob(wait, "exit 0", **claim()))
    job.workers[0].wait()
    assert not job.is_complete

    (kubelet.volume("shared") / "go").touch()

    job.wait()
    assert len(job.pods) == 2


def test_a_pytorchjob_that_is_deleted_makes_no_pods(kubelet: Kubelet) -> None:
    """All ranks are stopped at once: each hook waits for that of the other."""
    hook = (
        "touch /shared/$HOSTNAME; until [ -e /shared/ranks-master-0 -a -e /shared/ranks-worker-0 ]; do sleep 0.01; done"
    )
    job: PyTorchJob = kubelet.apply(a_pytorchjob(STAYS, STAYS, **claim(), **pre_stop(hook)))
    for pod in job.wait_for_start(1):
        up(pod)

    stops = job.delete()

    assert [(stop.exit_code, stop.hook.code) for stop in stops] == [(143, 0), (143, 0)]
    assert len(job.pods) == 2
    assert not job.is_complete


def test_a_start_that_never_comes_says_why(kubelet: Kubelet) -> None:
    """At once, not when the wait is over."""
    job: PyTorchJob = kubelet.apply(a_pytorchjob("exit 1", STAYS))

    with pytest.raises(StandInError, match=r"not all were started 2 times: .*; ranks-master-0 ended with 1"):
        job.wait_for_start(2)


def test_pytorchjobs_that_are_not_run_here(kubelet: Kubelet) -> None:
    """Refused when they are applied."""
    document = a_pytorchjob("true")
    with pytest.raises(StandInError, match="PyTorchJob ranks has no Worker to make 2 of"):
        kubelet.apply(document, workers=2)

    document["spec"]["elasticPolicy"] = {"maxReplicas": 4}
    with pytest.raises(StandInError, match=r"found replicas Master; expected .* an elasticPolicy and Worker"):
        kubelet.apply(document)

    del document["spec"]["elasticPolicy"]
    document["spec"]["pytorchReplicaSpecs"]["Chief"] = {}
    with pytest.raises(StandInError, match="found replicas Master, Chief; expected Master and Worker"):
        kubelet.apply(document)


# What a spec says.


def test_variables_of_a_container(kubelet: Kubelet) -> None:
    """In order, with references to earlier ones, from the pod, with paths replaced; the image's are not seen."""
    env: list[dict[str, Any]] = [
        {"name": "ROOT", "value": "/shared"},
        {"name": "LATER", "value": "$(RUN)"},
        {"name": "RUN", "value": "$(ROOT)/run"},
        {"name": "ME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "MINE", "value": "$(RUN)/$(ME)"},
        {"name": "DOLLAR", "value": "$$(ROOT)"},
        {"name": "IMAGE", "value": "$(HOME)"},
        {"name": "HOME", "value": "/shared/home"},
    ]
    names = [one["name"] for one in env]
    main = "; ".join([*(f'echo {name}="${name}"' for name in names), "echo given $GIVEN $1 $2"])
    document = a_pod(main, env=env, **claim())
    document["spec"]["containers"][0]["args"] = ["sh", "$(MINE)", "$$(MINE)"]

    pod = kubelet.apply(document, env={"GIVEN": "$(ME)"})

    pod.wait()
    volume = kubelet.volume("shared")
    assert pod.log.splitlines() == [
        f"ROOT={volume}",
        "LATER=$(RUN)",
        f"RUN={volume}/run",
        "ME=a-pod",
        f"MINE={volume}/run/a-pod",
        "DOLLAR=$(ROOT)",
        "IMAGE=$(HOME)",
        f"HOME={volume}/home",
        f"given a-pod {volume}/run/a-pod $(MINE)",
    ]


def test_the_environment_is_that_of_the_container(kubelet: Kubelet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the tests' own reaches it but PATH, in which the tests' python comes first."""
    monkeypatch.setenv("LEAKS", "1")
    pod = kubelet.run(sh("env; command -v python"), pre_stop=None, volumes={})

    pod.wait()

    names = {line.partition("=")[0] for line in pod.log.splitlines() if "=" in line}
    ours = {"MIGRATOR_GRACE_S", "MIGRATOR_SIGNAL", "MIGRATOR_TERMINATION_LOG"}
    shell = {"PWD", "OLDPWD", "SHLVL", "_"}
    assert names - shell == {"PATH", "HOME", "HOSTNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", *ours}
    assert pod.log.splitlines()[-1] == str(Path(sys.executable).parent / "python")


def test_volumes_of_a_container(kubelet: Kubelet, tmp_path: Path) -> None:
    """Claims and host paths are shared by pods, emptyDirs are not; a sub path is a directory of the volume."""
    volumes = [
        {"name": "v", "persistentVolumeClaim": {"claimName": "shared"}},
        {"name": "h", "hostPath": {"path": "/mnt/ssd"}},
        {"name": "e", "emptyDir": {}},
        {"name": "n", "nfs": {"server": "far"}},
    ]
    mounts = [
        {"name": "v", "mountPath": "/shared/"},
        {"name": "v", "mountPath": "/runs", "subPath": "runs/a"},
        {"name": "h", "mountPath": "/host"},
        {"name": "e", "mountPath": "/cache"},
        {"name": "n", "mountPath": "/nfs"},
    ]
    (tmp_path / "nfs").mkdir()
    places = "/shared /runs /host /cache /nfs"
    main = f"for place in {places}; do echo $(ls $place | wc -l); touch $place/$HOSTNAME; done"
    document = a_pod(main, volumes=volumes, volumeMounts=mounts)
    pods = []
    for name in ("one", "two"):
        document["metadata"]["name"] = name
        pods.append(kubelet.apply(document, volumes={"n": tmp_path / "nfs"}))
        assert pods[-1].wait().exit_code == 0, pods[-1].log

    assert pods[0].log.split() == ["1", "0", "0", "0", "0"]  # /shared has the directory of its sub path
    assert pods[1].log.split() == ["2", "1", "1", "0", "1"]
    assert pods[0].path("/runs") == kubelet.volume("shared") / "runs" / "a"
    assert pods[0].path("/cache") != pods[1].path("/cache")
    assert {path.name for path in (tmp_path / "nfs").iterdir()} == {"one", "two"}


def test_a_single_file_may_be_mounted(kubelet: Kubelet, tmp_path: Path) -> None:
    """A configMap's key by its sub path, as scripts often come into a pod."""
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "train.sh").write_text("echo trained\n")
    mount = mounted({"name": "c", "configMap": {"name": "x"}}, "/app/train.sh", subPath="train.sh")
    document = a_pod("exec sh /app/train.sh", **mount)

    pod = kubelet.apply(document, volumes={"c": tmp_path / "config"})

    assert pod.wait().exit_code == 0
    assert pod.log == "trained\n"


def test_a_path_is_replaced_once(kubelet: Kubelet, tmp_path: Path) -> None:
    """Also where the directory that stands for it begins like it: a repository in the image's own place."""
    here = tmp_path / "src"
    here.mkdir()
    env = [{"name": "APP", "value": str(tmp_path)}]
    document = a_pod("echo $APP $0", env=env, workingDir=str(tmp_path))
    document["spec"]["containers"][0]["args"] = ["$(APP)"]

    pod = kubelet.apply(document, image={str(tmp_path): here})

    pod.wait()
    assert pod.log == f"{here} {here}\n"


def test_a_hook_has_what_the_container_has(kubelet: Kubelet) -> None:
    """Its variables and its files; but in the command of a hook Kubernetes expands nothing."""
    told = "echo $A $HOSTNAME $MIGRATOR_SIGNAL $(cat mine) /shared"
    env = [{"name": "A", "value": "one"}]
    hook = pre_stop(f"{told} '$(A)' $$")
    pod = up(kubelet.apply(a_pod(f"echo file >mine; {told}; {STAYS}", env=env, **claim(), **hook)))

    stop = pod.delete()

    first = pod.log.splitlines()[0]
    assert first.split()[:2] == ["one", "a-pod"]
    assert first.split()[3:] == ["file", str(kubelet.volume("shared"))]
    assert re.fullmatch(rf"{re.escape(first)} \$\(A\) \d+\n", stop.hook.text)


def test_the_working_directory(kubelet: Kubelet, tmp_path: Path) -> None:
    """That of the spec, for hooks too; without one, the container's own, which is HOME."""
    (tmp_path / "src").mkdir()
    document = a_pod(f"pwd; {STAYS}", workingDir="/app", **pre_stop("pwd"))
    pod = up(kubelet.apply(document, image={"/app": tmp_path / "src"}))
    assert (pod.log, pod.delete().hook.text) == (f"{tmp_path}/src\nup\n", f"{tmp_path}/src\n")

    own = kubelet.run(sh("pwd; echo $HOME"), pre_stop=None)
    own.wait()
    assert len(set(own.log.split())) == 1

    nowhere = kubelet.apply(a_pod("true", workingDir="/app"))
    assert nowhere.wait().reason == "StartError"
    assert "the working directory /app of container main is not there" in nowhere.wait().message


def test_init_containers_run_in_order(kubelet: Kubelet) -> None:
    """Each when the one before has ended well, with volumes and variables of their own."""
    first = container("sleep 0.1; echo one >>/cache/order", volumeMounts=[{"name": "c", "mountPath": "/cache"}])
    second = container(
        "echo $WORD >>/data/order",
        env=[{"name": "WORD", "value": "two"}],
        volumeMounts=[{"name": "c", "mountPath": "/data"}],
    )
    cache = mounted({"name": "c", "emptyDir": {}}, "/cache")

    pod = kubelet.apply(a_pod("cat /cache/order", initContainers=[first, second], **cache))

    assert pod.wait().exit_code == 0
    assert pod.log == "one\ntwo\n"


def test_a_failing_init_container_is_the_end(kubelet: Kubelet) -> None:
    """Neither the next one nor the container is started."""
    failing = container("echo no network; exit 3")
    pod = kubelet.apply(a_pod("touch /shared/ran", initContainers=[failing, container("true")], **claim()))

    stop = pod.wait()

    assert (stop.exit_code, stop.message) == (3, "init container main: no network\n")
    with pytest.raises(StandInError, match="pod a-pod ended before its container was started"):
        _ = pod.container
    assert not (kubelet.volume("shared") / "ran").exists()


def test_the_termination_message(kubelet: Kubelet) -> None:
    """What the container leaves in its file, cut as kubelet does; each container has a file of its own."""
    short = kubelet.run(sh("echo why >/dev/termination-log; echo $MIGRATOR_TERMINATION_LOG"), pre_stop=None)
    long = kubelet.run(sh("head -c 5000 /dev/zero | tr '\\0' x >/dev/termination-log; exit 1"), pre_stop=None)

    assert short.wait().message == "why"
    assert Path(short.log.strip()).read_text() == "why\n"
    assert long.wait().message == "x" * 4096


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo tail; exit 1", "tail"),
        ("seq 1 200; exit 1", "\n".join(map(str, range(121, 201)))),
        ("head -c 5000 /dev/zero | tr '\\0' x; exit 1", "x" * 2048),
        ("echo tail; exit 0", ""),
        ("echo tail; echo said >/dev/termination-log; exit 1", "said"),
    ],
    ids=["failed", "80 lines", "2048 bytes", "completed", "said"],
)
def test_the_termination_message_may_fall_back_to_the_log(kubelet: Kubelet, script: str, message: str) -> None:
    """The end of the output of a container that failed and said nothing."""
    pod = kubelet.apply(a_pod(script, terminationMessagePolicy="FallbackToLogsOnError"))

    assert pod.wait().message == message


def test_each_container_has_a_signal_file_of_its_own(kubelet: Kubelet) -> None:
    """In its own file system, which goes with it; unless the spec says where."""
    pod = up(
        kubelet.run(sh(f"echo $MIGRATOR_SIGNAL; ls /tmp/migrator; {STAYS}"), pre_stop=None, restart_policy="Always")
    )
    pod.crash()
    pod.wait_for_log("^up$", count=2)
    files = [Path(line) for line in pod.log.splitlines() if line.startswith("/")]
    assert len(set(files)) == 2
    assert pod.path("/tmp/migrator/signal") == files[-1]

    theirs = kubelet.run(sh("echo $MIGRATOR_SIGNAL"), pre_stop=None, env={"MIGRATOR_SIGNAL": "/ckpts/signal"})
    theirs.wait()
    assert theirs.log.strip() == str(kubelet.volume("ckpts") / "signal")


def test_args_and_grace_may_be_given(kubelet: Kubelet) -> None:
    """`args` take the place of the yaml's; the grace is told to the script."""
    document = a_pod('echo "$0 $MIGRATOR_GRACE_S"', terminationGracePeriodSeconds=90)
    document["spec"]["containers"][0]["args"] = ["theirs"]

    plain, given = kubelet.apply(document), kubelet.apply(document, args=["ours"], grace_s=2.5)

    plain.wait()
    given.wait()
    assert (plain.log, plain.spec.grace_s) == ("theirs \n", 90)
    assert (given.log, given.spec.grace_s) == ("ours 2.5\n", 2.5)


def test_one_of_several_containers_may_be_named(kubelet: Kubelet) -> None:
    """The others are not run."""
    document = a_pod("echo main")
    document["spec"]["containers"].append({"name": "side", "command": sh("echo side")})

    pod = kubelet.apply(document, container="side")

    pod.wait()
    assert pod.log == "side\n"
    with pytest.raises(StandInError, match="there is no container 'x'; there are: main, side"):
        kubelet.apply(document, container="x")


def test_all_that_is_wrong_is_said_at_once(kubelet: Kubelet) -> None:
    """By name, with what to do."""
    wrong = {
        "name": "trainer",
        "env": [
            {"name": "NUMBER", "value": 3},
            {"name": "SECRET", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
            {"name": "LABEL", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['a']"}}},
        ],
        "args": "--epochs=3",
        "envFrom": [{"configMapRef": {"name": "c"}}],
        "volumeMounts": [{"name": "nowhere", "mountPath": "/x"}],
        "lifecycle": {"preStop": {"httpGet": {"port": 80}}, "postStart": {"exec": {"command": []}}},
    }
    document = {
        "kind": "Pod",
        "metadata": {"name": "many"},
        "spec": {
            "containers": [wrong],
            "volumes": [{"name": "config", "configMap": {"name": "c"}}],
            "terminationGracePeriodSeconds": -1,
            "restartPolicy": "Sometimes",
        },
    }

    with pytest.raises(StandInError) as error:
        kubelet.apply(document)

    head, *lines = str(error.value).splitlines()
    assert head == "Pod many cannot be run here:"
    for part in (
        "volume 'config' is a configMap; give a directory for it: volumes={'config': PATH}",
        "container 'trainer' has no command",
        "container 'trainer': envFrom names the ConfigMap 'c', which is not in this file",
        "the value of NUMBER is 3; Kubernetes wants a string",
        "SECRET comes from a secretKeyRef; give it by env=",
        "LABEL is to be metadata.labels['a'], which is not known here; give it by env=",
        "container 'trainer': args is '--epochs=3'; Kubernetes wants a list of words",
        "container 'trainer' mounts the volume 'nowhere', which the pod does not have",
        "container 'trainer': preStop is no exec",
        "container 'trainer': postStart is no exec",
        "terminationGracePeriodSeconds is -1",
        "restartPolicy is 'Sometimes'; expected Always, OnFailure or Never",
    ):
        assert any(part in line for line in lines), (part, lines)
    assert len(lines) == 12
    assert kubelet.pods == []


def test_two_containers_are_refused(kubelet: Kubelet) -> None:
    """Rather than one of them left out."""
    document = a_pod("true")
    document["spec"]["containers"].append({"name": "side", "command": sh("true")})

    with pytest.raises(StandInError, match=r"has 2 containers \(main, side\) and one is run here; say which"):
        kubelet.apply(document)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("kind: [Pod", "is no yaml"),
        ("- a\n- b\n", "has no document with a kind; expected a Pod, a Job, a StatefulSet or a PyTorchJob"),
        ("", "has no document with a kind"),
        (
            "kind: Service\n---\nkind: ConfigMap\n",
            "has Service, ConfigMap; expected one Pod, Job, StatefulSet, PyTorchJob",
        ),
        ("kind: Pod\n---\nkind: Job\n", "has Pod, Job; expected one"),
        (None, "cannot be read: No such file or directory"),
    ],
    ids=["broken", "list", "empty", "others", "two", "missing"],
)
def test_files_that_are_not_one_document_to_run(kubelet: Kubelet, tmp_path: Path, text: str | None, why: str) -> None:
    """Each error names the file."""
    path = tmp_path / "a.yaml"
    if text is not None:
        path.write_text(text)

    with pytest.raises(StandInError, match=f"{re.escape(str(path))} {why}"):
        kubelet.apply(path)


def test_a_file_may_have_other_documents(kubelet: Kubelet, tmp_path: Path) -> None:
    """The one that can be run is run."""
    path = tmp_path / "a.yaml"
    path.write_text(
        textwrap.dedent("""\
        kind: PersistentVolumeClaim
        metadata: {name: ckpts}
        ---
        kind: Job
        metadata: {generateName: train-}
        spec:
          template:
            spec:
              restartPolicy: OnFailure
              containers: [{name: main, command: [echo], args: [hello, "1"], resources: {limits: {cpu: 1}}}]
        """)
    )

    job = kubelet.apply(str(path))

    job.wait()
    assert (job.name, job.pod.log) == ("train", "hello 1\n")


def test_without_pyyaml_a_dict_will_do(kubelet: Kubelet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a file needs it, and the error says how to get it."""
    monkeypatch.setitem(sys.modules, "yaml", None)

    with pytest.raises(StandInError, match=r"takes PyYAML: pip install 'migrator\[testing\]'"):
        kubelet.apply(tmp_path / "a.yaml")
    assert kubelet.apply(a_pod("true")).wait().exit_code == 0


def test_a_program_that_does_not_exist(kubelet: Kubelet, rules: str) -> None:
    """The pod is over before it began, and says which."""
    pod = kubelet.run(["no-such-program", "--epochs=3"], restart_policy="Always")

    stop = pod.wait()

    assert (stop.reason, stop.exit_code, stop.hooks) == ("StartError", 128, ())
    assert "no-such-program: No such file or directory" in stop.message
    with pytest.raises(StandInError, match=r"it has ended(?s:.*)no-such-program"):
        pod.wait_for_log("step")


def test_a_pod_from_plain_arguments(kubelet: Kubelet, tmp_path: Path) -> None:
    """Ckpts on a claim, directories where they are named, the grace told to the script."""
    (tmp_path / "data").mkdir()
    volumes: dict[str, str | Path] = {"/ckpts/": "mine", "/data/": tmp_path / "data"}
    main = "echo $MIGRATOR_CKPT $MIGRATOR_GRACE_S $A; touch /ckpts/c /data/d"

    pod = kubelet.run(sh(main), env={"A": "1"}, volumes=volumes, grace_s=4.5, pre_stop=None, cwd=tmp_path)

    assert pod.wait().exit_code == 0
    mine = kubelet.volume("mine")
    assert pod.log == f"{mine} 4.5 1\n"
    assert ((mine / "c").exists(), (tmp_path / "data" / "d").exists()) == (True, True)


def test_a_wait_says_what_it_waited_for(kubelet: Kubelet) -> None:
    """And what the pod wrote instead."""
    pod = up(kubelet.run(sh(STAYS), pre_stop=None))

    with pytest.raises(StandInError, match="pod pod still runs after 0 s\nup"):
        pod.wait(0.01)
    with pytest.raises(StandInError, match="pod pod wrote 'step' 0 times, expected 1: 0 s are over\nup"):
        pod.wait_for_log("step", 0.01)
    assert pod.wait_for_log(r"^(u)p$")[1] == "u"


# Nothing outlives a test.


@pytest.mark.processes
def test_tests_that_are_killed_leave_nothing_behind(tmp_path: Path, rules: str) -> None:
    """SIGKILL to whoever runs the tests ends the containers, daemons and hooks too."""
    script = f"""
import sys, threading
import migrator.testing.container
from migrator.testing import Kubelet
if {rules == "none"}:
    migrator.testing.container.isolation = lambda: "none here"
kubelet = Kubelet({str(tmp_path)!r})
pod = kubelet.run(["sh", "-c", {f"{DAEMON}; {STAYS}"!r}], pre_stop=["sh", "-c", "touch /ckpts/hook; exec sleep 60"])
pod.wait_for_log("^daemon$")
pod.wait_for_log("^up$")
threading.Thread(target=pod.delete).start()
print("runs", flush=True)
threading.Event().wait(60)
"""
    tests = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert tests.stdout is not None
        with tests.stdout:
            assert tests.stdout.readline() == "runs\n"
        until((tmp_path / "volumes" / "ckpts" / "hook").exists, "the hook to run")
        assert len(processes_of(tmp_path)) >= 4
    finally:
        tests.kill()
        tests.wait()

    until(lambda: processes_of(tmp_path) == [], "the containers to end")


def test_a_kubelet_is_closed_once_and_for_all(kubelet: Kubelet) -> None:
    """May be called twice; what is started afterwards is refused."""
    pod = up(kubelet.run(sh(IGNORES), pre_stop=sh("touch /ckpts/hook"), restart_policy="Always"))

    kubelet.close()
    kubelet.close()

    assert processes_of(kubelet.directory) == []
    assert (pod.wait().exit_code, pod.restarts, pod.path("/ckpts/hook").exists()) == (137, 0, False)
    with pytest.raises(StandInError, match="pod late: the kubelet is closed"):
        kubelet.run(sh("true"), name="late")
    with pytest.raises(StandInError, match="pod a-pod: the kubelet is closed"):
        kubelet.apply(a_pod("true"))


def test_a_kubelet_may_be_closed_during_a_delete(kubelet: Kubelet, aside: Callable[..., Any]) -> None:
    """Who waits for the delete is told how it ended."""
    pod = up(kubelet.run(sh(STAYS), pre_stop=sh("touch /ckpts/hook; exec sleep 60"), grace_s=50))
    deleted = aside(pod.delete)
    until(pod.path("/ckpts/hook").exists, "the hook to run")

    kubelet.close()

    assert processes_of(kubelet.directory) == []
    assert deleted.result(20).exit_code == 137


@pytest.mark.parametrize("document", [a_job(STAYS), a_pytorchjob(STAYS, STAYS)], ids=["Job", "PyTorchJob"])
def test_a_kubelet_may_be_closed_while_a_job_runs(kubelet: Kubelet, document: dict[str, Any]) -> None:
    """The pods that end now are not replaced."""
    job = kubelet.apply(document)
    for pod in list(job.pods):
        up(pod)
    before = len(kubelet.pods)

    kubelet.close()

    assert len(kubelet.pods) == before
    assert processes_of(kubelet.directory) == []


@pytest.mark.processes
def test_threads_end_with_the_kubelet(tmp_path: Path) -> None:
    """Those of pods and those that listen to containers."""
    before = set(threading.enumerate())
    with Kubelet(tmp_path) as kubelet:
        pod = up(kubelet.run(sh(STAYS), pre_stop=None, restart_policy="Always"))
        pod.crash()
        kubelet.run(sh("true"), pre_stop=None).wait()

    until(lambda: set(threading.enumerate()) <= before, "the threads to end", timeout_s=10)


# The pytest side.

MINE = """
pytest_plugins = ["migrator.testing.fixtures"]
started = []


def test_passes(kubelet):
    pod = kubelet.run(["sh", "-c", "echo hello"], pre_stop=None)
    assert pod.wait().exit_code == 0


def test_fails(kubelet):
    kubelet.run(["sh", "-c", "echo the first pod; exit 3"], name="first", pre_stop=None).wait()
    pod = kubelet.run(["sh", "-c", "echo the log of the pod; sleep 60"], name="second", pre_stop=None)
    pod.wait_for_log("log of")
    started.append(pod)
    assert False, "on purpose"


def test_nothing_is_left():
    assert [True] == [pod.is_over.is_set() for pod in started]


def test_needs_none():
    assert False, "without a kubelet"
"""


@pytest.mark.processes
def test_the_fixture(tmp_path: Path) -> None:
    """It is there, nothing outlives it, and the report of a failed test has what each pod wrote."""
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["migrator.testing.fixtures"]\n')
    (tmp_path / "test_mine.py").write_text(MINE)
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, f"--rootdir={tmp_path}", "-p", "no:cacheprovider"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    how = ["-p", "no:xdist", "-p", "no:randomly", f"--basetemp={tmp_path / 'temp'}", str(tmp_path)]

    done = subprocess.run(
        [*command, *how], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False
    )

    assert "2 failed, 2 passed" in done.stdout, done.stdout + done.stderr
    header = "NO PID NAMESPACES HERE" if isolation() else "containers run as process 1 of a PID namespace"
    assert f"migrator.testing: {header}" in done.stdout
    _, first, second = re.split("-+ pod (?:first|second) -+\n", done.stdout)
    assert "exit_code=3, reason='Error'" in first
    assert "the first pod\n" in first
    assert "the log of the pod\n" in second
    assert processes_of(tmp_path) == []
