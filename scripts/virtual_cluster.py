"""Run a command under mpirun on a virtual cluster: hosts on one Linux machine, with rate-limited network ports.

    python scripts/virtual_cluster.py run --nodes 5 --rate 400mbit --ranks 9 --ranks-per-node 2 -- \\
        python scripts/train.py --steps 20
    python scripts/virtual_cluster.py run --nodes 5 --rate 1gbit --ranks 9 --first-node 1 --slow node2:100mbit -- ...
    python scripts/virtual_cluster.py run --nodes 4 --rate 1gbit --ranks 4 --cores-per-host 0.4 --memory-per-host 1GB \\
        -- python scripts/train.py --steps 20
    python scripts/virtual_cluster.py down

Needs root, iproute2 and util-linux, and uses the mpirun of this Python. Hosts node0, node1, ... see the machine's files
and reach only each other. Each has its own network, host name, /dev/shm and processes. They share the machine's cores
and memory unless you limit each host; a process that exceeds its host's memory is killed, and a line says so. Ctrl-C or
SIGTERM stops mpirun, then the hosts. The exit code is mpirun's, or 2 for invalid input.
"""

import os
import sys

from dist.console import open_console
from scripts.cluster.groups import Limits, kills_line, read_limits
from scripts.cluster.hosts import end_clusters, running_hosts
from scripts.cluster.launch import mpirun_here, place_ranks, run_ranks
from scripts.cluster.network import Port, connect, host_addresses, node_name, node_ports
from scripts.cluster.program import check_command, check_machine, end_with, split_command
from scripts.settings.command_line import Parser
from scripts.settings.units import size_in_bytes
from traces.units import bytes_text, count_text


def main():
    own, command = split_command(sys.argv[1:])
    arguments = parser().parse_args(own)
    end_with(lambda: run(arguments, command) if arguments.verb == "run" else down(arguments))


def parser() -> Parser:
    result = Parser(__doc__)
    verbs = result.add_subparsers(dest="verb", required=True)
    run_flags = verbs.add_parser("run", help="run one command on a new cluster", usage="%(prog)s FLAGS -- COMMAND...")
    add = run_flags.add_argument
    add("--nodes", type=int, required=True, metavar="M", help="hosts: node0 to node(M-1)")
    add("--rate", required=True, help="rate of every port, per direction: 400mbit, 1gbit")
    add("--ranks", type=int, required=True, metavar="N", help="number of ranks")
    add("--ranks-per-node", type=int, metavar="P", help="ranks per node; the last node gets the rest (N/M, rounded up)")
    add("--first-node", type=int, metavar="K", help="ranks on node0 (P)")
    add("--slow", action="append", default=[], metavar="HOST[:in|:out]:RATE", help="rate of this port; may be repeated")
    add("--burst", type=size_in_bytes, metavar="BYTES", help="burst after a pause, such as 512KiB (2 ms at the rate)")
    add("--delay", metavar="TIME", help="delay of packets that leave a node, such as 100us; needs a kernel with netem")
    # BBR drains its pipe for 200 ms every 10 s; one draining connection delays a whole ring.
    add("--congestion", default="reno", metavar="NAME", help="TCP congestion control of the hosts (reno)")
    add("--cores-per-host", metavar="CORES", help="CPU time limit of each host, in cores: 0.4 (all; needs cgroups)")
    add("--memory-per-host", metavar="BYTES", help="memory limit of each host, such as 600MB (none; needs cgroups)")
    down_flags = verbs.add_parser("down", help="remove leftover virtual clusters of scripts that were killed")
    down_flags.add_argument("--all", action="store_true", help="also end running clusters")
    return result


def run(arguments, command: list[str]) -> int:
    """Make a cluster for one command. Return the command's exit code."""
    check_machine()
    check_command(command)
    addresses = host_addresses(arguments.nodes)
    placement = place_ranks(arguments.ranks, arguments.nodes, arguments.ranks_per_node, arguments.first_node)
    ports = node_ports(arguments.nodes, arguments.rate, arguments.slow, arguments.burst)
    limits = read_limits(arguments.cores_per_host, arguments.memory_per_host)
    mpirun_here()
    if count := end_clusters():
        print(f"ended {count_text(count, 'virtual cluster')} that a killed run left behind", flush=True)
    with running_hosts(addresses, limits=limits) as (head, nodes):
        connect(head, nodes, ports, arguments.delay, arguments.congestion)
        print(cluster_table(addresses, placement, ports, limits), flush=True)
        try:
            return run_ranks(head, nodes, placement, command)
        finally:
            for node in nodes:  # the launcher only reports the signal that killed a process
                if node.group and (line := kills_line(node.group)):
                    print(line, file=sys.stderr, flush=True)


def down(arguments) -> int:
    check_machine()
    count = end_clusters(running_too=arguments.all)
    print(f"ended {count_text(count, 'virtual cluster')}" if count else "no cluster to end")
    return 0


def cluster_table(addresses: dict[str, str], placement: list[int], ports: list[Port], limits: Limits) -> str:
    each = {"cores": f"{limits.cores:g}"} if limits.cores is not None else {}
    each |= {"memory": bytes_text(limits.memory)} if limits.memory is not None else {}
    rows = [["host", "address", "ranks", "out", "in", *each]]
    for node, port in enumerate(ports):
        name = node_name(node)
        first = sum(placement[:node])
        last = first + placement[node] - 1
        ranks = f"{first}-{last}" if last > first else f"{first}" if last == first else "-"
        rows.append([name, addresses[name], ranks, port.outgoing, port.incoming, *each.values()])
    lines = [f"{row[0]:<8} {row[1]:<13} {row[2]:<9}" + "".join(f" {word:>9}" for word in row[3:]) for row in rows]
    return "\n".join([*lines, *crowd_line(limits, len(ports)), ""])


def crowd_line(limits: Limits, nodes: int) -> list[str]:
    """Return a warning if the hosts together may use more cores than the machine has."""
    own = len(os.sched_getaffinity(0))
    if limits.cores is None or round(limits.cores * nodes, 6) <= own:
        return []
    return [f"{nodes} hosts of {limits.cores:g} cores share this machine's {own}: they will slow each other down"]


if __name__ == "__main__":
    open_console()
    main()
