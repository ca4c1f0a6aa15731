"""The names of the phases: the one place that code, trace files, plots and tests take them from."""

# In the order in which a step meets them.
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
    "reduce",
    "reduce_scatter",
    "allreduce",
    "norm",
    "wait",
    "update",
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

# "compute" is what a program of another kind has in place of forward and backward.
COMPUTE = ("compute", "forward", "backward", "update")
# Of the last four, between the ranks that share a model: sums over parts of tensors, what part 0 lends of tensors that
# are not cut, the token embedding between first and last stage, squares of the gradients.
EXCHANGE = ("reduce", "reduce_scatter", "allreduce", "bcast", "allgather", "tensor", "lend", "borrow", "norm")
# Between neighbouring stages of a pipeline; a receive's root is the rank that sends, a send's the one that receives.
PIPELINE = ("send", "recv")
# What exactly two ranks do: the root of one is the other.
BETWEEN_TWO = ("borrow", *PIPELINE)
COPY = ("copy_out", "copy_in")


def check_phase(name):
    """Return `name` if it is a phase; a ValueError that lists the valid names otherwise."""
    if name not in PHASES:
        raise ValueError(f"no phase is called {name!r}; the phases are {', '.join(PHASES)}")
    return name
