"""What a training run is made of, put together in order: backend, data, parameters, folder, tracer, strategy, model."""

import math
import resource
from dataclasses import replace
from pathlib import Path

from auto_strategy import choose_strategy
from choose_backend import choose_backend
from run_folder import RunFolder, default_run_folder
from train_settings import AUTO, checkpoint_file
from worker import Worker

from dist.clock import clock_offset
from dist.cores import threads_per_rank
from dist.gpu_topology import gpu_topology
from dist.links import bucket_bytes, probe_links
from dist.ports import Ports
from dist.progress import poking
from dist.waiting import gather_everywhere, sum_everywhere
from dist.watchdog import Watchdog
from dist.world import end_with_one_line, library_name
from gpt2 import llmc, texts, windows
from gpt2.errors import UserError
from gpt2.model import GPT2
from gpt2.optimizer import AdamWSettings
from gpt2.parameters import Layout, Parameters, initialize
from gpt2.schedule import Schedule
from gpt2.shards import file_errors, open_shards
from gpt2.windows import Windows
from strategies import Job, worker_count
from traces import Tracer
from traces.clocks import write_end_clocks
from traces.counters import CounterFile
from traces.phases import EXCHANGE, PHASES
from traces.stream_times import GPU_PHASES
from traces.tracing_cost import tracing_share

SHARD_MULTIPLE = 16  # elements: a rank's shard begins on a cache line


class TrainingRun:
    """Every rank makes one, at the same moment. A user's mistake ends the job here, before anything is exchanged."""

    def __init__(self, settings, config, world):
        self.config, self.world = config, world
        self.layout = Layout(config, multiple_of=SHARD_MULTIPLE * world.size)
        self.links = probe_links(world)
        settings = self._with_strategy(settings)
        self.threads = settings.threads or threads_per_rank(world)
        adamw = AdamWSettings(settings.beta1, settings.beta2, settings.eps, settings.weight_decay)
        chosen = choose_backend(settings, config, world, self.layout, adamw, self.threads)
        self.settings, new_backend, self.backend_facts = settings, *_ = chosen
        self.schedule = Schedule(settings.schedule, settings.lr, settings.min_lr, settings.warmup, settings.steps)
        self.global_batch = settings.batch_size * settings.grad_accum * worker_count(settings.server, world.size)
        train, val = self._open_data()
        self.backend = new_backend()
        self.parameters = self._filled_parameters()
        self.folder = self._make_folder()
        self.watchdog = self._new_watchdog()
        self.tracer = self._new_tracer()
        self.strategy = self.backend.new_strategy(self._job())
        self.validates = val is not None
        with world.together(UserError):
            self.worker = None if self.strategy.worker is None else self._new_worker(train, val)

    def _with_strategy(self, settings):
        """The settings, with `auto` decided."""
        if settings.strategy != AUTO:
            return settings
        name, why = choose_strategy(self.world, settings, self.layout.size, self.links)
        self.world.print(why)
        return replace(settings, strategy=name)

    def _open_data(self) -> tuple[Windows, Windows | None]:
        """Training and validation windows; a text is tokenized on rank 0, if the cache does not hold it yet."""
        s, world = self.settings, self.world
        patterns = (s.train_data, s.val_data)
        if not s.train_data:
            with world.together(UserError):
                if world.rank == 0:
                    cache = Path(s.out or default_run_folder(s.strategy)).parent / "tokens"
                    patterns = texts.prepare(Path(s.text) if s.text else None, s.tokenizer, cache)
            patterns = world.comm.bcast([str(path) for path in patterns])
        with world.together(UserError):
            train = Windows(open_shards(patterns[0]), s.seq_len, s.shuffle, s.seed)
            val = Windows(open_shards(patterns[1]), s.seq_len) if patterns[1] else None
            windows.check(train, self.global_batch, self.config.vocab_size, world.rank, world.size)
            if val:
                windows.check_tokens(val.shards, self.config.vocab_size, world.rank, world.size)
        return train, val

    def _filled_parameters(self) -> Parameters:
        """The first parameters, in host memory; the buffers have them when it returns."""
        buffers, init = self.backend.buffers, self.settings.init
        parameters = Parameters(self.layout, self.backend.host_parameters)
        with self.world.together(UserError):
            if buffers.fills_parameters and init == "random":
                initialize(parameters, self.settings.seed, buffers.filled)
            elif buffers.fills_parameters:
                llmc.read_parameters(checkpoint_file(init), parameters, buffers.filled)
        return parameters

    def _make_folder(self) -> RunFolder | None:
        """Rank 0's run folder, with config.json."""
        s, world, folder = self.settings, self.world, None
        with world.together(UserError):
            if world.rank == 0:
                folder = RunFolder(Path(s.out) if s.out else default_run_folder(s.strategy))
                facts = {"parameters": self.layout.count, "threads_per_rank": self.threads, "links": self.links}
                if s.backend == "cupy":
                    facts["gpu_topology"] = gpu_topology()  # of rank 0's node
                folder.write_config(s, world, library_name(), facts | self.backend_facts)
        self.path = world.comm.bcast(folder.path if folder else None)
        return folder

    def _new_watchdog(self) -> Watchdog | None:
        s, meetings = self.settings, (*EXCHANGE, "wait")
        if not s.stall_after or self.world.size == 1:
            return None
        return Watchdog(self.world, self.path / "traces", PHASES, meetings, s.stall_after, s.end_on_stall)

    def _new_tracer(self) -> Tracer:
        world = self.world
        identity = world.places[world.rank] | {"ranks": world.size, "strategy": self.settings.strategy}
        clock, folder, counters = clock_offset(world), self.path / "traces", None
        with world.together(UserError), file_errors(self.path, "choose another --out"):
            on_phase = self.watchdog and self.watchdog.on_phase
            if world.local_rank == 0 and world.node_count > 1 and self.settings.trace != "off":
                ports = Ports()
                counters = CounterFile(folder, identity, ports.names, clock, lambda: (*ports.read(), ports.stalls()))
            device = {} if self.settings.backend == "numpy" else self._device()
            return Tracer(folder, identity, self.settings.trace, clock, counters, on_phase, **device)

    def _device(self) -> dict:
        """What the tracer times phases on: with NCCL the exchange is queued on the stream too."""
        on_stream = (*GPU_PHASES, *EXCHANGE) if self.settings.transport == "nccl" else GPU_PHASES
        return {"device": self.backend.kernels.device, "on_stream": on_stream}

    def _job(self) -> Job:
        s, backend = self.settings, self.backend
        return Job(
            world=backend.world,
            buffers=backend.buffers,
            new_optimizer=backend.new_optimizer,
            sum_of_squares=backend.sum_of_squares,
            max_norm=s.grad_clip,
            tracer=self.tracer,
            server=s.server,
            wire=s.wire,
            error_feedback=s.error_feedback,
            final_ranges=self.layout.final_ranges(),
            bucket_bytes=bucket_bytes(self.links) if s.overlap else None,
        )

    def _new_worker(self, train, val) -> Worker:
        s, strategy, backend = self.settings, self.strategy, self.backend
        kernels = poking(backend.kernels, strategy.poke) if s.overlap else backend.kernels
        arrays = (Parameters(self.layout, flat) for flat in (backend.model.parameters, backend.model.gradients))
        model = GPT2(kernels, *arrays, s.batch_size, s.seq_len, strategy.before_use)
        place = (strategy.worker, strategy.workers)
        return Worker(model, train, val, s.grad_accum, *place, self.tracer, strategy.keeps_gradients)

    def meet(self, loss_part: float) -> tuple[float, float, list[float]]:
        """The step's end, where all ranks meet: the loss; the workers' mean seconds of exposed exchange; by rank the
        seconds that its gradients took, nan of one that computes none."""
        own = (loss_part, self.tracer.exchange_seconds(), self.tracer.seconds("data", "forward", "backward"))
        loss, exposed_s, compute_s = gather_everywhere(
            self.world.comm, *(own if self.worker else (0.0, 0.0, math.nan))
        ).T
        return math.fsum(loss), math.fsum(exposed_s) / self.strategy.workers, compute_s.tolist()

    def sum_over_workers(self, *numbers: float) -> list[float]:
        """Each number summed over the ranks that compute."""
        return sum_everywhere(self.world.comm, *(numbers if self.worker else [0.0] * len(numbers)))

    def record(self, step: int, loss: float, norm: float, lr: float, exposed_s: float) -> dict:
        """The step's line of log.jsonl."""
        tokens, step_s = self.global_batch * self.settings.seq_len, self.tracer.seconds("step")
        return {
            "step": step,
            "loss": loss,
            "grad_norm": norm,
            "lr": lr,
            "tokens": step * tokens,
            "step_s": step_s,
            "tokens_per_s": tokens / step_s,
            "exposed_exchange_s": exposed_s,
        }

    def validates_after(self, step: int) -> bool:
        every = self.settings.eval_every
        return self.validates and every > 0 and (step % every == 0 or step == self.settings.steps)

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

    def _save_checkpoint(self) -> None:
        """Rank 0 writes; all make the parameters available, range by range, also when the writing has failed."""
        steps, ranges = self.settings.steps, self._ranges_in_use()
        try:
            if self.world.rank == 0:
                self.folder.save_checkpoint(steps, self.parameters, steps * self.global_batch, ranges)
        finally:
            for _ in ranges:
                pass

    def _ranges_in_use(self):
        """The layout's ranges, each when its parameters are there. Collective: all ranks go through all of them."""
        for start, stop in self.layout.ranges:
            self.strategy.before_use(start, stop)
            self.backend.fetch(start, stop)
            yield start, stop

    def finish(self) -> None:
        """Leave the last checkpoint and the summary."""
        peak_bytes = self.world.comm.gather(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        end_clocks = self.world.comm.gather({"node": self.world.node} | clock_offset(self.world))
        with self.world.together(UserError):
            if self.settings.strategy != "none":
                self._save_checkpoint()
            if self.world.rank == 0:
                if self.settings.trace != "off" and self.world.node_count > 1:
                    write_end_clocks(self.path / "traces", end_clocks)
                share = tracing_share(self.tracer)
                self.folder.write_summary(peak_memory_bytes=peak_bytes, tracing_share=share)
                self.world.print(
                    f"peak memory of a rank {max(peak_bytes) / 1e9:.2f} GB; tracing took {share:.2%} of the traced "
                    f"steps; run folder {self.path}"
                )
        if self.watchdog:
            self.watchdog.close()
        self.backend.close()
