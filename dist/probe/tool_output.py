"""What another program says, with a limit on the time it may take."""

import subprocess
from contextlib import suppress

LIMIT_S, END_S = 10.0, 1.0


def tool_output(*command: str, limit_s: float = LIMIT_S) -> str | None:
    """What a command prints; None where it is missing, fails or hangs, even if it cannot be killed."""
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except OSError:
        return None
    with process.stdout:
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            with suppress(subprocess.TimeoutExpired):  # one that is stuck in a driver does not even die
                process.wait(END_S)
            return None
    return output.decode(errors="replace") if process.returncode == 0 else None
