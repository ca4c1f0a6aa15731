"""Calls that are under way beside each other, and beside phases: when each began and ended, and its bytes.

rank-00000.calls, laid out as the rank's trace is (files.py), with a record of the same fields for each call, in the
order of their ends. The file is there once a call has been noted: most strategies make one call at a time, and the
phase around it says it all.
"""

from time import perf_counter_ns

import numpy as np

from traces.record import files
from traces.record.files import RECORD
from traces.record.phases import INDEX


class CallFile:
    """folder, identity, clock: as files.create takes them. Call `begin` before the first `write`. OSError."""

    def __init__(self, folder, identity: dict, clock: dict | None):
        self._path = files.calls_path(folder, identity["rank"])
        self._header = files.header_of(files.CALLS_FORMAT, identity, clock)
        self._records, self._file = [], None

    def begin(self) -> None:
        """Remove the file of an earlier run in the same folder."""
        self._path.unlink(missing_ok=True)

    def add(self, *record) -> None:
        self._records.append(record)

    def write(self) -> int:
        """Hand the records so far to the operating system. Returns how many."""
        if count := len(self._records):
            self._file = self._file or files.begin(self._path, self._header)
            files.append(self._file, np.array(self._records, RECORD).tobytes())
            self._records.clear()
        return count

    def mark(self) -> int:
        """What `back_to` is to leave."""
        return len(self._records)

    def back_to(self, mark: int) -> None:
        """Leave out what came after."""
        del self._records[mark:]

    def close(self) -> None:
        """Close the file, if there is one, without what is not written."""
        if self._file is not None:
            self._file.close()


class Call:
    """One call, which begins now: `ended()` when it is complete, or a with block around it. It belongs to this step."""

    __slots__ = ("_call", "_file")

    def __init__(self, file: CallFile | None, step: int, name: str, size: int, root: int):
        """file: None where nothing is written."""
        self._file, self._call = file, (step, INDEX[name], root, perf_counter_ns(), size)

    def ended(self) -> None:
        if self._file is not None:
            step, phase, root, start, size = self._call
            self._file.add(step, phase, root, start, perf_counter_ns(), size)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.ended()
