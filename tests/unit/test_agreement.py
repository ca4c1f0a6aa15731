"""A report, its figures and its last lines say what the verdict says, and nothing that another verdict would say."""

import re
from html import unescape

import pytest
from matplotlib.text import Text

from scripts.plot import report
from scripts.prediction.run_prediction import own_schedule
from scripts.reports import figures
from scripts.reports.html_page import CAPTIONS, write_report
from scripts.reports.verdict import answer_of, as_text, diagnose
from tests.support.drawn import title_of, top_of
from tests.support.faulty_runs import make
from tests.support.make_run import write_run
from traces import read_run
from traces.record.phases import COPY, STEP
from traces.verdict.summary import measure_runs
from traces.verdict.titles import SHOWN_IN, WHOLE_STEP, shown_in

# The words of each verdict, which nobody else's report may have.
WORDS = {
    "network-congestion": r"network-congestion|exchanging takes|longest in",
    "server-hotspot": r"hot ?spot|where the server is|(receives|sends) \S+ \S+ a step through",
    "slow-link": r"slow-link|port carries [\d.]+ [kMG]?B/s|port of \S+ is slow|cable|link out of|one way of the link",
    "straggler": r"straggler|computes? \S+ m?s a step, the others|stalls|clock rate",
    "imbalance": r"(?<!stage-)\bimbalance|uneven|equal work",
    "data": r"\bdata:|for its data|reading data takes|file system",
    "compute-bound": r"compute-bound|computing takes|faster kernels",
    "latency-bound": r"latency-bound|small exchanges|exchange more at once",
    "stage-imbalance": r"stage-imbalance|is long:|the mean stage|--pipeline-layers",
    "pipeline-bubble": r"pipeline-bubble|stages wait|raise --grad-accum",
    "tensor-exchange": r"tensor-exchange|sums over (the \d+ )?shards",
    "none": r"none: \d+% of the step|nothing stands out",
}
# What figures once found by rules of their own.
NOBODYS = r"largest part|most is lost|most of it|is full|slow rank|alike|of it exchange|bottleneck|waits \d+% of"
QUARTER, FAST = 12.5e6, 500e6
CASES = {
    "network-congestion": [{"rate": 5e6}, {"nodes": [0, 0, 0], "rate": 20e6}, {"rate": 5e6, "counted": False}],
    "server-hotspot": [{"strategy": "reduce-bcast"}],
    "slow-link": [{"ports": {(2, "in"): QUARTER}}, {"nodes": [0, 0, 1, 1], "ports": {(0, "out"): QUARTER}}],
    "straggler": [{"slow": {5: 2.0}, "rate": FAST}, {"slow": {3: 1.8, 4: 1.9}}, {"stall": (4, 20, 1000.0)}],
    "imbalance": [{"slow": {1: 1.6, 3: 1.8, 6: 1.7}, "rate": FAST}],
    "data": [{"data_ms": {2: 200.0}}, {"data_ms": dict.fromkeys(range(9), 80.0), "rate": FAST}],
    "compute-bound": [{"rate": FAST}, {"nodes": [0], "strategy": "none"}],
    "latency-bound": [{"vector": 600.0 * 40, "calls": 40, "compute_ms": 10.0}],
    "stage-imbalance": [{"mesh": (1, 1, 4), "micro_steps": 16, "tau_ms": (30, 30, 30, 60)}],
    "pipeline-bubble": [{"mesh": (1, 1, 4), "micro_steps": 2}],
    "tensor-exchange": [{"mesh": (1, 2, 1), "tau_ms": (30,), "layers": None, "tensor_ms": 12.0}],
    "none": [None],
}
THREE = ("straggler", "server-hotspot", "network-congestion")
EACH = [(kind, changes) for kind, cases in CASES.items() for changes in cases]


def run_of(folder, changes, steps=24):
    if changes is not None:
        return make(folder, **{"steps": max(steps, 42 if "stall" in changes else 0)} | changes)
    spans = []
    for step in range(1, steps + 1):
        zero = 100 * step
        spans += [(step, "forward", -1, zero, zero + 40), (step, COPY[0], -1, zero + 40, zero + 99)]
        spans.append((step, STEP, -1, zero, zero + 99))
    return read_run(write_run(folder, [spans], [0]))


def texts_of(figure) -> str:
    """Title, legends, labels, notes: all that is written in a figure."""
    return "\n".join(text.get_text() for text in figure.findobj(Text))


def page_of(one, drawn, folder) -> str:
    """The report's text. What lies in its pictures is looked at apart."""
    picture = folder / "picture.svg"
    picture.write_text("<svg/>")
    pictures = dict.fromkeys(drawn, picture)
    answer = answer_of(one.diagnosis)
    path = write_report(folder / "report.html", one.figures, answer, pictures, one.run.config)
    page = re.sub(r'<p class="next">.*?</p>', "", path.read_text())
    return unescape(re.sub(r"<[^>]*>", "\n", re.sub(r"<style>.*?</style>|src=\"[^\"]*\"", "", page, flags=re.S)))


def judged(text: str) -> set[str]:
    """The kinds whose words are there."""
    return {kind for kind, words in WORDS.items() if re.search(words, text, re.IGNORECASE)}


def test_every_kind_has_a_headline_and_figures():
    assert set(WORDS) == set(CASES) == set(SHOWN_IN)
    assert {name for names in SHOWN_IN.values() for name in (*names, *WHOLE_STEP)} <= set(CAPTIONS)
    assert judged("\n".join(CAPTIONS.values())) == set()


@pytest.mark.parametrize(("kind", "changes"), EACH, ids=lambda value: value if isinstance(value, str) else "")
def test_a_report_says_its_verdict_and_no_other(kind, changes, tmp_path):
    run = run_of(tmp_path / "run", changes)
    (one,) = measure_runs([run], own_schedule)
    answer, drawn = diagnose(run), figures.figures_of_run(one)
    assert answer["bottleneck"]["kind"] == one.diagnosis.finding.kind == kind
    page, printed = page_of(one, drawn, tmp_path), report([one])
    assert answer["verdict"][1:] in page, "one verdict for diagnose.py, the page and the last line"
    assert printed.endswith(f"{one.label}: {answer['verdict']}")
    evidence = re.sub(r"^after that: .*", "", as_text(answer), flags=re.M)
    for text in (page, printed, evidence):
        assert judged(text) == {kind}
    for name, figure in drawn.items():
        is_seen = name in shown_in(one.diagnosis.finding)
        assert (title_of(figure) == f"{one.label}: {one.diagnosis.finding.headline}") == is_seen, name
        assert judged(texts_of(figure)) == ({kind} if is_seen else set()), name
    said = [page, printed, evidence, *map(texts_of, drawn.values())]
    assert re.search(NOBODYS, "\n".join(said), re.IGNORECASE) is None


def test_what_comes_after_the_verdict_is_no_part_of_it(tmp_path):
    """A slow rank and a server: the second is said where it is found to come second."""
    (one,) = measure_runs([make(tmp_path / "run", slow={5: 2.0}, strategy="reduce-bcast", steps=24)], own_schedule)
    assert [finding.kind for finding in one.diagnosis.others] == ["server-hotspot"]
    page_of(one, {}, tmp_path)
    (after,) = re.findall(r'<p class="next">After that: (.*?)</p>', (tmp_path / "report.html").read_text())
    assert judged(after) == {"server-hotspot"}
    assert judged(texts_of(figures.figures_of_run(one)["ports"])) == set()


def test_a_slow_port_says_nothing_of_the_exchange_without_it(tmp_path):
    """All exchanges are long as they wait for that port: whether they would be without it is not known."""
    found = diagnose(make(tmp_path, ports={(2, "in"): QUARTER}, steps=24))
    assert (found["bottleneck"]["kind"], found["evidence"]["also"]) == ("slow-link", [])


def test_a_comparison_says_of_each_run_what_its_own_verdict_says(tmp_path):
    runs = [run_of(tmp_path / kind[:2], CASES[kind][0]) for kind in CASES if kind in THREE]
    measured = measure_runs(runs, own_schedule)
    kinds = {one.diagnosis.finding.kind for one in measured}
    assert len(kinds) == 3
    drawn, printed = figures.figures_of_runs(measured), report(measured)
    _, *lanes = drawn["comparison"].axes
    lanes = {axes.get_title("left").partition(", step")[0]: axes.get_title("left") for axes in lanes}
    for one in measured:
        line = f": {one.diagnosis.finding.headline}"
        assert lanes[one.label].endswith(line)
        assert f"\n{one.label}{line}\n" in printed
        timeline = drawn[f"timeline-{figures.file_name(one.label)}"]
        assert judged(texts_of(timeline)) == {one.diagnosis.finding.kind}
    assert judged(printed) == judged(texts_of(drawn["comparison"])) == kinds
    for name in ("phases", "loss", "model"):
        assert judged(texts_of(drawn[name])) == set(), name
    assert re.search(NOBODYS, "\n".join([printed, *map(texts_of, drawn.values())]), re.IGNORECASE) is None


def test_runs_of_growing_size_end_with_the_largest_ones_verdict(tmp_path):
    sizes = ([0, 0], [0, 0, 1, 1])
    runs = [make(tmp_path / str(len(nodes)), nodes=nodes, rate=5e6, steps=12) for nodes in sizes]
    measured = measure_runs(runs, own_schedule)
    scaling = figures.figures_of_runs(measured)["scaling"]
    assert top_of(scaling).endswith(f"on 4 ranks: {measured[-1].diagnosis.finding.headline}")
    assert judged(texts_of(scaling)) == {measured[-1].diagnosis.finding.kind}
