"""Control groups of versions 1 and 2, in made-up trees: what limits this process."""

from pathlib import Path

import pytest

from dist import control_groups
from scripts.settings.memory import available_bytes

pytestmark = pytest.mark.any_mpi


def tree(tmp_path, own: str, files: dict[str, str]) -> tuple[Path, Path]:
    """A made-up /sys/fs/cgroup and /proc/self/cgroup."""
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        path = tmp_path / "mount" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return tmp_path / "mount", tmp_path / "own"


def test_limits_of_version_2(tmp_path):
    """The smallest of the own group's and of those around it; "max" is none."""
    files = {
        "job_7/step_0/memory.max": "max", "job_7/memory.max": "8000000000", "memory.max": "9000000000",
        "job_7/step_0/cpu.max": "max 100000", "job_7/cpu.max": "250000 100000", "cpu.max": "300000 100000",
        "job_8/memory.max": "5",
    }  # fmt: skip
    places = tree(tmp_path, "0::/job_7/step_0\n", files)
    assert control_groups.memory_limit(places) == 8_000_000_000
    assert control_groups.cpu_quota(places) == 2.5


def test_limits_of_version_2_beside_version_1(tmp_path):
    """It is mounted in a folder of its own then."""
    places = tree(tmp_path, "1:cpu:/\n0::/a\n", {"unified/a/memory.max": "7000", "cpu/cpu.cfs_quota_us": "-1"})
    assert control_groups.memory_limit(places) == 7000
    assert control_groups.cpu_quota(places) is None


def test_limits_of_version_1(tmp_path):
    """Controllers have trees of their own; in a container the path is the host's, and the mount's top counts."""
    files = {
        "memory/memory.limit_in_bytes": "4000000000", "cpu,cpuacct/cpu.cfs_quota_us": "150000",
        "cpu,cpuacct/cpu.cfs_period_us": "100000",
    }  # fmt: skip
    places = tree(tmp_path, "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n0::/\n", files)
    assert control_groups.memory_limit(places) == 4_000_000_000
    assert control_groups.cpu_quota(places) == 1.5
    (tmp_path / "mount/memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    (tmp_path / "mount/cpu,cpuacct/cpu.cfs_quota_us").write_text("-1\n")
    assert control_groups.memory_limit(places) is None
    assert control_groups.cpu_quota(places) is None


def test_quotas_tell_groups_apart(tmp_path):
    """By what is the same for all processes in a group, whatever its path is there."""
    files = {"cpu/a/cpu.cfs_quota_us": "5000", "cpu/a/cpu.cfs_period_us": "10000", "cpu/a/b/cpu.cfs_quota_us": "20000",
             "cpu/a/b/cpu.cfs_period_us": "10000", "cpu/cpu.cfs_quota_us": "-1"}  # fmt: skip
    places = tree(tmp_path, "1:cpu:/a/b\n", files)
    outer, inner = ((tmp_path / "mount/cpu" / name).stat() for name in ("a", "a/b"))
    expected = {(outer.st_dev, outer.st_ino): 0.5, (inner.st_dev, inner.st_ino): 2.0}
    assert control_groups.cpu_quotas(places) == expected
    assert control_groups.cpu_quotas((tmp_path / "nothing", tmp_path / "nothing")) == {}


@pytest.fixture
def put(tmp_path):
    """Writes a file of a made-up Linux, put("proc/meminfo", text)."""

    def write(path, text):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    return write


def available(root: Path) -> int | None:
    return available_bytes((root / "sys/fs/cgroup", root / "proc/self/cgroup"), root / "proc/meminfo")


def test_memory_is_what_the_machine_and_the_control_groups_leave(tmp_path, put):
    assert available(tmp_path) is None
    put("proc/meminfo", "MemTotal: 9000 kB\nMemAvailable:    5000 kB\n")
    assert available(tmp_path) == 5_120_000
    put("proc/self/cgroup", "0::/job/step\n")
    assert available(tmp_path) == 5_120_000
    put("sys/fs/cgroup/job/step/memory.max", "max\n")
    put("sys/fs/cgroup/job/step/memory.current", "1000\n")
    assert available(tmp_path) == 5_120_000
    put("sys/fs/cgroup/job/memory.max", "3000000\n")
    put("sys/fs/cgroup/job/memory.current", "2000000\n")
    assert available(tmp_path) == 1_000_000
    put("sys/fs/cgroup/job/memory.stat", "anon 1500000\nfile 500000\nfile_mapped 7\n")
    assert available(tmp_path) == 1_500_000
    put("sys/fs/cgroup/job/memory.stat", "anon 1500000\nfile 500000\nfile_mapped 7\nshmem 200000\n")
    assert available(tmp_path) == 1_300_000, "what lies in /dev/shm gives way to nothing"


def test_memory_that_control_groups_of_version_1_leave(tmp_path, put):
    """Where no limit is set they show an immense one; in a container the path may be the machine's."""
    put("proc/meminfo", "MemAvailable:    5000 kB\n")
    put("proc/self/cgroup", "5:cpu:/\n4:memory:/job/step\n3:name=systemd:/memory:/\n0::/\n")
    put("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    put("sys/fs/cgroup/memory/memory.usage_in_bytes", "7000000\n")
    assert available(tmp_path) == 5_120_000
    put("sys/fs/cgroup/memory/job/step/memory.limit_in_bytes", "4000000\n")
    put("sys/fs/cgroup/memory/job/step/memory.usage_in_bytes", "3000000\n")
    assert available(tmp_path) == 1_000_000
    stat = "cache 1\nshmem 2\ntotal_cache 500000\ntotal_shmem 100000\n"
    put("sys/fs/cgroup/memory/job/step/memory.stat", stat)
    assert available(tmp_path) == 1_400_000
    put("proc/self/cgroup", "4:hugetlb,memory:/docker/elsewhere\n")
    put("sys/fs/cgroup/memory/memory.limit_in_bytes", "7200000\n")
    assert available(tmp_path) == 200_000
