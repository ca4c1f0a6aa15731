"""--strategy auto: choose the strategy, and whether it overlaps, by the shortest expected step.

On cores the cost model predicts the step of every strategy that fits into memory, from the measured links and compute
times (step_timing.py). If the best predictions are close, a trial of their exchanges corrects them. On one node overlap
is not considered: the cores that compute also exchange, so nothing can be hidden. A single rank exchanges nothing. The
choice takes less than two seconds.

Between GPUs a trial compares all strategies that may be fastest, without overlap unless --overlap is given. The cost
model covers neither the links inside a node nor NCCL's algorithms.
"""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from dist.buffers import OwnBuffers
from dist.cost.model import Cluster, Prediction
from dist.cost.overlap import Training
from dist.gpu.buffers import device_zeros
from dist.probe.links import rate_both_ways
from dist.wire import WireFormat
from dist.world import World
from gpt2.config import GPT2Config
from gpt2.errors import UserError
from scripts.backends.backends import exchange_on_gpus, form_on_gpus
from scripts.backends.step_timing import cluster_of, library
from scripts.exchange_bench.contenders import DeviceContender, StrategyContender
from scripts.exchange_bench.rounds import measured_seconds
from scripts.prediction.predictor import ABOUT_EQUAL, PredictedStep, predicted_step
from scripts.settings.memory import check_memory, has_room, needed_bytes
from strategies import OWN_FILE, Strategy, candidates
from traces.units import seconds_text

CANDIDATES = 3
ROUNDS = 3
NEAR = 1.25  # times the shortest step: the model may be wrong by this much
TRIAL_S = 0.2  # predicted time of a trial's exchanges
LONGEST_TRIAL_S = 0.3  # if the model was wrong, or a rate has changed
LEAST_TRIAL_BYTES = 1 << 18
MOST_TRIAL_BYTES = 64 << 20
ALIKE = 2.0  # rates of a link at two starts may differ by this factor
# A choice depends on these settings and on the nodes.
DECIDING_FLAGS = (
    "strategy", "overlap", "wire", "op", "error_feedback", "backend", "transport", "tensor_parallel",
    "pipeline_parallel",
)  # fmt: skip
LEAST_S = 1e-6  # lower bound of a prediction, which is 0 on one node
NAMED = 4  # how many other strategies the explanation names, besides the user's own


@dataclass(frozen=True)
class Form:
    """A strategy with or without overlap. name: its value for --strategy."""

    name: str
    kind: type[Strategy]
    overlap: bool

    def __str__(self):
        return f"{self.name} with overlap" if self.overlap else self.name


@dataclass(frozen=True)
class AutoChoice:
    """The choice of --strategy auto. why: in words."""

    name: str
    overlap: bool
    why: str


def surroundings(settings, job: World, links: list[dict]) -> dict:
    """Return the facts that a choice depends on, for checkpoints. "rate": of the slowest node, in bytes/s."""
    flags = {name: getattr(settings, name) for name in DECIDING_FLAGS}
    return flags | {"ranks": job.size, "nodes": [place["node"] for place in job.places], "rate": rate_both_ways(links)}


def kept_choice(kept: dict | None, around: dict, settings) -> AutoChoice | None:
    """Return the checkpoint's choice if nodes and flags are the same, and rates within a factor of ALIKE; else None."""
    if kept is None or settings.overlap not in (None, kept["overlap"]):
        return None
    rates = [kept["around"]["rate"], around["rate"]]
    if None not in rates and max(rates) > ALIKE * min(rates):
        return None
    if kept["around"] | {"rate": None} != around | {"rate": None}:
        return None
    return AutoChoice(kept["strategy"], kept["overlap"], "as before, on the same nodes")


def forms_on_cores(settings, has_links: bool) -> list[Form]:
    """Return the forms that the flags allow, in the order of the registry. has_links: if there are several nodes."""
    found = []
    for name, kind in candidates(settings.strategy, "host").items():
        if (
            settings.wire in kind.traits.wires
            and (kind.traits.error_feedback or not settings.error_feedback)
            and (settings.op is None or settings.op in kind.traits.operations)
        ):
            decided = [False, *([True] if has_links else [])] if settings.overlap is None else [settings.overlap]
            found += [Form(name, kind, overlap) for overlap in decided if kind.traits.overlaps or not overlap]
    return found


def fitting(forms: list[Form], settings, config: GPT2Config, job: World) -> list[Form]:
    """Return the forms that fit into the memory of all nodes, as far as its size is known. Collective.

    If no form fits, the job ends with one line about the form that needs the least memory.
    """
    formed = [replace(settings, strategy=form.name, overlap=form.overlap) for form in forms]
    needed = [needed_bytes(one, config, job) for one in formed]
    fits = job.comm.allgather([has_room(bytes_needed) for bytes_needed in needed])
    if found := [form for form, *all_fit in zip(forms, *fits, strict=True) if all(all_fit)]:
        return found
    least = job.comm.bcast(needed.index(min(needed)))
    with job.together(UserError):
        check_memory(formed[least], config, job)
    return [forms[least]]


def choose_on_cores(
    world: World, forms: list[Form], training: Training, links: list[dict], wire_format: WireFormat
) -> AutoChoice:
    """Choose the form with the shortest step. Collective.

    training: the work of a step, with its measured times. links: from probe_links.
    """
    kinds = {form.name: form.kind for form in forms}
    places = training.parameters, world.size, world.node_count
    held = {form: form.kind.traits.memory.of_rank(*places, form.overlap).total for form in forms}
    if world.size == 1:
        best = min(reversed(forms), key=held.get)
        return AutoChoice(best.name, best.overlap, "one rank exchanges nothing; this strategy needs the least memory")
    cluster = cluster_of(world, links)
    steps = {name: predicted_step(kind, cluster, training, library()) for name, kind in kinds.items()}
    tried = near(forms, steps, count=CANDIDATES if links else 1)
    said = ""
    if len(tried) > 1 or steps[tried[0]].exchange is None:
        steps |= corrected({name: (kinds[name], steps[name]) for name in tried}, world, cluster, training, wire_format)
        said = f", corrected by a trial of {' and '.join(tried)}"
    known = [form for form in forms if steps[form.name].exchange is not None]
    beside = {form: steps[form.name].seconds(form.overlap) - training.compute_s for form in known}
    order = sorted(known, key=lambda form: beside[form])
    limit = ABOUT_EQUAL * (beside[order[0]] + training.compute_s)
    equal = [form for form in order if beside[form] + training.compute_s <= limit]
    best = min(sorted(equal, key=forms.index, reverse=True), key=held.get)
    why = f"predicted {seconds_text(beside[best])} a step for exposed exchange and update{said}"
    return AutoChoice(best.name, best.overlap, why + others_text(best, order, beside))


def others_text(best: Form, order: list[Form], beside: dict[Form, float]) -> str:
    """Describe the next best forms and the user's own. beside: seconds of exposed exchange and update of each form."""
    others = [form for form in order if form is not best]
    named = [form for at, form in enumerate(others) if at < NAMED or form.name.endswith(OWN_FILE)]
    listed = ", ".join(f"{form} {seconds_text(beside[form])}" for form in named)
    more = f", {len(others) - len(named)} more" if len(others) > len(named) else ""
    return f" ({listed}{more})" if others else ""


def near(forms: list[Form], steps: dict[str, PredictedStep], count: int) -> list[str]:
    """Return the strategies to try: the `count` fastest if they are close, and all that declare no messages.

    On one node the caller passes `count` 1, because messages go through memory.
    """
    unknown = dict.fromkeys(form.name for form in forms if form.kind.traits.messages is None)
    shortest = {}
    for form in forms:
        seconds = steps[form.name].seconds(form.overlap)
        if seconds is not None:
            shortest[form.name] = min(seconds, shortest.get(form.name, seconds))
    if not shortest:  # this MPI's algorithms are unknown
        return [*steps]
    names = sorted(shortest, key=shortest.get)[:count]
    return [name for name in names if shortest[name] <= NEAR * shortest[names[0]]] + [*unknown]


def corrected(
    tried: dict[str, tuple[type[Strategy], PredictedStep]], world: World, cluster: Cluster, training: Training,
    wire_format: WireFormat,
) -> dict[str, PredictedStep]:  # fmt: skip
    """Correct the predicted steps by a trial with shorter vectors. Collective.

    Scale each predicted exchange by the ratio of measured to predicted seconds in the trial. If the model cannot
    predict the exchange or its trial, scale the measured exchange by its bytes.
    """
    longest_s = sum(LEAST_S if step.exchange is None else step.exchange.seconds for _, step in tried.values())
    wanted = TRIAL_S / (2 * ROUNDS * max(longest_s, LEAST_S)) * training.parameters * 4
    trial_bytes = min(max(LEAST_TRIAL_BYTES, int(wanted)), MOST_TRIAL_BYTES)
    size = whole_shards(min(training.parameters, trial_bytes // 4), world.size)
    measured = trial_seconds(world, {name: kind for name, (kind, _) in tried.items()}, size, wire_format)
    result = {}
    short = replace(training, parameters=size, ranges=())
    for name, (kind, step) in tried.items():
        modelled = predicted_step(kind, cluster, short, library()).exchange
        if step.exchange is None or modelled is None:
            result[name] = with_exchange(kind, step, training, measured[name] * training.parameters / size)
        else:
            result[name] = step.scaled(measured[name] / max(modelled.seconds, LEAST_S))
    return result


def with_exchange(kind: type[Strategy], step: PredictedStep, training: Training, seconds: float) -> PredictedStep:
    """Use a measured exchange of `seconds` to complete a step that the model cannot predict."""
    exchange = Prediction(seconds, np.zeros(1), np.zeros(1), [])
    update_s = training.update_s * step.memory.updated_share(training.parameters)
    return replace(
        step, unknown=None, exchange=exchange, compute_s=training.compute_s, update_s=update_s,
        overlap=kind.traits.overlap(replace(training, rows=None)),
    )  # fmt: skip


def trial_seconds(world: World, kinds: dict[str, type[Strategy]], size: int, wire_format: WireFormat) -> dict:
    """Return the median seconds of each strategy's exchange of `size` elements, measured in turn. Collective."""
    own_buffers = OwnBuffers(world, size)
    contenders = {name: StrategyContender(world, own_buffers, wire_format, kind) for name, kind in kinds.items()}
    seconds = measured_seconds(world, contenders, ROUNDS, LONGEST_TRIAL_S)
    for contender in contenders.values():
        contender.close()
    return seconds


def choose_on_gpus(world: World, settings, size: int, wire_format: WireFormat, comm) -> AutoChoice:
    """Choose the fastest strategy for vectors of `size` elements, exchanged over comm. Collective."""
    trial_size = whole_shards(min(size, MOST_TRIAL_BYTES // 4), world.size)
    buffers = OwnBuffers(world, trial_size, zeros=partial(device_zeros, comm.device))
    without_feedback = replace(wire_format, error_feedback=False)
    has_nodes = 1 < world.node_count < world.size  # several ranks per node, as some strategies expect
    contenders = {
        name: DeviceContender(world, buffers, form_on_gpus(kind, False), comm, exchange_on_gpus(kind, without_feedback))
        for name, kind in candidates(settings.strategy, "gpus").items()
        if wire_format.wire in kind.traits.on_gpus.exchanges and (has_nodes or not kind.traits.knows_nodes)
    }
    seconds = measured_seconds(world, contenders, ROUNDS)
    tried = ", ".join(f"{name} {taken * 1e3:.1f} ms" for name, taken in seconds.items())
    why = f"{trial_size * 4 / 1e6:.1f} MB in a trial between GPUs, which the cost model does not cover: {tried}"
    return AutoChoice(min(seconds, key=seconds.get), settings.overlap, why)


def whole_shards(size: int, ranks: int) -> int:
    """Round `size` up so that all ranks have equal shards."""
    return -(-size // ranks) * ranks
