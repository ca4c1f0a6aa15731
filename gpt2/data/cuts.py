"""Cut a text into pieces whose concatenated tokens are the tokens of the whole text.

GPT-2's tokenizer divides a text by a regular expression (encoder.py in the openai/gpt-2 repository) and encodes each
match on its own. So a text may be cut wherever a match must end, whatever the rest of the text:

- between a character that is not white space and white space;
- between two of the classes letter, digit and sign. An apostrophe is an exception: "'s" in "it's" is one match. Only
  characters that have the same class in every version of Unicode count. "|" is left out, to keep <|endoftext|> whole;
- before the last of several white-space characters, if a character that is not white space follows, because that match
  includes the last one. This rule needs the text after the cut, so it is for complete texts only.
"""

import re
from collections.abc import Iterator

PIECE_CHARACTERS = 1 << 18  # takes 25 ms to tokenize

WHITE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"  # Unicode's White_Space
DIGITS = "0-9"
LETTERS = "A-Za-z\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"  # of Latin, Japanese, Chinese and Korean
SIGNS = r"!-&(-/:-@\[-`{}~\u2026\u3001-\u3003\u3008-\u3011\uff01-\uff0f\uff1a-\uff20"  # without the apostrophe

ANYWHERE = (
    f"[^{WHITE}](?=[{WHITE}])|[{LETTERS}](?=[{DIGITS}{SIGNS}'])|[{DIGITS}](?=[{LETTERS}{SIGNS}'])"
    f"|[{SIGNS}](?=[{LETTERS}{DIGITS}])"
)
IN_COMPLETE_TEXT = f"{ANYWHERE}|[{WHITE}](?=[{WHITE}][^{WHITE}])"


def end_of_piece(text: str, start: int, characters: int, places: str) -> int:
    """Return where the piece that begins at `start` ends, or 0 if the text is short or has no cut yet.

    That is at the last possible cut within `characters` characters, or else the first beyond. Appending text does not
    change a cut that was found. places: the regular expression of the character before a cut, ANYWHERE or
    IN_COMPLETE_TEXT.
    """
    stop = start + characters
    if len(text) <= stop:
        return 0
    last = re.compile(f"(?s:.*)(?:{places})")
    found = last.match(text, start, stop + 1) or re.compile(places).search(text, stop)
    return found.end() if found else 0


def pieces_of(text: str, characters: int = PIECE_CHARACTERS) -> Iterator[str]:
    """Yield a complete text in pieces of at most about `characters` characters, as far as it can be cut."""
    start = 0
    while end := end_of_piece(text, start, characters, IN_COMPLETE_TEXT):
        yield text[start:end]
        start = end
    yield text[start:]
