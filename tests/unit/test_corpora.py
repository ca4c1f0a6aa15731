"""The text that training takes where the user gives none: which one it is, and that it is packed."""

import hashlib
import tomllib

import numpy as np

from gpt2.data.shards import open_shard
from gpt2.data.texts import SHAKESPEARE, prepare, shakespeare
from tests.support.in_process import ROOT
from tests.support.refusal import refusal


def test_the_embedded_corpus_is_the_same_everywhere(tmp_path):
    """To the last byte; the rest is for people to see which text it is."""
    train, validation = prepare(None, "bytes", tmp_path)
    assert train.name.startswith("shakespeare-bytes-")
    tokens = [open_shard(path)[:] for path in (train, validation)]
    assert [len(part) for part in tokens] == [761_553, 84_617]
    content = bytes(np.concatenate(tokens).astype(np.uint8))
    assert hashlib.sha256(content).hexdigest() == "f560ada7082e71cda0fed573d553d16700e05646ee52a9f45131570f8481844c"
    text = content.decode("ascii")
    assert len(text) < 1_000_000
    assert text.startswith("First Citizen:\nBefore we proceed any further, hear me speak.\n")
    assert text.endswith("We were dissever'd: hastily lead away.\n")


def test_a_changed_or_missing_corpus_is_refused_in_one_line(tmp_path):
    path = tmp_path / "shakespeare.txt"
    path.write_bytes(SHAKESPEARE.read_bytes().replace(b"\n", b"\r\n", 1))
    message = refusal(shakespeare, path)
    for fact in [str(path), "its SHA-256 begins", "expected f560ada7082e", "install the project again", "--text"]:
        assert fact in message
    assert f"{tmp_path / 'none.txt'}: No such file" in refusal(shakespeare, tmp_path / "none.txt")


def test_packages_take_their_data_files_with_them():
    """All that lies beside modules: a wheel would lack it, and who works in a checkout would never see that."""
    packaged = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    listed = {path for name, patterns in packaged.items() for each in patterns
              for path in (ROOT / name.replace(".", "/")).glob(each)}  # fmt: skip
    packages = [ROOT / "gpt2", ROOT / "scripts" / "slurm"]  # other files beside modules are read in a checkout alone
    everything = [path for package in packages for path in package.rglob("*")]
    files = {path for path in everything if path.is_file() and path.parent.name != "__pycache__"}
    beside = {path for path in files if path.suffix != ".py"}
    assert SHAKESPEARE in listed
    assert beside == listed
