"""--tensor-parallel, --pipeline-parallel and their siblings: what they come to, and what is refused in one line."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from gpt2.errors import UserError
from gpt2.model_shards import ONE_SHARD
from gpt2.parallel_model import ParallelGPT2
from gpt2.parameters import Layout, Parameters
from scripts.settings import memory
from scripts.settings.checks import complete
from scripts.settings.derived import global_batch, lasting
from scripts.settings.memory import bytes_of_pieces, check_memory
from scripts.settings.model_parallel import model_cut
from scripts.settings.training import parse_settings
from scripts.training.shared_model import GroupTracer

pytestmark = pytest.mark.any_mpi


def completed(flags: str, ranks: int):
    return complete(parse_settings("", flags.split()), ranks)


@pytest.mark.parametrize(
    ("flags", "ranks", "says"),
    [
        ("--tensor-parallel 3", 4, "4 ranks with --tensor-parallel 3 and --pipeline-parallel 1, expected a multiple"),
        ("--tensor-parallel 2 --pipeline-parallel 2", 6, "expected a multiple of 4: start 8"),
        ("--tensor-parallel 5", 5, "--tensor-parallel 5, expected at most the model's 4 heads"),
        ("--pipeline-parallel 6", 6, "--pipeline-parallel 6, expected at most 5: the model has 4 layers, and a last"),
        ("--pipeline-parallel 5 --tensor-parallel 2", 10, "expected at most 4: the model has 4 layers: lower it"),
        ("--tensor-parallel 0", 1, "--tensor-parallel is 0, expected a number of at least 1"),
        ("--pipeline-parallel -1", 1, "--pipeline-parallel is -1, expected"),
        ("--pipeline-parallel 2 --pipeline-layers 4", 2, "--pipeline-layers 4 has 1 stages, expected 2"),
        ("--pipeline-parallel 2 --pipeline-layers 3,2", 2, "--pipeline-layers 3,2 add up to 5, expected the model's 4"),
        ("--pipeline-parallel 2 --pipeline-layers 0,4", 2, "--pipeline-layers 0,4 leaves a stage empty"),
        ("--pipeline-parallel 2 --tensor-parallel 2 --pipeline-layers 4,0", 4, "leaves a stage empty"),
        ("--pipeline-layers 4,0", 1, "--pipeline-layers 4,0 has 2 stages, expected 1"),
        ("--strategy reduce-bcast --server dedicated --tensor-parallel 2", 4, "--server dedicated with several ranks"),
        (
            "--strategy diloco --pipeline-parallel 2",
            4,
            "--strategy diloco with several ranks sharing a model, expected",
        ),
    ],
)
def test_what_does_not_go_together(flags, ranks, says):
    with pytest.raises(UserError) as refused:
        completed(flags, ranks)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("text", ["4,,4", "4;4", "-1,5", "", "a", "99999999"])
def test_layers_that_are_no_list(text, capsys):
    with pytest.raises(SystemExit):
        parse_settings("", [f"--pipeline-layers={text}"])
    assert "expected numbers such as 4,4,4,0" in capsys.readouterr().err


def test_layers_are_chosen_by_operations_unless_given():
    s, config = completed("--pipeline-parallel 4 --model gpt2-124M", 4)
    assert model_cut(s, config).layers == (4, 4, 4, 0)
    assert [model_cut(s, config).in_flight(stage) for stage in range(4)] == [1, 1, 1, 1]  # of one micro-step
    s, config = completed("--pipeline-parallel 2 --pipeline-layers 03,1 --grad-accum 8", 4)
    assert (s.pipeline_layers, model_cut(s, config).layers) == ("3,1", (3, 1))
    assert [model_cut(s, config).in_flight(stage) for stage in range(2)] == [2, 1]
    s, config = completed("--pipeline-parallel 2 --pipeline-schedule gpipe --grad-accum 8", 2)
    assert model_cut(s, config).in_flight(0) == 8
    assert completed("", 4)[0].pipeline_layers is None


def test_copies_alone_share_the_global_batch():
    """8 ranks as two models take as many sequences as 2 ranks that have a model each."""
    cut, _ = completed("--tensor-parallel 2 --pipeline-parallel 2 --grad-accum 3 --batch-size 5", 8)
    plain, _ = completed("--grad-accum 3 --batch-size 5", 2)
    assert global_batch(cut, 8) == global_batch(plain, 2) == 30
    assert lasting(cut, 8) == lasting(plain, 2)


def test_a_preset_keeps_its_tokens():
    flags = "--preset llmc-fineweb-124M --train-data x --val-data y --batch-size 8"
    s, _ = completed(flags + " --tensor-parallel 2 --pipeline-parallel 2", 8)
    plain, _ = completed(flags, 2)
    assert (s.batch_size, s.grad_accum) == (plain.batch_size, plain.grad_accum)


def test_the_table_says_what_the_cut_costs():
    s, config = completed("--tensor-parallel 2 --pipeline-parallel 2 --grad-accum 3", 8)
    assert model_cut(s, config).text(2) == (
        "2 replicas x 2 shards x 2 stages of 2, 2 layers; 1f1b, 3 microbatches, bubble 25% of a step"
    )
    s, config = completed("--pipeline-parallel 2", 2)
    assert "bubble 50% of a step, as there are fewer microbatches than stages" in model_cut(s, config).text(1)
    assert len(model_cut(s, config).shards) == 2
    assert model_cut(*completed("", 2)).text(2) is None


def test_a_groups_roots_are_traced_by_their_numbers_in_the_job():
    seen = []

    def keep(*call):
        seen.append(call)

    group = GroupTracer(SimpleNamespace(phase=keep, interruption=None, seconds=None), (1, 5, 9))
    group.phase("reduce", bytes=8, root=2)
    group.phase("update")
    assert seen == [("reduce", 8, 9), ("update", 0, None)]


@pytest.mark.parametrize(
    "flags", ["--tensor-parallel 2 --pipeline-parallel 2", "--pipeline-parallel 4", "--tensor-parallel 4"]
)
def test_memory_of_pieces_is_that_of_their_arrays(flags):
    """On one node, with gradients, moments and all that a model allocates; links and rooms are small beside them."""
    flags += " --grad-accum 4 --batch-size 2 --seq-len 32 --strategy allreduce --n-layer 8 --n-embd 256"
    s, config = completed(flags, 4)
    world = SimpleNamespace(places=[{"rank": r, "node": 0, "local_rank": r} for r in range(4)], node=0, size=4)
    allocated = 0
    cut = model_cut(s, config)
    for number, shard in enumerate(cut.shards):
        counted = []
        layout = Layout(config, 1, shard)

        def empty(shape, dtype, counted=counted):
            counted.append(shape)
            return np.empty(shape, "i1")

        kernels = SimpleNamespace(empty=empty, operand_dtype=None)
        group = SimpleNamespace(room=lambda shape: np.empty(shape, "i1")) if shard.tp_size > 1 else ONE_SHARD
        parameters = Parameters.zeros(layout)
        ParallelGPT2(kernels, parameters, parameters, 2, 32, group, in_flight=cut.in_flight(number // cut.tensor))
        product = max(int(np.prod(t.shape)) for t in layout.tensors if "fc" in t.name)
        allocated += 4 * product
        allocated += 4 * (4 * layout.count + 2 * layout.replicated_size + sum(int(np.prod(shape)) for shape in counted))
    layers = [stop - start for start, stop in Layout(config).ranges]
    allocated += 4 * (layers[0] + 2 * layers[1] + layers[-1])  # where rank 0 gathers model.bin
    assert bytes_of_pieces(s, config, world) == pytest.approx(allocated, rel=0.03)
    assert bytes_of_pieces(s, config, world) >= allocated


def test_memory_is_that_of_the_own_node():
    s, config = completed("--pipeline-parallel 2 --grad-accum 4 --strategy allreduce", 4)
    places = [{"rank": r, "node": r // 2, "local_rank": r % 2} for r in range(4)]
    first, second = (bytes_of_pieces(s, config, SimpleNamespace(places=places, node=node, size=4)) for node in range(2))
    on_one = [place | {"node": 0, "local_rank": place["rank"]} for place in places]
    assert first + second == bytes_of_pieces(s, config, SimpleNamespace(places=on_one, node=0, size=4))
    assert first > second  # stage 0 holds more micro-steps, and where the head's gradient lands


def test_a_model_that_fits_in_stages_alone(monkeypatch):
    """GPT-2 124M and AdamW are 2 GB: of two stages neither node needs so much."""
    monkeypatch.setattr(memory, "available_bytes", lambda: int(1.8e9))
    places = [{"rank": rank, "node": rank, "local_rank": 0} for rank in range(2)]
    world = SimpleNamespace(local_size=1, size=2, node_count=2, host="node1", node=1, places=places)
    flags = "--model gpt2-124M --backend numpy --strategy allreduce --batch-size 1 --seq-len 64"
    with pytest.raises(UserError, match=r"of 124M parameters and --batch-size 1 take 2[.]\d GB or more on node1"):
        check_memory(*completed(flags, 2), world)
    settings, config = completed(f"{flags} --pipeline-parallel 2", 2)
    check_memory(settings, config, world)
    with pytest.raises(UserError, match=r"--batch-size 1000 take \d+[.]\d GB or more on node1"):
        check_memory(replace(settings, batch_size=1000), config, world)
