"""The numbers behind a verdict as plain values, for JSON and for the text that scripts/diagnose.py prints."""

import numpy as np

from traces.read.analysis import rates
from traces.read.node_traffic import WAYS, against_schedule, utilisation
from traces.read.overlap import spread
from traces.read.wait_states import STATES, check_sums
from traces.verdict.diagnosis import Diagnosis, compute_s
from traces.verdict.evidence import Evidence


def evidence_dict(diagnosis: Diagnosis) -> dict:
    """The numbers behind a verdict, ready for JSON; times in seconds, rates in bytes/s."""
    evidence = diagnosis.evidence
    ranks = evidence.rank_numbers
    result = {
        "steps": len(evidence.times.steps),
        "step_s": evidence.step_s,
        **rates(evidence.run, evidence.times),
        "compute_s": compute_s(evidence),
        "exchange_s": evidence.transfer_s,
        "exchange_by_phase_s": evidence.transfer_by_phase,
        "hidden_exchange_s": evidence.overlap.hidden_s,
        "waiting_s": _waiting(evidence),
        "waited_for_s": _waited_for(evidence),
        "efficiency": evidence.efficiency.as_dict(),
        "ranks": [
            {"rank": rank, "node": node, "compute_s": compute, "data_s": data}
            for rank, node, compute, data in zip(
                ranks, evidence.rank_nodes, _quartiles(evidence.compute), _quartiles(evidence.phase("data")),
                strict=True,
            )
        ],
        "nodes": _nodes(evidence),
        "finding": diagnosis.finding.facts,
        "also": [{"kind": one.kind, "seconds": one.seconds, "sentence": one.sentence} for one in diagnosis.others],
        "sums": check_sums(evidence.run, evidence.times),
        "thin": evidence.thin,
    }  # fmt: skip
    return result


def _quartiles(seconds: np.ndarray) -> list[dict[str, float]]:
    """Of each rank, from (S, R) seconds."""
    table = spread(seconds)
    return [{name: float(table[name][rank]) for name in table} for rank in range(seconds.shape[1])]


def _waiting(evidence: Evidence) -> dict[str, float]:
    """Median over steps of the seconds that ranks waited on average, by wait state."""
    per_step = evidence.wait_states.per_step(evidence.times.steps, len(evidence.run.ranks)).mean(axis=1)
    medians = np.median(per_step, axis=0)
    return {name: float(seconds) for name, seconds in zip(STATES, medians, strict=True) if seconds > 0}


def _waited_for(evidence: Evidence) -> dict[str, float]:
    """Median over steps of the seconds that the other ranks together waited for each rank that anyone waited for."""
    caused = evidence.wait_states.caused(evidence.times.steps, len(evidence.run.ranks))
    medians = np.median(caused, axis=0)
    return {str(rank): float(s) for rank, s in zip(evidence.rank_numbers, medians, strict=True) if s > 0}


def _nodes(evidence: Evidence) -> list[dict]:
    """Of each node what is known: host, the link as probed, the part of it used, bytes a step, over the schedule's."""
    amounts, used = evidence.node_bytes, _port_use(evidence)
    of_schedule = _counted_over_schedule(evidence)
    links = {link["node"]: link for link in evidence.links}
    rows = []
    for index, node in enumerate(evidence.nodes):
        row = {"node": node, "host": evidence.host(node)}
        if node in links:
            row["link_bytes_per_s"] = {way: links[node][way] for way in ("in", "out", "both")}
        if node in links and used is not None:
            row["link_used"] = {way: float(used[way][index]) for way in used}
        if amounts is not None:
            row["bytes_a_step"] = {way: float(amounts[way][index]) for way in amounts}
        if of_schedule is not None:
            row["bytes_over_schedule"] = {way: _number(of_schedule[way][index]) for way in of_schedule}
        rows.append(row)
    return rows


def _port_use(evidence: Evidence) -> dict[str, np.ndarray] | None:
    """{"in", "out"}: (M,) the part of its link's rate used in its busiest exchange phase."""
    if evidence.traffic is None or not evidence.links:
        return None
    return {way: utilisation(evidence.traffic, evidence.links, way) for way in WAYS}


def _counted_over_schedule(evidence: Evidence) -> dict[str, np.ndarray] | None:
    """{"in", "out"}: (M,) bytes that a node's ports counted over those of the strategy's messages."""
    schedule = evidence.schedule
    if evidence.traffic is None or schedule is None or schedule.nodes != evidence.traffic.nodes:
        return None
    return against_schedule(evidence.traffic, schedule.bytes_in, schedule.bytes_out)


def _number(value: float) -> float | None:
    """JSON has no nan."""
    return float(value) if np.isfinite(value) else None
