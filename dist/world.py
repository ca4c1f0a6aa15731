"""The ranks of the job and their nodes; how a job starts, prints once, and ends on all ranks."""

import atexit
import os
import signal
import socket
import sys
import time
import traceback
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from dist.console import BY_CTRL_C, USER_MISTAKE, say
from dist.control_groups import cpu_quotas
from dist.mpi import MPI, what_is_missing
from dist.probe.programs import RANKS, is_first
from dist.shared_memory import start_problem
from dist.waiting import barrier

PRINTING_S = 0.3  # a launcher that aborts may drop output that it has not forwarded yet
SPEAKING_S = 1.0  # each rank waits this long for the rank before it, which may print the same mistake
ABORTING_S = 3.0  # MPI_Abort may hang; a rank that exits ends the job too


@dataclass(frozen=True)
class World:
    """One rank's place in the job, or in a group of its ranks.

    Nodes are numbered from 0, in the order of their first ranks, the leaders. whole: the job's world if this is the
    world of a group, else None. Ranks, sizes and nodes describe the group, but printing and ending concern the whole
    job: other groups would wait forever for a group that ended alone. Exchanges duplicate
    these communicators and leave the copies to MPI_Finalize: a job makes a few dozen.
    """

    comm: "MPI.Intracomm"
    local_comm: "MPI.Intracomm"  # of the node's ranks, which share memory
    rank: int
    size: int
    node: int
    node_count: int
    local_rank: int
    local_size: int
    host: str
    places: list  # of every rank: [{"rank", "node", "host", "local_rank"}, ...]
    whole: "World | None" = None
    job_ranks: tuple[int, ...] = ()  # the number in the job of each rank of this world

    @property
    def job(self) -> "World":
        """Return the world of all ranks."""
        return self.whole or self

    def print(self, *text) -> None:
        """Print at once, on the job's rank 0 only (console.say)."""
        if self.job.rank == 0:
            say(*text)

    @contextmanager
    def together(self, mistake: type[Exception]):
        """Run local work in which some ranks may find a user's mistake: then all ranks end with one line.

        Every rank of the job must enter this, also in the world of a group; the work must not wait for another rank.
        """
        message = None
        try:
            yield
        except mistake as error:
            message = str(error)
        job = self.job
        found = [(rank, text) for rank, text in enumerate(job.comm.allgather(message)) if text is not None]
        if found:
            rank, text = found[0]
            where = f" (rank {rank} on {job.places[rank]['host']})" if rank else ""
            end_with_one_line(job.comm, f"{text}{where}")


def end_with_one_line(comm, text: str):
    """Print the line on rank 0 and end all ranks with the exit code of a user's mistake. Every rank calls this."""
    if comm.rank == 0:
        say(f"error: {text}", on_stderr=True)
    raise SystemExit(USER_MISTAKE)


def end_without_mpi(text: str, is_first: bool):
    """End with one line before MPI starts. The launcher ends all with the first, so the others wait."""
    if is_first:
        say(f"error: {text}", on_stderr=True)
    time.sleep(PRINTING_S if is_first else 2 * PRINTING_S)
    raise SystemExit(USER_MISTAKE)


class ClosedTogether(ExitStack):
    """Closes collective resources when all ranks end together: at the program's end, or with one line.

    After an exception on one rank, which aborts the job, it closes nothing: the others may never arrive. Resources that
    stay open at a normal end may make MPI_Finalize fail with an exit code of its own.
    """

    def __exit__(self, kind, *error):
        if kind not in (None, SystemExit):
            self.pop_all()
        return super().__exit__(kind, *error)


def install_abort_hook(comm, mistakes: tuple[type[Exception], ...] = ()) -> None:
    """Make an uncaught exception print rank, host and traceback and call MPI_Abort, under any launcher.

    Without this, the rank would wait in MPI_Finalize for the others, which wait for it in a collective. User mistakes
    (exceptions of a type in `mistakes`) and Ctrl-C print one line without a traceback.
    """

    def abort(kind, error, trace):
        where = f"rank {comm.rank} of {comm.size} on {socket.gethostname()}"
        say(end="")
        if isinstance(error, mistakes):
            end_job_in_turn(comm, f"error: {error} ({where})\n", USER_MISTAKE)
        if isinstance(error, KeyboardInterrupt):
            end_job_in_turn(comm, "ended by Ctrl-C\n", BY_CTRL_C)
        what = "".join(traceback.format_exception_only(error)).strip()
        end_job(comm, f"{where} ends the job: {what}\n{''.join(traceback.format_exception(kind, error, trace))}")

    sys.excepthook = abort


def end_job_in_turn(comm, text: str, code: int) -> None:
    """End the job after a mistake that other ranks may have found too: the lowest rank prints it."""
    time.sleep(SPEAKING_S * min(comm.rank, 3))
    end_job(comm, text, code)


def end_job(comm, text: str, code: int = 1) -> None:
    """Print the text and end all ranks, from any thread of any rank. Never return."""
    say(text, end="", on_stderr=True)
    time.sleep(PRINTING_S)
    # mpi4py keeps Python's lock in Abort. If that hangs, no Python thread runs, but the kernel's timer does.
    signal.setitimer(signal.ITIMER_REAL, ABORTING_S)
    comm.Abort(code)
    # MPI_Abort may return under some launchers; nothing of this rank must run after it.
    os._exit(code)


def library_name() -> str:
    """Return the MPI library and its version, in one line."""
    return " ".join(MPI.Get_library_version().splitlines()[0].split()).split(", package")[0].replace("Version: ", "")


def start_mpi() -> "MPI.Intracomm":
    """Return the world's communicator. Initialize MPI if needed; end with one line if there is no MPI."""
    if MPI is None:
        end_without_mpi(": ".join(what_is_missing()), is_first(RANKS))
    if not MPI.Is_initialized():
        if "MPICH" in library_name() and (problem := start_problem(os.environ)):
            end_without_mpi(problem, os.environ.get("MPI_LOCALRANKID", "0") == "0")
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
        atexit.register(leave_together, MPI.COMM_WORLD)
    return MPI.COMM_WORLD


def leave_together(comm) -> None:
    """Meet at the end of a job that nothing has aborted. Collective.

    When the first rank ends with a non-zero code, srun --kill-on-bad-exit sends SIGTERM to the others, and would report
    the signal instead of the code. So no rank ends before all ignore SIGTERM.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if not MPI.Is_finalized():
        barrier(comm)


def start_world(expect_ranks: int | None = None, mistakes: tuple[type[Exception], ...] = ()) -> World:
    """Set up the world of this job; an exception on any rank then ends it (install_abort_hook). Collective.

    If the world is smaller than SLURM, the launcher or `expect_ranks` says, end with a line that says what to do.
    """
    comm = start_mpi()
    install_abort_hook(comm, mistakes)
    if problem := lost_ranks(comm.size, expect_ranks, os.environ):
        end_with_one_line(comm, problem)
    return world_of(comm, comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank))


def world_of(comm, local_comm, whole: World | None = None) -> World:
    """Make the world of comm. local_comm: its ranks on this node, which share memory. Collective.

    whole: the job's world, if this one is for a group.
    """
    leader = local_comm.bcast(comm.rank)
    everyone = comm.allgather((leader, socket.gethostname(), local_comm.rank, (whole or comm).rank))
    leaders = sorted({leader for leader, *_ in everyone})
    places = [
        {"rank": rank, "node": leaders.index(leader), "host": host, "local_rank": local_rank}
        for rank, (leader, host, local_rank, _) in enumerate(everyone)
    ]
    own = places[comm.rank]
    return World(
        comm, local_comm, comm.rank, comm.size, own["node"], len(leaders), own["local_rank"], local_comm.size,
        own["host"], places, whole, tuple(job_rank for *_, job_rank in everyone),
    )  # fmt: skip


def lost_ranks(size: int, expect_ranks: int | None, environment) -> str | None:
    """Return what is wrong if the world of `size` has fewer ranks than the launcher's environment says, or None.

    srun without the right --mpi, or the mpirun of another MPI, starts N worlds of size 1 without an error.
    """
    if expect_ranks is not None and size != expect_ranks:
        return f"{size} ranks, expected {expect_ranks} (--expect-ranks): check the launch line, mpirun -n or srun -n"
    if size > 1:
        return None
    name = next((name for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE") if name in environment), "SLURM_NTASKS")
    if name == "SLURM_NTASKS" and "SLURM_STEP_ID" not in environment:
        return None  # a batch script's own process, not started by srun
    meant = environment.get(name, "1")
    if not meant.isdecimal() or int(meant) <= 1:
        return None
    return (
        f"a world of 1 rank, but the launcher started {meant} ({name}): it and this MPI ({library_name()}) do not know "
        "each other; start with the mpirun of this MPI, or with srun --mpi=pmix (Open MPI) or --mpi=pmi2 (MPICH)"
    )


def threads_per_rank(world: World) -> int:
    """Return how many threads each rank may run, so that a node's ranks share its cores. Collective.

    Local ranks share the cores that they may all use, and the CPU time that their control group allows.
    OMP_NUM_THREADS and SLURM_CPUS_PER_TASK, if set, limit the number. All ranks get the least of any rank: the others
    would only wait for it, and its node would look slow.
    """
    own = os.sched_getaffinity(0)
    quotas = cpu_quotas()
    everyone = world.local_comm.allgather((own, list(quotas)))
    sharers = Counter(core for cores, _ in everyone for core in cores)
    members = Counter(group for _, groups in everyone for group in groups)
    shares = [sum(1 / sharers[core] for core in own), *(cores / members[group] for group, cores in quotas.items())]
    threads = max(1, int(min(shares) + 1e-9))  # three thirds make one, despite rounding
    limits = [os.environ.get(name, "") for name in ("OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK")]
    least = min([threads, *(int(limit) for limit in limits if limit.isdecimal() and int(limit) > 0)])
    return world.comm.allreduce(least, MPI.MIN)
