"""How long a process takes to its first step: seconds to import the kernels and to make the step, as JSON.

python scripts/makers/first_step.py --dtype bfloat16
python scripts/makers/first_step.py --processes 1,2,4 --dtypes float32,bfloat16 --repeat 5 --json first.json

The second starts so many processes at once, as a node's ranks are, on an empty cache of compiled loops, and again on
what that has left. Of each start the slowest process counts; of all repeats, in turns, the median, least and most.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from dist.console import open_console
from gpt2.files import write_json
from scripts.machine.host import machine, versions

CACHES = "empty", "filled"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--dtype", default="float32", help="what this process computes in")
    add("--threads", type=int, default=1, help="its threads")
    add("--processes", type=numbers, metavar="N,N", help="start so many at once, each with its share of the cores")
    add("--dtypes", type=lambda text: text.split(","), default=["float32", "bfloat16"], metavar="NAME,NAME")
    add("--repeat", type=int, default=5)
    add("--json", type=Path, metavar="FILE", help="write it to this file, with machine and versions")
    settings = parser.parse_args()
    if settings.processes:
        found = {"rows": starts(settings.dtypes, settings.processes, settings.repeat)}
    else:
        found = first_step(settings.dtype, settings.threads)
    print(json.dumps(found))
    if settings.json:
        write_json(settings.json, found | {"machine": machine(), "versions": versions("numpy", "numba")})


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def starts(dtypes: list[str], counts: list[int], repeat: int) -> list[dict]:
    """A row for each dtype, number of processes and cache."""
    cases = [(dtype, count) for dtype in dtypes for count in counts]
    seconds = {(*case, cache): [] for case in cases for cache in CACHES}
    for _ in range(repeat):
        for case in cases:
            with tempfile.TemporaryDirectory() as folder:
                for cache in CACHES:
                    seconds[*case, cache].append(start_at_once(*case, folder))
    return [
        {"dtype": dtype, "processes": processes, "cache": cache} | summary(of_one)
        for (dtype, processes, cache), of_one in seconds.items()
    ]


def start_at_once(dtype: str, processes: int, cache: str) -> dict:
    """What the slowest process took: {"import_s", "first_step_s", "total_s"}; total: of all, with start and end."""
    threads = max(1, len(os.sched_getaffinity(0)) // processes)
    command = [sys.executable, __file__, "--dtype", dtype, "--threads", str(threads)]
    began = time.perf_counter()
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"NUMBA_CACHE_DIR": cache})
        for _ in range(processes)
    ]
    told = [process.communicate()[0] for process in started]
    total_s = time.perf_counter() - began
    if failed := [process.returncode for process in started if process.returncode]:
        raise SystemExit(f"{len(failed)} of {processes} processes have failed, exit code {failed[0]}")
    slowest = max(map(json.loads, told), key=lambda seconds: seconds["first_step_s"])
    return slowest | {"total_s": total_s}


def summary(starts: list[dict]) -> dict:
    """The medians; of the first step also the least and the most."""
    steps = [seconds["first_step_s"] for seconds in starts]
    medians = {name: statistics.median(seconds[name] for seconds in starts) for name in starts[0]}
    return medians | {"least_s": min(steps), "most_s": max(steps)}


def first_step(dtype: str, threads: int) -> dict:
    """{"import_s", "first_step_s"}: imports are inside, as their time is what is asked for."""
    began = time.perf_counter()
    from gpt2.config import PRESETS
    from gpt2.kernels import load_kernels

    kernels = load_kernels("numpy", threads, dtype=dtype)
    imported = time.perf_counter()
    from gpt2.model import new_model
    from gpt2.optimizer import AdamW, AdamWSettings

    model = new_model(PRESETS["tiny"], kernels, 1, 8)
    layout = model.parameters.layout
    optimizer = AdamW(kernels, layout, 0, layout.size, AdamWSettings())
    tokens = np.zeros((1, 8), np.int32)
    ready = time.perf_counter()
    model.forward(tokens, tokens, 1.0)
    model.backward(False)
    optimizer.update(model.parameters.flat, model.gradients.flat, 1e-3, 1.0)
    return {"import_s": imported - began, "first_step_s": time.perf_counter() - ready}


if __name__ == "__main__":
    open_console()
    main()
