"""The texts that a run prints: a header at its start, a summary at its end, and warnings about lost traces."""

import errno
import os
import resource
from itertools import zip_longest
from pathlib import Path

import numpy as np

from dist.console import say
from dist.probe.links import clock_offset, probe_links
from dist.world import library_name
from gpt2.data.windows import Windows
from gpt2.errors import UserError
from scripts.machine.blas import blas_facts, blas_text
from scripts.machine.gpu import limits_text
from scripts.machine.names import rank_names
from strategies.compatibility import worker_count
from traces.record.files import END_CLOCKS, END_LINKS, write_at_end
from traces.record.recorder import tracing_share
from traces.units import count_text


def run_table(used: dict, plan, world, peak) -> str:
    """Return the header that rank 0 prints before the first step. used: from derived.resolved.

    It names the choice of --strategy auto, facts that follow from the settings, and all settings."""
    shared = plan.shared
    config = shared.whole.config
    workers = worker_count(used["server"], world.size)
    on_gpus = "gpus" in plan.backend
    hardware = gpu_facts(world.places, plan.backend, used["transport"]) if on_gpus else core_facts(plan.backend)
    tokens = plan.global_batch * used["seq_len"]
    other_weights = "differ from those of the exact strategies: this exchange loses information"
    facts = {
        "model": f"{config.n_layer} layers, {config.n_head} heads, {config.n_embd} channels, context {config.context}, "
        f"{config.vocab_size} tokens: {shared.whole.count:,} parameters",
        "cut": shared.cut.text(shared.mesh.data),
        "ranks": f"{world.size} on {count_text(world.node_count, 'node')}, {workers} compute, "
        f"{count_text(plan.threads, 'thread')} on rank 0",
        **hardware,
        "peak": str(peak),
        "embedding": plan.embedding.text,
        "step": f"{plan.global_batch} sequences of {used['seq_len']}: {tokens:,} tokens",
        "weights": None if plan.same_weights else other_weights,
        "data": data_text(plan.train, plan.val, used["steps"] * plan.global_batch),
        "MPI": library_name(),
        "run folder": str(plan.folder),
    }
    lines = [f"{name:<13} {value}" for name, value in facts.items() if value is not None]
    if auto := plan.backend["auto"]:
        overlap = " with overlap" if auto["overlap"] else ""
        lines.insert(0, f"--strategy auto chose {auto['strategy']}{overlap}: {auto['why']}")
    return "\n".join([*lines, "", *two_columns(used), ""])


def data_text(train: Windows, val: Windows | None, windows_read: int) -> str:
    """Return the number of tokens, and of the run's epochs. windows_read: how many windows all its steps read."""
    epochs = windows_read / train.count
    times = f"{epochs:,.0f}" if epochs >= 100 else f"{epochs:.2f}" if epochs >= 0.1 else f"{epochs:.2g}"
    validation = f", {val.token_count:,} for validation" if val else ""
    return f"{train.token_count:,} tokens for training{validation}; all steps make {times} epochs"


def blas_of_ranks(world) -> dict:
    """Return {"blas": list} for config.json: blas_facts and "ranks" for each kind of BLAS and CPU in the job.

    Collective. Rank 0 warns if there are several kinds.
    """
    kinds = []
    for rank, facts in enumerate(world.comm.allgather(blas_facts(os.environ))):
        like = next((kind for kind in kinds if kind | {"ranks": None} == facts | {"ranks": None}), None)
        if like is None:
            kinds.append(like := facts | {"ranks": []})
        like["ranks"].append(rank)
    if world.rank == 0 and len(kinds) > 1:
        said = []
        for kind in kinds:
            ranks = rank_names([world.places[rank] for rank in kind["ranks"]])
            said.append(f"{blas_text(kind)} on {kind['processor']} ({', '.join(kind['instructions'])}): {ranks}")
        warn(f"the ranks multiply by unlike kernels, with other last bits and at other speeds: {'; '.join(said)}")
    return {"blas": kinds}


def core_facts(backend: dict) -> dict[str, str | None]:
    """Describe the BLAS, and other kernels that also compute products (None if there are none)."""
    kinds = backend["blas"]
    products = backend["products"]
    blas = blas_text(kinds[0]) + (" on rank 0; others are unlike" if len(kinds) > 1 else "")
    return {"BLAS": blas, "products": None if products == "BLAS" else products}


def gpu_facts(places: list[dict], backend: dict, transport: str) -> dict[str, str]:
    """Describe the GPUs and their limits, the transport of the exchange between them, and why it was chosen."""
    gpus = backend["gpus"]
    different = {(place["host"], gpu["id"]) for place, gpu in zip(places, gpus, strict=True)}
    names = "; ".join(sorted({limits_text(gpu) for gpu in gpus}))
    return {"GPUs": f"{len(different)}: {names}", "transport": f"{transport}: {backend['transport_why']}"}


def two_columns(used: dict) -> list[str]:
    names = [name.replace("_", "-") for name in used]
    values = ["-" if v is None else str(v) for v in used.values()]
    half = -(-len(names) // 2)
    longest = max(map(len, names))
    cells = [f"{name:<{longest}} {value:<22}" for name, value in zip(names, values, strict=True)]
    return [f"{left} {right}".rstrip() for left, right in zip_longest(cells[:half], cells[half:], fillvalue="")]


class TraceFailures:
    """Warns on rank 0 about ranks that can no longer write traces: at once about the first, at the end about others.

    traces: RUN/traces. own: this rank's failure as an error number, which other ranks get; 0 if there is none.
    """

    def __init__(self, world, traces: Path, tracer):
        self.world = world
        self.traces = traces
        self.tracer = tracer
        self._told = set()

    def own(self) -> int:
        failure = self.tracer.failure
        return 0 if failure is None else failure.errno or errno.EIO

    def tell(self, failures, at_end: bool = False) -> None:
        """Warn on rank 0. failures: each rank's `own`."""
        if self.world.rank or (self._told and not at_end):
            return
        if new := [rank for rank in np.flatnonzero(failures).tolist() if rank not in self._told]:
            self._told.update(new)
            ranks = f"rank {new[0]} on {self.world.places[new[0]]['host']}"
            ranks += f" and {len(new) - 1} more" if new[1:] else ""
            what = f"the traces of {ranks} end early" if at_end else f"tracing is off from here on for {ranks}"
            warn(f"{self.traces}: {os.strerror(int(failures[new[0]]))}: {what}{'' if at_end else '; training goes on'}")


def warn(text: str) -> None:
    """Print a line on stderr about lost traces; training goes on."""
    say(f"warning: {text}", on_stderr=True)


def end_run(
    world, folder, traces: Path | None, tracer, failures: TraceFailures, step: int, ended_by: str | None,
    checkpoint_costs: list[dict],
) -> None:  # fmt: skip
    """Write summary.json, and the clocks and links of all nodes, after the last step. Collective.

    folder: rank 0's RunFolder. traces: RUN/traces, None if the run has no traces. ended_by: None if the run has made
    all its steps; else rank 0 prints it, and how to resume.
    """
    facts = {
        "peak_memory_bytes": world.comm.gather(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024),
        "tracing_share": tracing_share(tracer),
        "checkpoints": world.comm.gather(checkpoint_costs),
    }
    are_full = world.comm.gather(tracer.is_full)
    at_end = {END_CLOCKS: world.comm.gather({"node": world.node} | clock_offset(world))}
    if ended_by is None and traces:  # not after a signal: a scheduler may be waiting for the end of the job
        at_end[END_LINKS] = probe_links(world)
    failures.tell(world.comm.gather(failures.own()), at_end=True)
    with world.together(UserError):
        if world.rank == 0:
            if traces and world.node_count > 1:
                keep_at_end(traces, at_end)
            folder.write_summary(**facts)
            path = folder.path
            world.print(
                f"peak memory of a rank {max(facts['peak_memory_bytes']) / 1e9:.2f} GB; tracing took "
                f"{facts['tracing_share']:.2%} of the traced steps; run folder {path}"
            )
            if any(are_full):
                world.print(
                    "the traces end before the run, as they are as large as --trace-mb allows: raise it, or choose "
                    "steps by --trace FROM:TO"
                )
            if ended_by:
                world.print(f"{ended_by} ended the run after step {step}: continue it with --out {path} --resume")


def keep_at_end(traces: Path, at_end: dict[str, list[dict]]) -> None:
    """Write these files of RUN/traces; warn if that fails. at_end: {name of the file: facts of all nodes}."""
    for name, nodes in at_end.items():
        try:
            write_at_end(traces, name, nodes)
        except OSError as error:
            kept = "clocks" if name == END_CLOCKS else "links"
            return warn(f"{traces / name}: {error.strerror}: the traces keep the {kept} of the start alone")
