"""Check that all nodes see the same files. A node-local copy under the same path may differ or be stale."""

import functools
import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from dist.console import say
from dist.world import World, end_with_one_line
from gpt2.errors import UserError
from gpt2.files import user_cache_folder
from gpt2.formats import weights

SAMPLE_BYTES = 4096
SAMPLES = 512  # over all files; takes a millisecond if they are in the page cache
FEWEST_SAMPLES = 4  # of each file
NAMED_AT_MOST = 3


def made_for_all(world: World, make: Callable[[Path], tuple], beside: Path) -> list[str]:
    """Let rank 0 make files where all ranks see them, and return their paths. Collective.

    make(folder=..., remark=...) makes the files. remark(line) prints a line, only once even if the files are made
    twice. The files go into the user's cache folder, which all runs share. If that is full, or other nodes do not see
    it, the files go into `beside`. The job ends if make raises UserError there.
    """
    remark = functools.cache(partial(say, on_stderr=True))
    paths = None
    if world.rank == 0 and (cache := user_cache_folder()):
        with suppress(UserError):  # a mistake of the user is raised again below, a problem with this folder is not
            paths = [str(path) for path in make(folder=cache / "tokens", remark=remark)]
    paths = world.comm.bcast(paths)
    if paths and all(world.comm.allgather(all(map(os.path.exists, paths)))):
        return paths
    with world.together(UserError):
        if world.rank == 0:
            paths = [str(path) for path in make(folder=beside, remark=remark)]
    return world.comm.bcast(paths)


def found_for_all(world: World, path: Path) -> Path:
    """Find the weights at `path`; in a run folder, the newest checkpoint that rank 0 sees. Collective.

    A run that still trains writes more checkpoints, so ranks that search on their own might find different ones.
    """
    place = None
    with world.together(UserError):
        if world.rank == 0:
            _, place = weights.find(path)
    return world.comm.bcast(place)


def check_same_files(world: World, paths: list[Path]) -> None:
    """End the job with one line if these files differ between a node and rank 0's node. Collective.

    paths: existing files that this rank found. The first rank of each node compares their `fingerprints`.
    """
    if world.node_count == 1:
        return
    found = problem = None
    if world.local_rank == 0:
        try:
            found = fingerprints(paths)
        except OSError as error:
            problem = f"{error.filename}: {error.strerror}"
    expected = world.comm.bcast(found)
    if found is not None and expected is not None:
        problem = difference(found, expected)
    problems = [(rank, text) for rank, text in enumerate(world.comm.allgather(problem)) if text]
    if problems:
        hosts = [world.places[rank]["host"] for rank, _ in problems]
        more = f" and {len(hosts) - NAMED_AT_MOST} more" if len(hosts) > NAMED_AT_MOST else ""
        end_with_one_line(
            world.comm,
            f"{problems[0][1]} on {', '.join(hosts[:NAMED_AT_MOST])}{more}, expected the same as on "
            f"{world.places[0]['host']}, where rank 0 is: copy it there again, or use a disk that all nodes share",
        )


def in_both(paths: list[Path], others: list[Path]) -> list[str]:
    """Return the `paths` whose content also occurs in `others`, under any name. Raise OSError."""
    found = fingerprints([*paths, *others])
    known = {tuple(content) for _, *content in found[len(paths) :]}
    return [path for path, *content in found[: len(paths)] if tuple(content) in known]


def difference(found: list[tuple], expected: list[tuple]) -> str | None:
    """Describe the first file that differs, or return None. Both lists hold (path, size, hash) of each file."""
    paths = {path for path, *_ in found}, {path for path, *_ in expected}
    for path in sorted(paths[0] ^ paths[1]):  # first: the number of files decides how much of each is read
        return f"{path}: {'one file more' if path in paths[0] else 'not there'}"
    for (path, size, content), (_, expected_size, expected_content) in zip(found, expected, strict=True):
        if size != expected_size:
            return f"{path}: {size} bytes, not {expected_size},"
        if content != expected_content:
            return f"{path}: other content of the same size"
    return None


def fingerprints(paths: list[Path]) -> list[tuple[str, int, str]]:
    """Return (path, size in bytes, hash in hex) of each file. Raise OSError.

    The hash covers blocks that are spread evenly over the file, including its first and last bytes. A single file of up
    to 2 MiB is read completely. In larger files, differences between the blocks are not seen.
    """
    samples = max(FEWEST_SAMPLES, SAMPLES // max(1, len(paths)))
    found = []
    for path in paths:
        digest = hashlib.blake2b(digest_size=8)
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            count = min(samples, max(2, -(-size // SAMPLE_BYTES)))
            last = max(0, size - SAMPLE_BYTES)
            for number in range(count):
                digest.update(os.pread(file.fileno(), SAMPLE_BYTES, last * number // (count - 1)))
        found.append((str(path), size, digest.hexdigest()))
    return found
