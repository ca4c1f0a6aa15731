"""What machine and which versions a number comes from."""

import os
import platform
from importlib.metadata import version
from pathlib import Path


def machine() -> dict:
    return {"processor": _processor(), "cores": os.cpu_count(), "system": platform.platform()}


def versions(*packages: str) -> dict[str, str]:
    return {"python": platform.python_version()} | {name: version(name) for name in packages}


def _processor() -> str:
    """The processor's name as Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
