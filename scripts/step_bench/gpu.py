"""bench_step.py on a GPU: our own figures first, then each other contender in turns with ours, one at a time.

No more than two are on the GPU at once, so that their memory fits; the one whose turn it is not is idle. A turn is some
steps and one wait for the GPU. What is measured is printed and written at once: it stays when the run is killed.
"""

import time
from contextlib import closing, contextmanager
from dataclasses import asdict

from gpt2.config import flops_per_token
from scripts.machine.gpu import peak_tflops
from scripts.machine.host import machine, versions
from scripts.step_bench.gpu_candidates import CANDIDATES
from scripts.step_bench.gpu_table import (
    candidate_header,
    candidate_line,
    contender_line,
    failure_line,
    has_table,
    header,
    kernel_table,
    notes,
)
from scripts.step_bench.process import (
    TORCH_CONTENDERS,
    Contender,
    ContenderError,
    chosen,
    contender_command,
    statistics_of,
    write_report,
)  # fmt: skip
from scripts.training.utilization import Peak

COMMAND = contender_command("--backend", "cupy")
CONTENDERS = {
    "ours": "this project", "apart": "  no work in epilogues", "cudnn": "  attention by cuDNN",
} | TORCH_CONTENDERS  # fmt: skip
NEEDED = tuple(TORCH_CONTENDERS)  # asked for by a flag: the command fails without them
STEPS_A_TURN = 5
WARM_UP_STEPS = 3
LIMIT_S = 450  # of the whole command; what is not begun by then is left out
FIRST_STEPS_LIMIT_S = 240  # compilers and the choice of algorithms included
RATES = {"copy_bytes": 2 << 30, "matmul_size": 8192}
CANDIDATE_OPTIONS = {"anchors": {"anchor_every": 8}}


def bench(settings, config, command=COMMAND, rates=RATES) -> int:
    """Measure, print, write; the exit code. ContenderError if our own step cannot be measured."""
    session = Session(settings, config, command)
    names = [name for name in CONTENDERS if name not in NEEDED or settings.vs == "torch"]
    with session.started("ours") as session.ours:
        session.measure_ours(rates)
        for name in names[1:]:
            session.measure_beside_ours(name)
        session.measure_candidates()
    print(notes(session.report))
    lacks = [name for name in NEEDED if "error" in session.report["contenders"].get(name, {})]
    return 1 if lacks or session.report.get("failed") else 0


class Session:
    """One run of the command: the report as far as it is known, and the time that is left."""

    def __init__(self, settings, config, command):
        self.settings, self.config, self.command = settings, config, command
        self.start, self.ours, self.first_losses = time.perf_counter(), None, {}
        shape = chosen(settings, "batch_size", "seq_len", "dtype")
        self.shape = shape | {"config": asdict(config)}
        counts = {"turns": settings.repeat, "steps_a_turn": STEPS_A_TURN, "warm_up_steps": WARM_UP_STEPS}
        self.report = {
            "settings": shape | {"model": settings.model} | counts,
            "machine": machine() | versions("numpy"),
            "contenders": {},
        }

    def measure_ours(self, rates) -> None:
        """Alone: tokens/s, then what this GPU reaches, then each kernel beside its floor."""
        gpu = self.ours.ask("gpu", limit_s=self._left())
        self.report["machine"] |= gpu["facts"]
        self.report["peak_tflops"] = self.settings.peak_tflops or peak_tflops(gpu["facts"]["GPU"])
        self.report["flops_per_token"] = flops_per_token(self.config, self.settings.seq_len, gpu["parameters"])
        print(header(self.report), flush=True)
        turns = [self._turn(self.ours) for _ in range(self.settings.repeat)]
        self._record("ours", list(zip(turns, turns, strict=True)))
        for part, options in (("rates", rates), ("kernels", {})):
            self._measure_part(part, options)
        self._write()
        if has_table(self.report):
            print(kernel_table(self.report), flush=True)

    def _measure_part(self, part: str, options) -> None:
        """What the table of kernels is made of. Where it fails, the contenders are measured all the same."""
        try:
            self.report[part] = self.ours.ask(part, limit_s=self._left(), **options)
        except ContenderError as error:
            self.report.setdefault("failed", {})[part] = str(error)
            print(failure_line(f"  its {part}", str(error)), flush=True)

    def measure_beside_ours(self, name: str) -> None:
        """Turns with ours. A failure is a result too: the report gets it, and a line of the table."""
        try:
            with self.started(name) as other:
                turns = [(self._turn(self.ours), self._turn(other)) for _ in range(self.settings.repeat)]
                self._record(name, turns)
        except ContenderError as error:
            self.report["contenders"][name] = {"error": str(error)}
            print(failure_line(CONTENDERS[name], str(error)), flush=True)
            self._write()

    def measure_candidates(self) -> None:
        """Each beside today's way, in our own process. Last of all, as one may spoil its process's GPU."""
        print(candidate_header(), flush=True)
        entries = self.report["candidates"] = {}
        for name in CANDIDATES:
            options = {"turns": self.settings.repeat} | CANDIDATE_OPTIONS.get(name, {})
            try:
                entries[name] = self.ours.ask("candidate", limit_s=self._left(), name=name, **options)
            except ContenderError as error:
                entries[name] = {"error": str(error)}
            print(candidate_line(name, entries[name]), flush=True)
            self._write()

    @contextmanager
    def started(self, name: str):
        """A new contender, once its steps that do not count are done; it ends with the block."""
        limit_s = min(FIRST_STEPS_LIMIT_S, self._left())
        with closing(Contender(self.command, name, self.shape)) as contender:
            self.first_losses[name] = contender.ask("steps", limit_s=limit_s, count=WARM_UP_STEPS)["loss"]
            yield contender

    def _turn(self, contender: Contender) -> dict:
        return contender.ask("steps", limit_s=self._left(), count=STEPS_A_TURN)

    def _left(self) -> float:
        """The seconds that are left. ContenderError where none are."""
        left_s = LIMIT_S - (time.perf_counter() - self.start)
        if left_s <= 0:
            raise ContenderError(f"not measured: the {LIMIT_S} s of this command are used up")
        return left_s

    def _record(self, name: str, turns: list[tuple[dict, dict]]) -> None:
        """What (ours, its own) turns come to, printed and written."""
        ours_s, seconds = ([turn["step_s"] for turn in side] for side in zip(*turns, strict=True))
        entry, last = statistics_of(seconds, ours_s, self.settings.batch_size * self.settings.seq_len), turns[-1][1]
        flops = entry["tokens_per_s"] * self.report["flops_per_token"]
        entry |= {
            "turns_s": seconds, "flops": flops, **({"mfu": None} | self._mfu(flops)),
            "memory_bytes": last["memory_bytes"], "loss": self.first_losses[name], "versions": last.get("versions", {}),
        }  # fmt: skip
        self.report["contenders"][name] = entry
        print(contender_line(CONTENDERS[name], entry), flush=True)
        self._write()

    def _mfu(self, flops: float) -> dict:
        """As Peak.mfu, where what any contender reached so far, and a product alone, is known, too."""
        tflops, rates = self.report["peak_tflops"], self.report.get("rates", {})
        seen = [entry.get("flops", 0.0) for entry in self.report["contenders"].values()]
        peak = Peak([tflops] if tflops else None, "--peak-tflops or the datasheet")
        return peak.mfu(flops, max([*seen, rates.get("matmul_flops", 0.0)], default=0.0))

    def _write(self) -> None:
        self.report["seconds"] = time.perf_counter() - self.start
        write_report(self.settings, self.report)
