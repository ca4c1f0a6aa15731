"""Checkpoints: folders from which training goes on. All ranks write them together; they are complete or not there.

    checkpoints/step-00000100/checkpoint.json            which step, whose model, which files of how many bytes
                              rank-00000.safetensors...  flat ranges of "parameters", "m" and "v" (state_file.py)
                              model.bin                  of a finished run: the parameters as llm.c has them

Ranks write into step-00000100.part. When all of it is on disk, checkpoint.json is written, and then the folder gets its
name. Ranges are numbered along the flat buffer without its pad, so any number of ranks can read what any other number
wrote.
"""

import json
import re
import shutil
import zlib
from dataclasses import asdict
from pathlib import Path

import numpy as np

from gpt2.config import GPT2Config
from gpt2.errors import UserError, file_errors
from gpt2.files import new_file, sync_folder
from gpt2.formats.state_file import StoredRange, damaged, read_index, read_range, write_ranges
from gpt2.formats.stored_numbers import check_config
from gpt2.parameters import Layout, Parameters, no_hook

MARKER = "checkpoint.json"
FORMAT = "gpt2-mpi checkpoint 1"
STATE = ("parameters", "m", "v")
NAME = re.compile(r"step-(\d{8,})", re.ASCII)
CHECKSUM = "crc32"


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def write_part(folder: Path, step: int, rank: int, ranges) -> int:
    """Write a rank's ranges [(array, start, values), ...] into a step's .part folder; returns the file's bytes.

    The folder is made; the one around it exists. OSError: the file cannot be written; then nothing of it stays.
    """
    path = folder / rank_file(rank)
    try:
        folder.mkdir(exist_ok=True)
        return write_ranges(path, _label(step), ranges)
    except OSError:
        path.unlink(missing_ok=True)
        raise


def complete(part: Path, facts: dict, files: dict[str, int]) -> Path:
    """Make a .part folder a checkpoint, once all its files {name: bytes} are on disk; returns the checkpoint's path.

    facts: "step", "count" (parameters without pad), "model" (the GPT2Config's numbers), and what else the reader wants.
    OSError: it cannot be done.
    """
    marker = {"format": FORMAT} | facts | {"files": files}
    marker[CHECKSUM] = _marker_checksum(marker)
    with new_file(part / MARKER) as file:
        file.write(json.dumps(marker, indent=1).encode())
    final = part.with_name(folder_name(facts["step"]))
    if final.exists():
        shutil.rmtree(final)  # the run was here once before, and was resumed from an earlier step
    sync_folder(part)  # before the rename: a folder that has its name is complete
    part.rename(final)
    sync_folder(part.parent)
    return final


def remove_old(folder: Path, keep: int) -> None:
    """Leave only the newest `keep` checkpoints of a folder."""
    for path in newest_first(folder)[keep:]:
        (path / MARKER).unlink(missing_ok=True)  # first, so that what is half removed is no checkpoint
        shutil.rmtree(path)


def remove_parts(folder: Path) -> None:
    """Remove what writers that were interrupted have left."""
    for path in folder.glob("step-*"):
        if path.suffix == ".part" or not (path / MARKER).exists():
            shutil.rmtree(path)


def newest_first(folder: Path) -> list[Path]:
    """The complete checkpoints in a run's checkpoints folder."""
    found = [path for path in folder.glob("step-*") if NAME.fullmatch(path.name) and (path / MARKER).exists()]
    return sorted(found, key=lambda path: int(NAME.fullmatch(path.name)[1]), reverse=True)


class Checkpoint:
    """A complete checkpoint, open to be read; `facts` are what `complete` was given.

    UserError: it is damaged, as far as one sees without the data. Those are checked when they are read.
    """

    def __init__(self, path: Path):
        self.path = path
        self.facts = _read_marker(path / MARKER)
        self.step, self._label = self.facts["step"], _label(self.facts["step"])
        self._ranges = {}
        for name, size in self.facts["files"].items():
            if name.endswith(".safetensors"):
                for stored in read_index(path / name, size):
                    self._ranges.setdefault(stored.array, []).append(stored)
        for array, ranges in self._ranges.items():
            ranges.sort(key=lambda stored: stored.start)
            self._check_cover(array, ranges)
        if missing := set(STATE) - set(self._ranges):
            raise damaged(path / MARKER, f"holds no {', '.join(sorted(missing))}")

    def _check_cover(self, array: str, ranges: list[StoredRange]) -> None:
        stops = [0, *(stored.stop for stored in ranges)]
        gaps = [stored.name for stored, stop in zip(ranges, stops, strict=False) if stored.start != stop]
        if array in STATE and (gaps or stops[-1] != self.facts["count"]):
            raise damaged(self.path / MARKER, f"its ranges of {array} do not make {self.facts['count']} elements")

    def holds(self, array: str) -> bool:
        return array in self._ranges

    def read(self, array: str, start: int, out: np.ndarray) -> None:
        """Fill out (n,) float32 with elements [start, start + n); 0 beyond the last. UserError: damaged, unreadable."""
        out.fill(0.0)
        for stored in self._ranges[array]:
            low, high = max(start, stored.start), min(start + len(out), stored.stop)
            if low < high:
                values = read_range(stored, self._label)
                out[low - start : high - start] = values[low - stored.start : high - stored.start]

    def read_parameters(self, parameters: Parameters, filled=no_hook) -> None:
        """Fill `parameters`, float32 in host memory; filled(start, stop) follows each range of the layout.

        UserError as in `read`, or if the model is another.
        """
        layout = parameters.layout
        check_config(self.path, self.config, layout.config)
        for start, stop in layout.ranges:
            self.read("parameters", start, parameters.flat[start:stop])
            filled(start, stop)

    def check(self, part: int, parts: int) -> None:
        """Read part number `part` of `parts` of it all; UserError where it is not what was written."""
        for stored in sorted((one for ranges in self._ranges.values() for one in ranges), key=str)[part::parts]:
            read_range(stored, self._label)

    @property
    def config(self) -> GPT2Config:
        return GPT2Config(**self.facts["model"])


def read_config(folder: Path) -> GPT2Config:
    """The shape of the model in a checkpoint. UserError: none is there, or it is damaged."""
    return Checkpoint(folder).config


def read_parameters(folder: Path, parameters: Parameters, filled=no_hook) -> None:
    """Fill `parameters`, float32 in host memory, from a checkpoint of the same GPT2Config, as llmc.py does."""
    Checkpoint(folder).read_parameters(parameters, filled)


def model_facts(layout: Layout) -> dict:
    """What a checkpoint's facts say of the model."""
    return {"model": asdict(layout.config), "count": layout.count}


def _read_marker(path: Path) -> dict:
    with file_errors(path, "cannot read it; check the disk"):
        text = path.read_bytes()
    try:
        marker = json.loads(text)
        if marker[CHECKSUM] != _marker_checksum(marker):
            raise ValueError("another checksum")
        if marker["format"] != FORMAT:
            raise UserError(
                f"{path}: a {marker['format']}, expected a {FORMAT}: read it with the release that wrote it"
            )
    except (ValueError, KeyError, TypeError, RecursionError):
        raise damaged(path, "not what was written") from None
    return marker


def _marker_checksum(marker: dict) -> int:
    facts = {name: value for name, value in marker.items() if name != CHECKSUM}
    return zlib.crc32(json.dumps(facts, sort_keys=True).encode())


def _label(step: int) -> str:
    return f"step {step}"
