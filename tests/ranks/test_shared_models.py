"""A model that ranks share, brought to rank 0 by messages too large to be sent before somebody receives them."""

import numpy as np
import pytest

from dist.world import start_world
from gpt2.config import GPT2Config
from gpt2.model_shards import model_shards
from gpt2.parameters import Layout, Parameters, initialize
from scripts.training.between_steps import MadeStep, check_replicas
from scripts.training.whole_model import WholeModel
from tests.support.stand_in_mesh import mesh_of

CONFIG = GPT2Config(n_layer=3, n_head=3, n_embd=192, context=8, vocab_size=2000)


@pytest.mark.ranks(2, 4)
def test_rank_0_sees_the_whole_model(comm):
    world, whole = start_world(), Parameters.zeros(Layout(CONFIG))
    initialize(whole, 5)
    shapes = [((3,), 2), ((1, 2), 1)] + ([((2, 1), 2), ((1, 1, 1, 0), 1)] if comm.size == 4 else [])
    for layers, parts in shapes:
        mesh = mesh_of(world, parts, len(layers))
        layout = Layout(CONFIG, 16, model_shards(layers, parts)[mesh.stage * parts + mesh.shard])
        held = Parameters.zeros(layout)
        initialize(held, 5)
        model = WholeModel(held, lambda start, stop: None, lambda start, stop: None, mesh)
        for _ in range(2):
            for start, stop in model.ranges():
                if world.rank == 0:
                    np.testing.assert_array_equal(model.parameters.flat[start:stop], whole.flat[start:stop])
        check_replicas(world, model, 1, True, mesh, MadeStep(1, None, {}))
        held.flat[-1] += mesh.replica + mesh.shard + 3 * mesh.stage  # replicas differ only if there are several
        if mesh.data == 1:
            check_replicas(world, model, 1, True, mesh, MadeStep(1, None, {}))
        else:
            with pytest.raises(SystemExit):
                check_replicas(world, model, 1, True, mesh, MadeStep(1, None, {}))
