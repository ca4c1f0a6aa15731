"""Checkpoints: folders from which training goes on. All ranks write them together; they are complete or not there.

    checkpoints/step-00000100/checkpoint.json            which step, whose model, which files of how many bytes
                              rank-00000.safetensors...  flat ranges of "parameters", "m" and "v"
                              model.bin                  of a finished run: the parameters as llm.c has them

Ranks write into step-00000100.part. When all of it is on disk, checkpoint.json is written, and then the folder gets its
name. Ranges are numbered along the flat buffer without its pad, so any number of ranks can read what any other number
wrote.

A rank's file is safetensors (safetensors.py), so other programs can look into it; its metadata hold the checksums:

    {"run": "the number of the start of the run that wrote it", "m[0:1048576]": "crc32 of step, name and data", ...}

A range is named ARRAY[START:STOP], in elements of the whole array. No range is longer than LONGEST, so that a reader of
a part reads and checks little more than it needs. The checksum also shows when a range was moved to another place, or a
file to another checkpoint. The number of the run, which checkpoint.json has, too, shows when two runs have written into
one folder. Checkpoints of earlier versions have none.

Only folders of exactly these names are ever removed, and nothing through a symbolic link.
"""

import json
import os
import re
import shutil
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from gpt2.config import GPT2Config
from gpt2.errors import UserError, file_errors
from gpt2.files import new_file, read_bytes, sync_folder
from gpt2.formats.safetensors import StoredTensor, make_header, read_header
from gpt2.formats.stored_numbers import check_config
from gpt2.parameters import Layout, Parameters, first_not_finite, no_hook

MARKER = "checkpoint.json"
FORMAT = "gpt2-mpi checkpoint 1"
STATE = ("parameters", "m", "v")
NAME = re.compile(r"step-(\d{8,})(\.part)?", re.ASCII)
FILE = re.compile(r"checkpoint\.json|rank-\d{5,}\.safetensors|model\.bin|\..*\.tmp", re.ASCII)
RUN = "run"
CHECKSUM = "crc32"
LONGEST = 1 << 20  # elements of a range: 4 MiB
RANGE = re.compile(r"(\w+)\[(0|[1-9]\d{0,15}):([1-9]\d{0,15})\]", re.ASCII)
RANGE_CHECKSUM = re.compile(r"\d{1,10}", re.ASCII)


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def write_part(folder: Path, step: int, rank: int, ranges, run: str | None = None) -> int:
    """Write a rank's ranges [(array, start, values (n,) float32), ...] into a step's .part folder.

    run: the number of the run, which the facts for `complete` hold, too. Returns the file's bytes when it is on disk.
    The folder is made; the one around it exists. OSError: the file cannot be written; then nothing of it stays.
    """
    pieces = {
        f"{array}[{start + low}:{start + low + len(values[low : low + LONGEST])}]": values[low : low + LONGEST]
        for array, start, values in ranges
        for low in range(0, len(values), LONGEST)
    }
    checksums = {name: str(_range_checksum(step, name, values)) for name, values in pieces.items()}
    metadata = {RUN: run} | checksums if run else checksums
    header, _ = make_header({name: values.shape for name, values in pieces.items()}, "float32", metadata)
    path = folder / rank_file(rank)
    try:
        folder.mkdir(exist_ok=True)
        with new_file(path) as file:
            file.write(header)
            for values in pieces.values():
                file.write(values)
            return file.tell()
    except OSError:
        path.unlink(missing_ok=True)
        raise


def check_parts(part: Path, facts: dict, files: dict[str, int]) -> None:
    """UserError unless a .part folder has these files {name: bytes}, all by the run of these facts."""
    for name, size in files.items():
        if name.endswith(".safetensors"):
            _read_index(part / name, size, facts.get(RUN))
        else:
            _check_size(part / name, size)


def not_finite(config: GPT2Config, ranges) -> str | None:
    """Says what is no number in ranges like write_part's, in which array and tensor; None if all are numbers."""
    for array, start, values in ranges:
        place = first_not_finite(values)
        if place is not None:
            return f"{values[place]} in {array} of {Layout(config).tensor_at(start + place)}"
    return None


def complete(part: Path, facts: dict, files: dict[str, int], check: Callable[[], None] = lambda: None) -> Path:
    """Make a .part folder a checkpoint, once all its files {name: bytes} are on disk; returns the checkpoint's path.

    facts: "step", "count" (parameters without pad), "model" (the GPT2Config's numbers), and what else the reader wants.
    check: called when the disk has it all, before anything else than the part is touched; what it raises comes through.
    OSError: it cannot be done. ValueError: a number in the facts is not finite, and a run could not go on with it.
    """
    marker = {"format": FORMAT} | facts | {"files": files}
    marker[CHECKSUM] = _marker_checksum(marker)
    with new_file(part / MARKER) as file:
        file.write(json.dumps(marker, indent=1, allow_nan=False).encode())
    final = part.with_name(folder_name(facts["step"]))
    sync_folder(part)  # before the rename: a folder that has its name is complete
    check()
    if final.is_symlink():
        final.unlink()  # what it leads to stays
    elif final.exists():
        shutil.rmtree(final)  # the run was here once before, and was resumed from an earlier step
    part.rename(final)
    sync_folder(part.parent)
    return final


def remove_old(folder: Path, keep: int) -> None:
    """Leave only the newest `keep` checkpoints of a folder. Those elsewhere, behind symbolic links, do not count."""
    for path in [path for path in newest_first(folder) if not path.is_symlink()][keep:]:
        (path / MARKER).unlink(missing_ok=True)  # first, so that what is half removed is no checkpoint
        shutil.rmtree(path)


def remove_parts(folder: Path) -> None:
    """Remove what writers that were interrupted have left."""
    for path in folder.glob("step-*"):
        if _step_of(path) is None or path.is_symlink() or not path.is_dir():
            continue
        # One that has its name, but no marker, is half removed: `remove_old` was interrupted.
        is_left = not (path / MARKER).exists() and all(FILE.fullmatch(file.name) for file in path.iterdir())
        if path.suffix == ".part" or is_left:
            shutil.rmtree(path)


def newest_first(folder: Path) -> list[Path]:
    """The complete checkpoints in a run's checkpoints folder."""
    found = [path for path in folder.glob("step-*") if not path.suffix and (path / MARKER).is_file()]
    return sorted((path for path in found if _step_of(path) is not None), key=_step_of, reverse=True)


def _step_of(path: Path) -> int | None:
    """The step of a folder that has the name of a checkpoint, complete or not; None if it has another name."""
    named = NAME.fullmatch(path.name)
    if named is None or folder_name(int(named[1])) != f"step-{named[1]}":  # step-000000010 would be a second step 10
        return None
    return int(named[1])


@dataclass(frozen=True)
class StoredRange:
    """Elements [start, stop) of `array`: the tensor that holds them, and the checksum that they must have."""

    array: str
    start: int
    stop: int
    tensor: StoredTensor
    checksum: int


class Checkpoint:
    """A complete checkpoint, open to be read; `facts` are what `complete` was given.

    UserError: it is damaged, as far as one sees without the data. Those are checked when they are read.
    """

    def __init__(self, path: Path):
        self.path = path
        self.facts = _read_marker(path / MARKER)
        self.step = self.facts["step"]
        self._ranges = {}
        for name, size in self.facts["files"].items():
            if name.endswith(".safetensors"):
                for stored in _read_index(path / name, size, self.facts.get(RUN)):
                    self._ranges.setdefault(stored.array, []).append(stored)
        count = self.facts["count"]
        for array in STATE:
            ends = sorted((stored.start, stored.stop) for stored in self._ranges.get(array, []))
            if [*(start for start, _ in ends), count] != [0, *(stop for _, stop in ends)]:
                raise _damaged(path / MARKER, f"its ranges of {array} do not make {count} elements")

    def holds(self, array: str) -> bool:
        return array in self._ranges

    def read(self, array: str, start: int, out: np.ndarray) -> None:
        """Fill out (n,) float32 with elements [start, start + n); 0 beyond the last. UserError: damaged, unreadable."""
        out.fill(0.0)
        for stored in self._ranges[array]:
            low, high = max(start, stored.start), min(start + len(out), stored.stop)
            if low < high:
                values = self._read_range(stored)
                out[low - start : high - start] = values[low - stored.start : high - stored.start]

    def read_parameters(self, parameters: Parameters, filled=no_hook) -> None:
        """Fill `parameters`, as weights.py says. UserError as in `read`, or if the model is another."""
        layout = parameters.layout
        check_config(self.path, self.config, layout.config)
        for start, stop in layout.ranges:
            self.read("parameters", start, parameters.flat[start:stop])
            filled(start, stop)

    def check(self, part: int, parts: int) -> None:
        """Read part number `part` of `parts` of it all; UserError where it is not what was written, or no run can go on
        from it, as what is in STATE is nan or infinite."""
        for stored in sorted((one for ranges in self._ranges.values() for one in ranges), key=str)[part::parts]:
            values = self._read_range(stored)
            if stored.array in STATE and (found := not_finite(self.config, [(stored.array, stored.start, values)])):
                raise UserError(f"{self.path}: holds {found}, expected finite numbers: use another checkpoint")

    def _read_range(self, stored: StoredRange) -> np.ndarray:
        count, tensor = stored.stop - stored.start, stored.tensor
        with file_errors(tensor.path, "cannot read it; check the disk"):
            values = np.fromfile(tensor.path, "<f4", count, offset=tensor.offset)
        if len(values) != count or _range_checksum(self.step, tensor.name, values) != stored.checksum:
            raise _damaged(tensor.path, f"{tensor.name} does not have its checksum")
        return values

    @property
    def config(self) -> GPT2Config:
        return GPT2Config(**self.facts["model"])


def read_config(folder: Path) -> GPT2Config:
    """The shape of the model in a checkpoint. UserError: none is there, or it is damaged."""
    return Checkpoint(folder).config


def read_parameters(folder: Path, parameters: Parameters, filled=no_hook) -> None:
    """Fill `parameters` from a checkpoint, as weights.py says."""
    Checkpoint(folder).read_parameters(parameters, filled)


def model_facts(layout: Layout) -> dict:
    """What a checkpoint's facts say of the model."""
    return {"model": asdict(layout.config), "count": layout.count}


def _read_marker(path: Path) -> dict:
    with file_errors(path, "cannot read it; check the disk"):
        text = read_bytes(path)
    try:
        marker = json.loads(text)
        if marker[CHECKSUM] != _marker_checksum(marker):
            raise ValueError("another checksum")
        if marker["format"] != FORMAT:
            raise UserError(
                f"{path}: a {marker['format']}, expected a {FORMAT}: read it with the release that wrote it"
            )
    except (ValueError, KeyError, TypeError, RecursionError):
        raise _damaged(path, "not what was written") from None
    return marker


def _marker_checksum(marker: dict) -> int:
    facts = {name: value for name, value in marker.items() if name != CHECKSUM}
    return zlib.crc32(json.dumps(facts, sort_keys=True).encode())


def _check_size(path: Path, size: int) -> None:
    with file_errors(path, "cannot read it; check the disk"):
        found = os.stat(path).st_size
    if found != size:
        raise _damaged(path, f"{found} bytes, expected {size}")


def _read_index(path: Path, size: int, run: str | None) -> list[StoredRange]:
    """The ranges of a rank's file. UserError: it has not `size` bytes, is no such file, or of another run."""
    _check_size(path, size)
    tensors, checksums = read_header(path)
    if checksums.get(RUN) != run:
        raise _damaged(path, f"written by the run {checksums.get(RUN, 'of an earlier version')}, expected {run}")
    return [_range(tensor, checksums.get(name, "")) for name, tensor in tensors.items()]


def _range(tensor: StoredTensor, checksum: str) -> StoredRange:
    named = RANGE.fullmatch(tensor.name)
    start, stop = (int(named[2]), int(named[3])) if named else (0, 0)
    fits = 0 < stop - start <= LONGEST and tensor.shape == (stop - start,) and tensor.dtype == "F32"
    if not fits or not RANGE_CHECKSUM.fullmatch(checksum):
        raise _damaged(tensor.path, f"{tensor.name!r} is no range with its checksum")
    return StoredRange(named[1], start, stop, tensor, int(checksum))


def _range_checksum(step: int, name: str, values) -> int:
    return zlib.crc32(values, zlib.crc32(f"step {step} {name}".encode()))


def _damaged(path: Path, what: str) -> UserError:
    return UserError(f"{path}: {what}: the checkpoint is damaged, use another")
