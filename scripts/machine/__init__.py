"""Which machine and versions a number comes from, what limits them, what started the process, what a GPU reaches."""
