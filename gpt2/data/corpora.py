"""The default training text, shakespeare.txt: the same bytes on every machine, so that losses can be compared.

It holds six plays by William Shakespeare (1564-1616): Coriolanus, Richard III, Richard II, Romeo and Juliet, Henry VI
part 3 and The Winter's Tale. It is the beginning of tinyshakespeare (Andrej Karpathy's char-rnn,
data/tinyshakespeare/input.txt), up to the end of the sixth play. The plays are in the public domain.
"""

import hashlib
from pathlib import Path

from gpt2.errors import UserError, file_errors
from gpt2.files import read_bytes

SHAKESPEARE = Path(__file__).with_name("shakespeare.txt")
SHAKESPEARE_SHA256 = "f560ada7082e71cda0fed573d553d16700e05646ee52a9f45131570f8481844c"
OR_ANOTHER = "or give a text of your own to --text"


def shakespeare(path: Path = SHAKESPEARE) -> str:
    """Return the text, 846,170 ASCII characters. UserError: the file is missing, unreadable or another one."""
    with file_errors(path, f"it comes with this project: install it again, {OR_ANOTHER}"):
        content = read_bytes(path)
    found = hashlib.sha256(content).hexdigest()
    if found != SHAKESPEARE_SHA256:
        raise UserError(
            f"{path}: its SHA-256 begins {found[:12]}, expected {SHAKESPEARE_SHA256[:12]}, that of the text which this "
            f"version comes with: install the project again, {OR_ANOTHER}"
        )
    return content.decode("ascii")
