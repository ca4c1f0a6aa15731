"""The ranks of the job, the nodes they sit on, and speaking with one voice."""

import atexit
import os
import signal
import socket
import sys
from contextlib import contextmanager
from dataclasses import dataclass

from dist.abort import USER_MISTAKE, install_abort_hook
from dist.mpi import MPI


@dataclass(frozen=True)
class World:
    """One rank's place: `rank` of `size`; `local_rank` among the `local_size` ranks of `node` (0 .. node_count-1).

    Nodes are numbered in the order of their first ranks, the leaders. `places` says it of every rank:
    [{"rank", "node", "host", "local_rank"}, ...].
    """

    comm: "MPI.Intracomm"
    local_comm: "MPI.Intracomm"
    rank: int
    size: int
    node: int
    node_count: int
    local_rank: int
    local_size: int
    host: str
    places: list

    def print(self, *text) -> None:
        """print on rank 0 only, at once."""
        if self.rank == 0:
            print(*text, flush=True)

    @contextmanager
    def together(self, mistake: type[Exception]):
        """Local work that may meet a user's mistake on some ranks: then the job ends on all of them with one line.

        Every rank enters it, and nothing inside may wait for another rank. Other exceptions pass through.
        """
        message = None
        try:
            yield
        except mistake as error:
            message = str(error)
        found = [(rank, text) for rank, text in enumerate(self.comm.allgather(message)) if text is not None]
        if found:
            rank, text = found[0]
            where = f" (rank {rank} on {self.places[rank]['host']})" if rank else ""
            end_with_one_line(self.comm, f"{text}{where}")


def end_with_one_line(comm, text: str):
    """Every rank calls this: rank 0 prints the line, all leave with the exit code of a user's mistake."""
    if comm.rank == 0:
        print(f"error: {text}", file=sys.stderr, flush=True)
    raise SystemExit(USER_MISTAKE)


def library_name() -> str:
    """The MPI library and its version, in one line."""
    return " ".join(MPI.Get_library_version().splitlines()[0].split()).split(", package")[0].replace("Version: ", "")


def start_mpi() -> "MPI.Intracomm":
    """The world's communicator; MPI is initialized if nobody has done it yet. ImportError or RuntimeError without MPI.

    At the end all ranks meet in MPI_Finalize. srun --kill-on-bad-exit sends SIGTERM to those that still are in there
    when the first one has left with an exit code of ours: that code is to count, not the signal.
    """
    if MPI is None:
        from mpi4py import MPI as missing  # noqa: F401  raises again what was wrong
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    atexit.register(signal.signal, signal.SIGTERM, signal.SIG_IGN)
    return MPI.COMM_WORLD


def start_world(expect_ranks: int | None = None, mistakes: tuple[type[Exception], ...] = ()) -> World:
    """Set up the world of this job; from here on an exception on any rank ends it, one of the types in `mistakes` with
    its text alone. Collective.

    A world smaller than SLURM, the launcher or `expect_ranks` meant ends here with the fix.
    """
    comm = start_mpi()
    install_abort_hook(comm, mistakes)
    if problem := lost_ranks(comm.size, expect_ranks, os.environ):
        end_with_one_line(comm, problem)
    return world_of(comm, comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank))


def world_of(comm, local_comm) -> World:
    """The world whose nodes are the local communicators: each holds the ranks that share a memory. Collective."""
    leader = local_comm.bcast(comm.rank)
    everyone = comm.allgather((leader, socket.gethostname(), local_comm.rank))
    leaders = sorted({leader for leader, _, _ in everyone})
    places = [
        {"rank": rank, "node": leaders.index(leader), "host": host, "local_rank": local_rank}
        for rank, (leader, host, local_rank) in enumerate(everyone)
    ]
    own = places[comm.rank]
    return World(
        comm, local_comm, comm.rank, comm.size, own["node"], len(leaders), own["local_rank"], local_comm.size,
        own["host"], places,
    )  # fmt: skip


def lost_ranks(size: int, expect_ranks: int | None, environment) -> str | None:
    """What is wrong with a world of `size`, or None.

    srun without the right --mpi, or the mpirun of another MPI, gives N worlds of size 1 and no error: N separate
    trainings. But the launchers leave the number of ranks they started in the environment.
    """
    if expect_ranks and size != expect_ranks:
        return f"{size} ranks, expected {expect_ranks} (--expect-ranks): check the launch line, mpirun -n or srun -n"
    if size > 1:
        return None
    name = next((name for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE") if name in environment), "SLURM_NTASKS")
    if name == "SLURM_NTASKS" and "SLURM_STEP_ID" not in environment:
        return None  # a batch script's own process, not started by srun
    meant = environment.get(name, "1")
    if not meant.isdigit() or int(meant) <= 1:
        return None
    return (
        f"a world of 1 rank, but the launcher started {meant} ({name}): it and this MPI ({library_name()}) do not know "
        "each other; start with the mpirun of this MPI, or with srun --mpi=pmix (Open MPI) or --mpi=pmi2 (MPICH)"
    )
