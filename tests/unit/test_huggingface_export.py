"""Folders that we write for transformers: whole or not at all, and what the safetensors package finds in them."""

import numpy as np
import pytest

from gpt2.errors import UserError
from gpt2.formats import huggingface_export, weights
from gpt2.formats.safetensors import make_header
from gpt2.parameters import Layout, Parameters, initialize
from tests.support.safetensors_file import CONFIG, assert_holds


def new_parameters() -> Parameters:
    parameters = Parameters.zeros(Layout(CONFIG))
    initialize(parameters, seed=1)
    return parameters


def test_the_safetensors_package_reads_every_tensor(tmp_path):
    package = pytest.importorskip("safetensors", reason="no safetensors: pip install -e '.[test]'")
    parameters = new_parameters()
    huggingface_export.write_parameters(tmp_path / "gpt2", parameters)
    with package.safe_open(tmp_path / "gpt2" / "model.safetensors", "np") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        assert file.metadata() == {"format": "pt"}
    assert_holds(parameters, tensors)


def test_an_export_is_complete_or_not_there(tmp_path):
    """Parameters that fail on the way leave no folder; an empty one is filled."""

    def failing_ranges():
        yield parameters.layout.ranges[0]
        raise RuntimeError("on the way")

    parameters = new_parameters()
    with pytest.raises(RuntimeError, match="on the way"):
        huggingface_export.write_parameters(tmp_path / "gpt2", parameters, failing_ranges())
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "gpt2").mkdir()
    huggingface_export.write_parameters(tmp_path / "gpt2", parameters)
    assert (weights.load(tmp_path / "gpt2").flat == parameters.flat).all()
    with pytest.raises(UserError, match=r"absent/gpt2: No such file.*choose a place that exists"):
        huggingface_export.write_parameters(tmp_path / "absent" / "gpt2", parameters)
    with pytest.raises(UserError, match="exists already"):
        huggingface_export.write_parameters(tmp_path / "gpt2", parameters)
    with pytest.raises(UserError, match="exists already"):
        huggingface_export.write_parameters(__file__, parameters)


def test_exports_range_by_range(tmp_path):
    """What is only there while its turn lasts, as ZeRO-3's parameters are."""
    whole, turns = new_parameters(), Parameters.zeros(Layout(CONFIG))

    def ranges():
        for start, stop in whole.layout.ranges:
            turns.flat[start:stop] = whole.flat[start:stop]
            yield start, stop
            turns.flat[start:stop] = np.nan

    huggingface_export.write_parameters(tmp_path / "gpt2", turns, ranges())
    assert (weights.load(tmp_path / "gpt2").flat == whole.flat).all()


def test_tensors_begin_at_a_multiple_of_eight_bytes():
    """However long the names are: readers map numbers where they lie."""
    for length in range(1, 17):
        header, offsets = make_header({"x" * length: (3,), "y": (2,)}, "float32")
        assert len(header) % 8 == 0
        assert offsets == {"x" * length: len(header), "y": len(header) + 12}
