"""A call that overlaps others: its begin, its end and its bytes."""

from time import perf_counter_ns

from traces.record.files import RecordFile
from traces.record.phases import INDEX


class TracedCall:
    """A call that begins now, in this step: call `ended()` when it is complete, or put a with block around it.

    file: None where nothing is written.
    """

    __slots__ = ("_call", "_file")

    def __init__(self, file: RecordFile | None, step: int, name: str, size: int, root: int):
        self._file = file
        self._call = (step, INDEX[name], root, perf_counter_ns(), size)

    def ended(self) -> None:
        if self._file is not None:
            step, phase, root, start, size = self._call
            self._file.records.append((step, phase, root, start, perf_counter_ns(), size))

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.ended()
