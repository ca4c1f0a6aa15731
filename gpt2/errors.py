"""UserError, the one exception that means a mistake of the user, and the conversion of an OSError into it."""

from contextlib import contextmanager


class UserError(Exception):
    """Invalid input. The text is one line: the value found, the value expected, and advice.

    Scripts print it without a traceback, once for all ranks, and exit with code 2.
    """


@contextmanager
def file_errors(path, advice: str):
    """Turn an OSError in the block into a UserError about `path` that ends with `advice`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}: {advice}") from error
