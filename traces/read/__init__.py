"""Read and check the files of a run, and measure it."""
