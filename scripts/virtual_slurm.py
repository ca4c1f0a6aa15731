"""Run a command under a real SLURM on one Linux machine, to try job scripts before you use a cluster.

    sudo python scripts/virtual_slurm.py run --nodes 4 --ranks-per-node 2 -- sbatch my.sbatch
    sudo python scripts/virtual_slurm.py run --nodes 2 --ranks-per-node 2 -- srun --mpi=pmi2 -N2 -n4 python my.py
    sudo python scripts/virtual_slurm.py run --nodes 2 -- bash

Needs root, iproute2, util-linux and Debian's slurm-wlm and munge (with libpmix-dev, srun --mpi=pmix works too). The
hosts are those of virtual_cluster.py: node0, node1, ... and head, where the command runs with SLURM_CONF set. Jobs see
this machine's files. SLURM ends when the command has ended and no job is left, or at Ctrl-C or SIGTERM. The exit code
is the command's, or 2 for invalid input.
"""

import signal
import sys
import time
from functools import partial

from dist.console import open_console
from scripts.cluster import program
from scripts.cluster.hosts import ClusterError, end_clusters
from scripts.cluster.network import host_addresses
from scripts.cluster.slurm_daemons import Slurm, running_slurm
from scripts.settings.command_line import Parser
from scripts.settings.units import bits_per_s

INSTALL = "(apt-get install slurm-wlm munge libpmix-dev)"
TOOLS = dict.fromkeys(("slurmctld", "slurmd", "srun"), f"slurm-wlm {INSTALL}") | {"munged": f"munge {INSTALL}"}
POLL_S = 0.5
GRACE_S = 5  # for a command that is told to end


def main():
    own, command = program.split_command(sys.argv[1:])
    arguments = parser().parse_args(own)
    program.end_with(lambda: run(arguments, command))


def parser() -> Parser:
    result = Parser(__doc__)
    run_flags = result.add_subparsers(dest="verb", required=True).add_parser(
        "run", help="run one command under a new SLURM", usage="%(prog)s FLAGS -- COMMAND..."
    )
    add = run_flags.add_argument
    add("--nodes", type=int, required=True, metavar="M", help="hosts: node0 to node(M-1)")
    add("--ranks-per-node", type=int, default=2, metavar="P", help="CPUs per node in SLURM's configuration (2)")
    add("--gpus-per-node", type=int, default=0, metavar="G", help="simulated GPUs per node, for SLURM only (0)")
    add("--rate", default="10gbit", help="rate of every port, per direction (10gbit)")
    return result


def check_slurm() -> None:
    """Raise ClusterError unless this machine can run virtual hosts and has SLURM's programs."""
    program.check_machine()
    program.check_tools(TOOLS)


def run(arguments, command: list[str]) -> int:
    """Start a SLURM for one command and the jobs that it submits. Return the command's exit code."""
    check_slurm()
    program.check_command(command)
    if arguments.ranks_per_node < 1 or arguments.gpus_per_node < 0:
        raise ClusterError("--ranks-per-node must be 1 or more, --gpus-per-node 0 or more")
    host_addresses(arguments.nodes)
    bits_per_s(arguments.rate)
    end_clusters()
    with running_slurm(arguments.nodes, arguments.ranks_per_node, arguments.gpus_per_node, arguments.rate) as slurm:
        print(slurm.output("sinfo", "--format", "%P %D nodes, %c CPUs each, GPUs: %G: %N", "--noheader"), flush=True)
        code = run_command(slurm, command)
        wait_for_jobs(slurm)
        return code


def run_command(slurm: Slurm, command: list[str]) -> int:
    """Run the command on the head. Return its exit code, or 128 + the signal that ended it."""
    if sys.stdin.isatty():
        signal.signal(signal.SIGINT, lambda number, frame: None)  # a terminal's Ctrl-C reaches the command as well
    try:
        stop = partial(program.end_process, grace_s=GRACE_S)
        return program.run_process(slurm.head.enter_here(*command), stop, env=slurm.environment())
    finally:
        signal.signal(signal.SIGINT, program.raise_stopped)


def wait_for_jobs(slurm: Slurm) -> None:
    """Wait until no job waits or runs; print the jobs whenever they change."""
    told = ""
    # For each job: number, name, state, reason or nodes.
    while jobs := slurm.output("squeue", "--noheader", "--format", "%i %j %T %R"):
        if jobs != told:
            print(f"waiting for these jobs (Ctrl-C ends them):\n{jobs}", end="", flush=True)
        told = jobs
        time.sleep(POLL_S)


if __name__ == "__main__":
    open_console()
    main()
