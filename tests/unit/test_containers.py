"""scripts/containers: both images are made of the same, and of what is there; docs/clusters.md names no other files."""

import re
import tomllib
from pathlib import Path

import pytest

from scripts.makers.one_package import INSIDE

pytestmark = pytest.mark.any_mpi
ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "scripts" / "containers"
IMAGES = {name: (FOLDER / name).read_text() for name in ("Dockerfile", "gpt2-mpi.def")}


@pytest.mark.parametrize("image", IMAGES.values(), ids=IMAGES)
def test_an_image_holds_what_the_wheel_is_built_of(image):
    copied = re.findall(r"^(?:COPY | {4})((?:[\w./-]+ )+)/opt/source", image, re.MULTILINE)
    assert {name for line in copied for name in line.split()} == {"pyproject.toml", "README.md", *INSIDE}
    assert re.search(r'pip install --no-cache-dir "/opt/source\$\{(\w+):\+\[\$\1\]\}"', image), "no extras at all, too"


def test_the_extras_that_are_named_are_there():
    with open(ROOT / "pyproject.toml", "rb") as file:
        known = tomllib.load(file)["project"]["optional-dependencies"]
    for image in IMAGES.values():
        [named] = re.findall(r"such as (\S+), (\S+), (\S+)\.", image)
        assert {extra for word in named for extra in word.split(",")} <= known.keys()
        assert re.search(r"^(ARG | {4})EXTRAS=mpich$", image, re.MULTILINE)


def test_both_are_alike():
    """The same system, the same packages, the same environment."""
    installed = r"apt-get install -y --no-install-recommends (.*?)(?: \\)?$"
    for pattern in (r"debian:\S+", installed, r"NUMBA_CACHE_DIR=[\w/-]*numba", r"PATH=/opt\S+"):
        found = [re.findall(pattern, image, re.MULTILINE) for image in IMAGES.values()]
        assert found[0] == found[1] != [], pattern


def test_users_of_a_host_do_not_share_compiled_loops():
    """Apptainer binds the host's /tmp."""
    assert re.search(r"NUMBA_CACHE_DIR=/tmp/\S+-\$\(id -u\)$", IMAGES["gpt2-mpi.def"], re.MULTILINE)
