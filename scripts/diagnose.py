"""What holds a run's steps up: one sentence to act on, the numbers behind it, and what other strategies would take.

    python scripts/diagnose.py runs/sliced
    python scripts/diagnose.py runs/sliced --json

Reads what scripts/train.py --out wrote; nothing is run or measured. --json prints one object: verdict, bottleneck,
evidence, advice. A run that crashed is diagnosed from what it left, and what is missing is said.
"""

import argparse
import json
import sys
from pathlib import Path

from scripts.prediction.steps import own_schedule, predicted_steps
from traces import RunError, read_run
from traces.read.analysis import measure
from traces.read.runs import Run
from traces.verdict.diagnosis import Diagnosis, find_bottleneck
from traces.verdict.evidence import Evidence
from traces.verdict.evidence_table import evidence_dict
from traces.verdict.findings import bytes_text, seconds_text
from traces.verdict.ranking import mfu_text

USER_MISTAKE = 2  # exit code, as argparse's
NETWORK_KINDS = ("network-congestion", "server-hotspot", "slow-link", "latency-bound")
WORTH_SAYING = 1.1  # times faster


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 2 where a run folder cannot be used."""
    settings = parse(arguments)
    try:
        answer = diagnose(read_run(settings.run, allow_missing=True))
    except RunError as error:
        print(f"diagnose.py: error: {error}", file=sys.stderr)
        return USER_MISTAKE
    print(json.dumps(answer, indent=1) if settings.json else as_text(answer))
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", type=Path, help="a run folder, written by train.py --out")
    parser.add_argument("--json", action="store_true", help="one object instead of text")
    return parser.parse_args(arguments)


def diagnose(run: Run) -> dict:
    """What --json prints, of a run as read_run gives it. RunError if no step of it is complete."""
    diagnosis = find_bottleneck(run, measure(run), own_schedule(run))
    evidence = diagnosis.evidence
    advice = predicted_steps(run, evidence.step_s, evidence.transfer_s)
    return {
        "verdict": verdict(diagnosis, advice),
        "bottleneck": diagnosis.bottleneck,
        "evidence": evidence_dict(diagnosis),
        "advice": advice,
    }


def verdict(diagnosis: Diagnosis, advice: list[dict]) -> str:
    """One sentence: the finding, what another strategy would do about it, and what is uncertain."""
    sentence, evidence = diagnosis.finding.sentence, diagnosis.evidence
    if diagnosis.finding.kind in NETWORK_KINDS and advice and is_worth_saying(evidence, advice[0]):
        best = advice[0]
        sentence += f"; {best['strategy']} would take {seconds_text(best['predicted_step_s'])} a step "
        sentence += f"instead of {seconds_text(evidence.step_s)}"
    if evidence.thin:
        sentence += f" (uncertain: {'; '.join(evidence.thin)})"
    return sentence


def is_worth_saying(evidence: Evidence, best: dict) -> bool:
    """Whether a strategy beats the run's own, as measured and in the model too, whose error must not look like gain."""
    if evidence.schedule is None:
        return False
    own_step_s = evidence.step_s - evidence.transfer_s + evidence.schedule.seconds
    return best["predicted_step_s"] * WORTH_SAYING <= min(evidence.step_s, own_step_s)


def as_text(answer: dict) -> str:
    found, evidence = answer["bottleneck"], answer["evidence"]
    where = [f"{name} {found[name]}" for name in ("phase", "node", "rank", "direction") if found[name] is not None]
    where.append(f"{found['share']:.0%} of the step")
    lines = [answer["verdict"], "", f"{found['kind']}: {', '.join(where)}", ""]
    lines += _step_lines(evidence) + _node_lines(evidence["nodes"]) + _advice_lines(answer["advice"])
    lines += [f"also: {one['sentence']}" for one in evidence["also"][:2] if one["kind"] != "none"]
    return "\n".join(lines)


def _step_lines(evidence: dict) -> list[str]:
    parts = ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in evidence["exchange_by_phase_s"].items())
    efficiency = {name: value for name, value in evidence["efficiency"].items() if name != "lost"}
    efficiencies = ", ".join(f"{name.replace('_', ' ')} {value:.2f}" for name, value in efficiency.items())
    lines = [
        f"step        {seconds_text(evidence['step_s'])}, median of {evidence['steps']}: computing "
        f"{seconds_text(evidence['compute_s'])}, exchanging {seconds_text(evidence['exchange_s'])}{_rates(evidence)}",
        f"exchange    {parts or 'none'}",
        f"efficiency  {efficiencies}",
    ]
    waits = ", ".join(f"{name.replace('_', ' ')} {seconds_text(s)}" for name, s in evidence["waiting_s"].items())
    return [*lines, f"waiting     {waits or 'none'}, mean over ranks"]


def _rates(evidence: dict) -> str:
    """As far as the log has them."""
    rate, mfu = evidence["tokens_per_s"], evidence["mfu"]
    return (f"; {rate:,.0f} tokens/s" if rate else "") + (f", MFU {mfu_text(mfu)}" if mfu else "")


def _node_lines(nodes: list[dict]) -> list[str]:
    lines = []
    for row in nodes:
        amounts, link = row.get("bytes_a_step"), row.get("link_bytes_per_s")
        if amounts or link:
            cells = [f"{way} {_amount(amounts, way)} a step, link {_amount(link, way)}/s" for way in ("in", "out")]
            lines.append(f"{row['host']:<11} {'; '.join(cells)}")
    return lines


def _amount(amounts: dict | None, way: str) -> str:
    return bytes_text(amounts[way]) if amounts else "?"


def _advice_lines(advice: list[dict]) -> list[str]:
    cells = [f"{row['strategy']} {seconds_text(row['predicted_step_s'])} ({row['speedup']:.2g}x)" for row in advice]
    return [f"others      {', '.join(cells)}"] if cells else []


if __name__ == "__main__":
    sys.exit(main())
