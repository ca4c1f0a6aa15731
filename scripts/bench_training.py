"""Whole training steps: ours beside PyTorch's DistributedDataParallel, its optimizer and FSDP, over gloo on CPUs.

mpirun -n 2 python scripts/bench_training.py -- --n-layer 2 --n-embd 128 --batch-size 2
srun -n 16 python scripts/bench_training.py --link 25gbit --json steps.json -- --model gpt2-124M --train-data '...'
sudo python scripts/virtual_cluster.py run --nodes 4 --ranks 4 --rate 400mbit -- \\
    python scripts/bench_training.py --link 400mbit --json steps.json -- --n-layer 6 --n-embd 384 --batch-size 4

The flags behind -- go to scripts/train.py: model, data, batch, optimizer. What they say of the exchange holds for ours
alone. Every contender begins with the same parameters and takes the same windows; they take turns, each turn a training
from its beginning. A step's computing is that of the same library without exchange; what a step is longer shows of its
exchange. torch is not a dependency of the project: without it ours is measured alone.
"""

import gc
import shutil
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from dist.console import open_console
from dist.probe.links import probe_links, rate_both_ways
from dist.wire import WIRE_BYTES
from dist.world import library_name, start_world, threads_per_rank
from gpt2.errors import UserError
from gpt2.files import place_of_file, write_json
from gpt2.parameters import Layout
from scripts.cluster.program import split_command
from scripts.exchange_bench.pytorch import has_torch, start_gloo
from scripts.machine.host import machine, versions
from scripts.settings.checks import complete
from scripts.settings.derived import global_batch
from scripts.settings.training import OneLineParser
from scripts.settings.units import bytes_per_s, repetitions
from scripts.training.assemble import data_of
from scripts.training_bench import ours
from scripts.training_bench.table import median_s, summarize, table


def main():
    own, training = split_command(sys.argv[1:])
    settings = parser().parse_args(own)
    world = start_world(None, (UserError,))
    with world.together(UserError):
        if world.rank == 0 and settings.json:
            place_of_file(settings.json)  # before the minutes that this takes
    try:
        report = bench(settings, training, world)
    finally:
        if world.rank == 0:
            shutil.rmtree(settings.out, ignore_errors=True)
    world.print(f"\n{table(report)}")
    with world.together(UserError):
        if world.rank == 0 and settings.json:
            write_json(settings.json, report)


def parser() -> OneLineParser:
    result = OneLineParser(__doc__)
    add = result.add_argument
    add("--contenders", default="all", metavar="all|LIST", help="by name, with ; between them (all)")
    add("--turns", type=repetitions, default=2, metavar="R", help="trainings of each (%(default)s)")
    add("--steps", type=repetitions, default=4, metavar="S", help="of a turn that count, after one of warm-up (4)")
    add("--link", type=bytes_per_s, metavar="RATE", help="a node's port, each way: 400mbit, 100gbit (probed)")
    add("--out", type=Path, default=Path("runs/bench-training"), help="where run folders lie meanwhile (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="write everything measured to this file")
    return result


def bench(settings, training: list[str], world) -> dict:
    """Every contender in turns; what was measured, where, and with what. Collective."""
    reference = ours.settings_of("ours", training, settings.steps + 1, settings.out)
    with world.together(UserError):
        s, config = complete(reference, world.size)
    makers = contenders(settings, training, world, s, config)
    turns, left_out = in_turns(world, makers, settings.turns)
    layout = Layout(config)
    report = describe(settings, training, world) | {
        "parameters": layout.count, "steps": s.steps, "turns": settings.turns, "left_out": left_out,
        "tokens": global_batch(s, world.size) * s.seq_len,
    }  # fmt: skip
    size_bytes, rate = WIRE_BYTES["float32"] * layout.count, report["link"]["bytes_per_s"]
    return report | summarize(turns, size_bytes, world.node_count, rate)


def contenders(settings, training: list[str], world, s, config) -> dict:
    """By name, what makes a turn: an iterator of (seconds, loss) of its steps. Collective."""
    makers = {name: partial(ours.train, world, name, training, s.steps, settings.out) for name in ours.FORMS}
    if not has_torch():
        world.print("PyTorch is not installed (pip install torch), so ours is measured alone")
    else:
        start_gloo(world)  # before torch is loaded
        from scripts.training_bench import pytorch

        windows, _, _ = data_of(s, config.vocab_size, world)
        threads = s.threads or threads_per_rank(world)
        for name in pytorch.FORMS:
            makers[name] = partial(pytorch.train, world, name, s, config, windows, threads)
    names = [*makers] if settings.contenders == "all" else settings.contenders.split(";")
    with world.together(UserError):
        check_names(names, makers)
    return {name: makers[name] for name in names}


def check_names(names: list[str], makers: dict) -> None:
    """UserError unless each is a contender, and what each library takes without exchange is among them."""
    if unknown := [name for name in names if name not in makers]:
        raise UserError(f"--contenders: no {unknown[0]!r}, expected all, or some of {'; '.join(makers)}")
    for name in names:
        alone = next(iter(ours.FORMS)) if name.startswith("ours") else "PyTorch, no exchange"
        if alone not in names:
            raise UserError(f"--contenders: {name!r} without {alone!r}, which says what computing takes: add it")


def in_turns(world, makers: dict, turns: int) -> tuple[dict, dict]:
    """({contender: for each turn [(seconds, loss), ...]}, {contender that does not run here: why}). Collective."""
    found, left_out = {name: [] for name in makers}, {}
    for turn in range(turns):
        for name in [name for name in makers if name not in left_out]:
            begun = time.monotonic()
            steps, problem = one_turn(makers[name]())
            if why := next((each for each in world.comm.allgather(problem) if each), None):
                left_out[name] = why
                del found[name]
                world.print(f"{name}: left out: {why}")
                continue
            found[name].append(steps)
            step_s, took_s = median_s([steps]), time.monotonic() - begun
            world.print(f"turn {turn + 1} of {turns}, {name}: {step_s:.3f} s a step ({took_s:.0f} s in all)")
    return found, left_out


def one_turn(steps: Iterator[tuple[float, float]]) -> tuple[list, str | None]:
    """(the steps, why there are none). What a contender held is free on return."""
    try:
        return list(steps), None
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:  # PyTorch refuses it over gloo
        return [], f"{type(error).__name__}: {(str(error).strip() or repr(error)).splitlines()[0]}"
    finally:
        gc.collect()


def describe(settings, training: list[str], world) -> dict:
    """What was measured, where, and with what. Collective."""
    probed = [] if settings.link else probe_links(world)
    rate = settings.link or rate_both_ways(probed)
    return {
        "command": sys.argv,
        "training": training,
        "ranks": world.size,
        "nodes": world.node_count,
        "places": world.places,
        "link": {"bytes_per_s": rate, "nominal": settings.link is not None, "probed": probed},
        "machine": machine(),
        "versions": versions("numpy", "numba", "mpi4py", *(["torch"] if has_torch() else [])),
        "mpi_library": library_name(),
    }


if __name__ == "__main__":
    open_console()
    main()
