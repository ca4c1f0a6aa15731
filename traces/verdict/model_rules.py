"""Is it how the model is cut? Stages that wait for each other, one that is longer, sums over parts that take long.

Each rule takes the evidence and returns its findings; without a cut, none.
"""

import numpy as np

from traces.read.pipeline import better_layers, stage_work
from traces.units import count_text, seconds_text
from traces.verdict.evidence import Evidence, Finding
from traces.verdict.rank_rules import slow_ranks, straggler

BUBBLE = 0.15  # of a step: what stages wait for each other before it is worth saying
MOSTLY = 0.5  # of the waiting
LONGER = 1.15  # times the mean of the stages
LEAST_SHARE = 0.05  # of a step
TENSOR = 0.3  # of a step


def stage_imbalance(evidence: Evidence) -> list[Finding]:
    """One stage computes longer for a micro-step than the others, which wait for it each time."""
    pipeline = evidence.pipeline
    if pipeline is None or pipeline.tau_s.max() < LONGER * pipeline.tau_s.mean():
        return []
    lost_s, stage = pipeline.imbalance_s, int(np.argmax(pipeline.tau_s))
    is_a_rank = stage in evidence.run.mesh.stage[slow_ranks(evidence)] and straggler(evidence)
    layers = better_layers(pipeline, least_last=0 if evidence.run.mesh.parts == 1 else 1)
    remedy = _remedy(evidence, stage, layers)
    if lost_s < LEAST_SHARE * evidence.step_s or is_a_rank or remedy is None:
        return []
    own_s, mean_s = float(pipeline.tau_s[stage]), float(pipeline.tau_s.mean())
    text = f"stage {stage} computes {seconds_text(own_s)} for a micro-step, the stages on average "
    text += f"{seconds_text(mean_s)}, and the others wait for it: {remedy}"
    facts = {"stage": stage, "tau_s": own_s, "mean_tau_s": mean_s, "layers": [*layers] if layers else None}
    return [Finding("stage-imbalance", lost_s, text, "recv", facts=facts)]


def _remedy(evidence: Evidence, stage: int, layers: tuple[int, ...] | None) -> str | None:
    """What to do about the longest stage; None where nothing helps: its head or its embedding alone is that long."""
    if (work := stage_work(evidence.pipeline)) is None:
        return "give it fewer layers with --pipeline-layers"
    layer, beside = work
    if evidence.pipeline.tau_s[stage] > LONGER * (evidence.pipeline.layers[stage] * layer + beside[stage]):
        run = evidence.run
        hosts = dict.fromkeys(run.hosts[run.rank_nodes[place]] for place in np.flatnonzero(run.mesh.stage == stage))
        return f"others are faster with as many layers, so look for what slows {', '.join(hosts)}"
    return f"use --pipeline-layers {','.join(map(str, layers))}" if layers else None


def pipeline_bubble(evidence: Evidence) -> list[Finding]:
    """Stages wait for the first micro-steps to come and the last to go: too few of them for so many stages."""
    pipeline = evidence.pipeline
    if pipeline is None or pipeline.wait_s < BUBBLE * evidence.step_s:
        return []
    if pipeline.structure_s < MOSTLY * pipeline.wait_s:
        return []
    m, share = pipeline.micro_steps, min(1.0, pipeline.wait_s / evidence.step_s)
    text = f"stages wait {share:.0%} of the step for each other: with {count_text(m, 'micro-step')} the bubble of "
    text += f"{pipeline.stages} equal stages is {pipeline.bubble(m):.0%}, with {2 * m} it would be "
    text += f"{pipeline.bubble(2 * m):.0%}: raise --grad-accum, or use fewer stages"
    facts = pipeline.as_dict()
    return [Finding("pipeline-bubble", pipeline.wait_s, text, "recv", facts=facts)]


def tensor_exchange(evidence: Evidence) -> list[Finding]:
    """Sums over the parts of tensors take a large share of the step, waiting for late parts left out."""
    if evidence.run.mesh is None or evidence.run.mesh.parts == 1:
        return []
    seconds = evidence.phase("tensor", "lend") - evidence.times.waiting_in("tensor", "lend")
    sums_s = float(np.median(seconds.mean(axis=1)))
    if sums_s < TENSOR * evidence.step_s:
        return []
    groups = {}
    for (copy, stage), node in zip(evidence.run.places_in("copy", "stage"), evidence.run.rank_nodes, strict=True):
        groups.setdefault((copy, stage), set()).add(node)
    parts, across = evidence.run.mesh.parts, any(len(nodes) > 1 for nodes in groups.values())
    text = f"sums over the {parts} parts of each layer take {seconds_text(sums_s)} a step, "
    text += f"{sums_s / evidence.step_s:.0%} of it: "
    if across:
        text += f"parts lie on several nodes: start a multiple of {parts} ranks on each node, or use fewer parts"
    else:
        text += "so little computing does not pay for them: use fewer parts, or a larger --batch-size"
    return [Finding("tensor-exchange", sums_s, text, "tensor", facts={"sums_s": sums_s, "spans_nodes": across})]
