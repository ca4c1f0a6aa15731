"""What a benchmark of exchanges is told: which exchanges, of how many bytes, over which ports."""

import argparse
from pathlib import Path

from scripts.settings.training import OneLineParser
from scripts.settings.units import bytes_per_s, repetitions, sizes

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
    add("--link", type=bytes_per_s, metavar="RATE", help="a node's port, each way: 400mbit, 100gbit (probed)")
    counted = "counted exchanges of each (%(default)s), one before each that is not"
    add("--repeat", type=repetitions, default=repeat, metavar="R", help=counted)
    add("--json", type=Path, metavar="FILE", help="write everything measured to this file")
    return parser


def vector_size(size_bytes: int, ranks: int) -> int:
    """Elements of a vector of at least so many bytes that ranks can cut into whole shards."""
    multiple = SHARD_MULTIPLE * ranks
    return -(-size_bytes // (FLOAT32 * multiple)) * multiple
