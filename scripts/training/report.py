"""What a run says of itself: a table at its start, a record and a line a step, a summary at its end."""

import errno
import os
import resource
import time
from itertools import zip_longest
from pathlib import Path

import numpy as np

from dist.console import say
from dist.probe.links import clock_offset, probe_links
from dist.world import library_name
from gpt2.errors import UserError
from gpt2.parameters import Layout
from scripts.checkup.findings import Ranks
from scripts.machine.blas import blas_facts, blas_text
from scripts.training.meeting import Meeting
from strategies.checks import worker_count
from traces.record.files import END_CLOCKS, END_LINKS, write_at_end
from traces.record.own_cost import tracing_share
from traces.units import count_text, mfu_text, short_ms

SECONDS_BETWEEN_LINES = 1.0
STANDS_OUT = 0.15  # a rank is named if it is slower than the others by this share
WARM_UP_STEPS = 2  # in these caches and compilers differ, not ranks


def run_table(
    settings: dict, whole: Layout, cut: str | None, world, threads: int, choice: dict, peak, batch: int, path
) -> str:
    """What rank 0 prints before the first step: what the settings come to on this machine, then all settings.

    whole: of the whole model. cut: how the ranks share it (scripts/settings/model_parallel.py), None where they do not.
    choice: what config.json says of the chosen backend. batch: sequences of a step, on all ranks together.
    """
    config, length, workers = whole.config, settings["seq_len"], worker_count(settings["server"], world.size)
    facts = {
        "model": f"{config.n_layer} layers, {config.n_head} heads, {config.n_embd} channels, context {config.context}, "
        f"{config.vocab_size} tokens: {whole.count:,} parameters",
        **({"cut": cut} if cut else {}),
        "ranks": f"{world.size} on {count_text(world.node_count, 'node')}, {workers} compute, "
        f"{count_text(threads, 'thread')} on rank 0",
        **(gpu_facts(world.places, choice, settings["transport"]) if "gpus" in choice else core_facts(choice)),
        "peak": str(peak),
        **({"embedding": choice["embedding"]} if choice.get("embedding") else {}),
        "step": f"{batch} sequences of {length}: {batch * length:,} tokens",
        "MPI": library_name(),
        "run folder": str(path),
    }
    return "\n".join([*(f"{name:<13} {value}" for name, value in facts.items()), "", *two_columns(settings), ""])


def blas_of_ranks(world, asked: str) -> dict:
    """{"blas": for each kind of BLAS and CPU in the job what blas_facts says of it, and "ranks"}. Collective.

    For config.json. asked: --blas-kernels. Rank 0 warns of unlike kinds.
    """
    kinds = []
    for rank, facts in enumerate(world.comm.allgather(blas_facts(os.environ, asked))):
        like = next((kind for kind in kinds if kind | {"ranks": None} == facts | {"ranks": None}), None)
        if like is None:
            kinds.append(like := facts | {"ranks": []})
        like["ranks"].append(rank)
    if world.rank == 0 and len(kinds) > 1:
        warn(unlike_blas(kinds, world.places))
    return {"blas": kinds}


def unlike_blas(kinds: list[dict], places: list[dict]) -> str:
    """Which ranks have which kernels and CPUs, in a sentence. kinds: as blas_of_ranks has them."""
    said = []
    for kind in kinds:
        ranks = Ranks({"place": places[rank]} for rank in kind["ranks"])
        said.append(f"{blas_text(kind)} on {kind['processor']} ({', '.join(kind['instructions'])}): {ranks.names}")
    return f"the ranks multiply by unlike kernels, with other last bits and at other speeds: {'; '.join(said)}"


def core_facts(choice: dict) -> dict[str, str]:
    """Which BLAS there is, and what makes the products where it is not that alone."""
    kinds, products = choice["blas"], choice["products"]
    line = {"BLAS": blas_text(kinds[0]) + (" on rank 0; others are unlike" if len(kinds) > 1 else "")}
    return line if products == "BLAS" else line | {"products": products}


def gpu_facts(places: list[dict], choice: dict, transport: str) -> dict[str, str]:
    """Which GPUs compute, what carries the exchange between them, and why."""
    gpus = choice["gpus"]
    different = {(place["host"], gpu["id"]) for place, gpu in zip(places, gpus, strict=True)}
    names = ", ".join(sorted({gpu["name"] for gpu in gpus}))
    return {"GPUs": f"{len(different)}: {names}", "transport": f"{transport}: {choice['transport_why']}"}


def two_columns(settings: dict) -> list[str]:
    names, values = (
        [name.replace("_", "-") for name in settings],
        ["-" if v is None else str(v) for v in settings.values()],
    )
    half, longest = -(-len(names) // 2), max(map(len, names))
    cells = [f"{name:<{longest}} {value:<22}" for name, value in zip(names, values, strict=True)]
    return [f"{left} {right}".rstrip() for left, right in zip_longest(cells[:half], cells[half:], fillvalue="")]


class StepRecords:
    """Makes the lines of log.jsonl. tokens: of a step, by all workers. utilization: a Utilization.

    stages: of each rank, the stage of the pipeline; all 0 without one.
    """

    def __init__(self, tokens: int, flops_per_token: float, utilization, stages: list[int]):
        self.tokens, self.flops_per_token, self.utilization = tokens, flops_per_token, utilization
        self.stages = stages

    def of_step(self, step: int, meeting: Meeting, norm: float, lr: float, step_s: float, skipped: bool) -> dict:
        """norm: of the gradients, before clipping. skipped: whether the update was left out, as the norm stands out."""
        record = {
            "step": step,
            "loss": meeting.loss,
            "grad_norm": norm,
            "lr": lr,
            "tokens": step * self.tokens,
            "step_s": step_s,
            "tokens_per_s": self.tokens / step_s,
            "exposed_exchange_s": exposed_exchange_s(meeting, step_s),
        }
        record |= self.utilization.of_step(self.tokens * self.flops_per_token / step_s)
        record |= {"skipped": True} if skipped else {}
        record |= {"pipeline_wait_s": float(np.mean(meeting.pipeline_s))} if any(self.stages) else {}
        return record | slowest(meeting.compute_s, self.stages)


def exposed_exchange_s(meeting: Meeting, step_s: float) -> float:
    """Seconds of exchange that nothing hid, the mean over the workers; at most step_s, those of rank 0's step.

    A worker that begins the step before rank 0 waits for it in an exchange: rank 0 still prints, or writes its log.
    These seconds lie between rank 0's steps, so they are none of this one's.
    """
    exchange, step, is_worker = np.array(meeting.exchange_s), np.array(meeting.step_s), np.isfinite(meeting.compute_s)
    within = np.maximum(0.0, exchange - np.maximum(0.0, step - step_s))
    return float(within[is_worker].mean())


def slowest(compute_s, stages: list[int]) -> dict[str, float]:
    """{"slowest_rank", "slowest_excess"}: of the ranks that took longest for their gradients in their stage, the one
    that stands out most, and by which share it took longer than the median of the stage's others; {} if no stage has
    two ranks that compute.

    compute_s: for each rank its seconds, nan if it computes nothing. stages: of each rank; stages differ by design.
    """
    seconds, found = np.asarray(compute_s), {}
    for stage in sorted(set(stages)):
        own = np.where(np.asarray(stages) == stage, seconds, np.nan)
        if np.isfinite(own).sum() < 2:
            continue
        rank = int(np.nanargmax(own))
        others = np.nanmedian(np.delete(own, rank))
        excess = float(own[rank] / others - 1) if others > 0 else 0.0
        if not found or excess > found["slowest_excess"]:
            found = {"slowest_rank": rank, "slowest_excess": excess}
    return found


class ProgressLines:
    """Rank 0 prints a line each `every` steps; None: a line a step, but at most one a second.

    The first, the last and validated steps always get one.

    A line names a rank that was clearly slower than the others in the steps since the line before. places: World's.
    stages: as slowest's.
    """

    def __init__(self, last_step: int, print_line, places: list[dict], stages: list[int], every: int | None = None):
        self.last_step, self.print_line, self.places, self.printed_at = last_step, print_line, places, 0.0
        self.compute_s, self.stages, self.every = [], stages, every

    def step(self, record: dict, compute_s: list[float]) -> None:
        """record: as StepRecords makes it, with "val_loss" after a validation. compute_s: as slowest's."""
        if record["step"] > WARM_UP_STEPS:
            self.compute_s.append(compute_s)
        now = time.monotonic()
        always = "val_loss" in record or "skipped" in record or record["step"] in (1, self.last_step)
        is_due = record["step"] % self.every == 0 if self.every else now - self.printed_at >= SECONDS_BETWEEN_LINES
        if not is_due and not always:
            return
        self.printed_at = now
        step = f"step {record['step']:>{len(str(self.last_step))}}/{self.last_step}"
        skipped = "  SKIPPED, the norm stands out" if "skipped" in record else ""
        mfu = f"  MFU {mfu_text(record['mfu'], 'peak_underestimated' in record)}" if "mfu" in record else ""
        exchange = record["exposed_exchange_s"] / record["step_s"]
        pipeline = (
            f"  pipeline {record['pipeline_wait_s'] / record['step_s']:.0%}" if "pipeline_wait_s" in record else ""
        )
        self.print_line(
            f"{step}  loss {record['loss']:#.5g}  norm {record['grad_norm']:.2f}  lr {record['lr']:.1e}  "
            f"{short_ms(1e3 * record['step_s'], 4)} ms  {record['tokens_per_s']:,.0f} tok/s{mfu}  "
            f"exchange {exchange:.0%}{pipeline}{self._slowest()}{skipped}"
        )
        if "val_loss" in record:
            self.print_line(f"{'':{len(step)}}  val loss {record['val_loss']:.4f}")  # beneath the loss

    def _slowest(self) -> str:
        """Names the rank whose median over the steps since the last line stands out, if there is one."""
        found = slowest(np.median(self.compute_s, axis=0), self.stages) if self.compute_s else {}
        self.compute_s = []
        if not found or found["slowest_excess"] < STANDS_OUT:
            return ""
        rank = found["slowest_rank"]
        return f"  slowest rank {rank} ({self.places[rank]['host']}) +{found['slowest_excess']:.0%}"


class TraceFailures:
    """Rank 0's word on ranks whose traces cannot be written any more: a line at once, and one at the end for the rest.

    traces: RUN/traces. `own` is this rank's failure as a number, which all ranks tell each other: 0 without one.
    """

    def __init__(self, world, traces: Path, tracer):
        self.world, self.traces, self.tracer, self._told = world, traces, tracer, set()

    def own(self) -> int:
        failure = self.tracer.failure
        return 0 if failure is None else failure.errno or errno.EIO

    def tell(self, failures, at_end: bool = False) -> None:
        """failures: each rank's `own`; only rank 0 needs them."""
        if self.world.rank or (self._told and not at_end):
            return
        if new := [rank for rank in np.flatnonzero(failures).tolist() if rank not in self._told]:
            self._told.update(new)
            ranks = f"rank {new[0]} on {self.world.places[new[0]]['host']}"
            ranks += f" and {len(new) - 1} more" if new[1:] else ""
            what = f"the traces of {ranks} end early" if at_end else f"tracing is off from here on for {ranks}"
            warn(f"{self.traces}: {os.strerror(int(failures[new[0]]))}: {what}{'' if at_end else '; training goes on'}")


def warn(text: str) -> None:
    """A line on stderr, of what is lost while training goes on."""
    say(f"warning: {text}", on_stderr=True)


class Ending:
    """What a run leaves and says at its end. folder: rank 0's RunFolder. traces: RUN/traces, None if it has none.

    utilization: a Utilization, which measures the peak once more.
    """

    def __init__(self, world, folder, traces, tracer, failures: TraceFailures, utilization):
        self.world, self.folder, self.traces, self.tracer, self.failures = world, folder, traces, tracer, failures
        self.utilization = utilization

    def tell(self, step: int, is_done: bool, checkpoint_costs: list[dict]) -> None:
        """After the last step: write summary.json; each node's clock and link, and the peak once more. Collective.

        is_done: whether the run has made all its steps; else rank 0 says how to go on.
        """
        world = self.world
        facts = {
            "peak_memory_bytes": world.comm.gather(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024),
            "tracing_share": tracing_share(self.tracer),
            "checkpoints": world.comm.gather(checkpoint_costs),
        }
        are_full = world.comm.gather(self.tracer.is_full)
        at_end = {END_CLOCKS: world.comm.gather({"node": world.node} | clock_offset(world))}
        if is_done and self.traces:  # else a scheduler may be waiting for the job's end
            at_end[END_LINKS] = probe_links(world)
        self.failures.tell(world.comm.gather(self.failures.own()), at_end=True)
        peak, peak_line = self.utilization.at_end()
        with world.together(UserError):
            if world.rank == 0:
                if self.traces and world.node_count > 1:
                    self._keep(at_end)
                self.folder.write_summary(**facts)
                if peak:
                    self.folder.add_to_config(peak=peak)
                if peak_line:
                    world.print(peak_line)
                path = self.folder.path
                world.print(
                    f"peak memory of a rank {max(facts['peak_memory_bytes']) / 1e9:.2f} GB; tracing took "
                    f"{facts['tracing_share']:.2%} of the traced steps; run folder {path}"
                )
                if any(are_full):
                    world.print(
                        "the traces end before the run, as they are as large as --trace-mb allows: raise it, or "
                        "choose steps by --trace FROM:TO"
                    )
                if not is_done:
                    world.print(f"a signal ended the run after step {step}: go on with it by --out {path} --resume")

    def _keep(self, at_end: dict[str, list[dict]]) -> None:
        for name, nodes in at_end.items():
            try:
                write_at_end(self.traces, name, nodes)
            except OSError as error:
                kept = "clocks" if name == END_CLOCKS else "links"
                return warn(f"{self.traces / name}: {error.strerror}: the traces keep the {kept} of the start alone")
