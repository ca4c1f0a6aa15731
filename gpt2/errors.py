"""The one exception that means: the user's mistake, not ours."""


class UserError(Exception):
    """A mistake in what the user gave. Its text is one line: what was found, what was expected, what to do.

    Scripts print it without a traceback, once for all ranks, and end with exit code 2.
    """
