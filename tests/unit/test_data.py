"""Token shards and the stream of windows, against bytes and lists made by hand."""

import errno
import os
import random
import resource
import struct
from types import SimpleNamespace

import numpy as np
import pytest

from gpt2.data.shards import open_shard, open_shards, write_shard
from gpt2.data.windows import SCAN_TOKENS, Windows, check, check_tokens
from gpt2.errors import UserError
from scripts.training.start import check_same_run
from tests.support.refusal import refusal

TOKENS = [1, 2, 300, 50256, 65535]
SHARD = struct.pack("<256i", 20240520, 1, 5, *[0] * 253) + struct.pack("<5H", *TOKENS)


def with_header(content: bytes, **fields: int) -> bytes:
    """The file's content with some header numbers changed: with_header(SHARD, i1=2) is another version."""
    changed = bytearray(content)
    for name, value in fields.items():
        struct.pack_into("<i", changed, 4 * int(name[1:]), value)
    return bytes(changed)


# Shards


def test_reads_a_shard_made_by_hand(tmp_path):
    (tmp_path / "a.bin").write_bytes(SHARD)
    shard = open_shard(tmp_path / "a.bin")
    assert shard.path == tmp_path / "a.bin"
    assert len(shard) == 5
    tokens = shard[:]
    assert tokens.dtype == np.uint16
    assert tokens.tolist() == [1, 2, 300, 50256, 65535]
    assert shard[1:3].tolist() == [2, 300]
    assert shard[3:9].tolist() == [50256, 65535]
    assert shard[5:9].tolist() == shard[3:2].tolist() == []
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 0


@pytest.mark.parametrize("tokens", [*(np.array(TOKENS, f"u{n}") for n in (2, 4, 8)), np.repeat(TOKENS, 2)[::2], TOKENS])
def test_writes_the_same_bytes(tmp_path, tokens):
    """Of any integer dtype, with gaps, or a list."""
    write_shard(tmp_path / "a.bin", tokens)
    assert (tmp_path / "a.bin").read_bytes() == SHARD
    assert [path.name for path in tmp_path.iterdir()] == ["a.bin"]


@pytest.mark.parametrize(
    ("content", "facts"),
    [
        (b"", ["is empty", "token shard"]),
        (SHARD[:1000], ["1000 bytes", "1024"]),
        (with_header(SHARD, i0=7), ["begins with 7", "20240520"]),
        (with_header(SHARD, i0=20240326), ["model checkpoint", "--init"]),
        (with_header(SHARD, i0=20240801), ["Llama 3", "uint32"]),
        (with_header(SHARD, i1=2), ["version 2", "expected 1"]),
        (with_header(SHARD, i2=0), ["promises 0 tokens"]),
        (with_header(SHARD, i2=-5), ["promises -5 tokens"]),
        (SHARD[:-2], ["1032 bytes", "2 too few", "5 tokens", "1034 bytes"]),
        (SHARD + b"xyz", ["1037 bytes", "3 too many"]),
    ],
)
def test_refuses_a_damaged_shard(tmp_path, content, facts):
    path = tmp_path / "a.bin"
    path.write_bytes(content)
    message = refusal(open_shard, path)
    for fact in [str(path), *facts]:
        assert fact in message


@pytest.mark.parametrize(("tokens", "fact"), [([5, 65536], "65536"), ([-1, 5], "-1"), ([], "0 tokens")])
def test_refuses_to_write_what_does_not_fit_and_keeps_the_old_file(tmp_path, tokens, fact):
    path = tmp_path / "a.bin"
    path.write_bytes(SHARD)
    assert fact in refusal(write_shard, path, np.array(tokens, np.int64))
    assert path.read_bytes() == SHARD


def test_a_failed_rename_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(*paths):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "replace", fail)
    assert "cross-device" in refusal(write_shard, tmp_path / "a.bin", [1])
    assert list(tmp_path.iterdir()) == []


def test_a_pattern_gives_shards_in_sorted_order(tmp_path):
    for number in (10, 2, 1):
        write_shard(tmp_path / f"train_{number:03}.bin", [number])
    write_shard(tmp_path / "val_000.bin", [9])
    assert [int(shard[:1][0]) for shard in open_shards(str(tmp_path / "train_*.bin"))] == [1, 2, 10]
    assert "no file matches" in refusal(open_shards, str(tmp_path / "test_*.bin"))
    write_shard(tmp_path / "odd[1].bin", [7])
    assert [int(shard[:1][0]) for shard in open_shards(str(tmp_path / "odd[1].bin"))] == [7]


def test_a_removed_or_replaced_file_is_read_on_as_it_was(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(SHARD)
    shard = open_shard(path)
    write_shard(path, [7, 8, 9, 10, 11])
    assert shard[:].tolist() == [1, 2, 300, 50256, 65535]
    path.unlink()
    assert shard[:2].tolist() == [1, 2]


def cut(path):
    os.truncate(path, len(SHARD) - 4)


def add_to(path):
    path.write_bytes(SHARD + SHARD)


def write_in_place(path):
    with open(path, "r+b") as file:
        file.seek(1024)
        file.write(b"\x07")


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        (cut, ["1030 bytes", "expected the 1034"]),
        (add_to, ["2068 bytes", "expected the 1034"]),
        (write_in_place, ["written to at 20", "expected it to stay"]),
    ],
)
def test_a_changed_file_is_refused(tmp_path, change, facts):
    path = tmp_path / "a.bin"
    path.write_bytes(SHARD)
    os.utime(path, ns=(0, 0))  # the file is old, so that a change is another time however coarse the clock
    windows = Windows([open_shard(path)], 2)
    assert read(windows, 0, 1) == [[1, 2, 300]]
    change(path)
    message = refusal(read, windows, 0, 1)
    for fact in [str(path), *facts, "--resume"]:
        assert fact in message


def test_a_file_that_is_cut_while_it_is_read(tmp_path, monkeypatch):
    """Its size is asked for after its tokens."""
    path = tmp_path / "a.bin"
    path.write_bytes(SHARD)
    shard, pread = open_shard(path), os.pread

    def cut_then_read(*arguments):
        cut(path)
        return pread(*arguments)

    monkeypatch.setattr(os, "pread", cut_then_read)
    assert "1030 bytes" in refusal(shard.__getitem__, slice(0, 2))


# Windows


def make_shards(*lengths: int) -> list[np.ndarray]:
    """Shards whose tokens are all different, so that a token tells where it was read."""
    tokens = np.arange(sum(lengths), dtype=np.uint16)
    return np.split(tokens, np.cumsum(lengths)[:-1])


def windows_in_order(shards, T: int) -> list[list[int]]:
    """All windows of an unshuffled epoch, the slow way."""
    found = []
    for shard in shards:
        start = 0
        while start + T + 1 <= len(shard):
            found.append([int(token) for token in shard[start : start + T + 1]])
            start += T
    return found


def read(windows: Windows, first: int, count: int) -> list[list[int]]:
    """Windows as lists of T+1 tokens; checks that the targets are the inputs moved by one."""
    T = windows.sequence_length
    inputs, targets = np.full((count, T), -1, np.int32), np.full((count, T), -1, np.int32)
    windows.read(first, inputs, targets)
    assert (inputs[:, 1:] == targets[:, :-1]).all()
    return np.hstack([inputs, targets[:, -1:]]).tolist()


@pytest.mark.parametrize("T", [1, 3, 4, 8])
@pytest.mark.parametrize("lengths", [(9,), (17, 9, 30), (1, 16, 2, 4, 33), (5, 5, 5, 25)])
def test_windows_in_order_match_the_slow_enumeration(lengths, T):
    shards = make_shards(*lengths)
    expected = windows_in_order(shards, T)
    windows = Windows(shards, T)
    assert windows.count == len(expected) == sum((length - 1) // T for length in lengths)
    assert read(windows, 0, 2 * len(expected) + 1) == [*expected, *expected, expected[0]]


@pytest.mark.parametrize("T", [1, 3, 4, 8])
@pytest.mark.parametrize("lengths", [(9,), (17, 9, 30), (1, 16, 2, 4, 33), (5, 5, 5, 25)])
def test_a_shuffled_epoch_holds_each_window_of_its_offset_once(lengths, T):
    shards = make_shards(*lengths)
    windows, orders, offsets = Windows(shards, T, shuffle=True, seed=3), set(), set()
    for epoch in range(8):
        found = read(windows, epoch * windows.count, windows.count)
        candidates = [shuffled_epoch(shards, T, offset) for offset in range(T)]
        matching = [offset for offset in range(T) if candidates[offset] == sorted(found)]
        assert matching
        offsets.add(matching[0])
        orders.add(str(found))
    if windows.count > 4:
        assert len(orders) == 8
    if T == 8 and max(lengths) > 24:
        assert len(offsets) > 2


def shuffled_epoch(shards, T: int, offset: int) -> list[list[int]]:
    """The sorted windows of a shuffled epoch: from `offset` on, and from 0 where that leaves one too few."""
    found = []
    for shard in shards:
        inside = windows_in_order([shard[offset:]], T)
        found += inside
        if len(inside) < (len(shard) - 1) // T:
            found.append([int(token) for token in shard[: T + 1]])
    return sorted(found)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_the_stream_does_not_depend_on_the_number_of_ranks(shuffle, ranks):
    shards, batch = make_shards(40, 23, 57), 12
    whole = read(Windows(shards, 4, shuffle, seed=5), 0, 5 * batch)
    each = [Windows(shards, 4, shuffle, seed=5) for _ in range(ranks)]
    share = batch // ranks
    split_up = [read(each[rank], step * batch + rank * share, share) for step in range(5) for rank in range(ranks)]
    assert [window for part in split_up for window in part] == whole


def test_any_window_can_be_read_directly():
    shards = make_shards(40, 23, 57)
    whole = read(Windows(shards, 4, True, seed=5), 0, 150)
    numbers = list(range(150))
    random.Random(0).shuffle(numbers)
    again = Windows(shards, 4, True, seed=5)
    assert all(read(again, number, 1) == [whole[number]] for number in numbers)
    assert read(again, 10**12, 1) == read(Windows(shards, 4, True, seed=5), 10**12, 1)


def test_another_seed_gives_another_order():
    shards = make_shards(400)
    assert read(Windows(shards, 4, True, seed=1), 0, 99) != read(Windows(shards, 4, True, seed=2), 0, 99)


def test_refuses_impossible_windows(tmp_path):
    assert "sequence length is 0" in refusal(Windows, make_shards(9), 0)
    assert "seed is -1" in refusal(Windows, make_shards(9), 4, True, -1)
    write_shard(tmp_path / "a.bin", np.arange(8))
    message = refusal(Windows, [open_shard(tmp_path / "a.bin"), *make_shards(3)], 8)
    for fact in [str(tmp_path / "a.bin"), "1 more", "11 tokens", "at most 8", "expected one of 9"]:
        assert fact in message
    assert "no shards" in refusal(Windows, [], 8)


def test_refuses_a_stream_shorter_than_a_global_batch():
    windows = Windows(make_shards(33, 17), 8)
    check(windows, 6, 50)
    message = refusal(check, windows, 7, 50)
    for fact in ["50 tokens", "6 windows of 8", "at least 7", "--batch-size"]:
        assert fact in message


def test_refuses_a_token_beyond_the_vocabulary(tmp_path):
    tokens = np.arange(3_000_000) % 256
    tokens[2_500_000], tokens[2_900_000] = 256, 300
    write_shard(tmp_path / "a.bin", [1, 2, 3])
    write_shard(tmp_path / "b.bin", tokens)
    shards = open_shards(str(tmp_path / "*.bin"))
    message = refusal(check_tokens, shards, 256)
    for fact in [str(tmp_path / "b.bin"), "token 2500000 is 256", "0 to 255", "--vocab-size"]:
        assert fact in message
    check_tokens(shards, 301)
    assert "token 2500000 is 256" in refusal(check, Windows(shards, 8), 4, 256)


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 50])
def test_one_part_of_the_scan_finds_the_token(parts):
    for position in (0, 1, 20, 39):
        tokens = np.zeros(40, np.uint16)
        tokens[position] = 9
        messages = []
        for part in range(parts):
            try:
                check_tokens([tokens], 9, part, parts)
            except UserError as error:
                messages.append(str(error))
        assert len(messages) == 1
        assert f"shard 0: token {position} is 9" in messages[0]


# What tells one data set from another


def content_of(shards, parts: int = 1) -> int:
    return Windows(shards, 8).facts(sum(check_tokens(shards, 256, part, parts) for part in range(parts)))["content"]


@pytest.fixture
def long_shards():
    """Three blocks and a bit, two tokens, one block and a bit."""
    random_tokens = np.random.default_rng(0).integers(0, 256, 5 * SCAN_TOKENS).astype(np.uint16)
    return np.split(random_tokens, [3 * SCAN_TOKENS + 7, 3 * SCAN_TOKENS + 9])


@pytest.mark.parametrize("parts", [2, 3, 4, 50])
def test_any_number_of_ranks_finds_the_same_content(long_shards, parts):
    assert content_of(long_shards, parts) == content_of(long_shards)


def test_any_other_content_is_noticed(long_shards):
    first, second, third = long_shards
    blocks = [first[:SCAN_TOKENS], first[SCAN_TOKENS : 2 * SCAN_TOKENS], first[2 * SCAN_TOKENS :]]
    changed = first.copy()
    changed[SCAN_TOKENS + SCAN_TOKENS // 2] ^= 1
    others = [
        [changed, second, third],
        [np.concatenate([blocks[1], blocks[0], blocks[2]]), second, third],
        [second, first, third],
        [first, third, second],
        [first, np.concatenate([second, third])],
    ]
    contents = [content_of(shards) for shards in [long_shards, *others]]
    assert len(set(contents)) == len(contents)


def test_a_run_goes_on_with_the_same_data_alone():
    facts = {name: 0 for name in ("model", "global_batch", "seq_len", "shuffle", "seed")}
    data = {"shards": 1, "tokens": 9000, "crc32": 5, "content": 1}
    checkpoint = SimpleNamespace(path="step-1", facts=facts | {"data": data})
    check_same_run(checkpoint, facts | {"data": dict(data)})
    for change in ({"content": 2}, {"tokens": 8}):
        assert "change the training data" in refusal(check_same_run, checkpoint, facts | {"data": data | change})
    del checkpoint.facts["seq_len"]
    assert "its seq_len is None, this run's 0" in refusal(check_same_run, checkpoint, facts | {"data": data})


def test_more_shards_than_a_process_may_usually_open(tmp_path):
    """The limit that a shell sets is raised to the one that the system sets."""
    for number in range(40):
        write_shard(tmp_path / f"{number:02}.bin", [number, 1])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard))
    try:
        assert [int(shard[:1][0]) for shard in open_shards(str(tmp_path / "*.bin"))] == [*range(40)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
