"""Text tables: the first column is aligned to the left, all others to the right."""

from collections.abc import Callable, Sequence

Column = tuple[str, int, Callable[[dict], str]]  # title, width, function that makes a cell from an entry


class FixedTable:
    """A table with columns of fixed width, for rows that are printed as they are measured.

    label_width: the width of the first column, which has no title. columns: the other columns.
    """

    def __init__(self, label_width: int, columns: Sequence[Column]):
        self.columns = columns
        self.widths = [label_width, *(width for _, width, _ in columns)]

    def head(self) -> str:
        return row_text(["", *(title for title, _, _ in self.columns)], self.widths, " ")

    def row(self, label: str, entry: dict) -> str:
        return row_text([label, *(text(entry) for _, _, text in self.columns)], self.widths, " ")


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return the rows as lines, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(row_text(row, widths, "  ") for row in rows)


def row_text(cells: Sequence[str], widths: Sequence[int], gap: str) -> str:
    first = cells[0].ljust(widths[0])
    others = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
    return gap.join([first, *others])
