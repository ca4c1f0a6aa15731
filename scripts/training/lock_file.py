"""RUN/lock.json: at most one start of a run writes into a run folder (docs/formats.md describes the fields).

The lock is made by an exclusive create, which also works on NFS and Lustre. Its modification time is the holder's
heartbeat. Others watch whether that time changes, so no clocks are compared. To replace or remove the lock, a process
first creates lock.claim, exclusively, and looks again: if the lock has changed, the process gives up the claim. The
claim contains the new lock, and a rename puts it in place. A holder checks its lock before every write (run_lock.py)
and ends if the lock is lost. So whatever else happens, only the last process to take the lock writes.
"""

import json
import os
import socket
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from gpt2.errors import UserError, file_errors
from gpt2.files import regular

LOCK = "lock.json"
CLAIM = "lock.claim"
FORMAT = "gpt2-mpi lock 1"
LONGEST_FILE = 1 << 14
BEAT_S = 2.0
OLD_S = 20.0  # without a heartbeat
PAUSE_S = 0.1
ATTEMPTS = 1000


@dataclass(frozen=True)
class Lock:
    """A lock: the start of a run that holds a folder. Without `run` the file is damaged or not yet written.

    run: a random number that identifies the start. boot: the machine's boot id and pid namespace. If both are ours,
    `pid` and `born` (when the process started, in clock ticks since boot) tell whether the holder runs. job: SLURM job.
    supervisor: identifies the --restarts process that made this start; the next start of that process may take over.
    touched_ns: the file's modification time, 0 for a lock that is not in a file.
    """

    format: str = FORMAT
    run: str = ""
    host: str = ""
    pid: int = 0
    born: int = 0
    boot: str = ""
    job: str = ""
    supervisor: str = ""
    started: str = ""
    touched_ns: int = 0

    def __str__(self) -> str:
        if not self.run:
            return "a process whose lock is damaged"
        job = f", SLURM job {self.job}" if self.job else ""
        return f"process {self.pid} on {self.host}{job}, started {self.started}"

    def content(self) -> bytes:
        """Return the content for the lock file."""
        facts = asdict(self)
        del facts["touched_ns"]
        return f"{json.dumps(facts, indent=1)}\n".encode()


def own_lock(supervisor: str = "") -> Lock:
    """Return a lock for this process, with a new run number."""
    return Lock(
        run=uuid.uuid4().hex,
        host=socket.gethostname(),
        pid=os.getpid(),
        born=_start_of(os.getpid()) or 0,
        boot=_boot(),
        job=os.environ.get("SLURM_JOB_ID", ""),
        supervisor=supervisor,
        started=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    )


def look(path: Path) -> Lock | None:
    """Read the lock file, None if there is none. Raise UserError if it is not a file or cannot be read.

    The file is opened each time: only then does NFS ask the server whether it has changed.
    """
    advice = "cannot read it; remove it if no run is being trained there, or choose another --out"
    with file_errors(path, advice), suppress(FileNotFoundError), open(path, "rb", opener=regular) as file:
        touched_ns = os.fstat(file.fileno()).st_mtime_ns
        with suppress(ValueError, TypeError, RecursionError):
            lock = Lock(**json.loads(file.read(LONGEST_FILE)), touched_ns=touched_ns)
            has_types = all(type(value) is Lock.__annotations__[name] for name, value in asdict(lock).items())
            if has_types and lock.format == FORMAT and lock.pid > 0 and str(lock).isprintable():
                return lock
        return Lock(touched_ns=touched_ns)
    return None


def is_running(lock: Lock) -> bool | None:
    """Return whether the lock's process runs; None if that is unknown here, as on another machine."""
    return _start_of(lock.pid) == lock.born if lock.boot == _boot() != "" else None


def _start_of(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot (see proc(5)); None if it does not run."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return int(words[19]) if words[0] not in ("Z", "X") else None
    except (OSError, IndexError, ValueError):
        return None


def _boot() -> str:
    """Return the boot id and pid namespace; "" if unknown, or if /proc shows the pids of another namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
        return f"{boot} {namespace}" if os.readlink("/proc/self") == str(os.getpid()) else ""
    except OSError:
        return ""


@dataclass(frozen=True)
class LockFile:
    """A lock that this process holds, made by `take`. new_folders: the folders that `take` made, innermost first."""

    path: Path
    lock: Lock
    new_folders: list[Path]

    def is_own(self) -> bool:
        """Return whether this process still holds the lock."""
        try:
            seen = look(self.path)
        except UserError:
            return self.path.parent.is_dir()  # a disk error says nothing about another holder
        return seen is not None and seen.run == self.lock.run

    def release(self) -> None:
        """Remove the lock if this process holds it, and the folders made for it if they are still empty."""
        with suppress(OSError, UserError):
            seen = look(self.path)
            if seen and seen.run == self.lock.run and _claim(self.path, seen, b""):
                self.path.unlink()
                self.path.with_name(CLAIM).unlink()
        with suppress(OSError):
            for folder in self.new_folders:
                folder.rmdir()


def take(folder: Path, own: Lock, anyway: bool, say: Callable[[str], None]) -> LockFile:
    """Make a run folder and its lock. Raise UserError if another start holds it or it cannot be written.

    Take over an existing lock if its holder has ended, shows no heartbeat for OLD_S seconds or belongs to the same
    supervisor, or if `anyway` (--take-over). say: prints a line before waiting and after taking over.
    """
    path = folder / LOCK
    new_folders = [each for each in (folder, *folder.parents) if not each.exists()]
    for _ in range(ATTEMPTS):
        # Other processes may make and remove the folder and its lock at any time.
        with file_errors(path, "choose another --out"), suppress(FileNotFoundError):
            folder.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                _create(path, own.content())
                return LockFile(path, own, new_folders)
            if _take_over(path, own, anyway, say):
                return LockFile(path, own, new_folders)
    raise UserError(f"{path}: other processes keep making and removing it: choose another --out")


def _create(path: Path, content: bytes) -> None:
    """Write a new file. Raise OSError if it exists or writing fails."""
    file = open(path, "xb")  # noqa: SIM115
    try:
        with file:  # closing it makes NFS send the content to the server
            file.write(content)
    except OSError:
        path.unlink(missing_ok=True)
        raise


def _take_over(path: Path, own: Lock, anyway: bool, say) -> bool:
    """Replace the lock if its holder has ended; False if the lock changes first. UserError: the holder lives."""
    seen = look(path)
    if seen is None:
        return False
    if anyway:
        why = "--take-over says so; if it still runs, it ends now"
    elif seen.supervisor == own.supervisor != "":
        why = "it is an earlier start of the same --restarts; if it still runs, it ends now"
    else:
        why = _why_gone(path, seen, say)
    if not _claim(path, seen, own.content()):
        return False
    path.with_name(CLAIM).rename(path)
    say(f"{path}: taken over from {seen}: {why}")
    return True


def _why_gone(path: Path, seen: Lock, say) -> str:
    """Return why the holder of a lock counts as ended. Raise UserError if it lives."""
    running = is_running(seen)
    if running is False:
        return "it has ended"
    if running is None:
        say(f"{path}: held by {seen}; watching for up to {OLD_S:g} s whether it lives")
        end = time.monotonic() + OLD_S
        now = seen
        while now == seen and time.monotonic() < end:
            time.sleep(PAUSE_S)
            now = look(path)
        running = now is not None and now != seen and now.run == seen.run
    if running:
        raise UserError(
            f"{path}: the run is being trained by {seen}: end that one, choose another --out, or take the run over "
            "(--take-over)"
        )
    return f"it showed no life for {OLD_S:g} s"


def _claim(path: Path, seen: Lock, content: bytes) -> bool:
    """Write lock.claim, and with it get the right to change the lock `seen`. Return False if the lock changes first."""
    claim = path.with_name(CLAIM)
    end = time.monotonic() + OLD_S
    while look(path) == seen:
        try:
            _create(claim, content)
        except FileExistsError:
            if time.monotonic() > end:
                claim.unlink(missing_ok=True)  # left by a process that died
            time.sleep(PAUSE_S)
            continue
        if look(path) == seen:
            return True
        claim.unlink()
    return False
