"""Facts about the measured machine: versions, CPU, GPU, mpiruns."""
