"""The items of gpu_check.py that can fail: compilation for this GPU, products and attention against NumPy."""

import pytest

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("item", ["compile", "products", "attention", "cudnn"])
def test_item(item, record_property, seconds_left):
    from tests.gpu.on_device import gpu_check

    seconds_left()
    result = gpu_check.run_process(item)
    record_property("lines", result["lines"])
    assert result["passed"], result.get("error") or "\n".join(result["lines"])
