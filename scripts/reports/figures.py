"""Which figures are drawn of one run and of several, and what each is given."""

from pathlib import Path

from scripts.diagnose import diagnose
from scripts.prediction.steps import message_matrix, own_exchange, own_schedule
from scripts.reports.html_page import write_report
from traces.plots import (  # fmt: skip
    communication_matrix,
    comparison,
    loss_curves,
    model_points,
    phase_bars,
    port_bars,
    rank_map,
    scaling_curves,
    timeline,
    wait_bars,
)
from traces.read.analysis import MeasuredRun
from traces.read.node_traffic import node_traffic


def of_one(measured: MeasuredRun) -> dict:
    """The figures of one run by name."""
    figures = {
        "timeline": timeline.draw(measured),
        "phases": phase_bars.draw([measured]),
        "ranks": rank_map.draw(measured),
        "waits": wait_bars.draw(measured),
        "loss": loss_curves.draw([measured]),
    }
    return figures | _ports(measured) | _messages(measured)


def of_several(measured: list[MeasuredRun]) -> dict:
    figures = {"comparison": comparison.draw(measured), "phases": phase_bars.draw(measured)}
    figures["loss"] = loss_curves.draw(measured)
    figures |= {f"timeline-{file_name(one.label)}": timeline.draw(one) for one in measured}
    points = [point for one in measured if (point := _model_point(one))]
    if points:
        figures["model"] = model_points.draw(points)
    has_rates = all(one.figures["tokens_per_s"] for one in measured)
    if has_rates and len({one.figures["ranks"] for one in measured}) > 1:
        figures["scaling"] = scaling_curves.draw(measured)
    return figures


def report(measured: MeasuredRun, pictures: dict[str, Path]) -> Path:
    """Write RUN/report.html."""
    run = measured.run
    return write_report(run.path / "report.html", measured.figures, diagnose(run), pictures, run.config)


def _ports(measured: MeasuredRun) -> dict:
    traffic, links = node_traffic(measured.run, measured.times), measured.run.config.get("links") or []
    if traffic is None:
        return {}
    by_node = {link["node"]: link for link in links}
    known = [by_node[node] for node in traffic.nodes] if set(traffic.nodes) <= set(by_node) else []
    schedule = own_schedule(measured.run)
    sent = None if schedule is None else {"in": schedule.bytes_in, "out": schedule.bytes_out}
    return {"ports": port_bars.draw(measured, traffic, known, sent)}


def _messages(measured: MeasuredRun) -> dict:
    matrix = message_matrix(measured.run)
    if matrix is None:
        return {}
    nodes = [place["node"] for place in measured.run.config["ranks"]]
    return {"messages": communication_matrix.draw(measured.label, matrix, nodes)}


def _model_point(measured: MeasuredRun) -> tuple[str, float, float] | None:
    """(label, predicted, measured) seconds of a run's exchange; None where the model has no say, or it overlaps."""
    run = measured.run
    if run.config["settings"].get("overlap"):
        return None
    predicted = own_exchange(run)
    if predicted is None:
        return None
    spent = diagnose(run)["evidence"]["exchange_s"]
    return (measured.label, predicted.seconds, spent) if min(predicted.seconds, spent) > 0 else None


def file_name(label: str) -> str:
    """A label as part of a file name: "reduce-bcast dedicated" gives reduce-bcast-dedicated."""
    return "-".join("".join(sign if sign.isalnum() or sign in "-_." else " " for sign in label).split())
