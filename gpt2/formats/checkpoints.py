"""Checkpoints: folders from which training goes on. All ranks write them together; they are complete or not there.

    checkpoints/step-00000100/checkpoint.json            which step, whose model, which files of how many bytes
                              rank-00000.safetensors...  flat ranges of "parameters", "m" and "v"
                              model.bin                  of a finished run: the parameters as llm.c has them

Ranks write into step-00000100.part. When all of it is on disk, checkpoint.json is written, and then the folder gets its
name. What a rank's file holds: checkpoint_files.py. Ranges are numbered along the flat buffer without its pad, so any
number of ranks can read what any other number wrote.

Where several ranks share one model (format 2), ranges are numbered along the flat buffer of a shard, and the names of
its arrays begin with its stage and part, as s1t0_m. checkpoint.json says how the model was cut. It is read in any other
shards, too, or as a whole (boxes.py).

Only folders of exactly these names are ever removed, and nothing through a symbolic link.
"""

import json
import re
import shutil
import zlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import lru_cache, partial
from operator import attrgetter
from pathlib import Path

import numpy as np

from gpt2.boxes import read_range
from gpt2.config import GPT2Config
from gpt2.errors import UserError, file_errors
from gpt2.files import new_file, read_bytes, sync_folder
from gpt2.formats import checkpoint_files
from gpt2.formats.checkpoint_files import RUN, StoredRange, damaged, file_checksum, read_index
from gpt2.formats.stored_numbers import check_config
from gpt2.model_shards import model_shards
from gpt2.parameters import Layout, Parameters, first_not_finite, no_hook

MARKER, MODEL = "checkpoint.json", "model.bin"
WHOLE, IN_PIECES = "gpt2-mpi checkpoint 1", "gpt2-mpi checkpoint 2"
CUT = "cut"
STATE = ("parameters", "m", "v")
NAME = re.compile(r"step-(\d{8,})(\.part)?", re.ASCII)
FILE = re.compile(r"checkpoint\.json|rank-\d{5,}\.safetensors|model\.bin|\..*\.tmp", re.ASCII)
CHECKSUM, MODEL_CHECKSUM = "crc32", "model_crc32"


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def not_finite(layout: Layout, ranges) -> str | None:
    """Says what is no number in ranges like write_part's, in which array and tensor; None if all are numbers."""
    for array, start, values in ranges:
        place = first_not_finite(values)
        if place is not None:
            return f"{values[place]} in {array} of {layout.tensor_at(start + place)}"
    return None


def complete(part: Path, facts: dict, files: dict[str, int], check: Callable[[], None] = lambda: None) -> Path:
    """Make a .part folder a checkpoint, once all its files {name: bytes} are on disk; returns the checkpoint's path.

    facts: "step", those of model_facts and cut_facts, and what else the reader wants.
    check: called when the disk has it all, before anything else than the part is touched; what it raises comes through.
    OSError: it cannot be done. ValueError: a number in the facts is not finite, and a run could not go on with it.
    """
    marker = {"format": IN_PIECES if CUT in facts else WHOLE} | facts | {"files": files}
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


def remove_old(folder: Path, keep: int, every: int = 0) -> None:
    """Leave only the newest `keep` checkpoints of a folder, and those of steps that are multiples of `every` (0: none).

    Those elsewhere, behind symbolic links, do not count.
    """
    for path in [path for path in newest_first(folder) if not path.is_symlink()][keep:]:
        if every and _step_of(path) % every == 0:
            continue
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


class Checkpoint:
    """A complete checkpoint, open to be read; `facts` are what `complete` was given.

    UserError: it is damaged, as far as one sees without the data. Those are checked when they are read.
    """

    def __init__(self, path: Path):
        self.path = path
        self.facts = read_marker(path / MARKER)
        self.step = self.facts["step"]
        self._layouts, counts = _pieces_in(path / MARKER, self.facts)
        self._ranges: dict[str, list[StoredRange]] = {}
        for name, size in self.facts["files"].items():
            if name.endswith(".safetensors"):
                for stored in read_index(path / name, size, self.facts[RUN]):
                    self._ranges.setdefault(stored.array, []).append(stored)
        for ranges in self._ranges.values():
            ranges.sort(key=attrgetter("start", "stop"))
        for array, count in ((begin + name, count) for begin, count in counts.items() for name in STATE):
            ends = [(stored.start, stored.stop) for stored in self._ranges.get(array, [])]
            if [*(start for start, _ in ends), count] != [0, *(stop for _, stop in ends)]:
                raise damaged(path / MARKER, f"its ranges of {array} do not make {count} elements")

    @property
    def arrays(self) -> list[str]:
        """The names of the arrays in its files."""
        return [*self._ranges]

    def read(self, array: str, start: int, out: np.ndarray, layout: Layout | None = None) -> None:
        """Fill out (n,) float32 with elements [start, start + n); 0 beyond the last. UserError: damaged, unreadable.

        array: one of STATE, in the numbering of the layout, of any shard of the model or, without one, of the whole of
        it; or the name of another array, in its own numbering.
        """
        # What ends within a range and what begins there, of each part of a tensor, is read from the disk once.
        parts = max(layout.shard.tp_size for layout in self._layouts.values())
        read = lru_cache(2 * parts)(partial(checkpoint_files.read_range, step=self.step))
        if array not in STATE:
            return self._read_stored(array, read, start, out)
        wanted = layout or Layout(self.config)
        stored = {begin: partial(self._read_stored, begin + array, read) for begin in self._layouts}
        for begin, theirs in self._layouts.items():
            if theirs.shard == wanted.shard:
                return stored[begin](start, out)
        return read_range(wanted, start, out, [(self._layouts[begin], read) for begin, read in stored.items()])

    def _read_stored(self, name: str, read: Callable, start: int, out: np.ndarray) -> None:
        """The same of an array of a rank's file, in its own numbering. read(a range): its values."""
        out.fill(0.0)
        ranges = self._ranges.get(name, [])
        for stored in ranges[bisect_right(ranges, start, key=attrgetter("stop")) :]:
            low, high = max(start, stored.start), min(start + len(out), stored.stop)
            if low >= high:
                break
            out[low - start : high - start] = read(stored)[low - stored.start : high - stored.start]

    def read_parameters(self, parameters: Parameters, filled=no_hook) -> None:
        """Fill `parameters`, as weights.py says. UserError as in `read`, or if the model is another."""
        layout = parameters.layout
        check_config(self.path, self.config, layout.config)
        for start, stop in layout.held_ranges:
            self.read("parameters", start, parameters.flat[start:stop], layout)
            filled(start, stop)

    def check(self, part: int, parts: int) -> None:
        """Read part number `part` of `parts` of it all; UserError where it is not what was written, or no run can go on
        from it, as what is in STATE is nan or infinite."""
        state = {begin + name: layout for begin, layout in self._layouts.items() for name in STATE}
        for stored in sorted((one for ranges in self._ranges.values() for one in ranges), key=str)[part::parts]:
            values, layout = checkpoint_files.read_range(stored, self.step), state.get(stored.array)
            if layout and (found := not_finite(layout, [(stored.array, stored.start, values)])):
                raise UserError(f"{self.path}: holds {found}, expected finite numbers: use another checkpoint")

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
    """What a checkpoint's facts say of the model, the same whichever shard of it the layout is of."""
    return {"model": asdict(layout.config), "count": Layout(layout.config).count}


def cut_facts(config: GPT2Config, layers: Sequence[int], parts: int) -> dict:
    """What they say beside that of a model that several ranks share, and nothing else: {} if each holds all of it.

    layers: how many each stage has. Ranks name their arrays by array_prefix.
    """
    if len(layers) == parts == 1:
        return {}
    counts = {begin: layout.count for begin, layout in _layouts(config, layers, parts).items()}
    return {CUT: {"layers": [*layers], "parts": parts, "counts": counts}}


def array_prefix(stage: int, part: int) -> str:
    """What the names of a shard's arrays begin with, where several ranks share a model."""
    return f"s{stage}t{part}_"


def _layouts(config: GPT2Config, layers: Sequence[int], parts: int) -> dict[str, Layout]:
    """By the prefix of their arrays: those of all shards of a model."""
    places = [(stage, part) for stage in range(len(layers)) for part in range(parts)]
    cut = model_shards((*layers,), parts)
    return {array_prefix(*place): Layout(config, 1, shard) for place, shard in zip(places, cut, strict=True)}


def _pieces_in(path: Path, facts: dict) -> tuple[dict[str, Layout], dict[str, int]]:
    """By the prefix of their arrays: the layouts of the shards in a checkpoint, and the elements of each one's arrays.

    path: the marker's. UserError: it says what no cut of this model is.
    """
    config = GPT2Config(**facts["model"])
    if facts["format"] == WHOLE:
        return {"": Layout(config)}, {"": facts["count"]}
    try:
        layers, parts = facts[CUT]["layers"], facts[CUT]["parts"]
        if sum(layers) != config.n_layer or min(layers) < 0 or not 1 <= parts <= config.n_head:
            raise ValueError
        if cut_facts(config, layers, parts) != {CUT: facts[CUT]}:
            raise ValueError
    except (ValueError, KeyError, TypeError):
        raise damaged(path, "it does not say how its model was cut") from None
    layouts = _layouts(config, layers, parts)
    return layouts, {begin: layout.count for begin, layout in layouts.items()}


def marker_of(path: Path) -> Path | None:
    """Find the marker of a checkpoint, or of its model.bin, which links may lead to. None: `path` is another file."""
    if path.is_dir():
        return path / MARKER
    places = [place.with_name(MARKER) for place in (path, path.resolve()) if place.name == MODEL]
    return next(filter(Path.is_file, places), None)


def check_model(path: Path) -> None:
    """Check a checkpoint's model.bin, but no other file, against its marker's checksum. UserError: they differ."""
    marker = marker_of(path)
    if path.is_dir() or not marker:
        return
    path = marker.with_name(MODEL)
    expected = read_marker(marker).get(MODEL_CHECKSUM)
    with file_errors(path, "cannot read it; check the disk"):
        if expected is not None and file_checksum(path) != expected:
            raise UserError(
                f"{path}: does not have the checksum in {MARKER}, expected the file that the run wrote: it is damaged; "
                "remove it, and the parameters are read from the files beside it"
            )


def read_marker(path: Path) -> dict:
    """The facts that a checkpoint.json holds. UserError: unreadable, damaged, or of another format."""
    with file_errors(path, "cannot read it; check the disk"):
        text = read_bytes(path)
    try:
        marker = json.loads(text)
        if marker[CHECKSUM] != _marker_checksum(marker):
            raise ValueError("another checksum")
        if marker["format"] not in (WHOLE, IN_PIECES):
            raise UserError(
                f"{path}: a {marker['format']}, expected a {WHOLE} or 2: read it with the release that wrote it"
            )
    except (ValueError, KeyError, TypeError, RecursionError):
        raise damaged(path, "not what was written") from None
    return marker


def _marker_checksum(marker: dict) -> int:
    facts = {name: value for name, value in marker.items() if name != CHECKSUM}
    return zlib.crc32(json.dumps(facts, sort_keys=True).encode())
