"""The verdict on a run, with predictions for other strategies, as an object and as text."""

from scripts.prediction.calibration import FASTER, SLOWER, UNCLEAR, UNEXPLAINED
from scripts.prediction.model_parallel_run import model_parallel_facts
from scripts.prediction.predictor import OTHER_WEIGHTS, exact
from scripts.prediction.run_prediction import advised, measured_of, others_steps, own_schedule, with_other_weights
from traces import RunError, read_run
from traces.read.analysis import measure
from traces.read.runs import Run
from traces.read.starts import number_of
from traces.units import bytes_text, count_text, mfu_text, range_text, seconds_text
from traces.verdict.diagnosis import Diagnosis, find_bottleneck

STARTS_SHOWN = 10  # how many starts of a resumed run are listed, latest last
# Limits for reading traces of a running job, and of starts other than the diagnosed one.
TRACE_BYTES = 256_000  # of a rank
ALL_TRACES_BYTES = 16_000_000  # of all ranks and starts
LEAST_BYTES = 32_000  # of a rank, even if that exceeds the limit for all


def diagnose(run: Run) -> dict:
    """Return the object that scripts/diagnose.py --json prints. Raise RunError if no step is complete.

    run: from read_run. Each other start gets a short verdict, based on its last steps.
    """
    answer = answer_of(find_bottleneck(run, measure(run), own_schedule(run)))
    others = judged(run, answer["evidence"]["start"])
    answer["evidence"]["starts"] = [one | others.get(one["start"], {}) for one in answer["evidence"]["starts"]]
    return answer


def judged(run: Run, own: int) -> dict[int, dict]:
    """Return {number: {"kind", "headline"}} for each shown start that has traces, except the diagnosed start `own`."""
    shown = run.starts[-STARTS_SHOWN:]
    most_bytes = most_bytes_of(sum(one["ranks"] for one in shown))
    found = {}
    for number in (one["start"] for one in shown if one["start"] != own):
        try:
            one = read_run(run.path, allow_missing=True, most_bytes=most_bytes, start=number)
            found[number] = _in_short(find_bottleneck(one, measure(one), own_schedule(one)))
        except RunError:  # there are no traces, or no step is complete on all ranks
            continue
    return found


def most_bytes_of(ranks: int) -> int:
    """Return how many bytes to read of each rank's trace, so that reading all of them takes a moment."""
    return max(LEAST_BYTES, min(TRACE_BYTES, ALL_TRACES_BYTES // max(1, ranks)))


def _in_short(diagnosis: Diagnosis) -> dict:
    return {"kind": diagnosis.finding.kind, "headline": diagnosis.finding.headline}


def answer_of(diagnosis: Diagnosis) -> dict:
    """Return the object that `diagnose` returns, for a diagnosed run."""
    run = diagnosis.evidence.run
    if run.config.get("mesh"):  # several ranks share a model
        answer = diagnosis.answer([], model_parallel_facts(diagnosis.evidence))
    else:
        advice, calibration = others_steps(run, measured_of(diagnosis.evidence))
        named = {"advised": advised(advice), "with_other_weights": with_other_weights(advice, calibration)}
        answer = diagnosis.answer(advice, calibration.facts() | named)
    number = number_of(run.config)
    answer["evidence"]["start"] = number
    answer["evidence"]["starts"] = [
        one | (_in_short(diagnosis) if one["start"] == number else {"kind": None, "headline": None})
        for one in run.starts
    ]
    answer["evidence"]["strategy"] = {"label": run.label, "by_auto": bool(run.config.get("auto"))}
    return answer


def as_text(answer: dict) -> str:
    """Return the text that scripts/diagnose.py prints. answer: from `diagnose`."""
    rows = [f"{name:<11} {text}" for name, text in evidence_rows(answer)]
    after = [f"after that: {one['sentence']}" for one in answer["evidence"]["also"][:2]]
    return "\n".join([answer["verdict"], "", place_text(answer["bottleneck"]), "", *rows, *after])


def evidence_rows(answer: dict) -> list[tuple[str, str]]:
    """Return (name, text) of each line of evidence; the name is "" where a line continues the one above."""
    evidence = answer["evidence"]
    strategy = evidence["strategy"]
    rows = [("strategy", f"{strategy['label']}{', which --strategy auto chose' if strategy['by_auto'] else ''}")]
    rows += [*_step_rows(evidence).items(), *_node_rows(evidence["nodes"])]
    for name, lines in (("starts", _start_lines(evidence)), ("others", _other_lines(answer))):
        rows += [("" if number else name, line) for number, line in enumerate(lines)]
    return rows + ([("model", model_text(evidence["model"]))] if answer["advice"] else [])


def _start_lines(evidence: dict) -> list[str]:
    """Return lines about the starts of a resumed run: the diagnosed start, then the last starts."""
    starts = evidence["starts"]
    own = evidence["start"]
    if len(starts) < 2 and own == 1:
        return []
    shown = starts[-STARTS_SHOWN:]
    count = f"the last {len(shown)} of {len(starts)}" if len(shown) < len(starts) else f"{len(starts)}"
    about = f"the lines above describe start {own}; --start K selects another"
    return [f"{count}; {about}", *map(start_text, shown)]


def start_text(start: dict) -> str:
    """Describe a start: "2: steps 81 to 160 on 4 ranks, 31 ms a step: the port of node2 is slow, and ..."."""
    text = f"{start['start']}: steps {start['first']} to {start['last']} on {count_text(start['ranks'], 'rank')}"
    text += f", {seconds_text(start['step_s'])} a step" if start["step_s"] is not None else ""
    return f"{text}: {start['headline'] or 'no usable traces'}"


def _other_lines(answer: dict) -> list[str]:
    """Return lines about other strategies, grouped by how they compare with the run."""
    lines = []
    for word in (FASTER, UNCLEAR, SLOWER):
        rows = [
            f"{row['strategy']}{'*' * (not row['same_weights'])} {seconds_text(row['predicted_step_s'])} "
            f"({range_text(row['range_s'])})"
            for row in answer["advice"]
            if row["compared"] == word
        ]
        lines += [f"{word}: {', '.join(rows)}"] if rows else []
    lines += [] if exact(answer["advice"]) == answer["advice"] else [OTHER_WEIGHTS]
    return lines or [not_predicted(answer["evidence"]["model"])]


def model_text(model: dict) -> str:
    """Say how the predictions for other strategies were calibrated."""
    whose = "the exposed part of this run's exchange" if model["overlap"] else "this run's exchange"
    predicted = seconds_text(model["predicted_exchange_s"])
    measured = seconds_text(model["measured_exchange_s"])
    factor = f"all predictions are multiplied by {model['factor']:.2f}"
    return f"{whose}: {predicted} predicted, {measured} measured; {factor}"


def not_predicted(model: dict) -> str:
    """Say why no other strategy is predicted. If ranks share a model, also predict the run's own step."""
    if "own_unknown" not in model:
        return f"not predicted: {UNEXPLAINED}: {model['reason']}"
    if model["predicted_step_s"] is None:
        own = f"this run's step is not predicted: {model['own_unknown']}"
    else:
        predicted_s = model["predicted_step_s"]
        measured_s = model["measured_step_s"]
        own = f"this run's step, predicted from its stages' compute times: {seconds_text(predicted_s)} "
        own += f"({predicted_s / measured_s - 1:+.1%} from measured)"
    return f"not predicted: {model['reason']}; {own}"


def place_text(bottleneck: dict) -> str:
    """Return a text like "server-hotspot: 53% of the step; node 0, direction in, seen in reduce".

    The share belongs to the whole bottleneck, not to the phase after `seen in`.
    """
    names = {"node": "node", "rank": "rank", "direction": "direction", "phase": "seen in"}
    where = [f"{text} {bottleneck[name]}" for name, text in names.items() if bottleneck[name] is not None]
    share = f"{bottleneck['kind']}: {bottleneck['share']:.0%} of the step"
    return f"{share}; {', '.join(where)}" if where else share


def _step_rows(evidence: dict) -> dict[str, str]:
    exchange = ", ".join(f"{name} {seconds_text(s)}" for name, s in evidence["exchange_by_phase_s"].items())
    waits = ", ".join(f"{name.replace('_', ' ')} {seconds_text(s)}" for name, s in evidence["waiting_s"].items())
    efficiencies = [f"{name.replace('_', ' ')} {s:.2f}" for name, s in evidence["efficiency"].items() if name != "lost"]
    mean_s = evidence["mean_step_s"]
    mean = f" (mean {seconds_text(mean_s)})" if mean_s > 1.05 * evidence["step_s"] else ""
    step = f"{seconds_text(evidence['step_s'])}, median of {evidence['steps']}{mean}: computing "
    step += f"{seconds_text(evidence['compute_s'])}, exchanging {seconds_text(evidence['exchange_s'])}"
    # The log may lack tokens/s and MFU.
    step += f"; {evidence['tokens_per_s']:,.0f} tokens/s" if evidence["tokens_per_s"] else ""
    step += f", MFU {mfu_text(evidence['mfu'], evidence['peak_underestimated'])}" if evidence["mfu"] else ""
    return {
        "step": step,
        "exchange": exchange or "none",
        "efficiency": ", ".join(efficiencies),
        **({"of which": _bubble_text(evidence)} if evidence["pipeline"] else {}),
        "waiting": f"{waits or 'none'}, mean over ranks",
    }


def _bubble_text(evidence: dict) -> str:
    """Describe how long stages wait for each other, and why: a part of the lost efficiency."""
    pipeline = evidence["pipeline"]
    step_s = evidence["step_s"]
    names = {"structure": "structure", "imbalance": "unequal stages", "transfer": "transfer"}
    waits = ", ".join(f"{text} {pipeline['waits_s'][name] / step_s:.0%}" for name, text in names.items())
    text = f"pipeline bubble {pipeline['wait_s'] / step_s:.0%} of the step: {waits}; "
    stages = ", ".join(map(seconds_text, pipeline["tau_s"]))
    ideal = seconds_text(pipeline["ideal_s"])
    text += f"{count_text(pipeline['micro_steps'], 'microbatch', 'es')} of {stages} on the stages take {ideal} "
    return text + "if messages take no time"


def _node_rows(nodes: list[dict]) -> list[tuple[str, str]]:
    rows = []
    for row in nodes:
        amounts = row.get("bytes_a_step")
        link = row.get("link_bytes_per_s")
        if amounts or link:
            cells = [f"{way} {_amount(amounts, way)} a step, link {_amount(link, way)}/s" for way in ("in", "out")]
            rows.append((row["host"], "; ".join(cells)))
    return rows


def _amount(amounts: dict | None, way: str) -> str:
    return bytes_text(amounts[way]) if amounts else "?"
