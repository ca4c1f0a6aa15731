"""How long a process takes to its first step: seconds to import the kernels and to make the step, as JSON.

python scripts/makers/first_step.py --json first.json
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np

from dist.console import open_console
from gpt2.files import write_json
from scripts.machine.host import machine, versions


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write it to this file, with machine and versions")
    settings = parser.parse_args()
    seconds = first_step()
    print(json.dumps(seconds))
    if settings.json:
        report = seconds | {"machine": machine(), "versions": versions("numpy", "numba")}
        write_json(settings.json, report)


def first_step() -> dict:
    """{"import_s", "first_step_s"}: imports are inside, as their time is what is asked for."""
    began = time.perf_counter()
    from gpt2.config import PRESETS
    from gpt2.kernels import load_kernels

    kernels = load_kernels("numpy", 1)
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
