"""Models that several ranks share: what rank 0 gathers, what replicas are compared, what is saved and filled again."""

from socket import gethostname
from types import SimpleNamespace

import numpy as np
import pytest

from dist.ranges import cut
from gpt2.formats import llmc
from gpt2.formats.checkpoints import Checkpoint, model_facts, newest_first
from gpt2.model_shards import whole as whole_piece
from gpt2.optimizer import Clipping
from gpt2.parameters import Parameters
from scripts.training.between_steps import MadeStep, Samples, check_replicas
from scripts.training.checkpointing import Checkpointing
from scripts.training.start import restore
from scripts.training.state import errors_name, mesh_facts, prefix_of
from scripts.training.whole_model import WholeModel
from strategies.base import Updated
from strategies.traits import Traits
from tests.support.cut_models import CONFIG, CUTS, WHOLE, arrays, layouts, of_piece
from tests.support.stand_in_mesh import mesh_of
from tests.support.thread_ranks import run_ranks

ARRAYS = arrays()
SHAPES = [(copies, *shape) for shape in CUTS[1:] for copies in (1, 2)]
every_shape = pytest.mark.parametrize(("copies", "layers", "parts"), SHAPES)


def on_all(copies, layers, parts, program) -> list:
    """program(world, mesh, layout of the rank's piece), on every rank: what each returned."""

    def of_rank(world):
        mesh = mesh_of(world, parts, len(layers))
        return program(world, mesh, layouts(layers, parts, multiple_of=16)[mesh.stage * parts + mesh.shard])

    return run_ranks([copies * len(layers) * parts], of_rank)


class Ranges:
    """Parameters of which one range is there at a time, as under ZeRO-3: what is not in use is no number."""

    def __init__(self, values, layout):
        self.values, self.used = of_piece(values, layout), []
        unused = np.full(layout.size, np.nan, np.float32), np.zeros(layout.replicated_size, np.float32)
        self.parameters = Parameters(layout, *unused)

    def before_use(self, start, stop):
        self.used.append((start, stop))
        self.parameters.flat.fill(np.nan)
        self.parameters.flat[start:stop] = self.values[start:stop]


def no_fetch(start, stop):
    """They are in host memory."""


@every_shape
def test_rank_0_sees_the_whole_model_range_by_range(copies, layers, parts):
    def program(world, mesh, layout):
        own = Ranges(ARRAYS["parameters"] * (-1) ** mesh.replica, layout)  # copy 0's are taken
        model, seen = WholeModel(own.parameters, own.before_use, no_fetch, mesh), []
        for start, stop in model.ranges():
            seen.append((start, stop))
            if world.rank == 0:
                np.testing.assert_array_equal(model.parameters.flat[start:stop], ARRAYS["parameters"][start:stop])
        assert tuple(seen) == WHOLE.ranges
        assert tuple(own.used) == layout.ranges, "each once, in the order of every other use, the empty ones, too"
        assert (model.parameters is own.parameters) == (world.rank > 0)
        assert model.held is own.parameters
        assert tuple(model.held_ranges()) == layout.held_ranges

    on_all(copies, layers, parts, program)


def test_where_each_rank_holds_a_model_nothing_is_sent():
    def program(world):
        own = Ranges(ARRAYS["parameters"], WHOLE)
        for mesh in (None, mesh_of(world, 1, 1)):
            model = WholeModel(own.parameters, own.before_use, no_fetch, mesh)
            assert model.parameters is model.held is own.parameters
            for start, stop in model.ranges():
                np.testing.assert_array_equal(own.parameters.flat[start:stop], ARRAYS["parameters"][start:stop])
            assert prefix_of(mesh) == ""
            assert mesh_facts(mesh, CONFIG, (5,)) == {}

    run_ranks([2], program)


def test_samples_are_drawn_from_a_copy_of_it_all():
    def program(world, mesh, layout):
        own = Ranges(ARRAYS["parameters"], layout)
        model = WholeModel(own.parameters, own.before_use, no_fetch, mesh)
        samples = Samples(world, None, model, None, 0, None, 1, 0, CONFIG.context)
        gathered = samples._gathered()
        if world.rank == 0:
            np.testing.assert_array_equal(gathered.flat, ARRAYS["parameters"])

    on_all(2, (3, 2), 2, program)


@pytest.mark.parametrize("wrong", [(), (4,), (0, 9), (5, 6)])
def test_replicas_of_a_piece_are_compared(wrong, capsys):
    """Three copies of a 2 x 2 model. Pieces differ from one another, and nobody is accused of that."""

    def program(world, mesh, layout):
        own = Ranges(ARRAYS["parameters"], layout)
        own.values[3] += world.rank in wrong
        model = WholeModel(own.parameters, own.before_use, no_fetch, mesh)
        check_replicas(world, model, 2, True, mesh, MadeStep(1, None, {}))
        assert own.used == []
        try:
            check_replicas(world, model, 2, True, mesh, MadeStep(2, None, {}))
        except SystemExit as end:
            return end.code
        return None

    assert on_all(3, (3, 2), 2, program) == [2 if wrong else None] * 12
    said, host = capsys.readouterr().err, gethostname()
    assert said.count("\n") == bool(wrong)
    for rank in range(12):
        assert (f"rank {rank} on {host}" in said) == (rank in wrong), said


# --- checkpoints ---


def new_strategy(layout, values: dict, world, holds_all: bool):
    """Its state is what the ranks of a data_world hold alike, or a share of it each; `arrays` is what it is made of."""
    held = {name: of_piece(array, layout) for name, array in values.items()}
    low, high = (0, layout.size) if holds_all else cut(layout.size, world.size)[world.rank]
    held = {name: array[low:high].copy() for name, array in held.items()}
    optimizer = SimpleNamespace(step=5, moments=lambda: [(low, held["m"], held["v"])])
    errors = np.full(layout.size, 1.0, np.float32)
    return SimpleNamespace(
        state=lambda: [Updated(low, held["parameters"], optimizer)], errors=lambda: errors,
        clipping=Clipping(1.0, outlier_z=3.0), resumed=lambda: None, held=held, bounds=(low, high), optimizer=optimizer,
        own_arrays=tuple, traits=Traits(),
    )  # fmt: skip


def facts_of(world, mesh, layers) -> dict:
    facts = {"run": "f" * 32, "global_batch": 4, "ranks": world.size, "strategy": "ring"}
    return facts | model_facts(WHOLE) | mesh_facts(mesh, CONFIG, layers)


def save(folder, copies, layers, parts, holds_all=True, failing=()):
    """One checkpoint, of step 3, which is the last: of what each rank said at the end."""

    def program(world, mesh, layout):
        strategy = new_strategy(layout, ARRAYS, mesh.data_world, holds_all)
        strategy.errors()[:] = world.rank + 2
        strategy.clipping.remember([1.0])
        own = Ranges(ARRAYS["parameters"], layout)
        model = WholeModel(own.parameters, own.before_use, no_fetch, mesh)
        facts = facts_of(world, mesh, layers)
        checkpoints = Checkpointing(world, folder, strategy, layout, facts, range(1, 4), 1, (2, 0), lambda: None, mesh)
        if world.rank in failing:
            strategy.held["m"][layout.by_name["lnf_weight"].start] = np.nan
        try:
            checkpoints.leave_last(3, model)
        except SystemExit as end:
            return end.code
        return [(cost["step"], cost["bytes"]) for cost in checkpoints.costs]

    folder.mkdir(exist_ok=True)
    return on_all(copies, layers, parts, program)


@pytest.mark.parametrize(("copies", "layers", "parts"), [*SHAPES, (2, (5,), 1)])
@pytest.mark.parametrize("holds_all", [True, False])
def test_a_run_goes_on_at_any_shape(tmp_path, capsys, copies, layers, parts, holds_all):
    costs = save(tmp_path / "checkpoints", copies, layers, parts, holds_all)
    (path,) = newest_first(tmp_path / "checkpoints")
    checkpoint = Checkpoint(path)
    checkpoint.check(0, 1)
    assert all(cost == [(3, (path / f"rank-{rank:05d}.safetensors").stat().st_size)] for rank, cost in enumerate(costs))
    shape = [copies, parts, len(layers)]
    assert checkpoint.facts.get("mesh", [copies, 1, 1]) == shape
    assert checkpoint.facts["format"] == f"gpt2-mpi checkpoint {1 if shape[1:] == [1, 1] else 2}"
    assert (checkpoint.facts["updates"], checkpoint.facts["next_window"]) == (5, 12)
    model = Parameters.zeros(WHOLE)
    llmc.read_parameters(path / "model.bin", model)
    np.testing.assert_array_equal(model.flat, ARRAYS["parameters"])
    assert checkpoint.facts["files"]["model.bin"] == (path / "model.bin").stat().st_size
    nothing = {name: np.zeros_like(values) for name, values in ARRAYS.items()}

    def resume(world, mesh, layout):
        strategy = new_strategy(layout, nothing, mesh.data_world, not holds_all)
        restore(checkpoint, strategy, layout, facts_of(world, mesh, other_layers), world, mesh)
        for name in ("m", "v"):
            expected = of_piece(ARRAYS[name], layout)[slice(*strategy.bounds)]
            np.testing.assert_array_equal(strategy.held[name], expected)
        assert (strategy.optimizer.step, [*strategy.clipping.norms]) == (5, [1.0])
        return set(strategy.errors())

    for other_copies, other_layers, other_parts in [(copies, layers, parts), (2, (5,), 1), *SHAPES[::4]]:
        errors = on_all(other_copies, other_layers, other_parts, resume)
        is_same = (other_copies, other_layers, other_parts) == (copies, layers, parts)
        # Each rank's own go on where the same ranks hold the same pieces; their pad is no part of them.
        assert all(found - {0.0} == ({rank + 2.0} if is_same else {1.0}) for rank, found in enumerate(errors))
        assert capsys.readouterr().out.count("error feedback begins anew") == (not is_same)


def test_what_one_piece_lacks_ends_all_ranks(tmp_path, capsys):
    """A rank of the last stage holds what is no number: no checkpoint, and one line that names the tensor."""
    ends = save(tmp_path / "checkpoints", 1, (3, 2), 2, failing=(2,))
    assert ends == [2] * 4
    said = capsys.readouterr().err
    assert "after step 3 there is nan in s1t0_m of lnf_weight, expected finite numbers" in said
    assert said.count("\n") == 1
    assert newest_first(tmp_path / "checkpoints") == []


def test_a_model_that_cannot_be_written_leaves_nobody_waiting(tmp_path, capsys, monkeypatch):
    """Rank 0 writes nothing; the others still bring it all, and the state is saved."""

    def fail(*arguments):
        raise MemoryError

    monkeypatch.setattr(llmc, "make_header", fail)
    assert save(tmp_path / "checkpoints", 2, (3, 2), 2) == [2] * 8
    assert "no memory left" in capsys.readouterr().err
    (path,) = newest_first(tmp_path / "checkpoints")
    Checkpoint(path).check(0, 1)
    assert not (path / "model.bin").exists()


def test_names():
    mesh = SimpleNamespace(tensor=2, data=3, pipeline=1, shard=1, stage=0)
    assert errors_name(4, mesh) == "s0t1_errors_4"
    assert errors_name(4) == "errors_4"
    assert mesh_facts(mesh, CONFIG, (5,)).keys() == {"mesh", "cut"}
    assert WHOLE.shard == whole_piece(CONFIG)
