"""A pipeline's plan: the order in which stages compute microbatches, and how many layers each stage has."""

from gpt2.config import GPT2Config

Actions = list[tuple[str, int]]  # ("forward" or "backward", number of the microbatch)


def gpipe(stage: int, stages: int, microbatches: int) -> Actions:
    """Order all forwards, then all backwards (Huang et al. 2019). Activations of all microbatches are held at once."""
    forwards = [("forward", index) for index in range(microbatches)]
    return forwards + [("backward", index) for index in range(microbatches)]


def one_forward_one_backward(stage: int, stages: int, microbatches: int) -> Actions:
    """Order a forward per later stage, then backward and forward in turns (PipeDream-flush, Narayanan et al. 2021).

    Activations of at most stages - stage microbatches are held. The bubble is as long as in GPipe. A single stage does
    forward, backward, forward, backward.
    """
    ahead = min(stages - stage - 1, microbatches)
    actions = [("forward", index) for index in range(ahead)]
    for index in range(microbatches - ahead):
        actions += [("forward", ahead + index), ("backward", index)]
    return actions + [("backward", index) for index in range(microbatches - ahead, microbatches)]


SCHEDULES = {"1f1b": one_forward_one_backward, "gpipe": gpipe}


def most_in_flight(actions: Actions) -> int:
    """Return the largest number of microbatches that are between forward and backward at once."""
    under_way = most = 0
    for action, _ in actions:
        under_way += 1 if action == "forward" else -1
        most = max(most, under_way)
    return most


def bubble(stages: int, microbatches: int) -> float:
    """Return the share of a step in which a stage waits for its neighbours, if all stages take equally long."""
    return (stages - 1) / (microbatches + stages - 1)


def operations(config: GPT2Config, sequence_length: int) -> tuple[int, int]:
    """Return the operations per token of (a layer, the head), forward and backward, as llm.c counts them."""
    C = config.n_embd
    return 72 * C**2 + 6 * C * sequence_length, 6 * C * config.padded_vocab_size


def layers_by_flops(config: GPT2Config, stages: int, sequence_length: int, least_last: int = 0) -> tuple[int, ...]:
    """Return the layers of each stage that make the slowest stage as fast as possible, counting the head.

    The last stage, which has the head, gets at least `least_last` layers, each other stage at least one.
    """
    layers = config.n_layer
    layer, head = operations(config, sequence_length)
    if stages == 1:
        return (layers,)

    def longest(last):
        return max(-(-(layers - last) // (stages - 1)) * layer, last * layer + head)

    last = min(range(least_last, layers - stages + 2), key=longest)
    others = layers - last
    return (
        *(others * (stage + 1) // (stages - 1) - others * stage // (stages - 1) for stage in range(stages - 1)),
        last,
    )
