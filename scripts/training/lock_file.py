"""Taking RUN/lock.json, taking it over and giving it back, so that of any number of processes at most one has it.

Made by an exclusive create, which NFS and Lustre have, too; flock is not needed. Its holder touches it every BEAT_S
seconds. Who finds it watches whether its time changes: no clocks are compared.

Only one may take over a lock, and none a lock that has been taken over already:

- To replace or remove a lock, one first makes, by an exclusive create, lock-RUN.claim, named by that lock's number.
- Behind that one looks again. If lock.json is not the same lock any more, untouched, one gives up the claim and judges
  what is there now. So who judged a lock, but comes late, changes nothing.
- If it is, it stays: all others who would change it need the claim. Now one's own lock takes its place by a rename, so
  there is no moment without a lock in which a third process could make one. Then the claim is removed.
- The holder itself needs the claim to remove its lock at the end.

A claim is there for a millisecond. One that stays belongs to a process that died just then; after OLD_S it is removed.
Whatever happens beyond that (a process stopped just then, a lock removed by hand): a holder looks at the lock before it
writes, and ends when it is not its own any more (run_lock.py). So the last one to have taken it is the only one.
"""

import os
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path

from gpt2.errors import UserError, file_errors
from scripts.training.lock import LOCK, Lock, Seen, is_near, is_running, look, why_gone

BEAT_S = 2.0
OLD_S = 20.0  # without a sign of life
PAUSE_S = 0.1
ATTEMPTS = 1000


class LockFile:
    """A lock that this process holds. `take` makes one."""

    def __init__(self, path: Path, lock: Lock, descriptor: int, new_folders: list[Path]):
        self.path, self.lock, self._descriptor, self._new_folders = path, lock, descriptor, new_folders
        self._inode = os.fstat(descriptor).st_ino

    def beat(self) -> bool:
        """Touch it; whether it still is this process's."""
        with suppress(OSError):  # a disk that is full or away for a while
            os.utime(self._descriptor)  # the open file: so it is never another one's lock that is touched
        return self._has_own_content()

    def is_own(self) -> bool:
        """Whether it still is this process's. Takes two microseconds: it is, if it is the same file."""
        try:
            if os.stat(self.path, follow_symlinks=False).st_ino == self._inode:
                return True
        except OSError:
            pass
        return self._has_own_content()  # some file systems in user space number their files anew

    def _has_own_content(self) -> bool:
        try:
            seen = look(self.path)
        except UserError:
            return self.path.parent.is_dir()  # then it is the disk's fault, and no sign of anybody else
        return seen is not None and seen.lock == self.lock

    def release(self) -> None:
        """Remove it, if it still is this process's; and folders made for it, if nothing else has come into them."""
        with suppress(OSError, UserError):
            claim = _claim_of(self.path, self.lock.run)
            os.close(os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY))  # there already: somebody is taking it over
            try:
                if self.is_own():
                    self.path.unlink()
            finally:
                claim.unlink()
        os.close(self._descriptor)
        with suppress(OSError):
            for folder in self._new_folders:
                folder.rmdir()


def take(folder: Path, own: Lock, anyway: bool, say: Callable[[str], None]) -> LockFile:
    """Make the lock of a run folder, and the folder. UserError: another start holds it, or it cannot be written.

    If it is there already: where its holder has provably ended, or shows no life for OLD_S, or with `anyway`, take it
    over. say: is given a line for people before waiting, and about what was taken over.
    """
    path = folder / LOCK
    new_folders = [each for each in (folder, *folder.parents) if not each.exists()]
    for _ in range(ATTEMPTS):
        with file_errors(folder, "choose another --out"):
            folder.mkdir(parents=True, exist_ok=True)
        # Another process may have made the folder for its lock, and removed both meanwhile.
        with file_errors(path, "choose another --out"), suppress(FileNotFoundError):
            try:
                descriptor = _create(path, own)
            except FileExistsError:
                descriptor = _take_over(path, own, anyway, say)
            if descriptor is not None:
                _remove_claims(path, own)
                return LockFile(path, own, descriptor, new_folders)
    raise UserError(f"{path}: others make and remove it all the time: choose another --out")


def _create(path: Path, own: Lock) -> int:
    """The open file of a new lock. OSError."""
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644)
    try:
        os.write(descriptor, own.content())
        os.close(os.dup(descriptor))  # when a descriptor is closed, NFS brings it to the server
    except OSError:
        path.unlink(missing_ok=True)
        os.close(descriptor)
        raise
    return descriptor


def _take_over(path: Path, own: Lock, anyway: bool, say) -> int | None:
    """The open file of the lock that has taken another's place; None if that one has changed. UserError: it lives."""
    seen = look(path)
    if seen is None:
        return None
    if anyway:
        # A holder that lives finds it out before it writes anything more, and ends.
        why = "--take-over says so; if it still runs, it ends now"
    else:
        why = seen.lock and why_gone(seen.lock, own)
        if why is None:
            seen = _unmoved(path, seen, own, say)
            why = f"it showed no life for {OLD_S:g} s"
    descriptor = _replace(path, seen, own) if seen else None
    if descriptor is not None:
        say(f"{path}: taken over from {_holder(seen)}: {why}")
    return descriptor


def _unmoved(path: Path, seen: Seen, own: Lock, say) -> Seen | None:
    """Watch a lock for OLD_S; None if it has become another one. UserError: its holder lives."""
    if seen.lock and is_near(seen.lock, own) and is_running(seen.lock):
        raise _held(path, seen)
    if seen.lock:
        say(f"{path}: held by {_holder(seen)}; watching for up to {OLD_S:g} s whether it lives")
    begun = time.monotonic()
    while time.monotonic() - begun < OLD_S:
        time.sleep(PAUSE_S)
        now = look(path)
        if not seen.is_same(now):
            return None
        if now != seen:
            raise _held(path, seen)
    return seen


def _replace(path: Path, seen: Seen, own: Lock) -> int | None:
    """Put the own lock in the place of the one seen; None if that is not there any more, or was touched since."""
    with _claimed(path, seen) as is_claimed:
        if not is_claimed or look(path) != seen:
            return None
        new = path.with_name(f"lock-{own.run}.new")
        descriptor = _create(new, own)
        try:
            new.rename(path)
        except OSError:
            new.unlink(missing_ok=True)
            os.close(descriptor)
            raise
        return descriptor


@contextmanager
def _claimed(path: Path, seen: Seen):
    """Whether this process has the right to change the lock seen. It has not if the lock has changed."""
    claim, begun = _claim_of(path, seen.name), time.monotonic()
    while True:
        try:
            os.close(os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            break
        except FileExistsError:
            if not seen.is_same(look(path)):
                yield False
                return
            if time.monotonic() - begun > OLD_S:
                claim.unlink(missing_ok=True)
            time.sleep(PAUSE_S)
    try:
        yield True
    finally:
        claim.unlink(missing_ok=True)


def _claim_of(path: Path, name: str) -> Path:
    return path.with_name(f"lock-{name}.claim")


def _remove_claims(path: Path, own: Lock) -> None:
    """What processes that died while they took the lock over have left. No such claim means anything any more."""
    for pattern in ("lock-*.claim", "lock-*.new"):
        for left in path.parent.glob(pattern):
            if own.run not in left.name:
                left.unlink(missing_ok=True)


def _holder(seen: Seen) -> str:
    return str(seen.lock) if seen.lock else "a process whose lock is damaged"


def _held(path: Path, seen: Seen) -> UserError:
    return UserError(
        f"{path}: the run is being trained by {_holder(seen)}: end that one, choose another --out, or take the run "
        "over (--take-over)"
    )
