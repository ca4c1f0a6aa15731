"""What follows from a run's settings and the machine: the rows above the settings in the table that rank 0 prints."""

from dist.world import library_name
from traces.units import count_text


def run_facts(run) -> dict[str, str]:
    """Of a TrainingRun."""
    s, c, world = run.settings, run.config, run.world
    return {
        "model": f"{c.n_layer} layers, {c.n_head} heads, {c.n_embd} channels, context {c.context}, "
        f"{c.vocab_size} tokens: {run.layout.count:,} parameters",
        "ranks": f"{world.size} on {count_text(world.node_count, 'node')}, {run.strategy.workers} compute, "
        f"{count_text(run.threads, 'thread')} on rank 0",
        **_gpu_facts(run),
        "peak": str(run.peak),
        "step": f"{run.global_batch} sequences of {s.seq_len}: {run.global_batch * s.seq_len:,} tokens",
        "MPI": library_name(),
        "run folder": str(run.path),
    }


def _gpu_facts(run) -> dict[str, str]:
    """Which GPUs compute, and what carries the exchange between them."""
    gpus = run.backend_facts.get("gpus")
    if gpus is None:
        return {}
    different = {(place["host"], gpu["id"]) for place, gpu in zip(run.world.places, gpus, strict=True)}
    names = ", ".join(sorted({gpu["name"] for gpu in gpus}))
    return {
        "GPUs": f"{len(different)}: {names}",
        "transport": f"{run.settings.transport}: {run.backend_facts['transport_why']}",
    }
