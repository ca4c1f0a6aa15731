"""One screen about a run, readable without colours.

From the top: the run and its progress, the verdict, the loss, each rank's step, each node's port. If not all ranks and
nodes fit on the screen, those that the verdict names come first, then the ranks that compute longest and the nodes with
the busiest ports.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from textwrap import wrap

import numpy as np
from rich.console import Group
from rich.text import Text

from scripts.training.step_records import STANDS_OUT, slowest
from scripts.watching.bars import Glyphs
from scripts.watching.run_state import RunState, rows_since
from traces.read.runs import strategy_name
from traces.read.waits import STATES
from traces.units import bytes_text, count_text, duration_text, mfu_text, seconds_text, short_ms
from traces.verdict.summary import wait_table

# Numbers of lines.
MOST_VERDICT = 4
MOST_STALL = 2
BAR = 20  # columns of a bar beside numbers
WIDE = 120  # columns at which ranks and ports fit side by side
GAP = 3  # columns between ranks and ports
ALIKE = 0.1  # rates in and out are shown as one if they differ by less
PARTS = ("computes", "moves", "waits", "other")


@dataclass(frozen=True)
class RankRow:
    """A rank's median step in milliseconds, in parts that roughly add up to it."""

    rank: int
    host: str
    parts: tuple[float, float, float, float]  # computing, moving data, waiting for others, all else


def screen(state: RunState, columns: int, lines: int, glyphs: Glyphs) -> Group:
    """Return the text of the screen: at most `lines` lines of at most `columns` characters."""
    head = [*_head(state, columns, glyphs), *_verdict(state, columns), "", _loss(state)]
    below = _below(state, columns, max(4, lines - len(head)), glyphs)
    shown = [*head, *below][:lines]
    texts = [line if isinstance(line, Text) else Text(line.rstrip()) for line in shown]
    for text in texts:
        text.no_wrap = True
        text.truncate(columns, overflow="ellipsis")
    return Group(*texts)


def _head(state: RunState, columns: int, glyphs: Glyphs) -> list[Text | str]:
    """Return the run's name, progress and speed, and its stall if there is one."""
    settings = state.config.get("settings", {})
    places = state.config.get("ranks") or []
    what = [strategy_name(settings)] if "strategy" in settings else []
    nodes = len({place["node"] for place in places})
    what += [f"{count_text(len(places), 'rank')} on {count_text(nodes, 'node')}"] if places else []
    what = f"  {', '.join(what)}"
    word = state.word.upper()
    left = max(0, columns - len(word))
    room = max(1, left - 2 - len(what))
    path = str(state.path)
    name = f"{path if len(path) <= room else '...' + path[-max(0, room - 3) :]}{what}"[: max(0, left - 2)]
    lines = [Text(f"{name:<{left}}{word}", "bold"), _progress(state, columns, glyphs), _speed(state)]
    stall = wrap(f"STALLED: {state.stall}", columns)[:MOST_STALL] if state.stall else []
    return lines + [Text(line, "reverse") for line in stall]


def _progress(state: RunState, columns: int, glyphs: Glyphs) -> str:
    step = state.log[-1]["step"] if state.log else 0
    times = []
    if state.elapsed_s is not None:
        resumed = state.config.get("resumed_step")
        since = f", since step {resumed}" if resumed and state.steps is not None else ""
        times.append(f"{duration_text(state.elapsed_s)} elapsed{since}")
    if state.steps is None:
        return ", ".join([f"step {step}" if step else "no step yet", *times])
    if state.remaining_s is not None:
        times.append(f"about {duration_text(state.remaining_s)} left")
    done = step / max(1, state.steps)
    before = f"step {step}/{state.steps} "
    after = f" {done:4.0%}  {', '.join(times)}"
    return before + glyphs.bar(done, max(4, min(60, columns - len(before) - len(after)))) + after


def _speed(state: RunState) -> str:
    if not state.log:
        return ""
    last = state.log[-1]
    recent = rows_since(state.log, state.config)[-20:] or [last]
    medians = {}
    for name in ("step_s", "tokens_per_s"):
        values = [row[name] for row in recent if name in row]
        medians |= {name: float(np.median(values))} if values else {}
    parts = [f"a step takes {seconds_text(medians['step_s'])}"] if "step_s" in medians else []
    parts += [f"{medians['tokens_per_s']:,.0f} tokens/s"] if "tokens_per_s" in medians else []
    parts += [f"MFU {mfu_text(last['mfu'], 'peak_underestimated' in last)}"] if "mfu" in last else []
    parts += [f"gradient norm {last['grad_norm']:.3g}"] if "grad_norm" in last else []
    parts += [f"lr {last['lr']:.1e}"] if "lr" in last else []
    return "  ".join(parts)


def _verdict(state: RunState, columns: int) -> list[Text | str]:
    """Return the verdict on the last traced steps, cut to MOST_VERDICT lines."""
    if state.answer is None:
        return ["", f"verdict so far: {state.unmeasured}"]
    steps = state.measured.times.steps
    head = f"verdict so far, by steps {steps[0]} to {steps[-1]}: " if len(steps) > 1 else "verdict so far: "
    kind = state.answer["bottleneck"]["kind"]
    text = head + ("" if kind == "none" else f"{kind}: ") + state.answer["verdict"]
    lines = wrap(text, columns, max_lines=MOST_VERDICT, placeholder=" ..." if columns > 4 else "")
    return ["", *(Text(line, "bold") for line in lines)]


def _loss(state: RunState) -> str:
    rows = [row for row in state.log if "loss" in row]
    if not rows:
        return "loss: no step yet"
    text = f"loss {rows[-1]['loss']:.4f} after step {rows[-1]['step']}"
    if found := [row for row in state.log if "val_loss" in row]:
        text += f", validation {found[-1]['val_loss']:.4f} after step {found[-1]['step']}"
    return text


def _below(state: RunState, columns: int, room: int, glyphs: Glyphs) -> list[str]:
    """Return ranks and nodes, in at most `room` lines."""
    if state.measured is None:
        return []
    rows = rank_rows(state)
    nodes = [row for row in state.answer["evidence"]["nodes"] if "bytes_a_step" in row]
    room -= 1  # the empty line before
    if columns >= WIDE and nodes:
        width = (columns - GAP) // 2
        left = _ranks(state, rows, width, room, glyphs)
        right = _ports(state, nodes, width, room, glyphs)
        return ["", *(f"{one[:width]:<{width + GAP}}{other}" for one, other in zip_longest(left, right, fillvalue=""))]
    for_nodes = min(len(nodes) + 1, max(3, room // 2)) if nodes else 0
    ranks = _ranks(state, rows, columns, room - for_nodes, glyphs)
    return ["", *ranks, *(_ports(state, nodes, columns, room - len(ranks), glyphs) if nodes else [])]


def rank_rows(state: RunState) -> list[RankRow]:
    """Return a row for each rank, from wait_table."""
    run = state.measured.run
    table = wait_table(state.measured)
    zeros = np.zeros(len(run.ranks))
    groups = (("computing",), ("transfer", "copies"), STATES, ("data", "other"))
    parts = np.array([sum((table.get(name, zeros) for name in names), zeros) for names in groups])
    places = zip(run.rank_numbers, run.rank_nodes, parts.T.tolist(), strict=True)
    return [RankRow(rank, run.hosts[node], tuple(of_rank)) for rank, node, of_rank in places]


def slowest_rank(rows: list[RankRow], state: RunState) -> tuple[int, float] | None:
    """Return (rank, relative excess) of a rank that clearly computes longer than others of its stage, or None."""
    compute = [row.parts[0] if row.parts[0] > 0 else np.nan for row in rows]
    found = slowest(compute, [stage for (stage,) in state.measured.run.places_in("stage")])
    if not found or found["slowest_excess"] < STANDS_OUT:
        return None
    return rows[found["slowest_rank"]].rank, found["slowest_excess"]


def _ranks(state: RunState, rows: list[RankRow], columns: int, room: int, glyphs: Glyphs) -> list[str]:
    """Return a header and a line for each rank, at most `room` lines."""
    slow = slowest_rank(rows, state)
    longest_ms = max(sum(row.parts) for row in rows)
    accused = state.answer["bottleneck"]["rank"]
    shown = _fitting(rows, room - 1, lambda row: (row.rank == accused, row.parts[0]), lambda row: row.rank)
    names = [f"rank {row.rank} {row.host}" for row in shown]
    head = "rank" if len(shown) == len(rows) else f"{len(shown)} of {len(rows)} ranks"
    left = max(map(len, [head, *names]))
    key = " ".join(f"{sign} {name}" for sign, name in zip(glyphs.parts, PARTS, strict=True))
    lines = [f"{head:<{left}}{'computes':>10}{'moves':>10}{'waits':>10}  {key}"]
    width = max(8, columns - left - 3 * 10 - 2 - (len(" SLOWEST, +100%") if slow else 0))
    for row, name in zip(shown, names, strict=True):
        cells = "".join(f"{short_ms(ms, 3)} ms".rjust(10) for ms in row.parts[:3])
        mark = f" SLOWEST, +{slow[1]:.0%}" if slow and row.rank == slow[0] else ""
        lines.append(f"{name:<{left}}{cells}  {glyphs.stacked(row.parts, longest_ms, width)}{mark}")
    return lines


def _fitting(rows: list, room: int, weight: Callable, place: Callable) -> list:
    """Return the `room` heaviest rows, at least one, in their original order."""
    return sorted(sorted(rows, key=weight, reverse=True)[: max(1, room)], key=place)


def _ports(state: RunState, nodes: list[dict], columns: int, room: int, glyphs: Glyphs) -> list[str]:
    """Return a header and a line for each node, at most `room` lines."""
    accused = state.answer["bottleneck"]["node"]

    def weight(row: dict) -> tuple:
        return row["node"] == accused, max(row.get("link_used", row["bytes_a_step"]).values())

    shown = _fitting(nodes, room - 1, weight, lambda row: row["node"])
    head = "port" if len(shown) == len(nodes) else f"{len(shown)} of {len(nodes)} ports"
    left = max(map(len, [head, *(row["host"] for row in shown)]))
    width = max(4, min(BAR, (columns - left - 62) // 2))
    lines = [f"{head:<{left}}  in and out a step; how much of its link's rate, at its busiest"]
    for row in shown:
        cells = [_port(row, way, width, glyphs) for way in ("in", "out")]
        lines.append(f"{row['host']:<{left}}  {'  '.join(cells)}  {_link(row.get('link_bytes_per_s'))}")
    return lines


def _link(rates: dict | None) -> str:
    """Return "48 MB/s", or "12 MB/s, 48 MB/s" if the rates in and out differ."""
    if rates is None:
        return ""
    shown = [rates["in"], rates["out"]] if abs(rates["in"] / rates["out"] - 1) > ALIKE else [rates["in"]]
    return ", ".join(f"{bytes_text(rate, 2)}/s" for rate in shown)


def _port(row: dict, way: str, width: int, glyphs: Glyphs) -> str:
    text = f"{way:<3} {bytes_text(row['bytes_a_step'][way]):>9} "
    used = row.get("link_used", {}).get(way)
    if used is None or not np.isfinite(used):
        return f"{text:<{width + 19}}"
    return f"{text}{glyphs.bar(used, width)} {min(9.99, used):4.0%}"
