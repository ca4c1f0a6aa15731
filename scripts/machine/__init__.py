"""The machine and the versions that a number comes from, and what its GPU reaches."""
