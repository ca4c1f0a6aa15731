"""scripts/training/gpu_choices.py: a run goes on with the algorithms that it began with, or says that it does not."""

import json
import shutil
from types import SimpleNamespace

import pytest

from gpt2.kernels.cupy import cublaslt, device
from scripts.training import gpu_choices
from scripts.training.between_steps import MadeStep
from scripts.training.gpu_choices import GpuChoices, merged, of_maker, ways_text
from tests.gpu.cuda_shim.fake_cublaslt import FakeCublasLt
from tests.gpu.gpu_trainer import Trainer

H200 = {"device": "NVIDIA H200", "cublaslt": 130100, "cudnn": None}


def choice(algorithm, way, **maker):
    return H200 | maker | {"products": {"a product": algorithm}, "ways": [["gelu", [2, 3], "bfloat16", way]]}


class FakeDevice:
    def __init__(self, **maker):
        self.maker, self.given, self.timed = H200 | maker, None, lambda: 0

    def give_choices(self, choices):
        self.given = choices

    def choices(self):
        return self.given or self.maker | choice("05", False)


class FakeWorld:
    """One rank. printed: what rank 0 said."""

    rank, host = 0, "here"

    def __init__(self):
        self.printed, self.comm = [], SimpleNamespace(allgather=lambda value: [value])

    def print(self, text):
        self.printed.append(text)


@pytest.fixture
def took_up(monkeypatch):
    """took_up(device, facts): (GpuChoices that goes on from a checkpoint of these facts, what was printed)."""
    monkeypatch.setattr(gpu_choices, "Device", FakeDevice)

    def new(device, facts, added=(), written=()):
        world = FakeWorld()
        checkpoint = facts and SimpleNamespace(path="RUN/checkpoints/step-00000009", facts=facts)
        checkpoints = SimpleNamespace(add_facts=lambda facts: added.append(facts))
        folder = SimpleNamespace(add_to_config=lambda **facts: written.append(facts))
        return GpuChoices(world, device, checkpoint, 10, checkpoints, folder), world.printed

    return new


def test_the_choice_of_the_same_gpu_and_libraries_is_taken(took_up):
    device = FakeDevice()
    stored = [choice("01", True, cublaslt=120000), choice("02", True)]
    added, written = [], []
    choices, printed = took_up(device, {"gpu_choices": stored}, added, written)
    assert (device.given, printed) == (stored[1], [])
    choices.after(MadeStep(11, None, {}))
    assert not added
    choices.after(MadeStep(10, None, {}))
    assert added == written == [{"gpu_choices": stored[::-1]}], "those of other GPUs stay"
    choices.after(MadeStep(20, None, {}, is_saved=True))
    assert (len(added), len(written)) == (2, 1)


@pytest.mark.parametrize(
    ("maker", "has"),
    [
        ({"device": "NVIDIA A100"}, "NVIDIA A100 with cuBLASLt 130100, no cuDNN"),
        ({"cublaslt": 130200}, "NVIDIA H200 with cuBLASLt 130200, no cuDNN"),
        ({"cudnn": 92000}, "NVIDIA H200 with cuBLASLt 130100, cuDNN 92000"),
    ],
)
def test_another_gpu_or_library_times_anew_and_says_so(took_up, maker, has):
    device = FakeDevice(**maker)
    _, printed = took_up(device, {"gpu_choices": [choice("02", True)]})
    assert device.given is None
    assert printed == [
        "RUN/checkpoints/step-00000009 holds GPU algorithms of NVIDIA H200 with cuBLASLt 130100, no cuDNN, "
        f"rank 0 on here has {has}: they are timed anew, so bits may differ from the run so far"
    ]


def test_a_checkpoint_without_choices_says_so_and_a_new_run_nothing(took_up):
    _, printed = took_up(FakeDevice(), {"step": 9})
    (line,) = printed
    assert line.startswith(
        "RUN/checkpoints/step-00000009 holds no GPU algorithms, rank 0 on here has NVIDIA H200 with "
    )
    assert took_up(FakeDevice(), None)[1] == []
    assert took_up(SimpleNamespace(), {"gpu_choices": []})[1] == [], "on cores"


def test_what_is_timed_though_a_checkpoint_was_taken_up_is_said(took_up):
    device = FakeDevice()
    choices, printed = took_up(device, {"gpu_choices": [choice("02", True)]}, [], [])
    device.timed = lambda: 3
    choices.after(MadeStep(10, None, {}))
    assert printed == [
        "GPU kernels: attention by our own, attention backward by our own; in products' epilogues: gelu at 1 of 1 "
        "shapes",
        "the checkpoint lacks 3 GPU algorithms, or they do not run here: they are timed anew, so bits may differ from "
        "the run so far",
    ]


def test_ways_in_words():
    ways = [("attention", True), ("attention backward", False), ("gelu", True), ("gelu", False)]
    ways.append(("bias gradient", False))
    choices = {"ways": [[work, [2, 3], "bfloat16", theirs] for work, theirs in ways]}
    assert ways_text(choices) == (
        "GPU kernels: attention by cuDNN, attention backward by our own; in products' epilogues: gelu at 1 of 2 "
        "shapes, bias gradient at 0 of 1 shapes"
    )
    assert ways_text({"ways": []}).endswith("by our own; in products' epilogues: nothing")


def test_the_lowest_rank_with_such_a_gpu_decides():
    """Of each product and each work; a server has chosen nothing."""
    server = H200 | {"products": {}, "ways": []}
    more = choice("02", True)
    more["products"]["another"] = "07"
    more["ways"].append(["dgelu", [2, 3], "bfloat16", False])
    a100 = choice("03", True, device="NVIDIA A100")
    found = merged([server, choice("01", False), a100, more])
    assert of_maker(found, H200) == H200 | {
        "products": {"a product": "01", "another": "07"},
        "ways": [["gelu", [2, 3], "bfloat16", False], ["dgelu", [2, 3], "bfloat16", False]],
    }
    assert of_maker(found, a100) == a100
    assert len(found) == 2


@pytest.mark.any_mpi
@pytest.mark.ranks(2)
def test_a_run_goes_on_with_its_algorithms(comm, monkeypatch, shared_path, capsys):
    """Each rank's clock prefers another one. After the first step both have rank 0's, and so has another start."""
    trainer, libraries, preferred = Trainer(comm, monkeypatch, shared_path), [], [2 - comm.rank]

    def open_library(name):
        libraries.append(FakeCublasLt())
        return libraries[-1]

    def time_ms(self, run):
        run()
        return 1.0 if libraries[-1].runs[-1:] == preferred else 2.0

    monkeypatch.setattr(cublaslt, "open_library", open_library)
    monkeypatch.setattr(device.Device, "time_ms", time_ms)
    flags = ["--backend", "cupy", "--dtype", "bfloat16", "--steps", 3, "--checkpoint-every", 1, "--eval-every", 3]
    whole = trainer.folder / "whole"

    def start(*more):
        if comm.rank == 0:
            shutil.copytree(whole, trainer.folder / f"{trainer.count + 1}-0", dirs_exist_ok=True)
        comm.Barrier()
        trainer.run(*flags, "--resume", *more)

    trainer.run(*flags)
    if comm.rank == 0:
        shutil.copytree(trainer.folder / "1-0", whole)
        shutil.rmtree(whole / "checkpoints" / "step-00000003")
    comm.Barrier()
    runs, kept = libraries[-1].runs, trainer.config["gpu_choices"]
    assert runs[0] == 0, "all three were timed"
    assert set(runs[-len(runs) // 4 :]) == {2}, "rank 0's"
    assert [maker["device"] for maker in kept] == ["shim"]
    assert {bytes.fromhex(text)[0] for text in kept[0]["products"].values()} == {2}
    marker = json.loads((whole / "checkpoints" / "step-00000002" / "checkpoint.json").read_text())
    assert marker["gpu_choices"] == kept
    capsys.readouterr()

    preferred[:] = [0]
    start()
    assert (set(libraries[-1].runs), libraries[-1].heuristics) == ({2}, 0), "nothing was timed again"
    assert "timed anew" not in capsys.readouterr().out
    assert trainer.config["gpu_choices"] == kept

    monkeypatch.setattr(FakeCublasLt, "first_version", 130200)
    start()
    assert libraries[-1].heuristics > 0
    assert libraries[-1].runs[-1] == 0
    assert capsys.readouterr().out.count("rank 0 on ") == (comm.rank == 0)
    assert [maker["cublaslt"] for maker in trainer.config["gpu_choices"]] == [130200, 130100]
