"""UserError, the one exception that means the user's mistake and not ours, and how an OSError becomes one."""

from contextlib import contextmanager


class UserError(Exception):
    """A mistake in what the user gave. Its text is one line: what was found, what was expected, what to do.

    Scripts print it without a traceback, once for all ranks, and end with exit code 2.
    """


@contextmanager
def file_errors(path, advice: str):
    """Turn any OSError of the block into a UserError about `path` that ends in `advice`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}: {advice}") from error
