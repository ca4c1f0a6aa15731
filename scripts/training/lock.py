"""RUN/lock.json: which start of a run holds the run folder, and whether that one is provably gone.

    {"format": "gpt2-mpi lock 1", "run": "9f...", "host": "node1", "pid": 4711, "born": 123456, "boot": "...",
     "namespace": "pid:[4026531836]", "cluster": "", "job": "", "supervisor": "",
     "started": "2026-01-31T12:00:00+0000"}

`run` is a number unlike that of any other start. `born`, the clock ticks from the machine's boot to the process's
start, tells the process from a later one of the same pid; `boot` and `namespace` say among which processes it counts.
`cluster` and `job` are SLURM's. `supervisor` is the number of the --restarts that made this start, or empty: one start
of it takes over from another. The file's time of change is the holder's heartbeat (lock_file.py).
"""

import json
import os
import re
import socket
import stat
import subprocess
import time
import uuid
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from gpt2.errors import UserError, file_errors

LOCK = "lock.json"
FORMAT = "gpt2-mpi lock 1"
RUN = re.compile(r"[0-9a-f]{32}", re.ASCII)
LONGEST = 1 << 14  # bytes of the file, and
LONGEST_WORD = 200  # characters of a text in it: it is printed in one line
LARGEST_PID = 1 << 31
SQUEUE_LIMIT_S = 5
ENDED = (
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT",
)  # fmt: skip
ZOMBIE = ("Z", "X")  # states of a process that has ended


@dataclass(frozen=True)
class Lock:
    """One start of a run; the module says what its fields are."""

    run: str
    host: str
    pid: int
    born: int
    boot: str
    namespace: str
    cluster: str
    job: str
    supervisor: str
    started: str

    def __str__(self) -> str:
        job = f", SLURM job {self.job}" if self.job else ""
        return f"process {self.pid} on {self.host}{job}, started {self.started}"

    def content(self) -> bytes:
        """What the file holds."""
        return f"{json.dumps({'format': FORMAT} | asdict(self), indent=1)}\n".encode()


@dataclass(frozen=True)
class Seen:
    """A lock file at one look. lock: None where the content is no lock: damaged, or still being written. Two looks are
    equal if it is the same file, and nobody has written or touched it between them."""

    lock: Lock | None
    inode: int
    moved_ns: int

    @property
    def name(self) -> str:
        """Of this one lock."""
        return self.lock.run if self.lock else f"inode-{self.inode}"

    def is_same(self, other: "Seen | None") -> bool:
        """Whether it is the same lock, touched or not."""
        return other is not None and (self.inode, self.lock) == (other.inode, other.lock)


def own_lock(supervisor: str = "") -> Lock:
    """The lock of this process, with a new number of a run. supervisor: the field of that name."""
    return Lock(
        run=uuid.uuid4().hex,
        host=_word(socket.gethostname()),
        pid=os.getpid(),
        born=_process(os.getpid())[1],
        boot=_boot(),
        namespace=_namespace(),
        cluster=_word(os.environ.get("SLURM_CLUSTER_NAME", "")),
        job=_word(os.environ.get("SLURM_JOB_ID", "")),
        supervisor=_word(supervisor),
        started=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    )


def read_lock(path: Path) -> Lock:
    """The lock that a file holds. UserError: there is none, or it is damaged."""
    seen = look(path)
    if seen is None or seen.lock is None:
        what = "no such file" if seen is None else "not what was written"
        raise UserError(f"{path}: {what}, expected the {LOCK} of a run that is being trained")
    return seen.lock


def look(path: Path) -> Seen | None:
    """The lock file as it is now, None if there is none. UserError: something else has its name, or it is unreadable.

    It is opened anew each time: only then does NFS ask the server whether the file has changed.
    """
    with file_errors(path, "cannot read it; remove it if no run is being trained there, or choose another --out"):
        try:
            # O_NONBLOCK: a FIFO would wait for a writer. O_NOFOLLOW: nobody makes a lock that is a link.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise UserError(f"{path}: not a file, expected the lock of a run: remove it, or choose another --out")
            return Seen(_parsed(os.read(descriptor, LONGEST)), status.st_ino, status.st_mtime_ns)
        finally:
            os.close(descriptor)


def why_gone(lock: Lock, own: Lock) -> str | None:
    """What proves that a lock's holder has ended, or that its own supervisor has given it up; None if nothing does."""
    if lock.supervisor == own.supervisor != "":
        return "it is an earlier start of the same --restarts; if it still runs, it ends now"
    if is_near(lock, own):
        return None if is_running(lock) else "it has ended"
    # Only from inside the same SLURM: another one counts its jobs by the same numbers.
    if lock.job and lock.job != own.job and lock.cluster == own.cluster != "":
        state = _slurm_state(lock.job)
        return f"SLURM says of its job: {state}" if state in ENDED else None
    return None


def is_near(lock: Lock, own: Lock) -> bool:
    """Whether a lock's process is, or was, one of those that this process can see."""
    return own.boot != "" != own.namespace and (lock.boot, lock.namespace) == (own.boot, own.namespace)


def is_running(lock: Lock) -> bool:
    """Whether the process of a lock that is near runs: it or a later one of its pid, the start tells."""
    state, born = _process(lock.pid)
    if not state:
        return _exists(lock.pid)
    return state not in ZOMBIE and born == lock.born


def _parsed(content: bytes) -> Lock | None:
    """None: it is no lock."""
    try:
        facts = {"supervisor": ""} | json.loads(content)  # locks of before do not say it
        lock = Lock(**{each.name: facts[each.name] for each in fields(Lock)})
        is_lock = facts["format"] == FORMAT
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    texts = [getattr(lock, each.name) for each in fields(Lock) if each.type is str]
    numbers = [lock.pid, lock.born]
    is_lock &= all(type(text) is str and text == _word(text) for text in texts)
    is_lock &= all(type(number) is int and number >= 0 for number in numbers)
    return lock if is_lock and 0 < lock.pid < LARGEST_PID and RUN.fullmatch(lock.run) else None


def _word(text: str) -> str:
    """The text, or nothing if it would not do in the middle of a printed line."""
    return text if text.isprintable() and len(text) <= LONGEST_WORD else ""


def _process(pid: int) -> tuple[str, int]:
    """(state, start in clock ticks) of a process, proc(5); ("", 0) if there is none."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return words[0], int(words[19])
    except (OSError, IndexError, ValueError):
        return "", 0


def _exists(pid: int) -> bool:
    """Whether there is such a process: /proc mounted with hidepid=2 does not show those of other users."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _namespace() -> str:
    """Empty where /proc shows another namespace's processes: their numbers say nothing of the lock's."""
    try:
        return os.readlink("/proc/self/ns/pid") if os.readlink("/proc/self") == str(os.getpid()) else ""
    except OSError:
        return ""


def _slurm_state(job: str) -> str:
    """A job's state in SLURM's words; "" if it cannot be had."""
    command = ["squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SQUEUE_LIMIT_S)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
