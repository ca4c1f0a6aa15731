"""The pictures that say who is slow, whose port is full, how it scales; and the report that holds them."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html import escape
from itertools import pairwise

import numpy as np
import pytest
from matplotlib.collections import QuadMesh

from scripts import plot
from scripts.prediction.run_prediction import message_matrix, own_schedule
from scripts.reports.html_page import CAPTIONS, write_report
from scripts.reports.verdict import diagnose, evidence_rows
from tests.support.drawn import is_inside, title_of, top_of
from tests.support.make_run import simulate, write_run
from traces import read_run
from traces.plots import comparison, expected, network, ranks, timeline
from traces.record.files import COUNTERS, counters_path
from traces.record.phases import COMPUTE, INDEX
from traces.verdict.summary import measure_runs, wait_table

NINE = [0, 0, 1, 1, 2, 2, 3, 3, 4]
NODES = range(5)
RATE = 50e6
LINKS = [
    {"node": node, "host": f"cn{node:02d}", "latency_s": 1e-4, "in": RATE, "out": RATE, "both": RATE} for node in NODES
]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """reduce-bcast on 9 ranks of 5 nodes, rank 3 slow; node 0 takes in 10 MB a step, the others 2."""
    folder = write_run(tmp_path_factory.mktemp("runs") / "run", simulate("reduce-bcast", NINE, slow=(3,)), NINE)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"links": LINKS, "parameters": 1_000_000}))
    run = read_run(folder)
    step = [one for one in run.ranks[0].records if one["phase"] == INDEX["step"]]
    for node in NODES:
        times = [step[0]["start"], *(one["end"] for one in step)]
        rows = [(time, index * (10e6 if node == 0 else 2e6), index * 3e6, 0) for index, time in enumerate(times)]
        header = {"format": "gpt2-mpi counters", "version": 1, "node": node, "host": f"cn{node:02d}", "ports": ["eth0"]}
        header["clock"] = {"offset_ns": 0, "error_ns": 0, "at_ns": 0}
        samples = np.array([tuple(int(value) for value in row) for row in rows], COUNTERS)
        counters_path(folder / "traces", node).write_bytes(json.dumps(header).encode() + b"\n" + samples.tobytes())
    return folder


@pytest.fixture(scope="module")
def measured(run_folder):
    return measure_runs([read_run(run_folder)], own_schedule)[0]


def test_the_map_shows_each_ranks_seconds_and_names_the_slow_one(measured):
    figure = ranks.draw_map(measured)
    assert is_inside(figure)
    low, high = np.median(measured.times.phase(*COMPUTE), axis=0)[[1, 3]] * 1e3
    (numbers,) = re.findall(r"ranks compute ([\d.]+) to ([\d.]+) ms", top_of(figure))
    assert [float(number) for number in numbers] == pytest.approx([low, high], rel=0.1)
    shown = figure.axes[0].images[0].get_array()
    seconds = measured.times.seconds[:, :, [INDEX[name] for name in COMPUTE]].sum(axis=2).T * 1e3
    np.testing.assert_allclose(shown, seconds)


def test_many_steps_are_averaged_into_columns():
    table = np.arange(3 * 1000.0).reshape(1000, 3)
    columns = ranks.average_columns(table)
    assert len(columns) == 334
    np.testing.assert_array_equal(columns[0], table[:3].mean(axis=0))
    np.testing.assert_array_equal(columns[-1], table[-1])
    np.testing.assert_array_equal(ranks.average_columns(table[:5]), table[:5])


def test_the_bars_of_a_rank_add_up_to_its_step(measured):
    figure = ranks.draw_waits(measured)
    assert is_inside(figure)
    table = wait_table(measured)
    step_ms = np.median(measured.times.seconds[:, :, INDEX["step"]], axis=0) * 1e3
    np.testing.assert_allclose(sum(table.values()), step_ms, rtol=0.05)
    assert "late_broadcast" in table
    assert table["late_broadcast"][0] == 0, "the root waits for no broadcast"
    drawn = sum(bars[0].get_width() for bars in figure.axes[0].containers)
    assert drawn == pytest.approx(sum(row[0] for row in table.values()))


def test_ports_are_drawn_against_their_rate(measured):
    figure = network.draw_ports(measured)
    assert is_inside(figure)
    share = 10e6 / (RATE * measured.figures["step_ms"] * 1e-3)
    (most,) = re.findall(r"passes [\d.]+ MB to ([\d.]+) MB in and .*\n?.*at most (\d+)% in and", top_of(figure))
    assert [float(number) for number in most] == pytest.approx([10, 100 * share], rel=0.05)
    heights = [bar.get_height() for bar in figure.axes[0].patches]
    np.testing.assert_allclose(heights[1:5], 2, rtol=0.05)
    evidence = replace(measured.diagnosis.evidence, predicted=None)
    without_links = replace(measured.run, config=measured.run.config | {"links": []})
    plain = replace(measured, run=without_links, diagnosis=replace(measured.diagnosis, evidence=evidence))
    assert is_inside(network.draw_ports(plain))


def test_the_timeline_has_a_lane_for_each_port(measured):
    figure = timeline.draw(measured)
    assert is_inside(figure)
    labels = [text.get_text() for text in figure.axes[1].get_yticklabels()]
    assert labels == [f"node {node} port" for node in NODES]
    assert figure.axes[0].get_xlim() == figure.axes[1].get_xlim()


def test_the_matrix_of_a_ring_is_a_band_and_of_a_server_a_row_and_a_column(tmp_path):
    for strategy, sends in (("ring", 1), ("reduce-bcast", None)):
        folder = write_run(tmp_path / strategy, simulate("allreduce", NINE), NINE, strategy)
        run = read_run(folder)
        matrix = message_matrix(run)
        (one,) = measure_runs([run], own_schedule)
        figure = network.draw_messages(one, matrix, NINE)
        assert is_inside(figure)
        if sends:
            assert ((matrix > 0).sum(axis=1) == 1).all()
            assert re.search(r"a node receives ([\d.]+ MB) and sends \1$", top_of(figure))
        else:
            assert re.search(r"a node receives [\d.]+ MB to [\d.]+ GB", top_of(figure))
    assert not any(isinstance(one, QuadMesh) for one in figure.axes[0].collections)


def test_node_matrix_by_hand():
    matrix = np.array([[0, 1, 2], [4, 0, 8], [16, 32, 0]])
    np.testing.assert_array_equal(network.node_matrix(matrix, [0, 0, 1]), [[0, 10], [48, 0]])


def test_the_model_plot_names_what_it_misses():
    within = expected.draw_model([("ring", 0.1, 0.11), ("tree", 0.3, 0.27)])
    assert "within 10%" in title_of(within)
    assert is_inside(within)
    off = expected.draw_model([("ring", 0.1, 0.11), ("tree", 0.3, 0.6)])
    assert "misses tree most: slower than it says by 100%" in title_of(off)


def test_scaling_says_what_eats_the_rest(tmp_path):
    folders = [
        write_run(tmp_path / f"n{len(nodes)}", simulate("allreduce", nodes), nodes, "allreduce")
        for nodes in ([0, 0], [0, 0, 1, 1], NINE)
    ]
    runs = measure_runs([read_run(folder) for folder in folders], own_schedule)
    figure = expected.draw_scaling(runs[::-1])
    assert is_inside(figure)
    assert re.match(r"9 ranks are [\d.]+ times as fast as 2, of 4.5 possible$", title_of(figure))
    perfect, *_ = figure.axes[0].lines
    slowest = runs[0].figures["tokens_per_s"]
    assert perfect.get_xydata() == pytest.approx(np.array([[2, slowest], [9, 4.5 * slowest]]))
    stacked = [bar for bar in figure.axes[1].patches if bar.get_x() < 0]
    assert sum(bar.get_height() for bar in stacked) == pytest.approx(1)
    for below, above in pairwise(stacked):
        assert above.get_y() == pytest.approx(below.get_y() + below.get_height())


def test_scaling_compares_the_fastest_of_several_strategies(tmp_path):
    made = [("allreduce", [0, 0]), ("allreduce", [0, 0, 1, 1]), ("reduce-bcast", [0, 0, 1, 1])]
    folders = [write_run(tmp_path / str(n), simulate(*one), one[1], one[0]) for n, one in enumerate(made)]
    runs = measure_runs([read_run(folder) for folder in folders], own_schedule)
    two, *four = (one.figures["tokens_per_s"] for one in runs)
    title = title_of(expected.draw_scaling(runs))
    said = f"The fastest run on 4 ranks is {max(four) / two:.1f} times as fast as the fastest on 2, of 2 possible"
    assert (title, four[0] > 1.1 * four[1]) == (said, True)


def test_one_run_gives_all_pictures_and_a_report(run_folder, tmp_path, capsys):
    assert plot.main([str(run_folder), "--out", str(tmp_path)]) == 0
    names = {path.stem for path in tmp_path.glob("*.svg")}
    assert names == set(CAPTIONS), "each has a caption"
    report = (tmp_path / "report.html").read_text()
    assert not (run_folder / "report.html").exists(), "--out is for everything"
    assert report.count("<img ") == len(CAPTIONS)
    assert not re.search(r"(src|href)=\"(?!data:)", report), "nothing is loaded from elsewhere"
    for name, text in evidence_rows(diagnose(read_run(run_folder))):
        assert f"<tr><td>{escape(name)}</td><td>{escape(text)}</td></tr>" in report, "as diagnose.py prints them"


def test_mfu_stands_where_it_is_known_and_of_what(run_folder, tmp_path):
    """Nine ranks, of which the server computes nothing: eight times 0.25 TFLOP/s; and steps faster than their peak."""
    run = read_run(run_folder)
    path = tmp_path / "report.html"
    known = {"tflops": [None] + [0.25] * 8, "source": "asked"}
    rate = run.log[-1]["tokens_per_s"]
    fast = [row | {"mfu": row["tokens_per_s"] / rate, "peak_underestimated": True} for row in run.log]
    runs = [run, replace(run, config=run.config | {"peak": known}, log=[row | {"mfu": 0.4567} for row in run.log])]
    runs.append(replace(run, log=fast))
    measured, answer = [measure_runs([one], own_schedule)[0] for one in runs], diagnose(run)
    pages = [write_report(path, one.figures, answer, {}, one.run.config).read_text() for one in measured]
    assert "MFU" not in pages[0]
    assert "<dt>MFU, of 2 TFLOP/s (asked)</dt><dd>46%</dd>" in pages[1]
    assert "(peak underestimated)</dd>" in pages[2]
    for one, end in zip(measured[1:], ("\nMFU 46%", "%\n(peak underestimated)"), strict=True):
        figure = comparison.draw_phases([one])
        assert is_inside(figure)
        assert any(label.get_text().endswith(end) for label in figure.axes[0].texts)
        assert expected._bar_label(one, several=False).endswith(end)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ({"commit": "0123456789abcdef", "dirty": False}, "5 nodes, commit 0123456789</h1>"),
        ({"commit": "0123456789abcdef", "dirty": True}, "5 nodes, commit 0123456789 with changes</h1>"),
        ({"commit": "0123456789abcdef", "dirty": None}, "5 nodes, commit 0123456789, changes unknown</h1>"),
        ({"commit": None, "dirty": None, "version": "0.1.0"}, "5 nodes, version 0.1.0</h1>"),
        (None, "5 nodes</h1>"),
    ],
)
def test_the_head_says_which_code_ran(run_folder, tmp_path, code, says):
    run = read_run(run_folder)
    (one,) = measure_runs([run], own_schedule)
    config = run.config | ({"code": code} if code else {})
    assert says in write_report(tmp_path / "report.html", one.figures, diagnose(run), {}, config).read_text()


def test_a_setting_cannot_break_the_report(run_folder, tmp_path):
    broken = shutil.copytree(run_folder, tmp_path / "run")
    config = json.loads((broken / "config.json").read_text())
    config["settings"]["text"] = "<script>alert(1)</script>"
    (broken / "config.json").write_text(json.dumps(config))
    assert plot.main([str(broken), "--out", str(tmp_path / "plots")]) == 0
    assert "<script" not in (tmp_path / "plots" / "report.html").read_text()


@pytest.mark.parametrize("rank", [4, 8])  # rank 8 is alone on its node
def test_what_a_crashed_run_lacks_is_said_and_the_rest_is_drawn(run_folder, tmp_path, capsys, rank):
    crashed = shutil.copytree(run_folder, tmp_path / "run")
    (crashed / "traces" / f"rank-0000{rank}.trace").unlink()
    assert plot.main([str(crashed), "--out", str(tmp_path / "plots")]) == 0
    assert "lacks 1 of 9 ranks' files" in capsys.readouterr().err
    assert (tmp_path / "plots" / "ports.png").exists()


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium, which shows the report as a reader sees it")
def test_a_browser_shows_the_report(run_folder, tmp_path):
    plot.main([str(run_folder), "--out", str(tmp_path)])
    page = (tmp_path / "report.html").read_text()
    probe = (
        "<script>onload = () => document.title = [...document.images].map(one => one.naturalWidth > 300).join()"
        " + ' ' + (document.body.scrollWidth <= innerWidth)</script></body>"
    )
    (tmp_path / "probed.html").write_text(page.replace("</body>", probe))
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}", "--window-size=1000,900"]
    shown = subprocess.run(
        ["chromium", *options, "--virtual-time-budget=5000", "--dump-dom", f"file://{tmp_path}/probed.html"],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    title = re.search("<title>(.*?)</title>", shown.stdout)[1]
    assert title == ",".join(["true"] * len(CAPTIONS)) + " true", shown.stderr
