"""The GPU path on stand-ins that need none; on_device/ needs a GPU."""
