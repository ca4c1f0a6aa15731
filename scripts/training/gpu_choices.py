"""The algorithms and kernels that GPUs compute with. Checkpoints hold them, so that a run resumes bit for bit.

The first step times several algorithms and takes the fastest. Each rounds differently, and the fastest may differ from
start to start. So ranks with the same GPU and libraries agree on one choice, checkpoints hold it, and a resumed run
uses it. A choice is the dict from Device.choices (gpt2/kernels/cupy): "device", "cublaslt" and "cudnn" name the GPU and
libraries that were timed, "products" the algorithm of each product, "ways" which work a library does.
"""

from gpt2.formats.checkpoints import Checkpoint
from gpt2.kernels.cupy import Device
from gpt2.kernels.cupy.faster_of import ATTENTION, EPILOGUES
from scripts.training.between_steps import MadeStep

MAKER = ("device", "cublaslt", "cudnn")
FACT = "gpu_choices"
ANEW = "they are timed anew, so bits may differ from the run so far"


class GpuChoices:
    """The choices of all ranks. The constructor gives this rank's GPU the choice of the checkpoint. Collective.

    device: this rank's GPU; CPU cores have nothing to choose. checkpoint: where the run resumes, or None.
    """

    def __init__(self, world, device, checkpoint: Checkpoint | None, first_step: int, checkpoints, folder):
        self.world = world
        self.first_step = first_step
        self.checkpoints = checkpoints
        self.folder = folder
        self.device = device if isinstance(device, Device) else None
        self.kept = checkpoint.facts.get(FACT, []) if checkpoint else []
        self.took_up = False
        if self.device is not None and checkpoint is not None:
            self._take_up(checkpoint)

    def _take_up(self, checkpoint: Checkpoint) -> None:
        found = of_maker(self.kept, self.device.maker)
        if found is not None:
            self.device.give_choices(found)
            self.took_up = True
        place = f"rank {self.world.rank} on {self.world.host} has {maker_text(self.device.maker)}"
        lacking = next(filter(None, self.world.comm.allgather(place if found is None else None)), None)
        if lacking:
            held = " and of ".join(maker_text(one) for one in self.kept)
            held = f"GPU algorithms of {held}" if held else "no GPU algorithms"
            self.world.print(f"{checkpoint.path} holds {held}, {lacking}: {ANEW}")

    def after(self, step: MadeStep) -> None:
        """Let all ranks agree on choices and keep them, after the first step and before each checkpoint. Collective."""
        is_first = step.number == self.first_step
        if self.device is None or not (step.is_saved or is_first):
            return
        told = self.world.comm.allgather((self.device.timed() if self.took_up else 0, self.device.choices()))
        self.kept = merged([*(choices for _, choices in told), *self.kept])
        self.device.give_choices(of_maker(self.kept, self.device.maker))
        self.checkpoints.add_facts({FACT: self.kept})
        if self.world.rank == 0 and is_first:
            self.folder.add_to_config(**{FACT: self.kept})
            self.world.print(ways_text(of_maker(self.kept, self.device.maker)))
            if missing := max(timed for timed, _ in told):
                self.world.print(f"the checkpoint lacks {missing} GPU algorithms, or they do not run here: {ANEW}")


def of_maker(choices: list[dict], maker: dict) -> dict | None:
    """Return the choice made with this GPU and these libraries, or None."""
    return next((one for one in choices if all(one[name] == maker[name] for name in MAKER)), None)


def merged(choices: list[dict]) -> list[dict]:
    """Merge choices into one for each kind of GPU and libraries. If several differ, the first one counts."""
    found = {}
    for one in choices:
        maker = {name: one[name] for name in MAKER}
        first = found.setdefault(tuple(maker.values()), maker | {"products": {}, "ways": []})
        first["products"] = one["products"] | first["products"]
        known = [way[:-1] for way in first["ways"]]
        first["ways"] += [way for way in one["ways"] if way[:-1] not in known]
    return [*found.values()]


def ways_text(choices: dict) -> str:
    """Return "GPU kernels: attention by cuDNN, ...; in products' epilogues: gelu at 1 of 1 shapes, ..."."""
    taken = {work: [way[-1] for way in choices["ways"] if way[0] == work] for work in (*ATTENTION, *EPILOGUES)}
    attention = [f"{work} by {'cuDNN' if any(taken[work]) else 'our own'}" for work in ATTENTION]
    epilogues = [f"{work} at {sum(taken[work])} of {len(taken[work])} shapes" for work in EPILOGUES if taken[work]]
    return f"GPU kernels: {', '.join(attention)}; in products' epilogues: {', '.join(epilogues) or 'nothing'}"


def maker_text(maker: dict) -> str:
    """Return a text like "NVIDIA H200 with cuBLASLt 130100, no cuDNN"."""
    cudnn = "no cuDNN" if maker["cudnn"] is None else f"cuDNN {maker['cudnn']}"
    return f"{maker['device']} with cuBLASLt {maker['cublaslt']}, {cudnn}"
