"""What ranks that share a model lend each other, between the model's hooks and the strategy.

    what is not cut      part 0 -> the other parts of its stage     before the first use after an update
    token embedding      first stage -> last stage, part by part    when the first stage first uses it
    its gradient, head   last stage -> first stage                  after the last micro-step's head

Each is held, exchanged over the copies and updated by its owner alone. So the strategy sees nothing of this, and what
is the same on several ranks of a model cannot drift apart. Both ways of the embedding hide in the pipeline's bubble:
the last stage waits for the first forwards anyway, and the first one still has backwards to make.
"""

from gpt2.model_shards import layer_tensors
from strategies.base import Around, Strategy


class Borrowing(Around):
    """Around a strategy. tensor_parts: dist/parts.py's, stage_links: dist/stage_links.py's; None where there is one.

    kernels: the set that the arrays are of. parameters, gradients: Parameters of the piece, with room for what is
    borrowed. micro_steps: of a step.
    """

    def __init__(self, strategy: Strategy, kernels, parameters, gradients, tensor_parts, stage_links, micro_steps: int):
        super().__init__(strategy)
        self.add = kernels.add
        self.parameters, self.gradients, self.stage_links = parameters, gradients, stage_links
        self.tensor_parts, self.layout, self.shard = tensor_parts, parameters.layout, parameters.layout.shard
        self.there = set()  # the ranges whose borrowed parameters have come since the update
        self.lends_head = stage_links is not None and self.shard.is_first
        self.borrows_head = stage_links is not None and self.shard.is_last
        # Where its gradient lands.
        self.head = kernels.empty(gradients.wte.shape, gradients.wte.dtype) if self.lends_head else None
        self.awaits_gradient = False  # whether it is under way
        # Of each step, how often the embedding's range, or the head's, becomes final: once, or in each micro-step.
        self.finals = self.finals_left = 1 if self.keeps_gradients else micro_steps

    def before_use(self, start, stop):
        if start < stop:
            self.strategy.before_use(start, stop)
        if not self.there and self.borrows_head:
            self.stage_links.borrow_head(self.parameters.wte)  # posted early: it comes while there is nothing to do
        if (start, stop) not in self.there:
            self.there.add((start, stop))
            self._borrow(self.layout.ranges.index((start, stop)))

    def _borrow(self, index: int) -> None:
        """What belongs to a range, on both sides: its owner has the updated parameters by now."""
        is_embedding = self.shard.is_first and index == 0
        is_last = self.shard.is_last and index == len(self.layout.ranges) - 1
        if self.tensor_parts is not None and not is_embedding:
            self.tensor_parts.lend(self._not_cut(None if is_last else index - self.shard.is_first))
        if is_embedding and self.lends_head:
            self.stage_links.lend_head(self.parameters.wte)
        if is_last and self.borrows_head:
            self.stage_links.wait_for_head()

    def _not_cut(self, layer: int | None) -> list:
        """The tensors of a layer, or of the last range, that all parts have whole."""
        if layer is None:
            return [self.parameters.lnf_weight, self.parameters.lnf_bias]
        shapes = layer_tensors(self.layout.config).items()
        return [getattr(self.parameters.layers[layer], name) for name, (_, cut_axis) in shapes if cut_axis is None]

    def gradients_final(self, start, stop):
        ranges = self.layout.ranges
        if self.lends_head and not self.awaits_gradient:
            self.awaits_gradient = True
            self.stage_links.take_head(self.head)
        if self.borrows_head and (start, stop) == ranges[-1] and self._is_last_time():
            self.stage_links.return_head(self.gradients.wte)
        if self.lends_head and (start, stop) == ranges[0] and self._is_last_time():
            self.stage_links.wait_for_head()
            self.add(self.gradients.wte, self.gradients.wte, self.head)
            self.awaits_gradient = False
        if start < stop:
            self.strategy.gradients_final(start, stop)

    def _is_last_time(self) -> bool:
        """Whether the gradients of the one range that asks, the first or the last, are the step's last."""
        self.finals_left -= 1
        if self.finals_left:
            return False
        self.finals_left = self.finals
        return True

    def poke(self):
        self.strategy.poke()
        if self.stage_links is not None:
            self.stage_links.poke()

    def update(self, lr):
        self.there.clear()
        return self.strategy.update(lr)

    def resumed(self):
        self.there.clear()
        self.strategy.resumed()
