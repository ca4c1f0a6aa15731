"""none: no exchange. Every rank updates its own parameters from its own gradients, so N models drift apart.

The control for comparisons: its steps only compute, so the extra time of another strategy is the cost of its exchange.
"""

from strategies.base import Strategy
from strategies.traits import OnGpus, Traits


class NoExchange(Strategy):
    name = "none"
    traits = Traits(line="nothing: a control, N models", exchanges=False, on_gpus=OnGpus())

    def __init__(self, job):
        super().__init__(job)
        self.optimizer = job.new_optimizer(0, len(self.parameters))

    def update(self, lr):
        with self.tracer.phase("update"):
            norm, scale = self.clipping.scale(self.sum_of_squares(self.gradients))
            self.optimizer.update(self.parameters, self.gradients, lr, scale)
        return norm
