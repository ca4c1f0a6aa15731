"""Whether this machine can have virtual hosts, for the tests that need some."""

import subprocess
from collections.abc import Callable

import pytest

from scripts.cluster.hosts import ClusterError

# A host in small: namespaces, a pair of interfaces, a limited rate.
HOST = ("unshare", "--net", "--uts", "--ipc", "--pid", "--fork", "--mount-proc", "sh", "-c")
TRIAL = "ip link add v0 type veth peer name v1 && tc qdisc add dev v0 root tbf rate 1mbit burst 10kb limit 10kb"


def missing_hosts(*checks: Callable[[], object]) -> str | None:
    """Why there can be none here, or None: the first ClusterError of the checks, or what the kernel says."""
    try:
        for check in checks:
            check()
    except ClusterError as error:
        return str(error)
    result = subprocess.run([*HOST, TRIAL], capture_output=True, text=True)
    return f"no namespaces or no tc here: {result.stderr.strip()}" if result.returncode else None


def needs(missing: str | None) -> pytest.MarkDecorator:
    """Skips a test for that reason, if there is one."""
    return pytest.mark.skipif(missing is not None, reason=missing or "")
