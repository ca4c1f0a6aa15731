"""What rank 0 prints: every setting once as a table, a line a step (once a second at most), the end."""

import time
from dataclasses import fields
from itertools import zip_longest

SECONDS_BETWEEN_LINES = 1.0


def settings_table(settings, facts: dict[str, str]) -> str:
    """All settings and the facts that follow from them, aligned, in two columns."""
    rows = [(item.name.replace("_", "-"), getattr(settings, item.name)) for item in fields(settings)]
    cells = [f"{name:<13} {'-' if value is None else value!s:<22}" for name, value in rows]
    half = -(-len(cells) // 2)
    lines = [f"{left} {right}".rstrip() for left, right in zip_longest(cells[:half], cells[half:], fillvalue="")]
    return "\n".join([*(f"{name:<13} {value}" for name, value in facts.items()), "", *lines, ""])


class Progress:
    """Progress lines of rank 0; the first, the last and the validated steps are always printed."""

    def __init__(self, steps: int, print_line):
        self.steps, self.print_line, self.printed_at = steps, print_line, 0.0

    def step(self, record: dict) -> None:
        now = time.monotonic()
        always = "val_loss" in record or record["step"] in (1, self.steps)
        if now - self.printed_at < SECONDS_BETWEEN_LINES and not always:
            return
        self.printed_at = now
        val = f"  val loss {record['val_loss']:.4f}" if "val_loss" in record else ""
        exchange = record["exposed_exchange_s"] / record["step_s"]
        self.print_line(
            f"step {record['step']:>{len(str(self.steps))}}/{self.steps}  loss {record['loss']:.4f}  "
            f"norm {record['grad_norm']:.3f}  lr {record['lr']:.2e}  {record['step_s'] * 1e3:.1f} ms  "
            f"{record['tokens_per_s']:,.0f} tokens/s  exchange {exchange:.0%}{val}"
        )
