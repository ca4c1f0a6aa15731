"""bench_step.py on a GPU: our own step first, then the other contenders, each alone on the GPU.

A contender's process has ended, and its memory is free, before the next one starts. A turn is several steps followed by
one wait for the GPU. Turn k of a contender is compared with our turn k, because a GPU's clock falls under load. Every
result is printed and written at once, so that it remains if the run is killed.
"""

import time
from contextlib import closing, contextmanager
from dataclasses import asdict
from statistics import fmean

from gpt2.config import flops_per_token
from scripts.bench.report import ReportFile
from scripts.machine.gpu import peak_tflops
from scripts.machine.host import machine, versions
from scripts.step_bench.gpu_table import failure_line, header, kernel_table, notes, row
from scripts.step_bench.llmc import run_llmc
from scripts.step_bench.process import (
    TORCH_CONTENDERS,
    ContenderError,
    ContenderProcess,
    compare_steps,
    contender_command,
    selected,
)  # fmt: skip
from scripts.training.utilization import PeakRate

COMMAND = contender_command("--backend", "cupy")
CONTENDERS = {
    "ours": "this project", "apart": "  no work in epilogues", "cudnn": "  attention by cuDNN",
} | TORCH_CONTENDERS | {"llmc": "llm.c"}  # fmt: skip
# Contenders requested by --vs: if one of them cannot be measured, the command fails.
ASKED_FOR_BY = {name: "torch" for name in TORCH_CONTENDERS} | {"llmc": "llmc"}
STEPS_A_TURN = 5
WARM_UP_STEPS = 3
LIMIT_S = 450  # after this time the command begins no further measurement
FIRST_STEPS_LIMIT_S = 240  # includes compiling and the choice of algorithms
RATES = {"copy_bytes": 2 << 30, "matmul_size": 8192, "matmul_s": 2.0}


def bench(settings, config, command=COMMAND, rates=RATES) -> int:
    """Measure, print and write. Return the exit code. Raise ContenderError if our step cannot be measured."""
    run = GpuBench(settings, config, command)
    run.measure_ours(rates)
    for name in CONTENDERS:
        if name != "ours" and (name not in ASKED_FOR_BY or ASKED_FOR_BY[name] in settings.vs):
            run.measure(name)
    print(notes(run.report))
    missing = [name for name in ASKED_FOR_BY if "error" in run.report["contenders"].get(name, {})]
    return 1 if missing or run.report.get("failed") else 0


class GpuBench:
    """One run of the command: the report so far, and the remaining time."""

    def __init__(self, settings, config, command):
        self.settings = settings
        self.config = config
        self.command = command
        self.start = time.perf_counter()
        self.first_losses = {}
        self.our_turns = []
        self.file = ReportFile(settings.json)
        shape = selected(settings, "batch_size", "seq_len", "dtype")
        self.shape = shape | {"config": asdict(config)}
        counts = {"turns": settings.repeat, "steps_a_turn": STEPS_A_TURN, "warm_up_steps": WARM_UP_STEPS}
        self.report = {
            "settings": shape | {"model": settings.model} | counts,
            "machine": machine() | versions("numpy"),
            "contenders": {},
        }

    def measure_ours(self, rates) -> None:
        """Measure our tokens/s, then this GPU's rates, then the time and the floor of each kernel."""
        with self._started("ours") as ours:
            gpu = ours.ask("gpu", limit_s=self._left())
            self.report["machine"] |= gpu["facts"]
            self.report["peak_tflops"] = self.settings.peak_tflops or peak_tflops(gpu["facts"]["GPU"])
            self.report["flops_per_token"] = flops_per_token(self.config, self.settings.seq_len, gpu["parameters"])
            print(header(self.report), flush=True)
            self.our_turns = self._turns(ours)
            self._record("ours", self.our_turns)
            for part, options in (("rates", rates), ("kernels", {})):
                self._measure_part(ours, part, options)
        self._write()
        if "kernels" in self.report and "rates" in self.report:
            print(kernel_table(self.report), flush=True)

    def _measure_part(self, ours: ContenderProcess, part: str, options) -> None:
        """Measure a part of the table of kernels. If it fails, report that and go on with the other contenders."""
        try:
            self.report[part] = ours.ask(part, limit_s=self._left(), **options)
        except ContenderError as error:
            self.report.setdefault("failed", {})[part] = str(error)
            print(failure_line(f"  its {part}", str(error)), flush=True)

    def measure(self, name: str) -> None:
        """Measure another contender. A failure goes into the report and the table."""
        try:
            if name == "llmc":
                turns = self._llmc_turns()
            else:
                with self._started(name) as contender:
                    turns = self._turns(contender)
            self._record(name, turns)
        except ContenderError as error:
            self.report["contenders"][name] = {"error": str(error)}
            print(failure_line(CONTENDERS[name], str(error)), flush=True)
            self._write()

    @contextmanager
    def _started(self, name: str):
        """Start a contender and run its warm-up steps. The contender ends with the block."""
        limit_s = min(FIRST_STEPS_LIMIT_S, self._left())
        with closing(ContenderProcess(self.command, name, self.shape)) as contender:
            self.first_losses[name] = contender.ask("steps", limit_s=limit_s, count=WARM_UP_STEPS)["loss"]
            yield contender

    def _turns(self, contender: ContenderProcess) -> list[dict]:
        return [contender.ask("steps", limit_s=self._left(), count=STEPS_A_TURN) for _ in range(self.settings.repeat)]

    def _llmc_turns(self) -> list[dict]:
        """Return the turns of llm.c, which runs all its steps in one process."""
        steps = WARM_UP_STEPS + STEPS_A_TURN * self.settings.repeat
        found = run_llmc(self.settings.vs["llmc"], self.shape, steps, self._left())
        self.first_losses["llmc"] = found[WARM_UP_STEPS - 1]["loss"]
        turns = (found[start : start + STEPS_A_TURN] for start in range(WARM_UP_STEPS, steps, STEPS_A_TURN))
        return [turn[-1] | {"step_s": fmean(step["step_s"] for step in turn)} for turn in turns]

    def _left(self) -> float:
        """Return the remaining seconds. Raise ContenderError if there are none."""
        left_s = LIMIT_S - (time.perf_counter() - self.start)
        if left_s <= 0:
            raise ContenderError(f"not measured: the {LIMIT_S} s of this command are used up")
        return left_s

    def _record(self, name: str, turns: list[dict]) -> None:
        """Summarize a contender's turns; print and write the result."""
        ours_s = [turn["step_s"] for turn in self.our_turns]
        seconds = [turn["step_s"] for turn in turns]
        last = turns[-1]
        entry = compare_steps(seconds, ours_s, self.settings.batch_size * self.settings.seq_len)
        flops = entry["tokens_per_s"] * self.report["flops_per_token"]
        entry |= {
            "turns_s": seconds,
            "flops": flops,
            **({"mfu": None} | self._mfu(flops)),
            "memory_bytes": last["memory_bytes"],
            "loss": self.first_losses[name],
            "versions": last.get("versions", {}),
        }
        self.report["contenders"][name] = entry
        print(row(CONTENDERS[name], entry), flush=True)
        self._write()

    def _mfu(self, flops: float) -> dict:
        """Return Peak.mfu, with the fastest rate that any contender or product has reached so far."""
        tflops = self.report["peak_tflops"]
        rates = self.report.get("rates", {})
        seen = [entry.get("flops", 0.0) for entry in self.report["contenders"].values()]
        peak = PeakRate([tflops] if tflops else None, "--peak-tflops or the datasheet")
        return peak.mfu(flops, max([*seen, rates.get("matmul_burst_flops", 0.0)], default=0.0))

    def _write(self) -> None:
        self.report["seconds"] = time.perf_counter() - self.start
        self.file.write(self.report)
