"""The run folder: config.json, log.jsonl, checkpoints, summary.json; written by rank 0."""

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from machine import machine, versions

from gpt2 import llmc
from gpt2.errors import UserError
from gpt2.shards import file_errors


class RunFolder:
    """RUN/config.json and RUN/log.jsonl. Making one fails with UserError if it cannot be written or holds a run."""

    def __init__(self, path: Path):
        self.path = Path(path)
        with file_errors(self.path, "choose another --out"):
            if (self.path / "config.json").exists():
                raise UserError(f"{self.path} already holds a run (config.json): choose another --out, or remove it")
            self.path.mkdir(parents=True, exist_ok=True)
            self._log = (self.path / "log.jsonl").open("w", buffering=1)

    def write_config(self, settings, world, mpi_library: str, facts: dict) -> None:
        """facts: of this run, beside its settings."""
        config = {
            "settings": asdict(settings),
            "command": sys.argv,
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "versions": versions("gpt2-mpi", "numpy", "numba", "mpi4py"),
            "machine": machine(),
            "mpi_library": mpi_library,
            "ranks": world.places,
        } | facts
        with file_errors(self.path, "choose another --out"):
            (self.path / "config.json").write_text(json.dumps(config, indent=1) + "\n")

    def log(self, record: dict) -> None:
        """One line of log.jsonl, on disk when it returns."""
        self._log.write(json.dumps(record) + "\n")

    def write_summary(self, **facts) -> None:
        """summary.json: what is known only at the end of a run."""
        (self.path / "summary.json").write_text(json.dumps(facts, indent=1) + "\n")

    def save_checkpoint(self, step: int, parameters, next_window: int, ranges) -> None:
        """checkpoints/step-00000100/: model.bin in llm.c's format and data.json; there once complete, or not at all.

        ranges: the layout's, each given when its parameters are there.
        """
        final = self.path / "checkpoints" / f"step-{step:08d}"
        part = final.with_suffix(".part")
        with file_errors(final, "free some space, or choose another --out"):
            part.mkdir(parents=True)
            llmc.write_parameters(part / "model.bin", parameters, ranges)
            (part / "data.json").write_text(json.dumps({"step": step, "next_window": next_window}) + "\n")
            part.rename(final)


def default_run_folder(strategy: str) -> Path:
    return Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{strategy}"
