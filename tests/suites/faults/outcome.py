"""What became of a run that something failed in, in the words of docs/failures.md."""

STATED_S = 10  # docs/failures.md promises an end within so many seconds: what takes longer is bold


def outcome(row: dict) -> str:
    """ "0.3 s, code 137, 5 lost": seconds to the launcher's end, its exit code, steps that are made again.

    `row`: a row of failure_suite.py. Bold is what nobody may expect.
    """
    if not row["ended"]:
        return "**does not end**"
    if row["went_on"] and row["code"] == 0:
        text = "goes on, step skipped" if row["skipped"] else "goes on"
        return text if row["same"] or row["skipped"] else f"{text}, **other losses**"
    parts = [duration(row), "**code 0**" if row["code"] == 0 else f"code {exit_code(row['code'])}", lost(row)]
    if row["survivors"]:
        parts.append(f"**rank {', '.join(map(str, row['survivors']))} stays**")
    return ", ".join(parts)


def duration(row: dict) -> str:
    if row["went_on"]:
        return "goes on to the end"
    # A launcher that a signal has killed is gone at once: what counts is when the ranks are gone.
    seconds = row["seconds"] if row["code"] >= 0 else row["gone_s"]
    return f"**{seconds:.1f} s**" if seconds > STATED_S else f"{seconds:.1f} s"


def exit_code(code: int) -> int:
    """As a shell counts a process that a signal has ended."""
    return code if code >= 0 else 128 - code


def lost(row: dict) -> str:
    """How many steps the resumed run made again, or why it is not the same run."""
    if row["resumed_code"]:
        return f"not resumed: code {row['resumed_code']}"
    if not row["same"]:
        return "**resumed with other losses**"
    return f"{row['last_step'] - row['resumed_from']} lost" if row["last_step"] else "all lost"


def summary(rows: list[dict]) -> str:
    """The sentence below the table."""
    same = sum(row["same"] for row in rows)
    refused = sum(row["resumed_code"] == 2 for row in rows)
    skipped = sum(bool(row["skipped"]) for row in rows)
    left = sum(len(row["left_over"]) for row in rows)
    return (
        f"Of {len(rows)} runs {same} ended with the losses of an undisturbed run, bit for bit, {skipped} with others, "
        f"as a step was skipped, and {refused} were not taken up, as no checkpoint was good. Half-written files left "
        f"after that: {left}."
    )
