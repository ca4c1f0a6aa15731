"""A cluster on one Linux machine: hosts with rate-limited network ports, and a command run on them under mpirun.

    python scripts/virtual_cluster.py run --nodes 5 --rate 400mbit --ranks 9 --ranks-per-node 2 -- \\
        python scripts/train.py --steps 20
    python scripts/virtual_cluster.py run --nodes 5 --rate 1gbit --ranks 9 --first-node 1 --slow node2:100mbit -- ...
    python scripts/virtual_cluster.py run --nodes 4 --rate 1gbit --ranks 4 --cores-per-host 0.4 --memory-per-host 1GB \\
        -- python scripts/train.py --steps 20
    python scripts/virtual_cluster.py down

Needs root, iproute2 and util-linux; mpirun is the one that belongs to this Python. Hosts node0, node1, ... see the
machine's files, share its cores and memory, or have a part of them each, and reach each other alone; each has a
network, host name, /dev/shm and processes of its own. What needs more memory than its host has is ended, and a line
says so. Ctrl-C or SIGTERM stops mpirun, then the hosts; the exit code is mpirun's, or 2 for a mistake.
"""

import os
import sys
from collections.abc import Iterable

from dist.console import open_console
from scripts.cluster.groups import Limits, kills_line, read_limits
from scripts.cluster.hosts import Host, end_clusters, running_hosts
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
    run_flags = verbs.add_parser("run", help="a cluster for one command", usage="%(prog)s FLAGS -- COMMAND...")
    add = run_flags.add_argument
    add("--nodes", type=int, required=True, metavar="M", help="hosts: node0 to node(M-1)")
    add("--rate", required=True, help="of every port, each way at once: 400mbit, 1gbit")
    add("--ranks", type=int, required=True, metavar="N")
    add("--ranks-per-node", type=int, metavar="P", help="the last node gets the rest (N/M, rounded up)")
    add("--first-node", type=int, metavar="K", help="ranks on node0, where not P")
    add("--slow", action="append", default=[], metavar="HOST[:in|:out]:RATE", help="a port's own rate; may be repeated")
    add("--burst", type=size_in_bytes, metavar="BYTES", help="what passes at once after a pause: 512KiB (2 ms)")
    add("--delay", metavar="TIME", help="added to each packet that leaves a node (100us); needs a kernel with netem")
    # BBR empties its pipe for 200 ms every 10 s; one such connection holds up a whole ring.
    add("--congestion", default="reno", metavar="NAME", help="TCP congestion control of the hosts (reno)")
    add("--cores-per-host", metavar="CORES", help="cores' time that each host has at most: 0.4 (all; needs cgroups)")
    add("--memory-per-host", metavar="BYTES", help="600MB: what needs more is ended (no limit; needs cgroups)")
    down_flags = verbs.add_parser("down", help="end what is left of clusters whose script is gone")
    down_flags.add_argument("--all", action="store_true", help="and those that are running")
    return result


def run(arguments, command: list[str]) -> int:
    """One cluster for one command; its exit code."""
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
            tell_kills(nodes)


def tell_kills(nodes: list[Host]) -> None:
    """A line for each host whose memory limit has ended a process: of that the launcher only knows the signal."""
    for node in nodes:
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
    lines = [f"{'host':<8} {'address':<13} {'ranks':<9} {'out':>9} {'in':>9}{columns(each)}"]
    for node, port in enumerate(ports):
        name, first, last = node_name(node), sum(placement[:node]), sum(placement[: node + 1]) - 1
        ranks = f"{first}-{last}" if last > first else f"{first}" if last == first else "-"
        row = f"{name:<8} {addresses[name]:<13} {ranks:<9} {port.outgoing:>9} {port.incoming:>9}"
        lines.append(row + columns(each.values()))
    return "\n".join([*lines, *crowd_line(limits, len(ports)), ""])


def columns(words: Iterable[str]) -> str:
    return "".join(f" {word:>9}" for word in words)


def crowd_line(limits: Limits, nodes: int) -> list[str]:
    """Where the hosts may use more than there is, they slow each other down, as they do without a limit."""
    own = len(os.sched_getaffinity(0))
    if limits.cores is None or round(limits.cores * nodes, 6) <= own:
        return []
    return [f"{nodes} hosts of {limits.cores:g} cores share this machine's {own}: they will hold each other up"]


if __name__ == "__main__":
    open_console()
    main()
