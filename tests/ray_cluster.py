"""A Ray cluster of some nodes on this machine, as a process: it takes commands, and prints facts.

    python -m tests.ray_cluster COUNT

The nodes have one CPU and say that they have two GPUs. It prints a line of JSON with the address,
and ends with its standard input, from which it reads lines, and answers each: "kill" kills a node
that is not the head with all its processes, as when a machine fails; "kill PID" the one that has
this process; "add" adds a node.
"""

import importlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

# Ray otherwise replaces the loopback by the address of this machine in its network.
ENVIRONMENT = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
STORE = 80 << 20  # bytes of an object store, about the least that Ray allows


def descendants(process: int) -> list[int]:
    """Returns the processes below one, and itself."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(entry.name)] = int(fields[1])
    found = [process]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def main() -> None:
    os.environ.update(ENVIRONMENT)
    cluster_utils: Any = importlib.import_module("ray.cluster_utils")  # not everywhere installed

    given = {"num_cpus": 1, "num_gpus": 2, "object_store_memory": STORE}
    given["node_ip_address"] = "127.0.0.1"
    cluster = cluster_utils.Cluster(
        initialize_head=True, head_node_args={"include_dashboard": False, **given}
    )
    nodes = [cluster.add_node(**given) for _ in range(int(sys.argv[1]) - 1)]
    say(address=cluster.address)
    for line in sys.stdin:
        command, *wanted = line.split()
        if command == "add":
            nodes.append(cluster.add_node(**given))
            say(added=1)
        else:
            say(killed=kill(nodes, int(wanted[0]) if wanted else None))
    cluster.shutdown()


def kill(nodes: list, wanted: int | None) -> list[int]:
    """Kills a node, by default the last, and removes it; returns its processes."""
    for node in nodes[::-1]:
        raylet = node.all_processes["raylet"][0].process
        tree = descendants(raylet.pid)
        if wanted is None or wanted in tree:
            for process in tree:
                os.kill(process, signal.SIGKILL)
            raylet.wait()
            nodes.remove(node)
            return tree
    return []


if __name__ == "__main__":
    main()
