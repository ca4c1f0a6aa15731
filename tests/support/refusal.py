"""What a user's mistake ends in: one line."""

import pytest

from gpt2.errors import UserError


def refusal(function, *arguments) -> str:
    """The one line of the UserError that the call must end in."""
    with pytest.raises(UserError) as caught:
        function(*arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message
