"""Draw all figures of one run, or of several."""

from scripts.prediction.run_prediction import message_matrix, own_exchange
from traces.plots import comparison, expected, loss_curves, network, ranks, timeline, whole_run
from traces.verdict.summary import TimedRun


def figures_of_run(measured: TimedRun) -> dict:
    """Return the figures of one run by name."""
    figures = {
        "timeline": timeline.draw(measured),
        "phases": comparison.draw_phases([measured]),
        "ranks": ranks.draw_map(measured),
        "waits": ranks.draw_waits(measured),
    }
    if any(row.get("loss") is not None for row in measured.run.log):
        figures |= {"loss": loss_curves.draw([measured]), "whole-run": whole_run.draw(measured)}
    if measured.diagnosis.evidence.traffic:
        figures["ports"] = network.draw_ports(measured)
    matrix = message_matrix(measured.run)
    if matrix is not None:
        nodes = [place["node"] for place in measured.run.config["ranks"]]
        figures["messages"] = network.draw_messages(measured, matrix, nodes)
    return figures


def figures_of_runs(measured: list[TimedRun]) -> dict:
    """Return the figures that compare several runs by name."""
    figures = {"comparison": comparison.draw_comparison(measured), "phases": comparison.draw_phases(measured)}
    figures["loss"] = loss_curves.draw(measured)
    figures |= {f"timeline-{file_name(one.label)}": timeline.draw(one) for one in measured}
    points = [point for one in measured if (point := _model_point(one))]
    if points:
        figures["model"] = expected.draw_model(points)
    has_rates = all(one.figures["tokens_per_s"] for one in measured)
    if has_rates and len({one.figures["ranks"] for one in measured}) > 1:
        figures["scaling"] = expected.draw_scaling(measured)
    return figures


def _model_point(measured: TimedRun) -> tuple[str, float, float] | None:
    """Return (label, predicted, measured), the seconds of a run's exchange; None with overlap or no prediction."""
    run = measured.run
    if run.config["settings"].get("overlap"):
        return None
    predicted = own_exchange(run)
    if predicted is None:
        return None
    spent = measured.diagnosis.evidence.transfer_s
    return (measured.label, predicted.seconds, spent) if min(predicted.seconds, spent) > 0 else None


def file_name(label: str) -> str:
    """Turn a label into a part of a file name: "reduce-bcast dedicated" gives reduce-bcast-dedicated."""
    return "-".join("".join(sign if sign.isalnum() or sign in "-_." else " " for sign in label).split())
