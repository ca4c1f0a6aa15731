"""The names of the phases, for code, trace files, plots and tests."""

# Roughly in the order of a step; docs/formats.md describes each.
PHASES = (
    "data",
    "compute",
    "recv",
    "lend",
    "borrow",
    "forward",
    "tensor",
    "backward",
    "send",
    "copy_out",
    "compress",
    "reduce",
    "reduce_scatter",
    "allreduce",
    "norm",
    "wait",
    "update",
    "outer",
    "bcast",
    "allgather",
    "copy_in",
    "eval",
    "checkpoint",
)

# The envelope of a whole step: recorded like a phase, never opened by name.
STEP = "step"

NAMES = (*PHASES, STEP)
INDEX = {name: index for index, name in enumerate(NAMES)}

# Other programs have "compute" in place of forward and backward.
COMPUTE = ("compute", "forward", "backward", "compress", "update", "outer")
# Between ranks that share a model: tensor sums over shards, lend synchronizes replicated LayerNorms, borrow the tied
# embedding, norm sums the squares of the gradients.
EXCHANGE = ("reduce", "reduce_scatter", "allreduce", "bcast", "allgather", "tensor", "lend", "borrow", "norm")
# Between neighbouring pipeline stages. The root of a receive is its sender, the root of a send its receiver.
PIPELINE = ("send", "recv")
# Between exactly two ranks: the root of one is the other.
BETWEEN_TWO = ("borrow", *PIPELINE)
COPY = ("copy_out", "copy_in")


def check_phase(name):
    """Return `name` if it is a phase; else raise a ValueError that lists the valid names."""
    if name not in PHASES:
        raise ValueError(f"no phase is called {name!r}; the phases are {', '.join(PHASES)}")
    return name
