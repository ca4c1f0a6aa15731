"""--sample-every K: what the model writes while it is being trained, printed by rank 0."""

import numpy as np

from dist.waiting import barrier
from gpt2.errors import UserError
from gpt2.formats import weights
from gpt2.inference.generated_text import Sampling, printable, sample_text
from gpt2.kernels import load_kernels
from gpt2.parameters import Parameters
from scripts.settings.tokenizer import choose_tokenizer

TOKENS = 100


class TrainingSamples:
    """Samples of a TrainingRun after every `every` steps, 0 for none. Every rank makes one. Collective.

    Rank 0 draws them on its cores, from parameters that it has in host memory or, where no rank holds all of them,
    copies there range by range: 4 bytes for each. A mistake ends the job: a vocabulary that no tokenizer is known for
    (of --train-data), gpt2's files missing, too little memory for the copy.
    """

    def __init__(self, run, every: int):
        self.run, self.every = run, every
        with run.world.together(UserError):
            if every and run.world.rank == 0:
                self._encoding = choose_tokenizer(run.settings.tokenizer, None, run.config.vocab_size)
                self._kernels = load_kernels("numpy", run.threads)
                if not self._is_whole:
                    weights.check_memory("--sample-every", run.config)

    @property
    def _is_whole(self) -> bool:
        return isinstance(self.run.parameters.flat, np.ndarray)

    def after(self, step: int) -> None:
        """Print a sample if it is time for one. Collective: all ranks go through the ranges, and wait for rank 0."""
        run = self.run
        if not self.every or step % self.every:
            return
        with run.tracer.phase("eval"):
            parameters = self._gathered()
            if run.world.rank == 0:
                print(f"sample after step {step}: {self._text(parameters, step)}", flush=True)
        with run.tracer.phase("wait"):
            barrier(run.world.comm)  # rank 0's parameters may be its node's: nobody changes them while it reads

    def _gathered(self) -> Parameters | None:
        """All parameters on rank 0, in host memory."""
        run, is_copied = self.run, self.run.world.rank == 0 and not self._is_whole
        copy = Parameters.zeros(run.layout) if is_copied else None
        for start, stop in run.ranges_in_use():
            if is_copied:
                copy.flat[start:stop] = run.parameters.flat[start:stop]
        return copy or run.parameters

    def _text(self, parameters: Parameters, step: int) -> str:
        sampling, seed = Sampling(), (self.run.settings.seed, step)
        pieces = sample_text(self._kernels, parameters, self._encoding, "", TOKENS, sampling, seed)
        return printable("".join(pieces))
