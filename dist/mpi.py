"""`MPI` of mpi4py, as everyone here imports it.

Importing it does not start MPI: dist.world.start_mpi does that, so that `--help` answers on a login node where MPI
cannot start. Where no MPI library can be loaded MPI is None: a strategy's declaration can be read there, and programs
such as advise.py and diagnose.py need no more.
"""

try:
    import mpi4py

    mpi4py.rc(initialize=False, finalize=True)
    from mpi4py import MPI
except (ImportError, RuntimeError):  # mpi4py's wheels find the library when MPI is imported, and raise RuntimeError
    MPI = None

__all__ = ["MPI"]
