"""The single commands of failure_suite.py: odd files to write to, odd values, texts that change, interruptions."""

import json
import os
import signal
import stat
import subprocess
import time
from pathlib import Path

import numpy as np

from gpt2.data.shards import write_shard
from gpt2.formats import checkpoint_files, checkpoints
from tests.suites.faults.case import ENDS, ERROR, GOES_ON
from tests.suites.faults.command import TINY, Command, run_here
from tests.suites.faults.log import last_step
from tests.suites.faults.processes import wait_until

START_S, BEGIN_LIMIT_S = 4, 60
TEXT_LINES = 400_000  # of a text that takes seconds to prepare
HUGE = 2**63
NEW = f"python scripts/train.py {TINY} --steps 4 --out new"
DATA = f"{NEW} --vocab-size 256 --train-data data.bin"
PREPARE = "python scripts/prepare.py long.txt --tokenizer bytes --shard-tokens 1000000 --processes 1 --out shards"
COMPARE = f"python scripts/compare.py --ranks 2 --strategies ring,tree --out cmp -- {TINY} --steps 1000000"
TRAIN_ON = f"python scripts/train.py {TINY} --steps 8 --resume --out run"
EXPORT = "python scripts/export.py run --format llmc --out"
EVALUATE = "python scripts/evaluate.py run --text text.txt --json"
LATIN = "caf\udce9"  # in ISO-8859-1
LARGER = (
    "mpirun -n 2 python scripts/train.py --strategy hierarchical-sharded --n-layer 4 --n-head 8 --n-embd 512 "
    "--context 64 --batch-size 2 --threads 1 --eval-every 0 --steps 4 --out new"
)
KILLED_THEN_AGAIN = (
    "mount -t tmpfs tmpfs /dev/shm; "
    f"mpirun -n 2 python scripts/train.py {TINY} --strategy zero-2 --steps 1000000 --out new & "
    "until [ -s new/log.jsonl ]; do sleep 0.1; done; kill -9 $(pgrep -f -- '--out new$'); wait; "
    f"mpirun -n 2 python scripts/train.py {TINY} --strategy zero-2 --steps 4 --out newer; code=$?; sleep 11; "
    "python scripts/doctor.py --remove-segments > doctored; ls /dev/shm > left; "
    "exit $code"
)


def device(folder: Path) -> None:
    subprocess.run(["mknod", folder / "device", "c", "1", "3"], check=True)  # /dev/null's numbers


def linked_device(folder: Path) -> None:
    device(folder)
    (folder / "link").symlink_to("device")


def fifo(name: str):
    """A function that puts a FIFO into a folder, instead of what has that name."""

    def put(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return put


def linked_file(folder: Path) -> None:
    (folder / "target").write_text("older")
    (folder / "link").symlink_to("target")


def is_kind(name: str, kind):
    """A function that sees whether a name still is what it was (stat.S_ISFIFO ...)."""

    def check(folder: Path) -> list[str]:
        path = folder / name
        return [] if os.path.lexists(path) and kind(path.lstat().st_mode) else [f"{name} is replaced"]

    return check


def link_is_followed(folder: Path) -> list[str]:
    kept = is_kind("link", stat.S_ISLNK)(folder)
    return kept or ([] if (folder / "target").stat().st_size > len("older") else ["the link is not followed"])


def device_is_there(folder: Path) -> list[str]:
    return is_kind("device", stat.S_ISCHR)(folder) + is_kind("link", stat.S_ISLNK)(folder)


def bad_parameter(folder: Path) -> None:
    """A newest checkpoint, all its checksums right, in which one parameter is no number."""
    newest = checkpoints.newest_first(folder / "run" / "checkpoints")[0]
    old = checkpoints.Checkpoint(newest)
    facts = {name: value for name, value in old.facts.items() if name not in ("files", "format", "crc32")}
    ranges = [(name, 0, np.empty(facts["count"], np.float32)) for name in checkpoints.STATE]
    for name, _, values in ranges:
        old.read(name, 0, values)
    ranges[0][2][0] = np.nan
    for path in newest.iterdir():
        path.unlink()
    newest.rmdir()
    part = newest.with_suffix(".part")
    size = checkpoint_files.write_part(part, facts["step"], 0, ranges, facts["run"])
    checkpoints.complete(part, facts, {checkpoint_files.rank_file(0): size})


def nothing_exported(folder: Path) -> list[str]:
    return ["it is exported"] if (folder / "model.bin").exists() else []


def long_text(folder: Path) -> None:
    (folder / "long.txt").write_text("One line of a text that changes while it is read.\n" * TEXT_LINES)


def grow(folder: Path, process) -> None:
    wait_for_shards(folder, process)
    with open(folder / "long.txt", "a") as file:
        file.write("And one more line.\n" * 1000)


def shrink(folder: Path, process) -> None:
    wait_for_shards(folder, process)
    os.truncate(folder / "long.txt", 10_000_000)


def wait_for_shards(folder: Path, process) -> None:
    wait_until(lambda: process.poll() is not None or list((folder / "shards").glob("*")), BEGIN_LIMIT_S)


def no_manifest(folder: Path) -> list[str]:
    return ["manifest.json says that all is well"] if (folder / "shards" / "manifest.json").exists() else []


def terminate_later(folder: Path, process) -> None:
    time.sleep(START_S)
    process.terminate()


def interrupt_training(number: int):
    """A function that sends a signal to the command when its first run trains."""

    def send(folder: Path, process) -> None:
        wait_until(lambda: process.poll() is not None or last_step(folder / "cmp" / "ring"), BEGIN_LIMIT_S)
        process.send_signal(number)

    return send


def latin_name(folder: Path) -> None:
    (folder / f"{LATIN}.txt").write_text("A text under a name that is no UTF-8.\n" * 50)


def changed_at_the_end(folder: Path) -> None:
    """A run on data of which the last tokens are others now."""
    tokens = np.random.default_rng(0).integers(256, size=20_000)
    write_shard(folder / "data.bin", tokens)
    run_here(DATA, folder)
    tokens[-5000:] = 0
    write_shard(folder / "data.bin", tokens)


def log_is_json(folder: Path) -> list[str]:
    """NaN and Infinity are none."""

    def refuse(word: str):
        raise ValueError(word)

    try:
        for line in (folder / "new" / "log.jsonl").read_text().splitlines():
            json.loads(line, parse_constant=refuse)
    except ValueError as error:
        return [f"{error} in log.jsonl"]
    return []


def is_complete(folder: Path) -> list[str]:
    return [] if (folder / "new" / "summary.json").exists() else ["no summary.json"]


def shared_memory_is_empty(folder: Path) -> list[str]:
    return [f"{name} stays in /dev/shm" for name in (folder / "left").read_text().split()]


def size(flag: str) -> Command:
    return Command(f"{flag} of 2^63", f"{NEW} {flag} {HUGE}")


def shm(size: str) -> Command:
    """Two ranks, whose /dev/shm is that small."""
    mount = f"mount -t tmpfs -o size={size} tmpfs /dev/shm"
    return Command(f"/dev/shm has {size.upper()}B", f"unshare --mount sh -c '{mount} && exec {LARGER}'", codes=(),
                   line=f"{ERROR}.*/dev/shm")  # fmt: skip


is_device, is_fifo = is_kind("device", stat.S_ISCHR), is_kind("fifo", stat.S_ISFIFO)
COMMANDS = {
    "export-device": Command("export.py onto a device", f"{EXPORT} device", before=device, check=is_device),
    "export-fifo": Command("export.py onto a FIFO", f"{EXPORT} fifo", before=fifo("fifo"), check=is_fifo),
    "export-linked-device": Command("export.py onto a link to a device", f"{EXPORT} link", before=linked_device,
                                    check=device_is_there),
    "export-link": Command("export.py onto a link to a file", f"{EXPORT} link", GOES_ON, linked_file,
                           check=link_is_followed),
    "evaluate-device": Command("evaluate.py --json onto a device", f"{EVALUATE} device", before=device,
                               check=is_device),
    "evaluate-fifo": Command("evaluate.py --json onto a FIFO", f"{EVALUATE} fifo", before=fifo("fifo"), check=is_fifo),
    "evaluate-link": Command("evaluate.py --json onto a link to a file", f"{EVALUATE} link", GOES_ON, linked_file,
                             check=link_is_followed),
    "export-nan": Command("a parameter of the checkpoint is no number", f"{EXPORT} model.bin", before=bad_parameter,
                          line=f"{ERROR}.*wte", check=nothing_exported),
    "prepare-grows": Command("prepare.py's text grows while it is read", PREPARE, ENDS, long_text, grow,
                             check=no_manifest, line=f"{ERROR}.*long.txt"),
    "prepare-shrinks": Command("prepare.py's text is cut while it is read", PREPARE, ENDS, long_text, shrink,
                               check=no_manifest, line=f"{ERROR}.*long.txt"),
    "config-fifo-plot": Command("config.json is a FIFO: plot.py", "python scripts/plot.py run", codes=(0, 2),
                                before=fifo("run/config.json")),
    "config-fifo-train": Command("config.json is a FIFO: train.py", TRAIN_ON, before=fifo("run/config.json")),
    "config-fifo-export": Command("config.json is a FIFO: export.py", "python scripts/export.py run --format perfetto "
                                  "--out trace.json", before=fifo("run/config.json"), codes=(0, 2)),
    "ntasks": Command("`SLURM_NTASKS=²`", f"env SLURM_STEP_ID=0 SLURM_NTASKS=² {NEW}", codes=(0, 2)),
    "size-embd": size("--n-embd"),
    "size-batch": size("--batch-size"),
    "size-vocabulary": size("--vocab-size"),
    "size-context": size("--context"),
    "seq-len": Command("no tokens in a sequence", f"{NEW} --seq-len 0"),
    "peak-tflops": Command("a peak that is almost nothing", f"{NEW} --peak-tflops 1e-320"),
    "layers-term": Command("SIGTERM while a model of a million layers is planned", f"{NEW} --n-layer 1000000",
                           during=terminate_later, codes=(), line=""),
    "terminal": Command("a terminal in ISO-8859-1, with `--sample-every`",
                        f"env PYTHONIOENCODING=iso-8859-1 {NEW} --sample-every 1", GOES_ON, check=is_complete),
    "name-text": Command("a text's name that is no UTF-8", f"{NEW} --text {LATIN}.txt", GOES_ON, latin_name,
                         check=is_complete),
    "name-run": Command("a run folder's name that is no UTF-8", f"{NEW}-{LATIN}", GOES_ON),
    "head": Command("`| head -n 1`", f"bash -c 'set -o pipefail; {NEW} | head -n 1'", GOES_ON, check=is_complete),
    "full": Command("`> /dev/full`", f"bash -c '{NEW} > /dev/full'", GOES_ON, check=is_complete),
    "nan-log": Command("the loss is no number: log.jsonl", f"{NEW} --lr 1e30 --warmup 0 --grad-clip 0 --steps 50",
                       check=log_is_json),
    "data-end": Command("a run's data are others at their end when it is resumed", f"{DATA} --resume --steps 8",
                        before=changed_at_the_end),
    "compare-int": Command("compare.py gets SIGINT", COMPARE, during=interrupt_training(signal.SIGINT), codes=(),
                           line=""),
    "compare-term": Command("compare.py gets SIGTERM", COMPARE, during=interrupt_training(signal.SIGTERM), codes=(),
                            line=""),
    "shm-small": shm("24m"),
    "shm-tiny": shm("512k"),
    "shm-left": Command("all ranks are killed: what `doctor.py --remove-segments` leaves in /dev/shm",
                        f'unshare --mount --pid --fork --mount-proc bash -c "{KILLED_THEN_AGAIN}"', GOES_ON,
                        check=shared_memory_is_empty),
}  # fmt: skip
