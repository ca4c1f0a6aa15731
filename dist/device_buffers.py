"""The two flat buffers of a rank on its GPU, for exchanges that start and end there."""

import numpy as np


class DeviceBuffers:
    """`parameters` and `gradients` (size,) float32 on the GPU, zeroed.

    host_parameters (size,): the parameters as a file has them, filled in before training and fetched for a checkpoint.
    """

    fills_parameters = True

    def __init__(self, device, size: int):
        self._device = device
        self.parameters, self.gradients = (device.empty((size,), np.float32) for _ in range(2))
        self.host_parameters = np.zeros(size, np.float32)

    def filled(self, start: int, stop: int) -> None:
        """The first parameters of a range have been written on the host."""
        self.parameters[start:stop].set(self.host_parameters[start:stop])

    def fetch(self, start: int, stop: int) -> None:
        """Bring a range of the parameters to the host."""
        self.host_parameters[start:stop] = self._device.download(self.parameters[start:stop])

    def close(self) -> None:
        """Nothing is shared."""
