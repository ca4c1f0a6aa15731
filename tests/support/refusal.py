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


def refusal_of_all(comm, capsys, function, *arguments) -> str:
    """The one error line with which the call must end all ranks, with code 2. Rank 0 prints it, and no other rank."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        function(*arguments)
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    errors = [line for line in printed.splitlines() if line.startswith("error: ")]
    assert len(errors) == (comm.rank == 0), printed
    assert "Traceback" not in printed
    return comm.bcast(errors)[0]
