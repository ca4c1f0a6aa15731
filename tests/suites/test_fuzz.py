"""Damaged files: a few hundred mutants of each kind are refused with one clear line, or read as what their bytes say.

tests/suites/damaged/ says what is right for each format; test_fuzz_objects.py looks for what would unpickle a file.
"""

import pytest

from tests.suites.damaged.table import KINDS, MISSING
from tests.support.mutations import ORIGINAL, PART, REFUSED, read_mutants

pytestmark = pytest.mark.any_mpi
COUNT = 200


@pytest.mark.parametrize("kind", KINDS)
def test_damaged(kind, tmp_path):
    if missing := MISSING.get(kind):
        pytest.skip(missing)
    case = KINDS[kind](tmp_path)
    found = read_mutants(case, COUNT)
    assert found.total() == COUNT
    assert found.total() - found[REFUSED] - found[PART] >= case.least * COUNT / 100
    assert found[REFUSED] + found[PART] or found[ORIGINAL] < COUNT  # the damage is seen
