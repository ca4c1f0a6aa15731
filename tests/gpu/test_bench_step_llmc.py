"""bench_step.py --backend cupy --vs llmc=PATH, with a program that prints as llm.c does."""

import json
import sys
from types import SimpleNamespace

import pytest

from gpt2.config import GPT2Config
from scripts.step_bench import bench, llmc

CONFIG = GPT2Config(n_layer=1, n_head=1, n_embd=64, context=32, vocab_size=250)
SHAPE = {"batch_size": 2, "seq_len": 32, "dtype": "bfloat16", "threads": 1}
SETTINGS = SHAPE | {"backend": "cupy", "model": "small", "repeat": 2, "json": None}
PROGRAM = """#!{python}
import sys
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert (flags["-e"], flags["-b"], flags["-t"], flags["-r"], flags["-ge"]) == ("d1", "2", "32", "0", "2")
assert len(open(flags["-i"], "rb").read()) == 1024 + 2 * (2 * 32 + 1)
for name, value in {rows}.items():
    print(f"| {{name:21}} | {{value:<50}} |")
print("device memory usage: 27916 MiB / 81109 MiB")
for step in range(1, int(flags["-x"]) + 1):
    print(f"step {{step:4d}}/{{flags['-x']}} | loss {{12 - step:7.6f}} (+nanz)| norm 15.7 (+nanz)| lr 3.00e-04 | "
          f"{{1000 / step:.2f}} ms | 40.0% bf16 MFU | 500 tok/s")
sys.exit({code})
"""
ROWS = {"precision": "BF16", "micro batch size B": 2, "sequence length T": 32, "num_layers L": 1, "num_heads NH": 1,
        "channels C": 64, "vocab_size V": 250}  # fmt: skip


@pytest.fixture
def run(tmp_path):
    """run(code, row=value, ...): the report's entry of a program with these rows, that ends so."""
    program = tmp_path / "train_gpt2cu"
    session = bench.StepBench(SimpleNamespace(**SETTINGS, vs={"llmc": program}), CONFIG, [])

    def measured(code=0, rows=ROWS):
        program.write_text(PROGRAM.format(python=sys.executable, rows=json.dumps(rows), code=code))
        program.chmod(0o700)
        session.report["contenders"] = {"ours": {"turns_s": [0.1, 0.2]}}
        session.measure(["llmc"])
        return session.report["contenders"]["llmc"]

    return measured


def test_its_steps_are_turns_as_ours(run):
    """Three steps that do not count, then five to a turn; the loss is that of the last that does not count."""
    entry = run()
    seconds = [sum(1 / step for step in steps) / 5 for steps in (range(4, 9), range(9, 14))]
    assert entry["turns_s"] == pytest.approx(seconds, rel=1e-3)
    assert (entry["loss"], entry["memory_bytes"]) == (9.0, 27916 << 20)
    assert entry["ours_over_this"] == pytest.approx((0.1 / seconds[0] + 0.2 / seconds[1]) / 2, rel=1e-3)


def test_what_cannot_be_compared_gets_no_time(run, monkeypatch):
    """Another precision or shape; a program that fails, prints other things or is not there."""
    for name, value in (("precision", "FP32"), ("channels C", 128)):
        error = f"llm.c has {name} {value}, expected {ROWS[name]}: give a shape that it knows"
        assert run(rows=ROWS | {name: value}) == {"error": error}
    assert run(code=3)["error"].startswith("llm.c ended with code 3: step   13/13 | loss")
    assert run(rows={})["error"].startswith("llm.c has precision None")
    run_llmc = llmc.run_llmc
    monkeypatch.setattr(llmc, "run_llmc", lambda program, *others: run_llmc(program.with_name("none"), *others))
    assert run()["error"].startswith("llm.c does not start: ")
