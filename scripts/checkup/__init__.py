"""The parts of doctor.py. A subject's file holds the facts that each rank gathers and the checks of these facts.

facts.py        gathering facts with a time limit, and questions about the facts of all ranks
software.py, machine.py, network.py, gpus.py    the subjects: SECTIONS of facts, CHECKS
together.py     what the ranks measure together          report.py      problems, the printed text, the verdict
"""
