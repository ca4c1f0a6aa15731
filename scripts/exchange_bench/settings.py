"""What bench_exchange.py and check_model.py are both told: which exchanges, of how many bytes, over which ports."""

import argparse
import re
from pathlib import Path

from scripts.cluster.hosts import ClusterError
from scripts.cluster.network import bits_per_s
from scripts.settings.training import OneLineParser

UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "KI": 2**10, "MI": 2**20, "GI": 2**30}
SHARD_MULTIPLE = 16  # elements, as in training: a rank's shard begins on a cache line
FLOAT32 = 4


def exchange_parser(description: str, repeat: int) -> OneLineParser:
    """repeat: how many exchanges count by default."""
    parser = OneLineParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--strategies", default="all", metavar="all|LIST", help="by name, with commas (all)")
    add("--bytes", type=sizes, default="8MB", metavar="D[,D2]", help="of one gradient vector in float32 (8MB)")
    add("--link", type=link_rate, metavar="RATE", help="a node's port, each way: 400mbit, 100gbit (probed)")
    counted = "counted exchanges of each (%(default)s), one before each that is not"
    add("--repeat", type=repetitions, default=repeat, metavar="R", help=counted)
    add("--json", type=Path, metavar="FILE", help="write everything measured to this file")
    return parser


def sizes(text: str) -> list[int]:
    """[8000000, 64000000] for "8MB,64MB"."""
    found = [re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?I?)B?", word, re.IGNORECASE) for word in text.split(",")]
    if not all(found) or not all(match[2].upper() in UNITS and float(match[1]) > 0 for match in found):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of sizes: expected 8MB, or 8MB,64MiB, or 8000000")
    return [int(float(match[1]) * UNITS[match[2].upper()]) for match in found]


def link_rate(text: str) -> float:
    """50e6, bytes/s, for "400mbit"."""
    try:
        return bits_per_s(text) / 8
    except ClusterError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def repetitions(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} rounds, expected 1 or more")
    return int(text)


def vector_size(size_bytes: int, ranks: int) -> int:
    """Elements of a vector of at least so many bytes that ranks can cut into whole shards."""
    multiple = SHARD_MULTIPLE * ranks
    return -(-size_bytes // (FLOAT32 * multiple)) * multiple
