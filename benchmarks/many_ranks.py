"""What a thousand ranks ask of the job's store: idle, while they leave, and over many saves.

    python benchmarks/many_ranks.py [RANKS ...]

More ranks than fit on one machine are threads of a few processes (`tests/support/rank_threads.py`), with one real
TCPStore in a process of its own. All of them share this machine's cores, so what is measured in seconds is an upper
bound.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from migrator.ranks.peers import Peers
from migrator.ranks.timing import Timing
from migrator.save.group import last_save
from migrator.save.group.joint_save import JointSave
from migrator.save.group.orders import order
from tests.support import rank_threads

PROCESSES = 4
GRACE_S = 30.0
IDLE_S = 10.0
SAVES = 10_000
ORDERS, ORDER_S = 15, 0.3


def without_lookups() -> None:
    """The store's server asks the name service for each connection's host, one by one: thousands of them would measure
    that. As root this starts itself again where the question is refused at once."""
    if os.geteuid() or not shutil.which("unshare") or "MANY_RANKS_INSIDE" in os.environ:
        return
    with tempfile.NamedTemporaryFile("w", suffix=".conf", delete=False) as file:
        file.write("nameserver 127.0.0.1\n")
    os.environ["MANY_RANKS_INSIDE"] = "1"
    script = 'mount --bind "$0" /etc/resolv.conf && rm "$0" && exec "$@"'
    os.execvp("unshare", ["unshare", "-m", "sh", "-c", script, file.name, sys.executable, *sys.argv])


def serve(pipe: Any) -> None:
    store = rank_threads.served()
    pipe.send(store.port)
    while pipe.recv() is not None:
        status = Path("/proc/self/status").read_text()
        rss = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
        pipe.send((time.process_time(), rss, store.num_keys()))


class Server:
    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs,))
        self._process.start()
        self.port = self._pipe.recv()

    def look(self) -> tuple[float, int, int]:
        """CPU seconds, kB, keys."""
        self._pipe.send("look")
        cpu, rss, keys = self._pipe.recv()
        return cpu, rss, keys

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join(10)


def host(which: range, size: int, port: int, directory: str, pipe: Any) -> None:
    """Some of the ranks."""
    last_save.LOOK_S = rank_threads.LOOK_S
    ours = [rank_threads.OneRank(rank, size, port, Path(directory)) for rank in which]
    pipe.send("there")
    while (asked := pipe.recv()) != "end":
        if asked == "count":
            pipe.send((sum(s.calls for r in ours for s in r.stores), sum(s.bytes for r in ours for s in r.stores)))
        elif asked == "order":
            # Only the first host is asked, which has rank 0.
            for step in range(1, ORDERS + 1):
                ours[0].peers.post(order((step, 0), 0), timeout_s=5.0)
                time.sleep(ORDER_S)
            pipe.send("ordered")
        elif asked == "heard":
            pipe.send([r.ordered_s for r in ours])
        elif asked == "leave":
            ours[-1].peers.tell_notice(time.monotonic() + GRACE_S)
            pipe.send(time.time())
        elif asked == "wait":
            for rank in ours:
                rank.saver.join(60)
            pipe.send([(r.decided_s, r.done_s, r.failure) for r in ours])


class Hosts:
    def __init__(self, size: int, port: int, directory: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        # Rank 0, which decides, does not share its interpreter with others, as in life.
        bounds = [0, *(1 + number * (size - 1) // PROCESSES for number in range(PROCESSES + 1))]
        for which in map(range, bounds[:-1], bounds[1:]):
            ours, theirs = context.Pipe()
            process = context.Process(target=host, args=(which, size, port, directory, theirs))
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        for pipe in self._pipes:
            pipe.recv()

    def counted(self) -> tuple[int, int]:
        """Requests and bytes so far."""
        for pipe in self._pipes:
            pipe.send("count")
        found = [pipe.recv() for pipe in self._pipes]
        return sum(calls for calls, _ in found), sum(size for _, size in found)

    def order(self) -> list[float]:
        """Of some saves that rank 0 orders: how long it took until all ranks had heard."""
        self._pipes[0].send("order")
        self._pipes[0].recv()
        time.sleep(1.0)
        for pipe in self._pipes:
            pipe.send("heard")
        told = [one for pipe in self._pipes for one in pipe.recv()]
        return [max(heard.get(step, float("inf")) for heard in told) - told[0][step] for step in range(1, ORDERS + 1)]

    def leave(self) -> tuple[float, list[tuple[float, float, str]]]:
        """The last rank of all has the notice."""
        self._pipes[-1].send("leave")
        start_s = self._pipes[-1].recv()
        for pipe in self._pipes:
            pipe.send("wait")
        return start_s, [one for pipe in self._pipes for one in pipe.recv()]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send("end")
        for process in self._processes:
            process.join(20)
            if process.is_alive():
                process.kill()


def many(size: int) -> dict[str, Any]:
    server = Server()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        hosts = Hosts(size, server.port, directory)
        time.sleep(2.0)
        before, cpu = hosts.counted(), server.look()[0]
        time.sleep(IDLE_S)
        after = hosts.counted()
        idle, idle_cpu = (after[0] - before[0]) / IDLE_S, (server.look()[0] - cpu) / IDLE_S
        ahead_s, heard = Timing(size).ahead_s(0), hosts.order()
        before, cpu = hosts.counted(), server.look()[0]
        start_s, told = hosts.leave()
        time.sleep(0.5)
        after = hosts.counted()
        result = {
            "ranks": size,
            "idle: requests a second": round(idle),
            "idle: server's cores": round(idle_cpu, 4),
            "orders heard by all in time": f"{sum(took <= ahead_s for took in heard)} of {ORDERS}",
            "order to the last rank, s": round(max(heard), 3),
            "of": round(ahead_s, 3),
            "notice to decision on all, s": round(max(decided for decided, _, _ in told) - start_s, 3),
            "leave: MB": round((after[1] - before[1]) / 1e6, 2),
            "leave: requests": after[0] - before[0],
            "leave: server's CPU s": round(server.look()[0] - cpu, 3),
            "failures": sorted({failure for _, _, failure in told if failure}),
        }
        hosts.close()
    server.close()
    return result


def saves(count: int = SAVES, size: int = 4) -> dict[str, Any]:
    """Orders, and how each of them ended: what goes through the store for a save of all ranks that goes on."""
    server = Server()
    ranks = []
    for rank in range(size):
        waiting = rank_threads.connected(server.port)
        ranks.append(Peers(rank, size, "n", rank_threads.connected(server.port), waiting=waiting))
        ranks[-1].start()
    context: Any = SimpleNamespace(gate=rank_threads.Gate())
    leaving: Any = SimpleNamespace(notice=None)
    others: Any = dict.fromkeys(("orders", "commits", "warnings", "changed_objects"))
    leads = JointSave(context, ranks[0], leaving, **others)
    result: dict[str, Any] = {"saves of all ranks": size}
    for step in range(1, count + 1):
        ranks[step % size].post(order((step, 0), step % size), timeout_s=5.0)
        leads.decide_end((step, 0), "commit")
        ranks[0].forget_old()
        if step in (count // 10, count):
            time.sleep(2.0)  # the last rings are heard
            _, rss, keys = server.look()
            result |= {f"after {step}: keys": keys, f"after {step}: server's kB": rss}
    result["lines kept by a rank"] = len(ranks[1].known.lines)
    for one in ranks:
        one.close()
    server.close()
    return result


def main() -> None:
    without_lookups()
    for size in [int(text) for text in sys.argv[1:]] or [64, 256, 1024]:
        print(json.dumps(many(size)), flush=True)
    print(json.dumps(saves()), flush=True)


if __name__ == "__main__":
    main()
