"""Measure the contenders of bench_step.py, print a line for each, and write the report.

On CPUs a turn is one step, on a GPU several steps with one wait at the end. A machine's speed drifts, so turn k of a
contender is compared with our turn k. Results are printed and written at once, so they
remain if the run is killed.
"""

import os
import statistics
import time
from contextlib import ExitStack, closing
from dataclasses import asdict

from gpt2.config import flops_per_token
from gpt2.parameters import Layout
from scripts.bench.report import ReportFile
from scripts.bench.turns import in_turns, step_times
from scripts.machine.blas import blas_facts
from scripts.machine.gpu import peak_tflops
from scripts.machine.host import machine, versions
from scripts.step_bench.llmc import LlmcRun
from scripts.step_bench.process import COMMAND, ContenderError, ContenderProcess
from scripts.step_bench.step_table import failure_line, header, notes, parts_text, row
from scripts.training.utilization import PeakRate

SHAPE = ("backend", "batch_size", "seq_len", "dtype", "threads")
WARM_UP_STEPS = 3
STEPS_A_TURN = {"numpy": 1, "cupy": 5}
# On CPUs the threads of BLAS and OpenMP still spin after a step, on cores that the next contender needs.
SETTLE_S = {"numpy": 0.5, "cupy": 0.0}


def bench(settings, config, command=COMMAND) -> int:
    """Measure, print and write. Return the exit code. Raise ContenderError if our step cannot be measured."""
    run = StepBench(settings, config, command)
    print(header(run.report), flush=True)
    for names in groups(settings):
        run.measure(names)
    print("\n\n".join([notes(run.report), *parts_text(run.report["contenders"])]))
    return 1 if any("error" in one for one in run.report["contenders"].values()) else 0


def groups(settings) -> list[list[str]]:
    """Return groups of contenders. Members of a group take turns; a group starts when the one before it has ended.

    On a GPU each contender is alone, because it may need all of the GPU's memory.
    """
    torch = ["torch", "torch-compiled"] if "torch" in settings.vs else []
    llmc = ["llmc"] if "llmc" in settings.vs else []
    if settings.backend == "cupy":
        return [[name] for name in ("ours", *torch, *llmc)]
    float32 = ["ours-float32"] if settings.dtype == "bfloat16" else []
    return [["peak", "ours", "floor", *float32, *torch]]


class StepBench:
    """One run of bench_step.py. report: the results so far. command: starts a contender, given its name and shape."""

    def __init__(self, settings, config, command):
        self.settings = settings
        self.command = command
        self.file = ReportFile(settings.json)
        self.steps_a_turn = STEPS_A_TURN[settings.backend]
        shape = {name: getattr(settings, name) for name in SHAPE}
        self.shape = shape | {"config": asdict(config)}
        counts = {"turns": settings.repeat, "steps_a_turn": self.steps_a_turn, "warm_up_steps": WARM_UP_STEPS}
        self.report = {
            "settings": shape | {"model": settings.model} | counts,
            "machine": machine() | versions("numpy", "numba"),
            "blas": blas_facts(os.environ),
            "flops_per_token": flops_per_token(config, settings.seq_len, Layout(config).count),
            "peak_tflops": None,
            "contenders": {},
        }

    def measure(self, names: list[str]) -> None:
        """Measure a group in turns; the first turn is warm-up. Drop a contender that fails; raise its error if ours."""
        turns = {name: [] for name in names}
        running = dict.fromkeys(names)
        with ExitStack() as stack:
            for turn, name, contender in in_turns(running, 1 + self.settings.repeat):
                try:
                    if turn == 0:
                        contender = running[name] = stack.enter_context(closing(self.start(name)))
                    time.sleep(SETTLE_S[self.settings.backend])
                    turns[name].append(contender.ask(self.steps_a_turn if turn else WARM_UP_STEPS))
                except ContenderError as error:
                    if name == "ours":
                        raise
                    del running[name]
                    self.report["contenders"][name] = {"error": str(error)}
        for name in names:
            self.record(name, turns[name])
        self.file.write(self.report)

    def start(self, name: str):
        if name == "llmc":
            steps = WARM_UP_STEPS + self.steps_a_turn * self.settings.repeat
            return LlmcRun(self.settings.vs["llmc"], self.shape, steps)
        return ContenderProcess(self.command, name, self.shape)

    def record(self, name: str, turns: list[dict]) -> None:
        """Add a contender's results to the report, and print them."""
        contenders = self.report["contenders"]
        if name in contenders:
            print(failure_line(name, contenders[name]["error"]), flush=True)
        elif name == "peak":
            self.report["peak_tflops"] = max(turn["flops"] for turn in turns) / 1e12
        else:
            contenders[name] = self.summarize(*turns)
            print(row(name, contenders[name]), flush=True)

    def summarize(self, warm_up: dict, *turns: dict) -> dict:
        """Return a contender's figures, medians unless their names say otherwise."""
        seconds = [turn["step_s"] for turn in turns]
        last = turns[-1]
        if "machine" in last:
            self.report["machine"] |= last["machine"]
            self.report["peak_tflops"] = peak_tflops(last["machine"]["GPU"])
        times = step_times(seconds)
        tokens_per_s = self.settings.batch_size * self.settings.seq_len / times["step_s"]
        ours = self.report["contenders"].get("ours", {}).get("turns_s", seconds)
        return times | {
            "tokens_per_s": tokens_per_s,
            "turns_s": seconds,
            # In each turn, a slow machine slows down both contenders.
            "ours_over_this": statistics.median(a / b for a, b in zip(ours, seconds, strict=True)),
            "mfu": None,
            **self.mfu(tokens_per_s),
            "memory_bytes": last["memory_bytes"],
            "loss": warm_up["loss"],
            "parts_s": {part: statistics.median(turn["parts"][part] for turn in turns) for part in last["parts"]},
            "versions": last["versions"],
        }

    def mfu(self, tokens_per_s: float) -> dict:
        """Return PeakRate.mfu. fastest: the highest rate of all contenders so far."""
        known = self.report["peak_tflops"]
        speeds = [one.get("tokens_per_s", 0.0) for one in self.report["contenders"].values()]
        fastest = max(speeds, default=0.0) * self.report["flops_per_token"]
        peak = PeakRate([known] if known else None, "")
        return peak.mfu(tokens_per_s * self.report["flops_per_token"], fastest)
