"""What a rank updates, as a checkpoint names it: written by checkpointing.py, filled again by start.py."""


def state_arrays(strategy):
    """(array, start, values) of everything that this rank updates, in host memory or on its GPU."""
    for updated in strategy.state():
        yield "parameters", updated.start, updated.parameters
        for start, m, v in updated.optimizer.moments():
            yield "m", start, m
            yield "v", start, v


def is_on_gpu(array) -> bool:
    """Whether an array is CuPy's, not NumPy's."""
    return hasattr(array, "get")


def on_host(array):
    """The array itself, or a copy of what is on the GPU."""
    return array.get() if is_on_gpu(array) else array


def errors_name(rank: int) -> str:
    """The name of a rank's error feedback in a checkpoint; each rank has its own, as each has its own gradients."""
    return f"errors_{rank}"
