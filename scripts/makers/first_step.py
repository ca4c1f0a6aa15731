"""How long a process takes to its first step: one line of JSON, seconds to import the kernels and to make the step.

python scripts/makers/first_step.py
"""

import json
import time

import numpy as np


def main():
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
    print(json.dumps({"import_s": imported - began, "first_step_s": time.perf_counter() - ready}))


if __name__ == "__main__":
    main()
