"""Write TensorBoard's event files: the fields of log.jsonl as scalars over the steps.

    events.out.tfevents.TIME.HOST.PID      records of protocol buffers (tensorboard/compat/proto/event.proto): the
                                           format's version, the start, then an Event per step

The package tensorboard is imported when a file is opened. Records are written without its EventFileWriter, whose thread
makes Python print a traceback at an error such as a full disk.
"""

import os
import socket
import time
from datetime import datetime
from pathlib import Path

from gpt2.errors import UserError, file_errors
from scripts.settings.checks import INSTALL_TENSORBOARD, check_tensorboard
from traces.read.schemas import LOG_ROW

FORMAT = "brain.Event:2"


class EventFile:
    """A new event file in a folder. Raise UserError if it cannot be written.

    first_step: the first step in the file. Readers discard this and later steps of earlier files in the folder.
    """

    def __init__(self, folder: Path, first_step: int):
        try:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError as error:
            raise UserError(f"the package tensorboard cannot be imported ({error}): {INSTALL_TENSORBOARD}") from None
        self.path = folder / f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._new_event = Event
        self._new_value = Summary.Value
        with self._errors():
            folder.mkdir(parents=True, exist_ok=True)
            self._records = RecordWriter(open(self.path, "xb"))  # noqa: SIM115
        now = time.time()
        self._write(Event(wall_time=now, file_version=FORMAT))
        # Also needed in the first file: readers do not treat the first start that they find as a restart.
        self._write(Event(wall_time=now, step=first_step, session_log=SessionLog(status=SessionLog.START)))

    def add(self, record: dict, wall_time: float) -> None:
        """Write a line of log.jsonl and flush it. wall_time: seconds since 1970.

        After a UserError do not use the file again: it may end in an incomplete record, which readers drop.
        """
        event = self._new_event(wall_time=wall_time, step=record["step"])
        for name in LOG_ROW:
            if record.get(name) is not None:
                event.summary.value.append(self._new_value(tag=name, simple_value=record[name]))
        self._write(event)

    def close(self) -> None:
        self._records.close()

    def _write(self, event) -> None:
        with self._errors():
            self._records.write(event.SerializeToString())
            self._records.flush()

    def _errors(self):
        return file_errors(self.path, "free some space, or see to the disk")


def write_log(folder: Path, config: dict, log: list[dict]) -> Path:
    """Write a run's whole log into a folder without event files, and return the file's path. Raise UserError.

    config, log: from read_config and read_log. The log has no times of day; they are computed from the seconds of the
    steps, forward and backward from the start of the run's last job.
    """
    check_tensorboard("--format tensorboard")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: a file, expected a folder or a new name: choose another --out")
    if any(folder.glob("*tfevents*")):
        raise UserError(f"{folder} holds event files already, whose points would be there twice: choose another --out")
    events = EventFile(folder, first_step=1)
    try:
        for record, wall_time in zip(log, _wall_times(config, log), strict=True):
            events.add(record, wall_time)
    except BaseException:
        events.path.unlink(missing_ok=True)  # else the next attempt would refuse to write
        raise
    events.close()
    return events.path


def _wall_times(config: dict, log: list[dict]) -> list[float]:
    """Estimate when each line of a log was written, in seconds since 1970."""
    begun = datetime.fromisoformat(config["started"]).timestamp() if "started" in config else 0.0
    resumed_step = config.get("resumed_step") or 0
    elapsed_s = 0.0
    times = []
    for record in log:
        elapsed_s += record.get("step_s", 0.0)
        times.append(elapsed_s)
    before_s = max((at for record, at in zip(log, times, strict=True) if record["step"] <= resumed_step), default=0.0)
    return [begun + at - before_s for at in times]
