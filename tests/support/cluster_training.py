"""What every rank of a virtual cluster runs for test_virtual_cluster_training.py: a few steps with every strategy.

Rank 0 prints one JSON object after RESULT: {case: error, relative to one serial rank, and whether all ranks hold the
same bits, and hold them again after a second run}; and of each strategy that can split the token embedding, how far its
weights are then from those without, relative to the largest.
"""

import json

import numpy as np

from dist.world import start_world
from strategies import STRATEGIES
from tests.ranks import test_strategies
from tests.ranks.test_strategies import cases, distributed, serial
from tests.unit import test_split_embedding

STEPS = 2
SPLITTING = [name for name, kind in STRATEGIES.items() if kind.traits.splits_embedding]


def all_cases(ranks):
    """(strategy, options), every one of the tests at fewer ranks, and half the bytes where nodes are told apart."""
    yield from cases(ranks)
    for name in ("ring", *(name for name in STRATEGIES if "hierarchical" in name)):
        yield name, {"wire": "bfloat16"}


def outcome(world, name, options, reference):
    parameters, _, _, early = distributed(world, name, **options)
    *_, again = distributed(world, name, test_strategies.EARLY, **options)
    seen = world.comm.allgather((parameters.tobytes(), early == again))
    return {
        "error": float(np.abs(parameters - reference).max() / np.abs(reference).max()),
        "same_everywhere": len({bits for bits, _ in seen}) == 1,
        "same_again": all(same for _, same in seen),
    }


def split_apart(world, name):
    """How far weights are from those of a whole embedding, after some steps."""
    found, tokens = [], test_split_embedding.batches("any")
    for split in (True, False):
        training = test_split_embedding.Training(world, name, None, bucket_bytes=300, split=split)
        for step in range(len(tokens)):
            training.step(tokens[step], False, tokens[(step + 1) % len(tokens)])
        found.append(training.whole())
    return float(np.abs(found[0] - found[1]).max() / np.abs(found[1]).max())


def main():
    world = start_world(expect_ranks=9)
    test_strategies.BATCHES, test_strategies.EARLY = test_strategies.BATCHES[:STEPS], 1
    reference, _, _ = serial()
    outcomes = {
        f"{name} {options}": outcome(world, name, options, reference) for name, options in all_cases(world.size)
    }
    splits = {name: split_apart(world, name) for name in SPLITTING}
    result = {"nodes": world.node_count, "parameters": len(reference), "outcomes": outcomes, "splits": splits}
    world.print("RESULT", json.dumps(result))


if __name__ == "__main__":
    main()
