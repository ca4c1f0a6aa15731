"""What a run leaves when it ends: the last checkpoint, with the model in llm.c's format, end clocks, the summary."""

import resource
from pathlib import Path

from dist.clock import clock_offset
from gpt2.errors import UserError, file_errors
from gpt2.formats import llmc
from traces.record.clocks import write_end_clocks
from traces.record.tracing_cost import tracing_share


def finish(run, step: int) -> bool:
    """End a TrainingRun after that step; whether all its steps have been made. Collective."""
    is_done, comm = step >= run.settings.steps, run.world.comm
    _save_last(run, step, is_done)
    facts = {
        "peak_memory_bytes": comm.gather(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024),
        "tracing_share": tracing_share(run.tracer),
        "checkpoints": comm.gather(run.checkpoints.costs),
    }
    end_clocks = comm.gather({"node": run.world.node} | clock_offset(run.world))
    with run.world.together(UserError):
        if run.world.rank == 0:
            if run.settings.trace != "off" and run.world.node_count > 1:
                write_end_clocks(run.path / "traces", end_clocks)
            run.folder.write_summary(**facts)
            _tell_the_end(run, step, is_done, facts)
    if run.watchdog:
        run.watchdog.close()
    run.backend.close()
    run.signals.close()
    return is_done


def _tell_the_end(run, step: int, is_done: bool, facts: dict) -> None:
    run.world.print(
        f"peak memory of a rank {max(facts['peak_memory_bytes']) / 1e9:.2f} GB; tracing took "
        f"{facts['tracing_share']:.2%} of the traced steps; run folder {run.path}"
    )
    if not is_done:
        run.world.print(f"a signal ended the run after step {step}: go on with it by --out {run.path} --resume")


def _save_last(run, step: int, is_done: bool) -> None:
    """The checkpoint of the last step, if that was not the one that this run went on from."""
    model_bytes = problem = None
    if run.settings.strategy != "none" and step >= run.steps.start:
        run.begin_checkpoint(step, goes_on=False)
        if is_done:
            model_bytes, problem = _write_model(run, run.checkpoints.part_folder(step))
    problem = run.checkpoints.finish(model_bytes) or problem
    with run.world.together(UserError):
        if problem:
            raise UserError(problem)


def _write_model(run, folder: Path) -> tuple[int | None, str | None]:
    """Rank 0 writes model.bin: its bytes, or what was wrong. All make the parameters available, range by range, also
    when the writing has failed."""
    ranges, path = run.ranges_in_use(), folder / "model.bin"
    try:
        if run.world.rank == 0:
            with file_errors(folder, "free some space, or choose another --out"):
                folder.mkdir(exist_ok=True)
                llmc.write_parameters(path, run.parameters, ranges)
                return path.stat().st_size, None
    except UserError as error:
        return None, str(error)
    finally:
        for _ in ranges:
            pass
    return None, None
