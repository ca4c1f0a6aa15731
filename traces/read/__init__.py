"""Read and check what a run wrote, and measure it."""
