"""What doctor.py is made of: a file a subject holds the facts that each rank gathers, and the checks over all of them.

facts.py        gathering them, with a time limit        findings.py    findings, and asking the facts of all ranks
software.py, machine.py, network.py, gpus.py    the subjects: SECTIONS of facts, CHECKS
together.py     what the ranks measure together          report.py      the text, and the verdict
"""
