"""Time whole training steps against PyTorch's DistributedDataParallel, its ZeRO optimizer and FSDP, over gloo on CPUs.

mpirun -n 2 python scripts/bench_training.py -- --n-layer 2 --n-embd 128 --batch-size 2
srun -n 16 python scripts/bench_training.py --link 25gbit --json steps.json -- --model gpt2-124M --train-data '...'
sudo python scripts/virtual_cluster.py run --nodes 4 --ranks 4 --rate 400mbit -- \\
    python scripts/bench_training.py --link 400mbit --json steps.json -- --n-layer 6 --n-embd 384 --batch-size 4

The flags after -- go to scripts/train.py: model, data, batch, optimizer. Flags of the exchange apply to ours only.
--contenders also takes strategies, with options as in scripts/compare.py: hierarchical-sharded/bfloat16. All contenders
begin with the same parameters and read the same windows; they take turns, and each turn is a new training.
A contender's computing is the step of the same library without exchange, and its exposed exchange is the rest of the
step. torch is not a dependency of the project: without it only ours is measured.
"""

import gc
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

from dist.console import open_console
from dist.wire import WIRE_BYTES
from dist.world import ClosedTogether, start_world, threads_per_rank
from gpt2.errors import UserError
from gpt2.files import place_of_file
from gpt2.parameters import Layout
from scripts.bench.job import describe_job
from scripts.bench.report import ReportFile
from scripts.bench.turns import in_turns
from scripts.cluster.program import split_command
from scripts.compare import strategy_flags
from scripts.machine.names import error_text
from scripts.settings.checks import complete
from scripts.settings.derived import global_batch
from scripts.settings.training import OneLineParser, Settings, parse_settings
from scripts.settings.units import bytes_per_s, repetitions
from scripts.training.assemble import assemble
from scripts.training.plan import data_of
from scripts.training.run_lock import RunLock
from scripts.training_bench.gloo import has_torch, start_gloo
from scripts.training_bench.training_table import ALONE, library_of, median_s, summarize, table

# Our contenders: flags of train.py after those of the user. The first exchanges nothing: its step is computing alone.
OURS = {
    "ours, no exchange": ["--strategy", "none", "--no-exchange"],
    "ours": [],
    "ours, bfloat16 wire": ["--wire", "bfloat16"],
}
# Switch off everything beside the steps. A peak that is given is not measured.
STEPS_ALONE = ["--eval-every", "0", "--trace", "off", "--stall-after", "0", "--peak-tflops", "1"]


def main():
    own, training = split_command(sys.argv[1:])
    settings = parser().parse_args(own)
    world = start_world(None, (UserError,))
    with world.together(UserError):
        if world.rank == 0 and settings.json:
            place_of_file(settings.json)  # fail before the minutes of measuring
    try:
        report = bench(settings, training, world)
    finally:
        if world.rank == 0:
            shutil.rmtree(settings.out, ignore_errors=True)
    world.print(f"\n{table(report)}")
    with world.together(UserError):
        if world.rank == 0:
            ReportFile(settings.json).write(report)


def parser() -> OneLineParser:
    """Return the parser of the flags before --."""
    result = OneLineParser(__doc__)
    add = result.add_argument
    add("--contenders", default="all", metavar="all|LIST", help="contenders or strategies, separated by ; (all)")
    add("--turns", type=repetitions, default=2, metavar="R", help="trainings of each contender (%(default)s)")
    add("--steps", type=repetitions, default=4, metavar="S", help="measured steps per turn, after one of warm-up (4)")
    add("--link", type=bytes_per_s, metavar="RATE", help="rate of a node's port, each way: 400mbit, 100gbit (probed)")
    add("--out", type=Path, default=Path("runs/bench-training"), help="folder for temporary run folders (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="write all measurements to this file")
    return result


def bench(settings, training: list[str], world) -> dict:
    """Measure every contender in turn and return the report. Collective."""
    reference = settings_of("ours", training, settings.steps + 1, settings.out)
    with world.together(UserError):
        s, config = complete(reference, world.size)
    makers = contenders(settings, training, world, s, config)
    turns, left_out = measure(world, makers, settings.turns)
    parameters = Layout(config).count
    packages = ["numpy", "numba", "mpi4py", *(["torch"] if has_torch() else [])]
    report = describe_job(world, settings.link, *packages) | {
        "training": training,
        "parameters": parameters,
        "steps": s.steps,
        "turns": settings.turns,
        "left_out": left_out,
        "tokens": global_batch(s, world.size) * s.seq_len,
    }
    size_bytes = WIRE_BYTES["float32"] * parameters
    return report | summarize(turns, size_bytes, world.node_count, report["link"]["bytes_per_s"])


def contenders(settings, training: list[str], world, s, config) -> dict:
    """Return {name: function that starts a turn}. A turn iterates over (seconds, loss) of its steps. Collective."""
    makers = {name: partial(train, world, name, training, s.steps, settings.out) for name in OURS}
    if not has_torch():
        world.print("PyTorch is not installed (pip install torch), so ours is measured alone")
    else:
        start_gloo(world)  # before torch is loaded
        from scripts.training_bench import torch_training

        windows, _, _ = data_of(s, config.vocab_size, world)
        threads = s.threads or threads_per_rank(world)
        for name in torch_training.FORMS:
            makers[name] = partial(torch_training.train, world, name, s, config, windows, threads)
    names = [*makers] if settings.contenders == "all" else settings.contenders.split(";")
    with world.together(UserError):
        check_names(names, makers)
        for name in names:
            if name not in makers:
                complete(settings_of(name, training, s.steps, settings.out), world.size)
                makers[name] = partial(train, world, name, training, s.steps, settings.out)
    return {name: makers[name] for name in names}


def check_names(names: list[str], makers: dict) -> None:
    """Raise UserError unless all names are known, and each library's step without exchange is among them."""
    for name in names:
        if name not in makers:
            strategy_flags(name)
        alone = f"{library_of(name)}, {ALONE}"
        if alone not in names:
            raise UserError(f"--contenders: {name!r} without {alone!r}, which measures computing alone: add it")


def settings_of(name: str, training: list[str], steps: int, out: Path) -> Settings:
    """Return the settings of a contender's training. training: flags of train.py."""
    own = OURS[name] if name in OURS else strategy_flags(name)
    folder = out / name.replace(" ", "-").replace("/", "-")
    return parse_settings("", [*STEPS_ALONE, *training, *own, "--steps", str(steps), "--out", str(folder)])


def train(world, name: str, training: list[str], steps: int, out: Path) -> Iterator[tuple[float, float]]:
    """Train from the beginning. Yield seconds and mean loss of each step. Collective.

    out: the folder for the run folder, which holds only its lock.
    """
    settings = settings_of(name, training, steps, out)
    with RunLock(world) as lock, ClosedTogether() as resources:
        loop = assemble(settings, world, lock, resources)
        with closing(loop.tracer), loop.checkpoints:
            for step in loop.steps:
                yield make_step(loop, step)
            for _ in loop.model.ranges():  # waits for parameters that are still being gathered
                pass


def make_step(loop, step: int) -> tuple[float, float]:
    """Make a step like scripts/train.py. Return this rank's seconds from meeting to meeting, and the mean loss."""
    tracer = loop.tracer
    strategy = loop.strategy
    with tracer.step(step):
        loss_part = loop.worker.forward_backward(step, strategy.gradients_final)
        norm = strategy.update(loop.learning_rate.at(step))
        with tracer.phase("wait"):
            reports = loop.meeting_point.meet(loss_part, None if strategy.clipping.skips else norm)
    return tracer.seconds("step"), reports.loss


def measure(world, makers: dict, turns: int) -> tuple[dict, dict]:
    """Return ({contender: [(seconds, loss), ...] for each turn}, {failed contender: why}). Collective."""
    found = {name: [] for name in makers}
    left_out = {}
    remaining = dict(makers)
    for turn, name, start_turn in in_turns(remaining, turns):
        begun = time.monotonic()
        steps, problem = one_turn(start_turn())
        if why := next((each for each in world.comm.allgather(problem) if each), None):
            left_out[name] = why
            del remaining[name], found[name]
            world.print(f"{name}: skipped: {why}")
            continue
        found[name].append(steps)
        took_s = time.monotonic() - begun
        world.print(f"turn {turn + 1} of {turns}, {name}: {median_s([steps]):.3f} s a step ({took_s:.0f} s in all)")
    return found, left_out


def one_turn(steps: Iterator[tuple[float, float]]) -> tuple[list, str | None]:
    """Return (the steps, the error that ended them or None). Free the contender's memory."""
    try:
        return list(steps), None
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:  # PyTorch refuses some over gloo
        return [], error_text(error)
    finally:
        gc.collect()


if __name__ == "__main__":
    open_console()
    main()
