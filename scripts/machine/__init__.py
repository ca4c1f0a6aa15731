"""Facts about the machine of a measurement: versions, CPU, GPU and its rates, launcher."""
