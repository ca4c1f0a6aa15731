"""Trace the steps and phases of any mpi4py program into a run folder that diagnose.py and plot.py can read.

    with traced(world, "RUN", "gradient-descent") as tracer:
        for step in range(1, steps + 1):
            with tracer.step(step):
                with tracer.phase("compute"):
                    ...
                with tracer.phase("allreduce", bytes=gradient.nbytes):
                    ...

Use the phase names of traces/record/phases.py: they tell the verdict which phases compute or exchange.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dist.probe.links import clock_offset, probe_links
from dist.probe.ports import Ports
from dist.world import World, library_name
from gpt2.errors import UserError, file_errors
from gpt2.files import as_json, write_json
from scripts.machine.host import machine, versions
from scripts.training.report import TraceFailures
from scripts.training.run_lock import RunLock
from traces import RunError, Tracer
from traces.read.schemas import NAME
from traces.record.files import END_CLOCKS, END_LINKS, RUN_FORMAT, CounterFile, write_at_end


class ProgramTracer(Tracer):
    """A Tracer that also writes a line of log.jsonl for each step. log: rank 0's open file, None on other ranks.

    made: the number of traced steps so far.
    """

    def __init__(self, log, *arguments, **options):
        super().__init__(*arguments, **options)
        self._log = log
        self._noted = {}
        self.made = 0
        self._begun = time.monotonic()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Trace a step, as Tracer.step does, and log it."""
        self._noted = {}
        with super().step(number):
            yield
        self.made += 1
        if self._log is not None:
            times = {"step_s": self.seconds("step"), "elapsed_s": time.monotonic() - self._begun}
            self._log.write(as_json(self._noted | {"step": number} | times) + "\n")

    def note(self, **numbers: float) -> None:
        """Add numbers to the current step's line of the log, on rank 0. For `loss` plot.py draws a figure."""
        self._noted |= {name: float(value) for name, value in numbers.items()}


@contextmanager
def traced(world: World, out: str, name: str) -> Iterator[ProgramTracer]:
    """Yield this rank's tracer; measure clocks and links before and after the block. Collective.

    out: the run folder, which must not hold a run. name: the program's name for titles, without spaces. A mistake in
    either ends the job with one line. The folder is locked during the block, so watch.py sees that the program runs.
    summary.json says that the block has ended. If the block raises, there is no summary and no second measurement: the
    other ranks may never arrive. The traces so far can be read.
    """
    with RunLock(world) as lock:
        lock.take(Path(out), anyway=False)
        links = probe_links(world)
        clock = clock_offset(world)
        log = None
        with world.together(RunError):
            if world.rank == 0:
                log = _begin(Path(out), name, world, links)
        place = world.places[world.rank] | {"ranks": world.size, "strategy": name}
        traces = Path(out) / "traces"
        counters = None
        if world.local_rank == 0 and world.node_count > 1:  # the first rank of each node samples the node's ports
            ports = Ports()
            counters = CounterFile(traces, place, ports.names, clock, lambda: (*ports.read(), ports.stalls()))
        tracer = ProgramTracer(log, traces, place, clock=clock, counters=counters)
        try:
            yield tracer
        finally:
            tracer.close()
            if log is not None:
                log.close()
        _end(world, Path(out), tracer)


def _end(world: World, folder: Path, tracer: ProgramTracer) -> None:
    """Measure again and write summary.json. Collective."""
    failures = TraceFailures(world, folder / "traces", tracer)
    failures.tell(world.comm.gather(failures.own()), at_end=True)
    nodes = world.comm.gather({"node": world.node} | clock_offset(world))
    links = probe_links(world)
    with world.together(UserError), file_errors(folder, "check the disk; the traces so far can be read"):
        if world.rank == 0 and world.node_count > 1:
            write_at_end(folder / "traces", END_CLOCKS, nodes)
            write_at_end(folder / "traces", END_LINKS, links)
        if world.rank == 0:
            write_json(folder / "summary.json", {"steps": tracer.made})


def _begin(folder: Path, name: str, world: World, links: list[dict]):
    """Make the folder and its config.json on rank 0. Return log.jsonl, open and empty."""
    if not NAME.accepts(name):
        raise RunError(f"the program's name is {name!r}, expected {NAME.expected}")
    if (folder / "config.json").exists():
        raise RunError(f"{folder} already holds a run (config.json): choose another folder, or remove it")
    config = {
        "format": RUN_FORMAT, "settings": {"strategy": name}, "program": name, "command": sys.argv,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "versions": versions("gpt2-mpi", "numpy", "mpi4py"),
        "machine": machine(), "mpi_library": library_name(), "ranks": world.places, "links": links,
    }  # fmt: skip
    try:
        (folder / "config.json").write_text(as_json(config, indent=1) + "\n")
        return open(folder / "log.jsonl", "w", buffering=1)
    except OSError as error:
        raise RunError(f"{folder} cannot be written: {error.strerror}; choose another folder") from None
