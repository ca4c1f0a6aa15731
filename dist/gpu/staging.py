"""Host staging: copies between float32 vectors in host memory and a GPU's arrays, while the GPU computes.

Exchange buffers, including windows that ranks share, are pinned in place (registered with the driver). If the driver
refuses, CUDA copies through its own pinned memory: the numbers are the same, but the host waits for each copy.
"""

import numpy as np

from dist.ranges import cut

CHUNK = 4 << 20  # elements that are cast or updated at once, while the previous chunk is copied
NOT_READY = 600  # cudaErrorNotReady


class Copied:
    """The end of a copy. Wait for it as for an MPI request (`Test()`); streams wait for `event`."""

    def __init__(self, runtime, event):
        self._runtime = runtime
        self.event = event

    def Test(self) -> bool:
        status = self._runtime.eventQuery(self.event.ptr)
        if status not in (0, NOT_READY):
            self.event.synchronize()  # raises the error
        return status == 0


class HostStaging:
    """Copies on two streams of `device`, one each way; each stream keeps the order of the calls.

    Gradients on the GPU that are not float32 are cast there, a chunk at a time. `landings`: two float32 arrays (CHUNK,)
    on the GPU, for callers that send chunks through in turn.
    """

    def __init__(self, device):
        cuda = device.cupy.cuda
        self.device = device
        self._runtime = cuda.runtime
        self._out = cuda.Stream(non_blocking=True)
        self._into = cuda.Stream(non_blocking=True)
        self._out_stage, self._into_stage, *self.landings = (device.empty((CHUNK,), np.float32) for _ in range(4))
        self._pinned = []

    def out(self, source, host) -> Copied:
        """Start to copy `source` to `host` (n,) float32, after the compute that is queued so far."""
        self._out.wait_event(self.computed().event)
        for low, high in chunks(len(host)):
            part = source[low:high]
            if part.dtype != np.float32:
                part = self._out_stage[: high - low]
                with self._out:
                    part[:] = source[low:high]
            part.data.copy_to_host_async(host[low:high].ctypes.data, part.nbytes, self._out)
        return self._mark(self._out)

    def into(self, host, target, after: Copied | None = None) -> Copied:
        """Start to copy `host` (n,) float32 to `target`, also float32, no sooner than `after`."""
        if after is not None:
            self._into.wait_event(after.event)
        target.data.copy_from_host_async(host.ctypes.data, target.nbytes, self._into)
        return self._mark(self._into)

    def through(self, host, store, after: Copied) -> Copied:
        """Start to copy `host` (n,) float32 to the GPU in chunks, no sooner than `after`.

        store(low, values) uses each chunk, which begins at element `low`; it queues its work on CuPy's current stream.
        """
        self._into.wait_event(after.event)
        for low, high in chunks(len(host)):
            values = self._into_stage[: high - low]
            values.data.copy_from_host_async(host[low:high].ctypes.data, values.nbytes, self._into)
            with self._into:
                store(low, values)
        return self._mark(self._into)

    def bring(self, host, target) -> Copied:
        """Start to copy `host` (n,) float32 to `target` of any dtype, after the compute queued so far and before the
        compute queued from now on."""

        def store(low, values):
            target[low : low + len(values)] = values

        is_free = self.computed()
        copied = self.into(host, target, is_free) if target.dtype == np.float32 else self.through(host, store, is_free)
        self.before_compute(copied)
        return copied

    def computed(self) -> Copied:
        """Return the end of the compute queued so far."""
        return self._mark(self.device.stream)

    def before_compute(self, copied: Copied) -> None:
        """Make compute that is queued from now on wait for this copy."""
        self.device.stream.wait_event(copied.event)

    def pin(self, array) -> None:
        """Pin a host array, which must live as long as this object."""
        if array.nbytes == 0 or any(np.may_share_memory(array, pinned) for pinned in self._pinned):
            return
        try:
            self._runtime.hostRegister(array.ctypes.data, array.nbytes, 0)
        except self._runtime.CUDARuntimeError:
            return  # too much memory is locked, or the driver cannot pin: CUDA then uses its own pinned memory
        self._pinned.append(array)

    def close(self) -> None:
        """Unpin all memory, before its owners free it."""
        for stream in (self._out, self._into):
            stream.synchronize()
        for array in self._pinned:
            self._runtime.hostUnregister(array.ctypes.data)
        self._pinned = []

    def _mark(self, stream) -> Copied:
        event = self.device.cupy.cuda.Event(disable_timing=True)
        event.record(stream)
        return Copied(self._runtime, event)


def chunks(count: int) -> list[tuple[int, int]]:
    """Cut `count` elements into chunks of at most CHUNK."""
    return cut(count, -(-count // CHUNK))
