"""Which machine and versions a number comes from, and what its GPU reaches."""
