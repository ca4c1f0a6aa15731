"""No test is left out unnoticed: what skipped in every run of pytest, for no reason known here, is an error.

    python tests/suites/check_skips.py FILE...

FILE: what pytest wrote with --skips FILE, one for each run. A test may skip in one if it ran in another: under another
MPI, or with other packages. Each reason beside the number of tests that it kept from running is printed.
"""

import argparse
import json
import re
from collections import Counter
from pathlib import Path

# (where, for what reason) tests may skip although everything is installed that a machine without a GPU can have.
KNOWN = (
    (r"tests/gpu/on_device/", r"no CuPy here"),  # make test-gpu runs them; three of them run on the CPU shim
    (r"tests/gpu/test_cupy_matmul", r"cuBLASLt is not installed"),  # 423 MB; where there is a GPU it is there
)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="what pytest --skips FILE wrote")
    never_ran = skipped_everywhere([json.loads(file.read_text()) for file in parser.parse_args().files])
    for reason, count in Counter(never_ran.values()).most_common():
        print(f"{count:>5} skipped: {reason}")
    if unknown := [address for address, reason in never_ran.items() if not is_known(address, reason)]:
        lines = "\n".join(f"    {address}: {never_ran[address]}" for address in unknown)
        raise SystemExit(
            f"check_skips.py: error: {len(unknown)} tests ran nowhere, for no reason that is known:\n{lines}"
        )


def skipped_everywhere(runs: list[dict[str, str | None]]) -> dict[str, str]:
    """{address: reason} of the tests that no run has run; a file that skips as a whole counts as one."""
    ran = {address for run in runs for address, reason in run.items() if reason is None}
    ran |= {address.partition("::")[0] for address in ran}
    return {address: reason for run in runs for address, reason in run.items() if address not in ran}


def is_known(address: str, reason: str) -> bool:
    return any(re.match(where, address) and re.search(why, reason) for where, why in KNOWN)


if __name__ == "__main__":
    main()
