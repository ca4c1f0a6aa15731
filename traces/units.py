"""Format numbers with units, for sentences, tables and figures."""


def count_text(number: int, noun: str, ending: str = "s") -> str:
    """Return "1 node", "5 nodes"; with the ending "es" "2 microbatches"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{ending}"


def short_count(number: int) -> str:
    """Shorten a count: 124439808 gives "124.4M", 820 gives "820"."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)


def bytes_text(amount: float, digits: int = 3) -> str:
    """Return "27 MB", "1.2 GB", "340 kB"."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if amount >= size:
            number = amount / size
            return f"{number:.{digits}g} {unit}" if number < 10**digits - 0.5 else f"{number:.0f} {unit}"
    return f"{amount:.0f} bytes"


def seconds_text(seconds: float) -> str:
    """Return "0.95 s", "120 ms", "0.4 ms"."""
    if seconds >= 0.5:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.2g} ms"


def duration_text(seconds: float) -> str:
    """Return "0:07", "12:34", "3:05:00", "2 d 03:05:00"."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours:02}:{minutes:02}:{rest:02}"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def range_text(ends) -> str:
    """Return "225 to 262 ms", "405 ms to 0.54 s", from two numbers of seconds."""
    low, high = map(seconds_text, ends)
    number, unit = low.split()
    return f"{number if high.endswith(f' {unit}') else low} to {high}"


def short_ms(ms: float, digits: int = 2) -> str:
    """Return milliseconds with `digits` significant digits, all digits before the point: 0.4, 4.2, 42, 421."""
    return f"{ms:.{max(0, digits - len(str(int(ms))))}f}"


def mfu_text(mfu: float, peak_underestimated: bool = False) -> str:
    """Return a fraction in two digits: "46%", "4.6%".

    peak_underestimated: a step exceeded the peak, which may have been measured on a busy machine: "at most 97% (...)".
    """
    text = f"{short_ms(100 * mfu)}%"
    return f"at most {text} (peak underestimated)" if peak_underestimated else text


def ratio_text(ratio: float) -> str:
    """Return "1.8 times faster", "8% faster"."""
    return f"{ratio:.1f} times faster" if ratio >= 1.2 else f"{ratio - 1:.0%} faster"


def listed(words: list[str]) -> str:
    """Return "a", "a and b", "a, b and c"."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if words[:-1] else words)
