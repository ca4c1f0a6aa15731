"""A safetensors file packed by hand, for the readers' tests; a GPT-2's tensors in it under Hugging Face's names."""

import json
import re
from pathlib import Path

import ml_dtypes
import numpy as np

from gpt2.config import GPT2Config

CODES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64", "bool": "BOOL", "uint8": "U8"}
CONFIG = GPT2Config(n_layer=2, n_head=2, n_embd=4, context=3, vocab_size=5)


def pack(tensors: dict[str, np.ndarray], edit=lambda header: None) -> bytes:
    """The file's content; edit(header) changes the header before it is written."""
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, values in tensors.items():
        stop = len(data) + values.nbytes
        header[name] = {
            "dtype": CODES[values.dtype.name],
            "shape": list(values.shape),
            "data_offsets": [len(data), stop],
        }
        data += values.tobytes()
    edit(header)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def gpt2_tensors(config: GPT2Config = CONFIG, prefix: str = "transformer.", dtype="float32") -> dict[str, np.ndarray]:
    """Every number another one, multiples of 1/8 that each dtype holds exactly up to 32 for bfloat16."""
    C, V, T = config.n_embd, config.vocab_size, config.context
    shapes = {"wte.weight": (V, C), "wpe.weight": (T, C)}
    for layer in range(config.n_layer):
        kinds = {
            "ln_1.weight": (C,), "ln_1.bias": (C,), "attn.c_attn.weight": (C, 3 * C), "attn.c_attn.bias": (3 * C,),
            "attn.c_proj.weight": (C, C), "attn.c_proj.bias": (C,), "ln_2.weight": (C,), "ln_2.bias": (C,),
            "mlp.c_fc.weight": (C, 4 * C), "mlp.c_fc.bias": (4 * C,),
            "mlp.c_proj.weight": (4 * C, C), "mlp.c_proj.bias": (C,),
        }  # fmt: skip
        shapes |= {f"h.{layer}.{name}": shape for name, shape in kinds.items()}
    shapes |= {"ln_f.weight": (C,), "ln_f.bias": (C,)}
    random = np.random.default_rng(3)
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    return {prefix + name: (random.integers(-127, 128, shape) / 8).astype(kind) for name, shape in shapes.items()}


def described(config: GPT2Config = CONFIG, **changes) -> dict:
    """config.json; a change to None takes its line out."""
    numbers = {"n_layer": config.n_layer, "n_head": config.n_head, "n_embd": config.n_embd}
    numbers |= {"n_positions": config.context, "vocab_size": config.vocab_size, "model_type": "gpt2"}
    return {name: value for name, value in (numbers | changes).items() if value is not None}


def write_folder(folder: Path, tensors: dict[str, np.ndarray] | bytes, **changes) -> Path:
    """A folder with one file; tensors may be the file's content."""
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(tensors if isinstance(tensors, bytes) else pack(tensors))
    (folder / "config.json").write_text(json.dumps(described(**changes)))
    return folder


OUR_NAMES = {
    "ln_1": "ln1", "attn.c_attn": "qkv", "attn.c_proj": "attproj", "ln_2": "ln2", "mlp.c_fc": "fc",
    "mlp.c_proj": "fcproj",
}  # fmt: skip


def assert_holds(parameters, tensors: dict[str, np.ndarray]) -> None:
    """Parameters have the values of tensors under Hugging Face's names, all of them, and 0 in wte's pad."""
    seen = set()
    for name, values in tensors.items():
        name, values = name.removeprefix("transformer."), values.astype(np.float32)
        outer = {"wte.weight": "wte", "wpe.weight": "wpe", "ln_f.weight": "lnf_weight", "ln_f.bias": "lnf_bias"}
        if name in outer:
            ours = outer[name]
        else:
            layer, kind, ending = re.fullmatch(r"h\.(\d+)\.(.*)\.(weight|bias)", name).groups()
            ours, values = f"layer.{layer}.{OUR_NAMES[kind]}_{ending}", values.T
        assert np.array_equal(parameters.view(ours)[: len(values)], values, equal_nan=True), name
        seen.add(ours)
    assert seen == {tensor.name for tensor in parameters.layout.tensors}
    assert (parameters.wte[parameters.layout.config.vocab_size :] == 0).all()
