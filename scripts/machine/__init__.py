"""Facts about the measured machine: versions, CPU, GPU, the GPU's rates, launcher."""
