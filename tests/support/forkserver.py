"""A warm interpreter that forks the processes our tests stop and kill.

Importing torch takes more than a second, a fork of a process that has done so a
few milliseconds. What a forked child then runs, and how it ends: `script.py`.

Run as `python -m tests.support.forkserver SOCKET`; one connection per child: a line of
JSON {"argv", "env", "cwd", "out", "delay_s", "whole_end"} in, with descriptors for standard input and output
if they are to be others, a line with the pid out, a line
with the exit status (negative: the signal) when the child has ended. It ends with the
connection that is opened first.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import selectors
import signal
import socket
import sys
import time
import weakref
from pathlib import Path
from typing import Any

from tests.support.forked_script import run_script

PR_SET_PDEATHSIG = 1


def main() -> None:
    gc.disable()  # it would take a third of the time that the imports take
    import numpy  # noqa: F401
    import torch
    import torch._dynamo  # the first optimizer of a process would import it, in more than half a second
    import torch.distributed.run  # what ranks and torchrun's agent need at their start
    import torch.nn.parallel
    import torch.utils.data
    import watchdog.observers  # noqa: F401

    import migrator.api  # noqa: F401

    die_with_parent(os.getppid())
    torch.set_num_threads(1)
    # What was imported here is not taken apart at a child's end (half of all the time it takes to end), and
    # neither searched nor copied when a child collects garbage.
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    gc.collect()
    gc.freeze()
    gc.enable()
    server = socket.socket(socket.AF_UNIX)
    server.bind(sys.argv[1])
    server.listen(64)
    request = _serve(server)
    if request is not None:  # a forked child: it leaves through the end of the interpreter
        _become(request)


def _serve(server: socket.socket) -> dict[str, Any] | None:
    selector = selectors.DefaultSelector()
    owner, _ = server.accept()
    selector.register(owner, selectors.EVENT_READ, "owner")
    selector.register(server, selectors.EVENT_READ, "server")
    open_things: list[Any] = [server, owner, selector]
    while True:
        for key, _ in selector.select():
            if key.data == "owner":
                return None
            if key.data == "server":
                request = _accept(server, selector, open_things)
                if request is not None:
                    return request
            else:
                _report(key.fd, key.data, selector, open_things)


def _accept(server: socket.socket, selector: Any, open_things: list[Any]) -> dict[str, Any] | None:
    connection, _ = server.accept()
    data, fds, _, _ = socket.recv_fds(connection, 1 << 16, 2)
    while not data.endswith(b"\n"):
        more = connection.recv(1 << 16)
        if not more:  # who asked has ended
            connection.close()
            return None
        data += more
    request: dict[str, Any] = json.loads(data)
    sys.stdout.flush()
    sys.stderr.flush()
    server_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        request["parent"] = server_pid
        for thing in open_things:
            thing.close()
        connection.close()
        request["fds"] = fds
        return request
    for fd in fds:
        os.close(fd)
    connection.sendall(f"{pid}\n".encode())
    fd = os.pidfd_open(pid)
    selector.register(fd, selectors.EVENT_READ, (pid, connection))
    open_things.append(connection)
    return None


def _report(fd: int, data: tuple[int, socket.socket], selector: Any, open_things: list[Any]) -> None:
    pid, connection = data
    selector.unregister(fd)
    os.close(fd)
    _, status = os.waitpid(pid, 0)
    try:
        connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    except OSError:  # the test does not wait for it any more
        pass
    connection.close()
    open_things.remove(connection)


def die_with_parent(parent: int) -> None:
    """From now on the kernel ends this process as soon as its parent has ended, however that ended."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended just before
        os._exit(1)


def _become(request: dict[str, Any]) -> None:
    """Turn this forked child into `python argv...`."""
    os.setsid()
    # A test run that is killed cleans nothing up, and its signals do not reach other sessions. So the kernel ends each
    # child with this server, which ends with its tests.
    die_with_parent(request["parent"])
    # As a terminal or a container starts it; whoever started the tests may have them ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    out = os.open(request["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
    for number, fd in enumerate(request["fds"]):
        os.dup2(fd, number)
        os.close(fd)
    sys.argv = request["argv"]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    # A line is one write, also where PYTHONUNBUFFERED makes one of each word: a thread's log line would cut it in two.
    sys.stdout.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    time.sleep(request["delay_s"])  # a late start, in a process that its test can already kill
    run_script(whole_end=request["whole_end"])


if __name__ == "__main__":
    main()
