"""Rules about models that ranks share: a long pipeline stage, the bubble, slow sums over tensor-parallel shards.

Each rule takes the evidence and returns its findings. There are none where each rank has its own model.
"""

import numpy as np

from traces.read.pipeline_times import better_layers, stage_work
from traces.units import count_text, seconds_text
from traces.verdict.evidence import Evidence, Finding
from traces.verdict.rank_rules import slow_ranks, straggler
from traces.verdict.thresholds import BUBBLE, LEAST_SHARE, LONG_STAGE, STRUCTURE_SHARE, TENSOR_SHARE


def stage_imbalance(evidence: Evidence) -> list[Finding]:
    """Find a stage that computes longer for a microbatch than the others, which wait for it each time."""
    pipeline = evidence.pipeline
    if pipeline is None or pipeline.tau_s.max() < LONG_STAGE * pipeline.tau_s.mean():
        return []
    lost_s = pipeline.imbalance_s
    stage = int(np.argmax(pipeline.tau_s))
    is_a_rank = stage in evidence.run.mesh.stage[slow_ranks(evidence)] and straggler(evidence)
    layers = better_layers(pipeline, least_last=0 if evidence.run.mesh.shards == 1 else 1)
    remedy = _remedy(evidence, stage, layers)
    if lost_s < LEAST_SHARE * evidence.step_s or is_a_rank or remedy is None:
        return []
    own_s = float(pipeline.tau_s[stage])
    mean_s = float(pipeline.tau_s.mean())
    text = f"stage {stage} computes {seconds_text(own_s)} for a microbatch, the mean stage {seconds_text(mean_s)}, "
    text += f"and the others wait for it: {remedy}"
    headline = f"stage {stage} is long: {seconds_text(own_s)} a microbatch, the mean stage takes {seconds_text(mean_s)}"
    facts = {"stage": stage, "tau_s": own_s, "mean_tau_s": mean_s, "layers": [*layers] if layers else None}
    return [Finding("stage-imbalance", lost_s, headline, text, "recv", facts=facts)]


def _remedy(evidence: Evidence, stage: int, layers: tuple[int, ...] | None) -> str | None:
    """Return advice about a long stage; None if nothing helps because its head or embedding alone takes that long."""
    work = stage_work(evidence.pipeline)
    if work is None:
        return "give it fewer layers with --pipeline-layers"
    layer, beside = work
    if evidence.pipeline.tau_s[stage] > LONG_STAGE * (evidence.pipeline.layers[stage] * layer + beside[stage]):
        run = evidence.run
        hosts = dict.fromkeys(run.hosts[run.rank_nodes[place]] for place in np.flatnonzero(run.mesh.stage == stage))
        return f"stages with the same number of layers are faster, so look for what slows {', '.join(hosts)}"
    return f"use --pipeline-layers {','.join(map(str, layers))}" if layers else None


def pipeline_bubble(evidence: Evidence) -> list[Finding]:
    """Find stages that wait at the beginning and the end of a step: too few microbatches for so many stages."""
    pipeline = evidence.pipeline
    if pipeline is None or pipeline.wait_s < BUBBLE * evidence.step_s:
        return []
    if pipeline.structure_s < STRUCTURE_SHARE * pipeline.wait_s:
        return []
    m = pipeline.microbatches
    share = evidence.share(pipeline.wait_s)
    headline = f"stages wait {share}: {pipeline.stages} stages, {count_text(m, 'microbatch', 'es')}"
    text = f"stages wait {share} for each other: the bubble of {pipeline.stages} equal stages is "
    text += f"{pipeline.bubble(m):.0%} with {count_text(m, 'microbatch', 'es')}, and would be "
    text += f"{pipeline.bubble(2 * m):.0%} with {2 * m}: raise --grad-accum, or use fewer stages"
    return [Finding("pipeline-bubble", pipeline.wait_s, headline, text, "recv", facts=pipeline.as_dict())]


def tensor_exchange(evidence: Evidence) -> list[Finding]:
    """Find sums over shards that take a large share of the step, not counting waiting for late shards."""
    if evidence.run.mesh is None or evidence.run.mesh.shards == 1:
        return []
    seconds = evidence.times.phase("tensor", "lend") - evidence.times.waiting_in("tensor", "lend")
    sums_s = float(np.median(seconds.mean(axis=1)))
    if sums_s < TENSOR_SHARE * evidence.step_s:
        return []
    groups = evidence.run.places_in("copy", "stage")
    across = len(set(zip(groups, evidence.run.rank_nodes, strict=True))) > len(set(groups))
    shards = evidence.run.mesh.shards
    text = f"sums over the {shards} shards of each layer take {seconds_text(sums_s)} a step, "
    text += f"{sums_s / evidence.step_s:.0%} of it, "
    if across:
        text += f"as shards lie on several nodes: start a multiple of {shards} ranks on each node, or use fewer shards"
    else:
        text += "as each shard computes little: use fewer shards, or a larger --batch-size"
    headline = f"sums over shards take {evidence.share(sums_s)}"
    facts = {"sums_s": sums_s, "spans_nodes": across}
    return [Finding("tensor-exchange", sums_s, headline, text, "tensor", facts=facts)]
