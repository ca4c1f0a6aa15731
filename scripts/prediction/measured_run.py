"""What a run folder says about a step: who sat where, over which links, how long ranks computed; as far as it goes."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from gpt2.config import GPT2_VOCABULARY, PRESETS, GPT2Config
from gpt2.errors import UserError
from gpt2.parameters import Layout
from strategies import Strategy, find
from traces.read import checks
from traces.read.analysis import measure
from traces.read.runs import read_run
from traces.record.files import RunError
from traces.record.phases import INDEX, STEP

WORK = ("data", "forward", "backward")


@dataclass(frozen=True)
class MeasuredRun:
    """settings, links: as config.json holds them; kind: its strategy; placement: node of each rank.

    work_s: a step's data, forward and backward on its slowest rank, update_s: AdamW over the whole vector, step_s: the
    step; medians over steps. ranges: as schedule() takes them, () if not known. notes: what was missing, a line each.
    """

    path: Path
    settings: dict
    kind: type[Strategy]
    placement: list[int]
    links: list[dict]
    library: str
    parameters: int
    ranges: tuple[int, ...]
    work_s: float
    update_s: float
    step_s: float
    notes: list[str]

    @property
    def workers(self) -> int:
        return len(self.placement) - (self.settings.get("server") == "dedicated")


def read_measured_run(path: Path) -> MeasuredRun:
    """RunError with one line where nothing can be said: no configuration, or no step that any rank has ended."""
    config, notes = read_config(path), []
    try:
        placement = [place["node"] for place in config["ranks"]]
        parameters, settings = config["parameters"], config["settings"]
        library = config["mpi_library"]
    except (KeyError, TypeError) as missing:
        raise RunError(f"{path}/config.json lacks {missing}: it is not what scripts/train.py writes") from None
    strategy, links = settings["strategy"], config.get("links") or []
    if not placement:
        raise RunError(f"{path}/config.json says strategy {strategy} on {len(placement)} ranks: restore it")
    try:
        kind = find(strategy)
    except UserError as error:
        raise RunError(f"{path}/config.json: {error}") from None
    times = traced_times(path, config, notes) or logged_times(path, notes)
    if times is None:
        raise RunError(
            f"{path} holds no complete step, in its traces or in log.jsonl: let the run go on for some steps"
        )
    work_s, own_update_s, step_s = times
    memory = kind.memory.of_rank(parameters, len(placement), max(placement) + 1)
    return MeasuredRun(
        path, settings, kind, placement, links, library, parameters, model_ranges(settings, parameters),
        work_s, own_update_s / memory.updated_share(parameters), step_s, notes,
    )  # fmt: skip


def read_config(path: Path) -> dict:
    try:
        return checks.read_config(path / "config.json")
    except OSError:
        raise RunError(
            f"{path} has no config.json, so it is no run folder: give what --out of train.py named"
        ) from None
    except ValueError as error:
        raise RunError(f"{path}/config.json is no configuration of a run: {error}: restore it") from None


def traced_times(path: Path, config: dict, notes: list[str]) -> tuple[float, float, float] | None:
    """(work, update, step) in seconds from the traces of the ranks that left any; None without a complete step."""
    try:
        run = read_run(path, allow_missing=True)
    except RunError as error:
        notes.append(str(error))
        return None
    run = replace(run, ranks=[trace for trace in run.ranks if len(trace.records)])
    if not run.ranks:
        return None
    if len(run.ranks) < len(config["ranks"]):
        notes.append(f"{len(run.ranks)} of {len(config['ranks'])} ranks left traces: the others' times are not known")
    try:
        seconds = measure(run).seconds
    except RunError:
        return None
    work = seconds[:, :, [INDEX[name] for name in WORK]].sum(axis=2).max(axis=1)
    update, step = (seconds[:, :, INDEX[name]].max(axis=1) for name in ("update", STEP))
    return float(np.median(work)), float(np.median(update)), float(np.median(step))


def logged_times(path: Path, notes: list[str]) -> tuple[float, float, float] | None:
    """The same from log.jsonl: what is not exchange counts as work."""
    try:
        lines = (path / "log.jsonl").read_bytes().split(b"\n")
    except OSError:
        return None
    rows = []
    for line in lines:
        try:
            row = checks.parse(line)
            checks.check_log_row(row)
            rows.append((row["step_s"], row["exposed_exchange_s"]))
        except (ValueError, KeyError):
            continue  # a line that a crash cut off
    if not rows:
        return None
    notes.insert(0, "no step is complete in the traces: from log.jsonl, what is not exchange counts as computing")
    step_s, exchange_s = np.median(np.array(rows), axis=0)
    return float(step_s - exchange_s), 0.0, float(step_s)


def model_ranges(settings: dict, parameters: int) -> tuple[int, ...]:
    """Elements of the embeddings, each layer and the last LayerNorm; () where the settings do not say."""
    config = PRESETS.get(settings.get("model") or "baby", PRESETS["baby"])
    shape = {name: settings.get(name) or getattr(config, name) for name in ("n_layer", "n_head", "n_embd", "context")}
    tokens = GPT2_VOCABULARY if settings.get("train_data") or settings.get("tokenizer") == "gpt2" else 256
    vocabulary = settings.get("vocab_size") or max(config.vocab_size, tokens)
    try:
        layout = Layout(GPT2Config(**shape, vocab_size=vocabulary))
    except UserError:
        return ()
    if layout.count != parameters:
        return ()
    return tuple(stop - start for start, stop in layout.ranges)
