"""Every source compiles for this GPU, and no kernel spills registers."""

import pytest

from gpt2.files import user_cache_folder
from gpt2.kernels.cupy.compile import SOURCES, STORAGES, compile_cubin, keep_code
from tests.gpu.kernel_resources import parse_log

pytestmark = [pytest.mark.gpu, pytest.mark.own_process]


def test_every_source_compiles_without_spills(new_device):
    """The code is kept in the cache: the tests after this one load it."""
    arch = new_device().arch
    for source in SOURCES:
        for storage in STORAGES:
            code, log = compile_cubin(source, storage, arch)
            keep_code(code, source, storage, arch, user_cache_folder())
            assert {name: spilled for name, (_, spilled) in parse_log(log).items() if spilled} == {}
