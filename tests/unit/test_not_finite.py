"""What is nan or infinite ends a run, is not written, and is refused where it is read."""

import json
from math import inf, nan
from types import SimpleNamespace

import numpy as np
import pytest

from gpt2.errors import UserError
from gpt2.files import as_json
from gpt2.formats import checkpoint_files, checkpoints, huggingface_export, llmc, weights
from gpt2.formats.checkpoints import Checkpoint
from gpt2.optimizer import Clipping
from gpt2.parameters import BLOCK_ELEMENTS, Layout, Parameters, first_not_finite, initialize
from scripts import export
from scripts.training.between_steps import MadeStep, end_if_diverged, who_differs
from scripts.training.meeting import RankReports
from tests.support.one_rank import one_rank
from tests.support.safetensors_file import CONFIG
from traces.read.run_files import read_log

PLACES = [{"rank": rank, "host": f"cn{rank}"} for rank in range(4)]


@pytest.mark.parametrize("place", [0, 1, BLOCK_ELEMENTS - 1, BLOCK_ELEMENTS, 2 * BLOCK_ELEMENTS + 5])
@pytest.mark.parametrize("number", [nan, inf, -inf])
def test_the_first_of_them_is_found_wherever_it_is(place, number):
    values = np.full(2 * BLOCK_ELEMENTS + 6, np.finfo(np.float32).max, np.float32)
    assert first_not_finite(values) is None, "though their sum is infinite"
    values[place:] = number
    assert first_not_finite(values) == place


# --- weights ---


def model(number: float, name: str) -> Parameters:
    parameters = Parameters.zeros(Layout(CONFIG))
    initialize(parameters, seed=1)
    parameters.view(name).reshape(-1)[-1] = number
    return parameters


WRITERS = {
    "llm.c": lambda path, parameters: llmc.write_parameters(path, parameters),
    "llm.c, bfloat16": lambda path, parameters: llmc.write_parameters(path, parameters, stored="bfloat16"),
    "Hugging Face": lambda path, parameters: huggingface_export.write_parameters(path, parameters),
    "checkpoint": lambda path, parameters: write_checkpoint(path, parameters),
}


def write_checkpoint(path, parameters, m=None, errors=None, **facts):
    values = parameters.flat[: parameters.layout.count]
    zeros = np.zeros_like(values)
    ranges = [("parameters", 0, values), ("m", 0, zeros if m is None else m), ("v", 0, zeros)]
    ranges += [] if errors is None else [("errors_0", 0, errors)]
    part = path / "checkpoints" / "step-00000003.part"
    part.parent.mkdir(parents=True, exist_ok=True)
    files = {checkpoint_files.rank_file(0): checkpoint_files.write_part(part, 3, 0, ranges, "run")}
    facts = {"run": "run", "step": 3} | checkpoints.model_facts(parameters.layout) | facts
    return checkpoints.complete(part, facts, files)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("form", WRITERS)
@pytest.mark.parametrize(
    ("number", "name"), [(nan, "wpe"), (inf, "layer.1.fcproj_weight"), (-inf, "layer.0.ln1_bias"), (nan, "lnf_bias")]
)
def test_weights_are_refused_by_the_tensors_name(tmp_path, capsys, form, number, name):
    WRITERS[form](tmp_path / "model", model(number, name))
    with pytest.raises(UserError, match=rf"^{tmp_path}.*: holds {number} in {name}, expected finite"):
        weights.load(tmp_path / "model")
    for target in ("llmc", "huggingface"):
        out = tmp_path / "out"
        assert export.main([str(tmp_path / "model"), "--format", target, "--out", str(out)]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert f"holds {number} in {name}" in said
        assert not out.exists()


def test_a_checkpoint_from_which_no_run_can_go_on_is_not_used(tmp_path):
    parameters = model(0.0, "wpe")
    Checkpoint(write_checkpoint(tmp_path / "good", parameters)).check(0, 1)
    m = np.zeros(parameters.layout.count, np.float32)
    m[parameters.layout.by_name["layer.1.fc_bias"].start] = nan
    with pytest.raises(UserError, match=r"step-00000003: holds nan in m of layer\.1\.fc_bias, expected finite"):
        Checkpoint(write_checkpoint(tmp_path / "bad", parameters, m)).check(0, 1)


def test_no_number_of_its_facts_is_no_number(tmp_path):
    with pytest.raises(ValueError, match="JSON compliant"):
        write_checkpoint(tmp_path, model(0.0, "wpe"), norms=[1.0, nan])
    assert checkpoints.newest_first(tmp_path / "checkpoints") == []


def test_past_norms_are_finite_also_from_an_old_checkpoint():
    """Of a nan or infinite one no deviation can be taken."""
    clipping = Clipping(1.0, outlier_z=3.0, window=4)
    clipping.remember([1.0, nan, 1.1, inf, 0.9, 1.0])
    for norm in (inf, nan):
        assert clipping.scale(norm * norm)[1] is None
    assert [*clipping.norms] == [1.0, 1.1, 0.9, 1.0]
    assert clipping.scale(1.0)[1] == 1.0
    assert clipping.scale(100.0)[1] is None


# --- a step ---


def ended(capsys, losses, norms=(1.0, 1.0, 1.0), val_loss=2.0) -> str | None:
    """The line with which step 7 ends the job, None if it does not."""
    world = SimpleNamespace(comm=SimpleNamespace(rank=0), places=PLACES)
    reports = RankReports(sum(losses), [*losses], [*norms], [], [], [], 0, [])
    try:
        end_if_diverged(world, SimpleNamespace(end_if_not_finite=id), MadeStep(7, reports, {"val_loss": val_loss}))
    except SystemExit as end:
        return capsys.readouterr().err if end.code == 2 else f"code {end.code}"
    return None


def test_what_is_no_number_any_more_ends_the_run(capsys):
    good = [1.0, 1.1, 0.9]
    rest = ": lower --lr, raise --warmup, or check the data\n"
    assert ended(capsys, good) is None
    assert ended(capsys, [0.0, 2.0, 2.0], [3.0, 0.0, 0.0]) is None, "a server"
    assert ended(capsys, [nan, nan, nan]) == f"error: the loss of step 7 is nan{rest}"
    assert ended(capsys, [0.0, inf, inf]) == f"error: the loss of step 7 is inf{rest}", "a server and its workers"
    assert ended(capsys, [1.0, nan, 1.0]) == f"error: the loss of step 7 is nan (rank 1 on cn1){rest}"
    assert ended(capsys, good, [inf, inf, inf]) == f"error: the gradients' norm of step 7 is inf{rest}"
    assert ended(capsys, good, [nan, 0.0, 0.0]) == f"error: the gradients' norm of step 7 is nan{rest}"
    alone = f"error: the gradients' norm of step 7 is inf (rank 2 on cn2){rest}"
    assert ended(capsys, good, [1.0, 2.0, inf]) == alone, "ranks that train models of their own"
    assert ended(capsys, good, val_loss=nan) == f"error: the validation loss of step 7 is nan{rest}"


def test_who_differs():
    assert who_differs([5, 5, 5, 5], PLACES) is None
    others = "these hold different parameters from the rest: "
    assert who_differs([5, 6, 5], PLACES[:3]) == f"{others}rank 1 on cn1"
    assert who_differs([6, 5, 5], PLACES[:3]) == f"{others}rank 0 on cn0"
    assert who_differs([5, 5, 6, None], PLACES) == f"{others}rank 2 on cn2", "one looks at another's copy"
    nobody = "these hold different parameters, and nobody can tell which are right: "
    assert who_differs([6, 5], PLACES[:2]) == f"{nobody}rank 0 on cn0; rank 1 on cn1"
    assert who_differs([5, None, 6], PLACES[:3]) == f"{nobody}rank 0 on cn0; rank 2 on cn2"
    assert who_differs([5, 6, 6, 5], PLACES) == f"{nobody}rank 0 on cn0, rank 3 on cn3; rank 1 on cn1, rank 2 on cn2"
    assert who_differs([5, 6, 7, 5], PLACES).startswith(nobody), "two of four are no majority"


# --- a checkpoint of the run ---


@pytest.mark.parametrize("array", ["parameters", "m", "v", "errors_0"])
def test_what_is_not_finite_becomes_no_checkpoint(tmp_path, capsys, array):
    run = one_rank(tmp_path)
    run.save(2)
    run.arrays[array][run.layout.by_name["layer.1.qkv_weight"].start + 3] = -inf
    run.checkpoints.begin(4)
    written = run.wait()
    run.checkpoints.settle(written)
    with pytest.raises(SystemExit) as end:
        run.checkpoints.end_if_not_finite(written)
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(
        f"error: after step 4 there is -inf in {array} of layer.1.qkv_weight, expected finite numbers: "
    )
    assert said.count("\n") == 1
    run.close()
    assert run.names() == ["step-00000002"], "the good one before stays"


def test_nor_does_the_last_step(tmp_path, capsys):
    run = one_rank(tmp_path)
    run.save(2)
    run.arrays["parameters"][run.layout.by_name["lnf_weight"].start] = nan
    with pytest.raises(SystemExit) as end:
        run.checkpoints.leave_last(6, run.model)
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: after step 6 there is nan in parameters of lnf_weight, expected finite numbers: ")
    assert said.count("\n") == 1
    run.close()
    assert run.names() == ["step-00000002"]


def test_a_model_that_is_not_the_parts_that_are_written(tmp_path, capsys):
    """Rank 0's copy of what other ranks have saved: the state is good, the model is not."""
    run = one_rank(tmp_path)
    run.model.parameters = model(nan, "layer.0.ln2_bias")
    with pytest.raises(SystemExit) as end:
        run.checkpoints.leave_last(6, run.model)
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert "model.bin: holds nan in layer.0.ln2_bias, expected finite numbers" in said
    assert said.count("\n") == 1
    assert [path.name for path in (run.folder / "step-00000006").glob("*.bin")] == []


def test_ranks_without_checkpoints_are_looked_at_too(tmp_path, capsys):
    run = one_rank(tmp_path, every=None)
    run.checkpoints.leave_last(6, run.model)
    assert run.names() == []
    run.arrays["parameters"][0] = nan
    with pytest.raises(SystemExit):
        run.checkpoints.leave_last(6, run.model)
    assert "after step 6 there is nan in parameters of wte" in capsys.readouterr().err


# --- JSON ---


def test_json_has_null_for_what_is_no_number(tmp_path):
    record = {"step": 3, "loss": nan, "grad_norm": np.float64(inf), "val_loss": -inf, "lr": 1.5, "skipped": True}
    text = as_json(record | {"list": [nan, (1.0, inf)], "name": "nan", "none": None})
    found = json.loads(text, parse_constant=pytest.fail)
    assert found["list"] == [None, [1.0, None]]
    assert [found[name] for name in ("loss", "grad_norm", "val_loss", "lr", "name")] == [None, None, None, 1.5, "nan"]
    (tmp_path / "log.jsonl").write_text(f"{as_json(record)}\n")
    (row,) = read_log(tmp_path)
    assert row["step"] == 3
    assert all(np.isnan(row[name]) for name in ("loss", "grad_norm", "val_loss"))
