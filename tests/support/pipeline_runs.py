"""Run folders of models that several ranks share, with known times: stages, parts and copies with one thing wrong.

Times follow from a small model of its own: each stage makes its actions in their order, a forward once its input has
come, and so on; messages take `hop_ms`. Ranks lie as in dist/mesh.py: parts first, then copies, then
stages.
"""

from dataclasses import dataclass, field

import numpy as np

from gpt2.pipeline import SCHEDULES
from tests.support.make_run import write_run
from traces import read_run
from traces.record.phases import STEP


@dataclass
class Shared:
    """tau_ms: of each stage, forward and backward of a micro-step together (a third and two thirds). slow: rank to the
    factor of its computing. tensor_ms: of the sums of a forward, and of a backward. embedding_ms: of each backward of
    the first stage. exchange_ms: of what copies exchange behind their micro-steps, before the norm; 0 for neither.
    nodes: of each rank; all on one if empty. layers: --pipeline-layers."""

    mesh: tuple[int, int, int] = (1, 1, 4)
    micro_steps: int = 8
    tau_ms: tuple[float, ...] = (30.0, 30.0, 30.0, 30.0)
    schedule: str = "1f1b"
    slow: dict = field(default_factory=dict)
    tensor_ms: float = 0.0
    embedding_ms: float = 0.0
    exchange_ms: float = 0.0
    hop_ms: float = 0.2
    update_ms: float = 2.0
    nodes: tuple[int, ...] = ()
    layers: str = "3,3,3,3"
    steps: int = 12
    noise: float = 0.02
    seed: int = 0


def make_shared(folder, **changes):
    """Write the run of a Shared and read it back."""
    setting = Shared(**changes)
    copies, parts, stages = setting.mesh
    ranks = copies * parts * stages
    spans, clock, random = [[] for _ in range(ranks)], np.zeros(ranks), np.random.default_rng(setting.seed)
    for step in range(1, setting.steps + 1):
        begun = clock.copy()
        for copy in range(copies):
            _train(setting, step, copy, spans, clock, random)
        if setting.exchange_ms:
            for piece in range(parts * stages):
                same = [piece % parts + parts * (copy + copies * (piece // parts)) for copy in range(copies)]
                _meet(spans, clock, step, "allreduce", same, setting.exchange_ms)
            for copy in range(copies):
                _meet(spans, clock, step, "norm", [rank for rank in range(ranks) if rank // parts % copies == copy])
        _meet(spans, clock, step, "wait", range(ranks))
        for rank in range(ranks):
            _span(spans, clock, step, "update", -1, rank, setting.update_ms)
            spans[rank].append((step, STEP, -1, begun[rank], clock[rank]))
        clock += 0.1
    places = places_of(setting.mesh)
    return read_run(
        write_run(
            folder, spans, list(setting.nodes or [0] * ranks), "reduce-scatter", places=places,
            grad_accum=setting.micro_steps, pipeline_layers=setting.layers, pipeline_schedule=setting.schedule,
        )
    )  # fmt: skip


def places_of(mesh) -> list[dict]:
    """What the trace of each rank says of its place."""
    copies, parts, stages = mesh
    return [
        {"copy": rank // parts % copies, "part": rank % parts, "stage": rank // (parts * copies), "mesh": [*mesh]}
        for rank in range(copies * parts * stages)
    ]


def _train(setting: Shared, step: int, copy: int, spans, clock, random) -> None:
    """The forwards and backwards of one copy, each as soon as its stage and its input are ready."""
    copies, parts, stages = setting.mesh
    plans = [SCHEDULES[setting.schedule](stage, stages, setting.micro_steps) for stage in range(stages)]
    plans, sent = [list(plan) for plan in plans], {}
    while any(plans):
        for stage, plan in enumerate(plans):
            if not plan:
                continue
            action, micro_step = plan[0]
            source = stage - 1 if action == "forward" else stage + 1
            has_source = 0 <= source < stages
            if has_source and (action, micro_step, source) not in sent:
                continue
            plan.pop(0)
            ranks = [part + parts * (copy + copies * stage) for part in range(parts)]
            ways = (source if has_source else None), (2 * stage - source if 0 <= 2 * stage - source < stages else None)
            sent[action, micro_step, stage] = _act(
                setting, step, action, ranks, ways, sent.get((action, micro_step, source)), spans, clock, random
            )


def _act(setting, step, action, ranks, ways, came, spans, clock, random) -> float:
    """One action on the parts of a stage; when its result was sent. ways: the stages it comes from and goes to."""
    copies, parts, _ = setting.mesh
    stage = ranks[0] // (parts * copies)
    share = (1 / 3 if action == "forward" else 2 / 3) * setting.tau_ms[stage]
    for rank in ranks:
        if action == "forward":
            _span(spans, clock, step, "data", -1, rank, 0.05)
        if ways[0] is not None:
            until = max(clock[rank], came + setting.hop_ms)
            _span(
                spans, clock, step, "recv", rank + parts * copies * (ways[0] - stage), rank, until - clock[rank] + 0.01
            )
        own = share * setting.slow.get(rank, 1.0) * max(0.5, random.normal(1, setting.noise))
        own += setting.embedding_ms if (action, stage) == ("backward", 0) else 0.0
        _span(spans, clock, step, action, -1, rank, own)
    if setting.tensor_ms:
        _meet(spans, clock, step, "tensor", ranks, setting.tensor_ms)
    for rank in ranks:
        if ways[1] is not None:
            _span(spans, clock, step, "send", rank + parts * copies * (ways[1] - stage), rank, 0.02)
    return float(max(clock[rank] for rank in ranks)) - 0.02


def _meet(spans, clock, step, phase, ranks, ms=0.02) -> None:
    """All of them leave together, so long after the last has come."""
    end = max(clock[rank] for rank in ranks) + ms
    for rank in ranks:
        _span(spans, clock, step, phase, -1, rank, end - clock[rank])


def _span(spans, clock, step, phase, root, rank, ms) -> None:
    spans[rank].append((step, phase, root, clock[rank], clock[rank] + ms, 1000))
    clock[rank] += ms
