"""A pipeline's plan: in which order its stages compute micro-steps, and how many layers each stage has."""

from gpt2.config import GPT2Config

Actions = list[tuple[str, int]]  # ("forward" or "backward", number of the micro-step)


def gpipe(stage: int, stages: int, micro_steps: int) -> Actions:
    """All forwards, then all backwards (Huang et al. 2019): activations of all micro-steps are held at once."""
    return [("forward", index) for index in range(micro_steps)] + [("backward", index) for index in range(micro_steps)]


def one_forward_one_backward(stage: int, stages: int, micro_steps: int) -> Actions:
    """As many forwards as there are stages after this one, then in turns (PipeDream-flush, Narayanan et al. 2021).

    Activations of at most stages - stage micro-steps are held. The bubble is as long as GPipe's. Of one stage alone it
    is the order of plain micro-steps: forward, backward, forward, backward.
    """
    ahead = min(stages - stage - 1, micro_steps)
    actions = [("forward", index) for index in range(ahead)]
    for index in range(micro_steps - ahead):
        actions += [("forward", ahead + index), ("backward", index)]
    return actions + [("backward", index) for index in range(micro_steps - ahead, micro_steps)]


SCHEDULES = {"1f1b": one_forward_one_backward, "gpipe": gpipe}


def most_in_flight(actions: Actions) -> int:
    """The most micro-steps that are between their forward and their backward."""
    under_way = most = 0
    for action, _ in actions:
        under_way += 1 if action == "forward" else -1
        most = max(most, under_way)
    return most


def bubble(stages: int, micro_steps: int) -> float:
    """The share of a step in which a stage waits for its neighbours, where all stages are equally long."""
    return (stages - 1) / (micro_steps + stages - 1)


def operations(config: GPT2Config, sequence_length: int) -> tuple[int, int]:
    """Of a token, forward and backward: a layer's products take 72 C^2 + 6 C T, the head's 6 C Vp (llm.c's count)."""
    C = config.n_embd
    return 72 * C**2 + 6 * C * sequence_length, 6 * C * config.padded_vocab_size


def layers_by_flops(config: GPT2Config, stages: int, sequence_length: int, least_last: int = 0) -> tuple[int, ...]:
    """How many layers each stage gets so that the longest stage is as short as can be, counting the head's product.

    Every stage has a layer at least, but the last, which has the head, `least_last`.
    """
    layers, (layer, head) = config.n_layer, operations(config, sequence_length)
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
