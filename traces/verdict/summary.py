"""The summary of a run, and a table of the medians of several runs."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from traces.read.analysis import StepTimes, measure, rates
from traces.read.runs import Run
from traces.read.waits import STATES, SYNCHRONIZING
from traces.record.phases import COMPUTE, COPY, EXCHANGE, INDEX, PHASES, PIPELINE, STEP
from traces.units import mfu_text, short_ms
from traces.verdict.diagnosis import Diagnosis, find_bottleneck
from traces.verdict.evidence import PredictedExchange

LEAST_VISIBLE = 0.002  # of a step: shorter bars are not drawn


@dataclass(frozen=True)
class TimedRun:
    """A run with its numbers and its verdict.

    figures: its `summary`, with a label that no other run has, and the verdict's "exchanging_share". diagnosis: the
    only source of judgments about the run.
    """

    run: Run
    times: StepTimes
    figures: dict
    diagnosis: Diagnosis

    @property
    def label(self) -> str:
        return self.figures["label"]


def measure_runs(runs: list[Run], predict: Callable[[Run], PredictedExchange | None]) -> list[TimedRun]:
    """Measure and diagnose several runs. Add the folders' names to labels that are equal.

    predict: the messages of a run's strategy, as `find_bottleneck` takes them.
    """
    labels = [run.label for run in runs]
    measured = []
    for run in runs:
        times = measure(run)
        diagnosis = find_bottleneck(run, times, predict(run))
        evidence = diagnosis.evidence
        label = run.label if labels.count(run.label) == 1 else f"{run.label} ({run.path.resolve().name})"
        figures = {"label": label, "exchanging_share": evidence.transfer_s / evidence.step_s}
        measured.append(TimedRun(run, times, summary(run, times) | figures, diagnosis))
    return measured


def summary(run: Run, times: StepTimes | None = None) -> dict:
    """Return the numbers of a run; times in milliseconds.

    Each is the median over steps of the mean over ranks, or a mean of means (StepTimes.average). So the phases and
    `other_ms` add up to `step_ms` if steps are alike; if not, phases that are long in different steps may add up to
    more. `phases_ms`: the phases that occur; exchanges and messages include waiting. `waiting_ms`: that waiting.
    `exchanges`: False for several ranks that never exchanged anything. Each of them trained a model of its own, as a
    yardstick for other runs.
    """
    times = times or measure(run)
    is_alone = run.ranks[0].identity["ranks"] == 1
    step_ms = float(times.average(times.step_seconds)) * 1e3
    phases = _averages_ms(times, times.seconds, PHASES)
    waiting = _averages_ms(times, times.waiting, (*EXCHANGE, *PIPELINE))
    return {
        "label": run.label,
        "ranks": len(run.ranks),
        "nodes": len(run.nodes),
        "steps": len(times.steps),
        "warm_up_dropped": times.dropped,
        "exchange_period": times.exchange_period,
        "step_ms": step_ms,
        "phases_ms": phases,
        "waiting_ms": waiting,
        "other_ms": max(0.0, step_ms - sum(phases.values())),
        "exchanges": is_alone or bool(times.phase(*EXCHANGE).any()),
        **rates(run, times),
    }


def _averages_ms(times: StepTimes, seconds: np.ndarray, names: tuple[str, ...]) -> dict[str, float]:
    """Return ms of each phase that occurs, from (S, R, P) seconds: mean over ranks, then average over steps."""
    averages = times.average(seconds.mean(axis=1)) * 1e3
    return {name: float(averages[INDEX[name]]) for name in names if averages[INDEX[name]] > 0}


def parts(figures: dict) -> dict[str, float]:
    """Split the step of a `summary` into parts that add up to it, in milliseconds.

    Exchanges exclude waiting; "waiting": all waiting for other ranks; "other": time in no phase.
    """
    waiting = figures["waiting_ms"]
    cut = {name: max(0.0, ms - waiting.get(name, 0.0)) for name, ms in figures["phases_ms"].items()}
    cut["waiting"] = cut.pop("wait", 0.0) + sum(waiting.values())
    cut["other"] = figures["other_ms"]
    return {name: ms for name, ms in cut.items() if ms > 0}


def wait_table(measured: TimedRun) -> dict[str, np.ndarray]:
    """Return (R,) milliseconds of each visible part of the step, medians over steps: work, wait states, and "other"."""
    times = measured.times
    states = measured.diagnosis.evidence.wait_states.per_step(times.steps, len(measured.run.ranks))
    seconds = {"data": times.phase("data"), "computing": times.phase(*COMPUTE), "copies": times.phase(*COPY)}
    seconds["transfer"] = np.maximum(times.phase(*SYNCHRONIZING) - states.sum(axis=2), 0)
    seconds |= {name: states[:, :, index] for index, name in enumerate(STATES)}
    seconds["other"] = np.maximum(times.phase(STEP) - sum(seconds.values()), 0)
    medians = {name: np.median(table, axis=0) * 1e3 for name, table in seconds.items()}
    least = LEAST_VISIBLE * np.median(times.phase(STEP)) * 1e3
    return {name: row for name, row in medians.items() if row.max() > least}


def table(runs: list[dict]) -> str:
    """Return a text table of the summaries, one line for each run.

    Columns: milliseconds of each part of the step, the step, the range of its rounds if there are several, the share of
    exchanging without waiting for late ranks, tokens per second, MFU if any run has one.
    """
    cuts = [parts(figures) for figures in runs]
    names = [name for name in (*PHASES, "waiting", "other") if any(name in cut for cut in cuts)]
    rounds = max(len(figures.get("rounds", [])) for figures in runs)
    rows = [["median ms", *names, "step", *([f"{rounds} rounds"] if rounds else []), "exchanging", "tokens/s", "MFU"]]
    for figures, cut in zip(runs, cuts, strict=True):
        times = [short_ms(cut[name], 3) if name in cut else "-" for name in names]
        rate = "-" if figures["tokens_per_s"] is None else f"{figures['tokens_per_s']:,.0f}"
        mfu = "-" if figures["mfu"] is None else mfu_text(figures["mfu"], figures["peak_underestimated"])
        share = f"{figures['exchanging_share']:.0%}"
        its = [one["step_ms"] for one in figures.get("rounds", [])]
        times += [short_ms(figures["step_ms"], 3)]
        times += [f"{short_ms(min(its), 3)} to {short_ms(max(its), 3)}"] if its else ["-"] * bool(rounds)
        rows.append([figures["label"], *times, share, rate, mfu])
    if all(figures["mfu"] is None for figures in runs):
        rows = [row[:-1] for row in rows]
    return aligned(rows)


def aligned(rows: list[list[str]]) -> str:
    """Return rows of equal length as a text table: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows)
