"""TensorBoard's event files: the fields of log.jsonl as scalars over the steps, written by TensorBoard's own package.

    events.out.tfevents.TIME.HOST.PID      records of protocol buffers (tensorboard/compat/proto/event.proto): the
                                           format's version, the session's start, then an Event a step

The package is imported when a file is begun. Records are written as they come, not by the package's EventFileWriter:
that one has a thread, on whose errors, like a full disk, Python prints a traceback.
"""

import os
import socket
import time
from datetime import datetime
from pathlib import Path

from gpt2.errors import UserError, file_errors
from scripts.settings.checks import INSTALL_TENSORBOARD, check_tensorboard
from traces.read.checks import LOG_ROW

FORMAT = "brain.Event:2"


class EventFile:
    """One more event file of a folder; UserError if it cannot be written.

    first_step: the first one in the file. Readers forget what earlier files of the folder say of it and later steps.
    """

    def __init__(self, folder: Path, first_step: int):
        try:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError as error:
            raise UserError(f"the package tensorboard cannot be imported ({error}): {INSTALL_TENSORBOARD}") from None
        self.path = folder / f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._new_event, self._new_value = Event, Summary.Value
        with self._errors():
            folder.mkdir(parents=True, exist_ok=True)
            self._records = RecordWriter(open(self.path, "xb"))  # noqa: SIM115
        now = time.time()
        self._write(Event(wall_time=now, file_version=FORMAT))
        # Also in the first file: readers take the first start that they find for no restart.
        self._write(Event(wall_time=now, step=first_step, session_log=SessionLog(status=SessionLog.START)))

    def add(self, record: dict, wall_time: float) -> None:
        """A line of log.jsonl, handed to the file system when it returns; wall_time: seconds since 1970.

        After a UserError the file is not to be used any more: it may end in a half record, which readers drop.
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
    """A run's whole log as one file of the folder, which must not hold any yet; returns its path. UserError.

    config, log: as read_config and read_log give them. The log holds no times of day: they are counted in the steps'
    own seconds, forwards and backwards from when the last of the run's jobs began.
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
        events.path.unlink(missing_ok=True)  # half of them would keep the next attempt from writing all
        raise
    events.close()
    return events.path


def _wall_times(config: dict, log: list[dict]) -> list[float]:
    """When each line of a log was about written, seconds since 1970."""
    begun = datetime.fromisoformat(config["started"]).timestamp() if "started" in config else 0.0
    resumed_step, elapsed_s, times = config.get("resumed_step") or 0, 0.0, []
    for record in log:
        elapsed_s += record.get("step_s", 0.0)
        times.append(elapsed_s)
    before_s = max((at for record, at in zip(log, times, strict=True) if record["step"] <= resumed_step), default=0.0)
    return [begun + at - before_s for at in times]
