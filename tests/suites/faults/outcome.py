"""What became of a run that something failed in, in the words of docs/failures.md, and whether that is right."""

import re

from tests.suites.faults.case import ENDS, GOES_ON, INTERRUPTED, Case

STATED_S = 10  # docs/failures.md promises an end within so many seconds: what takes longer is bold


def outcome(row: dict) -> str:
    """ "0.3 s, code 137, 5 lost": seconds to the launcher's end, its exit code, steps that are made again.

    `row`: a row of failure_suite.py. Bold is what nobody may expect.
    """
    text = ", ".join([*what_became(row), *second_job(row)])
    return ", ".join([text, *(f"**{words}**" for words in row["wrong"] if words not in text)])


def what_became(row: dict) -> list[str]:
    if not row["ended"]:
        return ["**does not end**"]
    if row["went_on"] and row["code"] == 0:
        text = "goes on, step skipped" if row["skipped"] else "goes on"
        if (restarts := row.get("starts", 1) - 1) > 0:
            text += f", {restarts} restart{'s' * (restarts > 1)}"
        return [text if row["same"] or row["skipped"] else f"{text}, **other losses**"]
    return [duration(row), "**code 0**" if row["code"] == 0 else f"code {exit_code(row['code'])}", lost(row)]


def second_job(row: dict) -> list[str]:
    """What became of another job beside this one, if there was one."""
    second = row["second"]
    if not second:
        return []
    if not second["ended"]:
        return ["the second: **does not end**"]
    return [f"the second: {second['seconds']:.1f} s, code {exit_code(second['code'])}"]


def judge(row: dict, case: Case) -> list[str]:
    """In words, what is not as `case` expects it."""
    found = ["no restart"] * (case.supervised and row["starts"] < 2)
    found += [*row["found"], *(f"rank {rank} stays" for rank in row["survivors"])]
    found += [f"{name} stays" for name in row["left_over"]]
    # A run that a signal has ended has a summary, too; that it is not done its code says.
    found += ["summary.json says that it is done"] * (row["stale"] and row["code"] != INTERRUPTED)
    if case.line and not case.by_launcher and not re.search(case.line, row["said"]):
        found.append("another line" if row["said"] else "no line")
    if row["ended"]:
        found += wrong_end(row, case)
    elif not case.by_launcher:
        found.append("does not end")
    return found + wrong_second(row, case) + wrong_afterwards(row, case)


def wrong_end(row: dict, case: Case) -> list[str]:
    """What is wrong about when the job ended, with which code."""
    if case.expected == GOES_ON:
        return [] if row["went_on"] and row["code"] == 0 else ["expected to go on"]
    found = []
    if row["went_on"] == (case.expected == ENDS):
        found.append(f"expected: {case.expected}")
    if row["code"] == 0 and not case.by_launcher:
        found.append("code 0")
    elif case.code is not None and exit_code(row["code"]) != case.code and not is_srun(row):
        found.append(f"expected code {case.code}")
    # What is wrong from the first is found by a job that has started: so long as a healthy one takes for it, too.
    within_s = case.within_s + (0 if row["began"] else row["start_s"])
    if case.expected == ENDS and not case.by_launcher and seconds(row) > within_s:
        found.append(f"later than {within_s:.1f} s")
    return found


def wrong_second(row: dict, case: Case) -> list[str]:
    """What is wrong with the job that was started beside this one."""
    second = row["second"]
    if not second or not second["ended"]:
        return ["the second: does not end"] if second else []
    found = [f"expected code {case.second} of the second"] * (second["code"] != case.second)
    within_s = case.within_s + row["start_s"]
    return found + [f"later than {within_s:.1f} s"] * (case.second != 0 and second["seconds"] > within_s)


def wrong_afterwards(row: dict, case: Case) -> list[str]:
    """What is wrong with the run that went on."""
    if row["resumed_code"] is None:
        return ["resumed, it does not end"]
    if row["resumed_code"] != case.resumed:
        return [f"expected code {case.resumed} when resumed"]
    return ["other losses"] if not (case.resumed or row["same"] or row["skipped"]) else []


def is_srun(row: dict) -> bool:
    """srun ends with 137 where it has killed another rank a moment later, whatever the first one's code was."""
    return row["launcher"].startswith("srun") and row["code"] == 137


def seconds(row: dict) -> float:
    # A launcher that a signal has killed is gone at once: what counts is when the ranks are gone.
    return row["seconds"] if row["code"] >= 0 else row["gone_s"]


def duration(row: dict) -> str:
    if row["went_on"]:
        return "goes on to the end"
    return f"**{seconds(row):.1f} s**" if seconds(row) > STATED_S else f"{seconds(row):.1f} s"


def exit_code(code: int) -> int:
    """As a shell counts a process that a signal has ended."""
    return code if code >= 0 else 128 - code


def lost(row: dict) -> str:
    """How many steps the resumed run made again, or why it is not the same run."""
    if row["resumed_code"] is None:
        return "**resumed, it does not end**"
    if row["resumed_code"]:
        return f"not resumed: code {row['resumed_code']}"
    if not row["same"]:
        return "**resumed with other losses**"
    if not row["last_step"]:
        return "all lost" if row["began"] else "not begun"
    return f"{row['last_step'] - row['resumed_from']} lost"


def summary(rows: list[dict]) -> str:
    """The sentence below the table."""
    rows = [row for row in rows if "resumed_code" in row]
    same = sum(row["same"] for row in rows)
    refused = sum(row["resumed_code"] == 2 for row in rows)
    skipped = sum(bool(row["skipped"]) for row in rows)
    left = sum(len(row["left_over"]) for row in rows)
    wrong = sum(bool(row.get("wrong")) for row in rows)
    return (
        f"{len(rows)} runs: {same} reached the losses of an undisturbed run, bit for bit; {skipped} skipped a step, so "
        f"their losses differ; {refused} could not be resumed, because no checkpoint was intact. Half-written files "
        f"left behind: {left}. Runs with an unexpected outcome: {wrong}."
    )
