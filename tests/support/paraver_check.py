"""A reader of Paraver traces that says what is wrong with one. Written from the format, not from our writer."""

import gzip
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

HEADER = re.compile(r"#Paraver \(\d\d/\d\d/\d{4} at \d\d:\d\d\):(\d+)_ns:(\d+)\(([\d,]+)\):1:(\d+)\(([\d:,]+)\),(\d+)")
COLLECTIVE, SIZES = 50000002, {50100001, 50100002, 50100004}
ROOT, IN = 50100003, 50100004
ROOTED = {7, 9}
OPENED_AND_CLOSED = {COLLECTIVE, 90000001, 90000002, 90000003, 40000001}
UNLABELLED = {50100001, 50100002, ROOT, 50100004, 90000002, 90000010, 90000011, 90000012, 90000020}


class Broken(Exception):
    """What is wrong with a trace."""


def demand(holds, what):
    if not holds:
        raise Broken(what)


@dataclass
class Header:
    end: int
    cpu_nodes: list  # of each CPU its node, both counted from 1 (index 0 is CPU 1)
    task_nodes: list
    communicators: list  # of each its tasks; number 1 is index 0


@dataclass
class Trace:
    """states: per task (begin, end, state); events: per task (time, {type: value}), tasks counted from 1."""

    header: Header
    states: dict
    events: dict


def check(prv, same_calls: bool = True) -> Trace:
    """Read PRV and the .pcf and .row beside it; raises Broken. same_calls: on all ranks, as in a run without damage."""
    prv = Path(prv)
    base = str(prv).removesuffix(".gz").removesuffix(".prv")
    opened = gzip.open if prv.suffix == ".gz" else open
    with opened(prv, "rt") as file:
        header = read_header(file)
        trace = Trace(header, defaultdict(list), defaultdict(list))
        read_records(file, trace)
    check_states(trace)
    check_events(trace)
    if same_calls:
        check_collectives(trace)
    check_labels(Path(base + ".pcf").read_text(), trace)
    check_rows(Path(base + ".row").read_text(), header)
    return trace


def read_header(file) -> Header:
    match = HEADER.fullmatch(file.readline().rstrip("\n"))
    demand(match, "the header is not one")
    end, nodes, cpus, tasks, task_list, communicators = match.groups()
    cpus = [int(count) for count in cpus.split(",")]
    demand(len(cpus) == int(nodes), f"{nodes} nodes, but CPUs of {len(cpus)}")
    cpu_nodes = [node for node, count in enumerate(cpus, start=1) for _ in range(count)]
    places = [tuple(map(int, place.split(":"))) for place in task_list.split(",")]
    demand(len(places) == int(tasks), f"{tasks} tasks, but places of {len(places)}")
    demand(all(threads == 1 and 1 <= node <= int(nodes) for threads, node in places), "a task's threads or node")
    demand(len(cpu_nodes) == int(tasks), "not one CPU a rank")
    members = [read_communicator(file.readline(), number) for number in range(1, int(communicators) + 1)]
    demand(members[0] == list(range(1, int(tasks) + 1)), "the first communicator is not that of all ranks")
    demand(all(1 <= task <= int(tasks) for one in members for task in one), "a communicator has a task unknown")
    return Header(int(end), cpu_nodes, [node for _, node in places], members)


def read_communicator(line: str, number: int) -> list[int]:
    match = re.fullmatch(rf"c:1:{number}:(\d+):([\d:]+)\n", line)
    demand(match, f"communicator {number}: {line!r}")
    members = [int(task) for task in match[2].split(":")]
    demand(len(members) == int(match[1]) and members == sorted(set(members)), f"communicator {number}: {line!r}")
    return members


def read_records(file, trace: Trace) -> None:
    header, last, cpus = trace.header, 0, {}
    for line in file:
        demand(re.fullmatch(r"[12](:\d+)+\n", line), f"not a record: {line!r}")
        kind, cpu, application, task, thread, *rest = map(int, line.split(":"))
        demand(application == 1 and thread == 1 and 1 <= task <= len(header.task_nodes), f"object of {line!r}")
        demand(1 <= cpu <= len(header.cpu_nodes), f"CPU of {line!r}")
        demand(header.cpu_nodes[cpu - 1] == header.task_nodes[task - 1], f"the CPU is on another node: {line!r}")
        demand(cpus.setdefault(task, cpu) == cpu, f"the task was on another CPU before: {line!r}")
        demand(last <= rest[0] <= header.end, f"time goes back, or beyond the end: {line!r}")
        last = rest[0]
        if kind == 1:
            demand(len(rest) == 3, f"not a state: {line!r}")
            trace.states[task].append(tuple(rest))
        else:
            demand(len(rest) >= 3 and len(rest) % 2 == 1, f"not an event: {line!r}")
            trace.events[task].append((rest[0], dict(zip(rest[1::2], rest[2::2], strict=True))))
    demand(len(set(cpus.values())) == len(cpus), "two tasks on one CPU")


def check_states(trace: Trace) -> None:
    for task in range(1, len(trace.header.task_nodes) + 1):
        reached = 0
        for begin, end, _ in trace.states[task]:
            demand(begin < end, f"task {task}: a state without length at {begin}")
            demand(begin >= reached, f"task {task}: states overlap at {begin}")
            demand(begin == reached, f"task {task}: no state from {reached} to {begin}")
            reached = end
        demand(reached == trace.header.end, f"task {task}: no state from {reached} to the end")


def check_events(trace: Trace) -> None:
    for task, events in trace.events.items():
        is_open = dict.fromkeys(OPENED_AND_CLOSED, 0)
        for time, pairs in events:
            for kind in OPENED_AND_CLOSED & set(pairs):
                demand(
                    bool(is_open[kind]) != bool(pairs[kind]), f"task {task}: {kind} opened or closed twice at {time}"
                )
                is_open[kind] = pairs[kind]
            if 90000001 in pairs and pairs.get(90000001):
                demand(is_open[40000001], f"task {task}: a phase outside the run at {time}")
        demand(not any(is_open.values()), f"task {task}: not closed at the end: {is_open}")


def check_collectives(trace: Trace) -> None:
    """A communicator's ranks make the same calls in the same order, as far as they come; a rooted one has one root."""
    calls = {task: [pairs for _, pairs in events if pairs.get(COLLECTIVE)] for task, events in trace.events.items()}
    for task, made in calls.items():
        for number, pairs in enumerate(made):
            demand(set(pairs) >= SIZES, f"task {task}: call {number} lacks a size or its communicator")
            members = trace.header.communicators[pairs[IN] - 1]
            demand(task in members, f"task {task}: call {number} is of a communicator that it is not in")
    for number, members in enumerate(trace.header.communicators, start=1):
        own = {task: [pairs for pairs in calls.get(task, []) if pairs[IN] == number] for task in members}
        check_same_calls({task: made for task, made in own.items() if task in calls}, len(members))


def check_same_calls(calls: dict, ranks: int) -> None:
    longest = max(calls.values(), key=len, default=[])
    for task, made in calls.items():
        for number, pairs in enumerate(made):
            demand(pairs[COLLECTIVE] == longest[number][COLLECTIVE], f"task {task}: call {number} is another one")
    shortest = min(map(len, calls.values())) if len(calls) == ranks else 0
    for number in range(shortest):
        roots = sum(ROOT in made[number] for made in calls.values())
        demand(roots == (longest[number][COLLECTIVE] in ROOTED), f"call {number} has {roots} roots")


def check_labels(text: str, trace: Trace) -> None:
    states, types = read_pcf(text)
    for task, found in trace.states.items():
        demand({state for *_, state in found} <= states, f"task {task}: a state without a name")
    for task, events in trace.events.items():
        for time, pairs in events:
            for kind, value in pairs.items():
                demand(kind in types, f"task {task}: type {kind} at {time} has no name")
                demand(kind in UNLABELLED or value in types[kind], f"task {task}: {kind}:{value} has no name")


def read_pcf(text: str) -> tuple[set, dict]:
    """The numbered states, which must have colours, and per event type the values named."""
    states, colours, types, section, current = set(), set(), {}, None, []
    for line in text.splitlines():
        if line in ("DEFAULT_OPTIONS", "DEFAULT_SEMANTIC", "STATES", "STATES_COLOR", "EVENT_TYPE", "VALUES"):
            section = line
            current = [] if line == "EVENT_TYPE" else current
        elif line.strip() and section in ("STATES", "STATES_COLOR"):
            pattern = r"(\d+)\s+\S.*" if section == "STATES" else r"(\d+)\s+\{\d+,\d+,\d+\}"
            demand(match := re.fullmatch(pattern, line), f"pcf: {line!r}")
            (states if section == "STATES" else colours).add(int(match[1]))
        elif line.strip() and section == "EVENT_TYPE":
            demand(match := re.fullmatch(r"\d+\s+(\d+)\s+\S.*", line), f"pcf: {line!r}")
            demand(int(match[1]) < 1 << 31 and int(match[1]) not in types, f"pcf: type {match[1]} again, or too large")
            current.append(int(match[1]))
            types[int(match[1])] = set()
        elif line.strip() and section == "VALUES":
            demand(match := re.fullmatch(r"(\d+)\s+\S.*", line), f"pcf: {line!r}")
            for kind in current:
                types[kind].add(int(match[1]))
    demand(states == colours, "pcf: states and colours differ")
    return states, types


def check_rows(text: str, header: Header) -> None:
    ranks = len(header.task_nodes)
    demand(text.startswith(f"LEVEL CPU SIZE {ranks}\n"), "row: the first line does not give the number of ranks")
    sizes = {"CPU": ranks, "NODE": max(header.task_nodes), "TASK": ranks, "THREAD": ranks}
    for block in text.strip().split("\n\n"):
        title, *names = block.split("\n")
        demand(match := re.fullmatch(r"LEVEL (CPU|NODE|TASK|THREAD) SIZE (\d+)", title), f"row: {title!r}")
        demand(int(match[2]) == len(names) == sizes.pop(match[1], 0), f"row: {match[1]} has {len(names)} names")
    demand(not sizes, f"row: no names of {set(sizes)}")
