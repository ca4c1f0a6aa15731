"""The table of docs/benchmarks.md that sets the cost model beside measured exchanges.

    sudo python scripts/makers/docs_model.py                         with this Python's MPI
    sudo python scripts/makers/docs_model.py PYTHON [PYTHON ...]     with the MPI of each of these Pythons

Twenty minutes a library, as root: check_model.py on virtual hosts, in parts of a minute.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPTS = Path(__file__).parents[1]
PAGE = SCRIPTS.parent / "docs" / "benchmarks.md"
BEGIN, END = "<!-- begin generated: model -->", "<!-- end generated: model -->"
LAYOUTS = {
    "3 hosts of 1": "--nodes 3 --ranks 3 --ranks-per-node 1",
    "4 hosts of 2": "--nodes 4 --ranks 8 --ranks-per-node 2",
    "9 ranks on 5 hosts": "--nodes 5 --ranks 9 --ranks-per-node 2",
}
RATE = "400mbit"
PARTS = (
    ("8MB", "all", 3),
    ("32MB", "reduce-bcast,sliced,ring,tree", 2),
    ("32MB", "reduce-scatter,allreduce,hierarchical,hierarchical-sharded", 2),
)
FAR_OFF = 0.15


def main():
    with tempfile.TemporaryDirectory() as folder:
        model(Path(folder), sys.argv[1:])


def model(folder: Path, pythons: list[str] | None = None) -> None:
    """Measure with the MPI of each Python (this one), and write the block."""
    reports = []
    for number, python in enumerate(pythons or [sys.executable]):
        for layout, flags in LAYOUTS.items():
            for part, (size, strategies, repeat) in enumerate(PARTS):
                file = folder / f"{number}-{layout.replace(' ', '-')}-{part}.json"
                cluster = [python, str(SCRIPTS / "virtual_cluster.py"), "run", *flags.split(), "--rate", RATE, "--"]
                check = [
                    python,
                    str(Path(__file__).with_name("check_model.py")),
                    "--strategies",
                    strategies,
                    "--bytes",
                    size,
                ]
                check += ["--link", RATE, "--latency", "100us", "--repeat", str(repeat), "--json", str(file)]
                subprocess.run([*cluster, *check], check=True, cwd=SCRIPTS.parent)
                reports.append((layout, json.loads(file.read_text())))
    write(block(reports))


def block(reports: list[tuple[str, dict]]) -> str:
    """The table and what follows from it, of (layout, what check_model.py wrote)."""
    cells, columns = {}, []
    for layout, report in reports:
        library = report["mpi_library"].split()[0].replace("Open", "Open MPI")
        for size in report["sizes"]:
            column = (library, layout, round(size["bytes"] / 1e6))
            if column not in columns:
                columns.append(column)
            for name, one in size["strategies"].items():
                cells[name, column] = one
    names = list(dict.fromkeys(name for name, _ in cells))
    rows = [
        f"| MPI library | hosts | MB | {' | '.join(f'`{name}`' for name in names)} |",
        "|" + "---|" * (3 + len(names)),
    ]
    for column in columns:
        rows.append(
            f"| {' | '.join(map(str, column))} | {' | '.join(cell(cells.get((name, column))) for name in names)} |"
        )
    return "\n".join([*rows, "", summary(cells), "", measured_on([report for _, report in reports])])


def cell(one: dict | None) -> str:
    if one is None:
        return ""
    deviation = "not modelled" if one["deviation"] is None else f"{one['deviation']:+.0%}"
    return f"{one['measured_s'] * 1e3:.0f} ms, {deviation}"


def summary(cells: dict) -> str:
    """How many are close, which one is farthest off, and the bytes."""
    known = {key: one for key, one in cells.items() if one["deviation"] is not None}
    (name, (library, layout, megabytes)), worst = max(known.items(), key=lambda item: abs(item[1]["deviation"]))
    far = sum(abs(one["deviation"]) > FAR_OFF for one in known.values())
    bytes_off = max(one["bytes_deviation"] for one in known.values())
    return (
        f"Measured, and by how much the prediction is longer (+) or shorter (-). Of {len(known)} predictions {far} are "
        f"more than {FAR_OFF:.0%} off; the worst, {worst['deviation']:+.0%}, is `{name}` of {megabytes} MB with "
        f"{library}, {layout}. Bytes through every host's port, each way, are those that its counters saw, to within "
        f"{bytes_off:.1%} of a vector."
    )


def measured_on(reports: list[dict]) -> str:
    machine = reports[0]["machine"]
    libraries = ", ".join(dict.fromkeys(report["mpi_library"] for report in reports))
    return f"Ports of {RATE} each way. Measured on {machine['processor']}, {machine['cores']} cores, with {libraries}."


def write(text: str) -> None:
    """Put the block between the page's marks, under its heading; at the page's end where it has none yet."""
    page = PAGE.read_text()
    if BEGIN not in page:
        page = f"{page.rstrip()}\n\n## The cost model beside the clock\n\n{BEGIN}\n{END}\n"
    before, rest = page.split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
