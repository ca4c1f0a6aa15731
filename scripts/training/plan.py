"""The plan of a run: all decisions made before its parts are built. config.json and the checkpoints hold them."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dist.probe.links import probe_links
from dist.wire import WIRE_BYTES
from dist.world import ClosedTogether, threads_per_rank
from gpt2.data import texts, windows
from gpt2.data.shards import open_shards
from gpt2.data.windows import Windows
from gpt2.errors import UserError
from gpt2.formats.checkpoints import Checkpoint, model_facts
from scripts.backends.choose import ChosenBackend, choose_backend
from scripts.backends.transports import bucket_size
from scripts.settings import derived
from scripts.settings.checks import complete
from scripts.settings.derived import adamw_settings, global_batch, lasting
from scripts.settings.memory import check_memory
from scripts.settings.model_parallel import model_cut
from scripts.settings.sequence_length import trained_positions
from scripts.settings.split_embedding import EmbeddingExchange, plan_embedding
from scripts.settings.training import Settings
from scripts.training import start
from scripts.training.folder import RUNS, take_run_folder
from scripts.training.report import blas_of_ranks, warn
from scripts.training.same_files import check_same_files, in_both, made_for_all
from scripts.training.shared_model import SharedModel
from scripts.training.state import mesh_facts
from strategies import find


@dataclass(frozen=True)
class Plan:
    """All decisions about a run, the same on all ranks except `threads`, and the objects opened to make them."""

    settings: Settings  # all flags; backend, transport, strategy, overlap and op are decided, nothing is "auto"
    folder: Path  # the run folder
    run: str  # the number of this start: one launch of the job. --resume and --restarts start a run again
    threads: int  # of this rank
    links: list[dict]  # measured links between the nodes
    backend: dict  # for config.json: why this backend, transport and strategy were chosen, and their hardware
    identity: dict  # facts that a checkpoint must share with a run that resumes from it (start.py)
    checkpoint: Checkpoint | None  # the one to resume from; None for a new run
    steps: range  # the steps left to make, counted from 1
    trained_positions: int  # how many context positions are trained at the end of the run
    bucket_bytes: int | None  # how many bytes --overlap exchanges at once; None without --overlap
    embedding: EmbeddingExchange  # how the token embedding is exchanged
    shared: SharedModel  # this rank's place among the ranks that share a model
    make_backend: Callable[[], object]  # collective
    train: Windows
    val: Windows | None  # None without validation data

    @property
    def global_batch(self) -> int:
        """The number of sequences of a step, on all ranks together."""
        return self.identity["global_batch"]

    @property
    def resumed_step(self) -> int | None:
        """The step after which the run resumes, 0 if --resume found no checkpoint; None without --resume."""
        return self.steps.start - 1 if self.settings.resume else None

    @property
    def traces(self) -> Path:
        return self.folder / "traces"

    @property
    def same_weights(self) -> bool:
        return find(self.settings.strategy).traits.gives_same_weights(WIRE_BYTES[self.settings.wire])

    def checkpoint_facts(self) -> dict:
        """Return the facts about the run that each of its checkpoints holds."""
        decided = {
            "auto": self.backend["auto"],
            "bucket_bytes": self.bucket_bytes,
            "trained_positions": self.trained_positions,
            "split_embedding": self.embedding.is_split,
        }
        return {"run": self.run} | self.identity | decided

    def config_facts(self) -> dict:
        """Return the facts about this run for config.json, besides its settings."""
        facts = {"threads_per_rank": self.threads, "links": self.links, "resumed_step": self.resumed_step}
        facts["same_weights"] = self.same_weights
        has_local_steps = find(self.settings.strategy).traits.takes_local_steps
        facts["exchange_period"] = self.settings.local_steps if has_local_steps else 1
        return facts | self.backend | self.embedding.config_facts()


def plan_run(settings, world, lock, resources: ClosedTogether) -> Plan | None:
    """Decide everything; None if no step is left to make. Collective.

    lock: a RunLock. Makes and locks the run folder, and writes nothing else there. resources: closed when the run ends.
    """
    with world.together(UserError):
        settings, config = complete(settings, world.size)
        check_memory(settings, config, world)
    for line in filter(None, (derived.doubtful_warmup(settings), derived.unused_steps(settings))):
        if world.rank == 0:
            warn(line)
    shared = SharedModel(model_cut(settings, config), config, world, resources)
    links = probe_links(world)
    threads = settings.threads or threads_per_rank(world)
    chosen = chosen_backend(settings, config, world, shared, threads, links)
    settings = chosen.settings
    is_auto = chosen.facts["auto"] is not None
    folder = take_run_folder(settings.out, settings.strategy, is_auto, settings.resume, settings.take_over, world, lock)
    train, val, data = data_of(settings, config.vocab_size, world)  # after locking: may write tokens beside the folder
    identity = run_identity(settings, shared, data, world.size)
    checkpoint = None
    if settings.resume:
        checkpoint = start.find_and_check(world, folder, identity, settings.typed, settings.steps)
    steps = range(checkpoint.step + 1 if checkpoint else 1, settings.steps + 1)
    with world.together(UserError):
        positions = trained_positions(settings.init, config, settings.seq_len, checkpoint.facts if checkpoint else {})
    if not steps:
        return None
    kept = checkpoint.facts if checkpoint and start.exchanges_alike(checkpoint, identity) else {}
    bucket_bytes = None
    if settings.overlap:  # checkpoints keep the size: other buckets would add in another order and round differently
        bucket_bytes = kept.get("bucket_bytes") or bucket_size(settings.transport, links)
    embedding = plan_embedding(settings, shared.layout, train, steps.start, identity["global_batch"], kept, world)
    return Plan(
        settings=settings,
        folder=folder,
        run=lock.run,
        threads=threads,
        links=links,
        backend=chosen.facts | blas_of_ranks(world),
        identity=identity,
        checkpoint=checkpoint,
        steps=steps,
        trained_positions=positions,
        bucket_bytes=bucket_bytes,
        embedding=embedding,
        shared=shared,
        make_backend=chosen.make,
        train=train,
        val=val,
    )


def chosen_backend(settings, config, world, shared, threads: int, links: list[dict]) -> ChosenBackend:
    """Choose backend, transport and strategy. --resume keeps the former choice of auto. Collective."""
    kept = start.chosen_before(world, Path(settings.out) / "checkpoints") if settings.resume else None
    adamw = adamw_settings(settings)
    chosen = choose_backend(settings, config, shared.mesh.data_world, shared.layout, adamw, threads, links, kept)
    with world.together(UserError):  # again: only now it is known which arrays are in host memory
        check_memory(chosen.settings, config, world)
    return chosen


def data_of(settings, vocab_size: int, world) -> tuple[Windows, Windows | None, dict]:
    """Return (training windows, validation windows or None, facts of the data). Collective.

    Rank 0 tokenizes a text unless the cache folder of the user or the one beside the run folder already has its tokens.
    """
    patterns = settings.train_data, settings.val_data
    if not settings.train_data:
        prepare = partial(texts.prepare, settings.text or None, settings.tokenizer, splits=settings.split_documents)
        patterns = made_for_all(world, prepare, (Path(settings.out).parent if settings.out else RUNS) / "tokens")
    return open_data(settings, patterns, global_batch(settings, world.size), vocab_size, world)


def open_data(
    settings, patterns: tuple[str, str | None], batch: int, vocab_size: int, world
) -> tuple[Windows, Windows | None, dict]:
    """Open the token shards of these patterns and return what data_of returns. Collective. End the job if bad."""
    with world.together(UserError):
        train = Windows(open_shards(patterns[0]), settings.seq_len, settings.shuffle, settings.seed)
        val = Windows(open_shards(patterns[1]), settings.seq_len) if patterns[1] else None
    train_paths = [shard.path for shard in train.shards]
    val_paths = [shard.path for shard in val.shards] if val else []
    check_same_files(world, train_paths + val_paths)
    if val and world.rank == 0:
        with suppress(OSError):  # a later read of the file reports the reason
            if same := in_both(val_paths, train_paths):
                more = f" and {len(same) - 1} more" if same[1:] else ""
                warn(f"{same[0]}{more}: both training and validation data, so val loss does not show overfitting")
    with world.together(UserError):
        content = windows.check(train, batch, vocab_size, world.rank, world.size)
        if val:
            windows.check_tokens(val.shards, vocab_size, world.rank, world.size)
    return train, val, train.facts(world.comm.allreduce(content))


def run_identity(settings, shared: SharedModel, data: dict, ranks: int) -> dict:
    """Return the facts that a checkpoint must share with the run that resumes. data: facts of the training data."""
    return {
        "global_batch": global_batch(settings, ranks),
        "seq_len": settings.seq_len,
        "shuffle": settings.shuffle,
        "seed": settings.seed,
        "data": data,
        "ranks": ranks,
        "strategy": find(settings.strategy).name,
        "wire": settings.wire,
        **model_facts(shared.whole),
        "settings": lasting(settings, ranks),
        **mesh_facts(shared.mesh, shared.whole.config, shared.cut.layers),
    }
