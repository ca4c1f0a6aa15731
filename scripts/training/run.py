"""What a training run is made of, put together in order: backend, data, parameters, folder, tracer, strategy, model."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from dist.gpu.topology import gpu_topology
from dist.probe.cores import threads_per_rank
from dist.probe.links import bucket_bytes, probe_links, rate_both_ways, segment_bytes
from dist.progress import poking
from dist.waiting import gather_everywhere, sum_everywhere
from dist.world import end_with_one_line, library_name
from gpt2.config import flops_per_token
from gpt2.errors import UserError
from gpt2.formats import weights
from gpt2.formats.checkpoints import model_facts
from gpt2.model import GPT2
from gpt2.optimizer import AdamWSettings, LearningRateSchedule
from gpt2.parameters import Layout, Parameters, initialize
from scripts.backends.choose import choose_backend
from scripts.training.checkpointing import Checkpointing
from scripts.training.data import open_data
from scripts.training.folder import RunFolder, default_run_folder
from scripts.training.replicas import check_replicas
from scripts.training.resume import check_same_run, find_checkpoint, restore
from scripts.training.signals import CHECKPOINT, END, Signals
from scripts.training.tracing import new_tracer, new_watchdog
from scripts.training.utilization import find_peak
from scripts.training.worker import Worker
from strategies import Job, worker_count

SHARD_MULTIPLE = 16  # elements: a rank's shard begins on a cache line


class Meeting(NamedTuple):
    """What all ranks know when they have met at the end of a step. compute_s: by rank the seconds that its gradients
    took, nan of one that computes none; exposed_s: the workers' mean seconds of exposed exchange; asked: the most that
    a signal asked of any rank; written: by rank, how far its part of a checkpoint is (Checkpointing.written)."""

    loss: float
    exposed_s: float
    compute_s: list[float]
    asked: int
    written: list[int]


class TrainingRun:
    """Every rank makes one, at the same moment. A user's mistake ends the job here, before anything is exchanged."""

    def __init__(self, settings, config, world):
        self.signals = Signals()
        self.config, self.world = config, world
        self.layout = Layout(config, multiple_of=SHARD_MULTIPLE * world.size)
        self.links = probe_links(world)
        self.threads = settings.threads or threads_per_rank(world)
        adamw = AdamWSettings(
            settings.beta1, settings.beta2, settings.eps, settings.weight_decay, settings.stochastic_rounding,
            settings.seed,
        )  # fmt: skip
        settings, new_backend, self.backend_facts = choose_backend(
            settings, config, world, self.layout, adamw, self.threads, self.links
        )
        self.settings = settings
        self.schedule = LearningRateSchedule(
            settings.schedule, settings.lr, settings.min_lr, settings.warmup, settings.steps
        )
        self.global_batch = settings.batch_size * settings.grad_accum * worker_count(settings.server, world.size)
        self.train, self.val = open_data(settings, config, self.global_batch, world)
        self.checkpoint = self._found_checkpoint()
        self.backend = new_backend()
        self.peak = find_peak(self.settings, world, self.backend.kernels, self.backend_facts.get("gpus"))
        self.parameters = self._filled_parameters()
        self.folder = self._make_folder()
        self.watchdog = new_watchdog(settings, world, self.path / "traces")
        self.tracer = new_tracer(self.settings, world, self.path / "traces", self.backend, self.watchdog)
        self.strategy = self.backend.new_strategy(self._job(), self.steps.start - 1)
        if self.checkpoint:
            restore(self.checkpoint, self.strategy, self.facts(self.checkpoint.step), world)
        self.checkpoints = Checkpointing(
            world, self.path / "checkpoints", self.strategy, self.layout.count, settings.keep
        )
        with world.together(UserError):
            self.worker = None if self.strategy.worker is None else self._new_worker()

    def _found_checkpoint(self):
        """What --resume goes on from, or None."""
        if not self.settings.resume:
            return None
        checkpoint = find_checkpoint(self.world, Path(self.settings.out) / "checkpoints")
        with self.world.together(UserError):
            if checkpoint:
                check_same_run(checkpoint, self.facts(checkpoint.step))
        begins = f"goes on from step {checkpoint.step}" if checkpoint else "holds no checkpoint: the run begins"
        self.world.print(f"{self.settings.out} {begins}")
        return checkpoint

    @property
    def steps(self) -> range:
        """The steps that are left, counted from 1."""
        return range(self.checkpoint.step + 1 if self.checkpoint else 1, self.settings.steps + 1)

    def facts(self, step: int) -> dict:
        """What a checkpoint says of itself."""
        s = self.settings
        return {
            "step": step, "next_window": step * self.global_batch, "global_batch": self.global_batch,
            "seq_len": s.seq_len, "shuffle": s.shuffle, "seed": s.seed, "data": self.train.facts(),
            "ranks": self.world.size, "strategy": s.strategy, "wire": s.wire, **model_facts(self.layout),
        }  # fmt: skip

    def _filled_parameters(self) -> Parameters:
        """The first parameters, in host memory; the buffers have them when it returns."""
        buffers, init = self.backend.buffers, self.settings.init
        parameters = Parameters(self.layout, self.backend.host_parameters)
        with self.world.together(UserError):
            if not buffers.fills_parameters:
                pass  # another rank of the node does
            elif self.checkpoint:
                self.checkpoint.read_parameters(parameters, buffers.filled)
            elif init == "random":
                initialize(parameters, self.settings.seed, buffers.filled)
            else:
                weights.read_parameters(init, parameters, buffers.filled)
        return parameters

    def _make_folder(self) -> RunFolder | None:
        """Rank 0's run folder, with config.json."""
        s, world, folder = self.settings, self.world, None
        resumed_step = self.steps.start - 1 if s.resume else None
        with world.together(UserError):
            if world.rank == 0:
                path = Path(s.out) if s.out else default_run_folder(s.strategy)
                folder = RunFolder(path, resumed_step, s.tensorboard)
                facts = {"parameters": self.layout.count, "threads_per_rank": self.threads, "links": self.links}
                facts |= {"resumed_step": resumed_step, "peak": asdict(self.peak)}
                if s.backend == "cupy":
                    facts["gpu_topology"] = gpu_topology()  # of rank 0's node
                folder.write_config(s, world, library_name(), facts | self.backend_facts)
        self.path = world.comm.bcast(folder.path if folder else None)
        return folder

    def _job(self) -> Job:
        s, backend = self.settings, self.backend
        return Job(
            world=backend.world,
            buffers=backend.buffers,
            new_optimizer=backend.new_optimizer,
            sum_of_squares=backend.sum_of_squares,
            max_norm=s.grad_clip,
            outlier_z=s.skip_outliers,
            tracer=self.tracer,
            server=s.server,
            wire=s.wire,
            error_feedback=s.error_feedback,
            segment_bytes=segment_bytes(rate_both_ways(self.links)),
            final_ranges=self.layout.final_ranges(),
            bucket_bytes=bucket_bytes(self.links) if s.overlap else None,
        )

    def _new_worker(self) -> Worker:
        s, strategy, backend = self.settings, self.strategy, self.backend
        kernels = poking(backend.kernels, strategy.poke) if s.overlap else backend.kernels
        arrays = (Parameters(self.layout, flat) for flat in (backend.model.parameters, backend.model.gradients))
        model = GPT2(kernels, *arrays, s.batch_size, s.seq_len, strategy.before_use)
        place = (strategy.worker, strategy.workers)
        return Worker(model, self.train, self.val, s.grad_accum, *place, self.tracer, strategy.keeps_gradients)

    def meet(self, loss_part: float) -> Meeting:
        """The step's end, where all ranks meet and a checkpoint that all of them have written becomes complete."""
        own = (loss_part, self.tracer.exchange_seconds(), self.tracer.seconds("data", "forward", "backward"))
        own = own if self.worker else (0.0, 0.0, math.nan)
        told = gather_everywhere(self.world.comm, *own, self.signals.asked(), self.checkpoints.written())
        loss, exposed_s, compute_s, asked, written = told.T
        meeting = Meeting(
            math.fsum(loss), math.fsum(exposed_s) / self.strategy.workers, compute_s.tolist(), int(asked.max()),
            written.astype(int).tolist(),
        )  # fmt: skip
        self.checkpoints.settle(meeting.written)
        return meeting

    def sum_over_workers(self, *numbers: float) -> list[float]:
        """Each number summed over the ranks that compute."""
        return sum_everywhere(self.world.comm, *(numbers if self.worker else [0.0] * len(numbers)))

    def record(self, step: int, meeting: Meeting, norm: float, lr: float) -> dict:
        """The step's line of log.jsonl."""
        tokens, step_s = self.global_batch * self.settings.seq_len, self.tracer.seconds("step")
        model_flops = tokens * flops_per_token(self.config, self.settings.seq_len, self.layout.count)
        record = {
            "step": step,
            "loss": meeting.loss,
            "grad_norm": norm,
            "lr": lr,
            "tokens": step * tokens,
            "step_s": step_s,
            "tokens_per_s": tokens / step_s,
            "exposed_exchange_s": meeting.exposed_s,
        }
        skipped = {"skipped": True} if self.strategy.clipping.skips else {}
        return record | self.peak.mfu(model_flops / step_s) | skipped

    def validates_after(self, step: int) -> bool:
        every = self.settings.eval_every
        return self.val is not None and every > 0 and (step % every == 0 or step == self.settings.steps)

    def validation_loss(self) -> float:
        """Mean loss over the validation windows, which all workers share."""
        with self.tracer.phase("eval"):
            part = self.worker.validation_loss(self.settings.eval_steps) if self.worker else (0.0, 0)
        with self.tracer.phase("wait"):
            loss, tokens = self.sum_over_workers(*part)
        return loss / tokens

    def end_if_diverged(self, step: int, loss: float) -> None:
        if not math.isfinite(loss):  # the sum over workers, so every rank comes here
            text = f"the loss of step {step} is {loss}: lower --lr, raise --warmup, or check the data"
            end_with_one_line(self.world.comm, text)

    def end_if_drifted(self, step: int) -> None:
        every = self.settings.check_replicas
        if every > 0 and step % every == 0:
            check_replicas(self.world, self.ranges_in_use(), self.parameters.flat, step)

    def leaves_checkpoint(self, step: int, meeting: Meeting) -> bool:
        """Whether one begins after this step: it is time for it, or a signal asked. The last one finish leaves."""
        every, is_last = self.settings.checkpoint_every, step == self.settings.steps
        due = meeting.asked == CHECKPOINT or (every > 0 and step % every == 0)
        return due and not is_last and meeting.asked != END and self.settings.strategy != "none"

    def begin_checkpoint(self, step: int, goes_on: bool = True) -> None:
        """The step's state is written while training goes on, or while this run ends."""
        # checkpoint.json takes rank 0's number: under every strategy it updates a part at least, in each step.
        updates = next((one.optimizer.step for one in self.strategy.state()), 0)
        norms = list(self.strategy.clipping.norms)
        self.checkpoints.begin(self.facts(step) | {"updates": updates, "norms": norms}, goes_on)

    def ranges_in_use(self):
        """The layout's ranges, each when its parameters are there. Collective: all ranks go through all of them."""
        for start, stop in self.layout.ranges:
            self.strategy.before_use(start, stop)
            self.backend.fetch(start, stop)
            yield start, stop
