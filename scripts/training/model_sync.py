"""Synchronization of tensors that several ranks of one model use, between the model's hooks and the strategy.

Replicated LayerNorm synchronization: every tensor-parallel rank uses the same LayerNorms and some biases.

    parameters      tensor-parallel rank 0 -> the others of its stage     before the first use after an update

Tied-embedding synchronization: the token embedding of the first stage is the head of the last stage.

    parameters      first stage -> last stage, shard by shard             when the first stage first uses them
    gradient        last stage -> first stage                             after the last microbatch's head

Each tensor has one owner, the only rank that exchanges it with the other data-parallel replicas and updates it. So the
strategy need not know about shared tensors, and the ranks of a model cannot diverge. The pipeline's bubble hides both
embedding messages: the last stage waits for the first forwards anyway, and the first stage still has backwards to do.
"""

from gpt2.model_shards import layer_tensors
from strategies import Strategy


class ModelSync:
    """Wraps a strategy. tensor_parts: see dist/shard_sums.py, None without tensor parallelism. stage_links: see
    dist/stage_links.py, None without a pipeline.

    kernels: the kernel set of the arrays. parameters, gradients: Parameters of the model shard, including buffers for
    tensors that other ranks own. micro_steps: microbatches of a step.
    """

    def __init__(self, strategy: Strategy, kernels, parameters, gradients, tensor_parts, stage_links, micro_steps: int):
        self.strategy = strategy
        self.add = kernels.add
        self.parameters = parameters
        self.gradients = gradients
        self.stage_links = stage_links
        self.tensor_parts = tensor_parts
        self.layout = parameters.layout
        self.shard = parameters.layout.shard
        self.synchronized = set()  # the ranges whose parameters have been synchronized since the last update
        self.owns_head = stage_links is not None and self.shard.is_first
        self.uses_head = stage_links is not None and self.shard.is_last
        # The gradient of the head arrives here.
        self.head = kernels.empty(gradients.wte.shape, gradients.wte.dtype) if self.owns_head else None
        self.awaits_gradient = False  # whether the receive is posted
        # How often per step the range with the embedding or the head becomes final: once, or in each microbatch.
        self.finals = self.finals_left = 1 if strategy.traits.keeps_gradients else micro_steps

    def __getattr__(self, name):
        """Take all other attributes from the strategy."""
        return getattr(self.strategy, name)

    def before_use(self, start, stop):
        if start < stop:
            self.strategy.before_use(start, stop)
        if not self.synchronized and self.uses_head:
            self.stage_links.receive_head(self.parameters.wte)  # posted early: the head arrives while this stage waits
        if (start, stop) not in self.synchronized:
            self.synchronized.add((start, stop))
            self._synchronize(self.layout.ranges.index((start, stop)))

    def _synchronize(self, index: int) -> None:
        """Send or receive the shared parameters of a range. Their owner has updated them by now."""
        is_embedding = self.shard.is_first and index == 0
        is_last = self.shard.is_last and index == len(self.layout.ranges) - 1
        if self.tensor_parts is not None and not is_embedding:
            self.tensor_parts.broadcast(self._replicated(None if is_last else index - self.shard.is_first))
        if is_embedding and self.owns_head:
            self.stage_links.send_head(self.parameters.wte)
        if is_last and self.uses_head:
            self.stage_links.wait_for_head()

    def _replicated(self, layer: int | None) -> list:
        """Return the replicated tensors of a layer, or those of the last range if layer is None."""
        if layer is None:
            return [self.parameters.lnf_weight, self.parameters.lnf_bias]
        shapes = layer_tensors(self.layout.config).items()
        return [getattr(self.parameters.layers[layer], name) for name, (_, cut_axis) in shapes if cut_axis is None]

    def gradients_final(self, start, stop):
        ranges = self.layout.ranges
        if self.owns_head and not self.awaits_gradient:
            self.awaits_gradient = True
            self.stage_links.receive_head(self.head)
        if self.uses_head and (start, stop) == ranges[-1] and self._is_last_time():
            self.stage_links.send_head(self.gradients.wte)
        if self.owns_head and (start, stop) == ranges[0] and self._is_last_time():
            self.stage_links.wait_for_head()
            self.add(self.gradients.wte, self.gradients.wte, self.head)
            self.awaits_gradient = False
        if start < stop:
            self.strategy.gradients_final(start, stop)

    def _is_last_time(self) -> bool:
        """Return whether the gradients of this range, the first or the last, are final for the step."""
        self.finals_left -= 1
        if self.finals_left:
            return False
        self.finals_left = self.finals
        return True

    def progress(self):
        self.strategy.progress()
        if self.stage_links is not None:
            self.stage_links.progress()

    def update(self, lr):
        self.synchronized.clear()
        return self.strategy.update(lr)

    def resumed(self):
        self.synchronized.clear()
        self.strategy.resumed()
