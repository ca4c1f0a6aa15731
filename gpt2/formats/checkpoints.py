"""Checkpoints: folders to resume training from. All ranks write one together; it appears complete or not at all.

    checkpoints/step-00000100/checkpoint.json            the step, the model, and the files with their sizes
                              rank-00000.safetensors...  flat ranges of "parameters", "m" and "v"
                              model.bin                  after the last step: the parameters in llm.c's format

Ranks write into step-00000100.part. When all files are on disk, checkpoint.json is written, and then the folder is
renamed. checkpoint_files.py describes a rank's file. Ranges are numbered along the flat buffer without its pad, so a
checkpoint can be read by any number of ranks.

If several ranks share one model (format 2), ranges are numbered along the flat buffer of a model shard, and the names
of its arrays begin with its stage and tp rank, as in s1t0_m. checkpoint.json says how the model was cut. A whole
model, or one cut otherwise, can read it (boxes.py).

Only folders with exactly these names are ever removed; symbolic links are never followed to remove anything.
"""

import json
import re
import shutil
import zlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
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

MARKER = "checkpoint.json"
MODEL = "model.bin"
WHOLE = "gpt2-mpi checkpoint 1"
IN_SHARDS = "gpt2-mpi checkpoint 2"
CUT = "cut"
STATE = ("parameters", "m", "v")
NAME = re.compile(r"step-(\d{8,})(\.part)?", re.ASCII)
FILE = re.compile(r"checkpoint\.json|rank-\d{5,}\.safetensors|model\.bin|\..*\.tmp", re.ASCII)
CHECKSUM = "crc32"
MODEL_CHECKSUM = "model_crc32"


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def not_finite(layout: Layout, ranges) -> str | None:
    """Return the first nan or infinity in ranges (as in write_part), with its array and tensor, as text; or None."""
    for array, start, values in ranges:
        place = first_not_finite(values)
        if place is not None:
            return f"{values[place]} in {array} of {layout.tensor_at(start + place)}"
    return None


def complete(part: Path, facts: dict, files: dict[str, int], check: Callable[[], None] = lambda: None) -> Path:
    """Turn a .part folder into a checkpoint, once all its files {name: bytes} are on disk; return its path.

    facts: "step", model_facts, cut_facts, and anything else that the reader needs. check: called when everything is on
    disk, before other folders are touched; its exceptions are passed on. OSError: it cannot be written. ValueError: a
    number in the facts is not finite, so no run could resume.
    """
    marker = {"format": IN_SHARDS if CUT in facts else WHOLE} | facts | {"files": files}
    marker[CHECKSUM] = _marker_checksum(marker)
    with new_file(part / MARKER) as file:
        file.write(json.dumps(marker, indent=1, allow_nan=False).encode())
    final = part.with_name(folder_name(facts["step"]))
    sync_folder(part)  # before the rename: a folder with this name is complete
    check()
    if final.is_symlink():
        final.unlink()  # a link; its target stays
    elif final.exists():
        shutil.rmtree(final)  # the run resumed from an earlier step and reached this step again
    part.rename(final)
    sync_folder(part.parent)
    return final


def remove_old(folder: Path, keep: int, every: int = 0) -> None:
    """Remove all checkpoints except the newest `keep`, those of every `every`-th step (0: none), and milestones.

    The facts of a milestone say that an earlier start kept it. Symbolic links to other checkpoints are ignored.
    """
    for path in [path for path in newest_first(folder) if not path.is_symlink()][keep:]:
        if (every and _step_of(path) % every == 0) or _is_milestone(path):
            continue
        (path / MARKER).unlink(missing_ok=True)  # first: a half-removed folder must not be a checkpoint
        shutil.rmtree(path)


def _is_milestone(path: Path) -> bool:
    with suppress(UserError):
        return read_marker(path / MARKER).get("milestone", False)
    return False


def remove_parts(folder: Path) -> None:
    """Remove the .part folders of interrupted writers."""
    for path in folder.glob("step-*"):
        if _step_of(path) is None or path.is_symlink() or not path.is_dir():
            continue
        # A folder without a marker is half removed: `remove_old` was interrupted.
        is_left = not (path / MARKER).exists() and all(FILE.fullmatch(file.name) for file in path.iterdir())
        if path.suffix == ".part" or is_left:
            shutil.rmtree(path)


def newest_first(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a run's checkpoints folder, the newest first."""
    found = [path for path in folder.glob("step-*") if not path.suffix and (path / MARKER).is_file()]
    return sorted((path for path in found if _step_of(path) is not None), key=_step_of, reverse=True)


def _step_of(path: Path) -> int | None:
    """Return the step of a folder with a checkpoint's name, complete or not; None for other names."""
    named = NAME.fullmatch(path.name)
    if named is None or folder_name(int(named[1])) != f"step-{named[1]}":  # step-000000010 would be another step 10
        return None
    return int(named[1])


class Checkpoint:
    """A complete checkpoint, open for reading. `facts`: as given to `complete`.

    UserError: it is damaged. The arrays are only checked when they are read.
    """

    def __init__(self, path: Path):
        self.path = path
        self.facts = read_marker(path / MARKER)
        self.step = self.facts["step"]
        self._layouts = _shards_in(path / MARKER, self.facts)
        self._ranges: dict[str, list[StoredRange]] = {}
        for name, size in self.facts["files"].items():
            if name.endswith(".safetensors"):
                for stored in read_index(path / name, size, self.facts[RUN]):
                    self._ranges.setdefault(stored.array, []).append(stored)
        for ranges in self._ranges.values():
            ranges.sort(key=attrgetter("start", "stop"))
        self._state = {begin + name: layout for begin, layout in self._layouts.items() for name in STATE}
        for array, layout in self._state.items():
            ranges = self._ranges.get(array, [])
            if [*(stored.start for stored in ranges), layout.count] != [0, *(stored.stop for stored in ranges)]:
                raise damaged(path / MARKER, f"its ranges of {array} do not make {layout.count} elements")

    @property
    def arrays(self) -> list[str]:
        """The names of the arrays in the files."""
        return [*self._ranges]

    def read(self, array: str, start: int, out: np.ndarray, layout: Layout | None = None) -> None:
        """Fill out (n,) float32 with elements [start, start + n) of an array; 0 beyond its end.

        array: one of STATE, as the flat buffer of `layout`, which may be any model shard (None: the whole model); or
        the name of another array. UserError: damaged or unreadable.
        """
        # Neighbouring reads share a stored range, one for each tensor-parallel shard: read each from the disk once.
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
        """Fill out from an array as it is stored. read(stored range) returns a range's values."""
        out.fill(0.0)
        ranges = self._ranges.get(name, [])
        for stored in ranges[bisect_right(ranges, start, key=attrgetter("stop")) :]:
            low = max(start, stored.start)
            high = min(start + len(out), stored.stop)
            if low >= high:
                break
            out[low - start : high - start] = read(stored)[low - stored.start : high - stored.start]

    def read_parameters(self, parameters: Parameters, filled=no_hook) -> None:
        """Fill `parameters`, as in weights.py. UserError as in `read`, or if the model has another shape."""
        layout = parameters.layout
        check_config(self.path, self.config, layout.config)
        for start, stop in layout.held_ranges:
            self.read("parameters", start, parameters.flat[start:stop], layout)
            filled(start, stop)

    def check(self, part: int, parts: int) -> None:
        """Read and check the part-th of `parts` shares of the checkpoint. UserError: it is damaged, or a number in
        STATE is not finite, so that no run can resume."""
        for stored in sorted((one for ranges in self._ranges.values() for one in ranges), key=str)[part::parts]:
            values = checkpoint_files.read_range(stored, self.step)
            layout = self._state.get(stored.array)
            if layout and (found := not_finite(layout, [(stored.array, stored.start, values)])):
                raise UserError(f"{self.path}: holds {found}, expected finite numbers: use another checkpoint")

    @property
    def config(self) -> GPT2Config:
        return GPT2Config(**self.facts["model"])


def read_config(folder: Path) -> GPT2Config:
    """Return the shape of a checkpoint's model. UserError: there is none, or it is damaged."""
    return Checkpoint(folder).config


def read_parameters(folder: Path, parameters: Parameters, filled=no_hook) -> None:
    """Fill `parameters` from a checkpoint, as in weights.py."""
    Checkpoint(folder).read_parameters(parameters, filled)


def model_facts(layout: Layout) -> dict:
    """Return a checkpoint's facts about the model, the same for the layout of any of its shards."""
    return {"model": asdict(layout.config), "count": Layout(layout.config).count}


def cut_facts(config: GPT2Config, layers: Sequence[int], parts: int) -> dict:
    """Return a checkpoint's facts about how ranks share a model; {} if each holds a whole one.

    layers: how many each stage has. Ranks name their arrays by array_prefix.
    """
    if len(layers) == parts == 1:
        return {}
    counts = {begin: layout.count for begin, layout in _layouts(config, layers, parts).items()}
    return {CUT: {"layers": [*layers], "parts": parts, "counts": counts}}


def array_prefix(stage: int, part: int) -> str:
    """Return the prefix of a model shard's array names."""
    return f"s{stage}t{part}_"


def _layouts(config: GPT2Config, layers: Sequence[int], parts: int) -> dict[str, Layout]:
    """Return {array_prefix: layout} of all shards of a model."""
    places = [(stage, part) for stage in range(len(layers)) for part in range(parts)]
    cut = model_shards((*layers,), parts)
    return {array_prefix(*place): Layout(config, 1, shard) for place, shard in zip(places, cut, strict=True)}


def _shards_in(path: Path, facts: dict) -> dict[str, Layout]:
    """Return {array_prefix: layout} of a checkpoint's model shards.

    path: of the marker. UserError: it does not describe a cut of this model.
    """
    config = GPT2Config(**facts["model"])
    if facts["format"] == WHOLE:
        return {"": Layout(config)}
    try:
        layers = facts[CUT]["layers"]
        parts = facts[CUT]["parts"]
        if sum(layers) != config.n_layer or min(layers) < 0 or not 1 <= parts <= config.n_head:
            raise ValueError
        if cut_facts(config, layers, parts) != {CUT: facts[CUT]}:
            raise ValueError
    except (ValueError, KeyError, TypeError):
        raise damaged(path, "it does not say how its model was cut") from None
    return _layouts(config, layers, parts)


def marker_of(path: Path) -> Path | None:
    """Return the marker of a checkpoint, or of its model.bin, also through links. None: `path` is another file."""
    if path.is_dir():
        return path / MARKER
    places = [place.with_name(MARKER) for place in (path, path.resolve()) if place.name == MODEL]
    return next(filter(Path.is_file, places), None)


def check_model(path: Path) -> None:
    """Check a checkpoint's model.bin against the checksum in its marker. UserError: they differ."""
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
    """Read the facts in a checkpoint.json. UserError: unreadable, damaged, or of another format."""
    with file_errors(path, "cannot read it; check the disk"):
        text = read_bytes(path)
    try:
        marker = json.loads(text)
        if marker[CHECKSUM] != _marker_checksum(marker):
            raise ValueError("another checksum")
        if marker["format"] not in (WHOLE, IN_SHARDS):
            raise UserError(
                f"{path}: a {marker['format']}, expected a {WHOLE} or 2: read it with the release that wrote it"
            )
    except (ValueError, KeyError, TypeError, RecursionError):
        raise damaged(path, "not what was written") from None
    return marker


def _marker_checksum(marker: dict) -> int:
    facts = {name: value for name, value in marker.items() if name != CHECKSUM}
    return zlib.crc32(json.dumps(facts, sort_keys=True).encode())
