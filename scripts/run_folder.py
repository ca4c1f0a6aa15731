"""The run folder: config.json, log.jsonl, checkpoints, summary.json; written by rank 0."""

import json
import os
import platform
import sys
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

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

    def write_config(self, settings, world, mpi_library: str, parameters: int, threads: int) -> None:
        config = {
            "settings": asdict(settings),
            "command": sys.argv,
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "versions": {"python": platform.python_version()}
            | {name: version(name) for name in ("gpt2-mpi", "numpy", "mpi4py")},
            "machine": {"processor": _processor(), "cores": os.cpu_count(), "system": platform.platform()},
            "mpi_library": mpi_library,
            "parameters": parameters,
            "threads_per_rank": threads,
            "ranks": world.places,
        }
        (self.path / "config.json").write_text(json.dumps(config, indent=1) + "\n")

    def log(self, record: dict) -> None:
        """One line of log.jsonl, on disk when it returns."""
        self._log.write(json.dumps(record) + "\n")

    def write_summary(self, **facts) -> None:
        """summary.json: what is known only at the end of a run."""
        (self.path / "summary.json").write_text(json.dumps(facts, indent=1) + "\n")

    def save_checkpoint(self, step: int, parameters, next_window: int) -> None:
        """checkpoints/step-00000100/: model.bin in llm.c's format and data.json; there once complete, or not at all."""
        final = self.path / "checkpoints" / f"step-{step:08d}"
        part = final.with_suffix(".part")
        with file_errors(final, "free some space, or choose another --out"):
            part.mkdir(parents=True)
            llmc.write_parameters(part / "model.bin", parameters)
            (part / "data.json").write_text(json.dumps({"step": step, "next_window": next_window}) + "\n")
            part.rename(final)


def default_run_folder(strategy: str) -> Path:
    return Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{strategy}"


def _processor() -> str:
    """The processor's name as Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
