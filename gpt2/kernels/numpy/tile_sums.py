"""The sums of one tile of a product, held in registers: LLVM code that avx512_bf16.py and avx2.py share."""

from gpt2.kernels.numpy import llvm_vectors as llvm

WRITE, ADD, ROUND = 0, 1, 2  # modes: write a tile's sums as float32, add them, or write them as bfloat16


def sums_in_registers(build, kind, rows: int, vectors: int, count, at_once: int, a, b, panel_bytes, add):
    """Return sums[row][vector], of LLVM's vector type `kind`, over `count` numbers (or pairs) of two panels.

    a, b: the panels' addresses. panel_bytes: bytes of one number (or pair) of all rows, and of all columns.
    add(sums, a, b): returns the sums plus the products of the next at_once numbers at a and b.
    """
    before, loop, after = build.block, build.append_basic_block("loop"), build.append_basic_block("after")
    build.branch(loop)
    build.position_at_end(loop)
    left, a_here, b_here = variables = [build.phi(llvm.I64) for _ in range(3)]
    sums = [[build.phi(kind) for _ in range(vectors)] for _ in range(rows)]
    new = add(sums, a_here, b_here)
    steps = -at_once, *(at_once * number for number in panel_bytes)
    for variable, start, step in zip(variables, (count, a, b), steps, strict=True):
        variable.add_incoming(start, before)
        variable.add_incoming(build.add(variable, llvm.I64(step)), loop)
    for row in range(rows):
        for v in range(vectors):
            sums[row][v].add_incoming(kind(None), before)
            sums[row][v].add_incoming(new[row][v], loop)
    build.cbranch(build.icmp_signed(">", left, llvm.I64(at_once)), loop, after)
    build.position_at_end(after)
    return new


def for_each_mode(build, mode, store):
    """Generate a switch over `mode` that calls store(case) for WRITE, ADD and ROUND."""
    end = build.append_basic_block("end")
    choice = build.switch(mode, end)
    for case in (WRITE, ADD, ROUND):
        block = build.append_basic_block("store")
        choice.add_case(llvm.I64(case), block)
        build.position_at_end(block)
        store(case)
        build.branch(end)
    build.position_at_end(end)
