"""Where a text may be cut so that the pieces' tokens, one after another, are the tokens of the whole text.

GPT-2's tokenizer divides a text by a regular expression (encoder.py in the openai/gpt-2 repository) and encodes each
match on its own. So a text may be cut where a match always ends, whatever surrounds it:

- between a character that is no white space and white space of any kind;
- between a letter, a digit and any other sign, in any order. An apostrophe is an exception: with the letters behind it,
  as in "it's", it is one match. Only characters that have had their class in every version of Unicode count here. "|"
  is left out, so that no cut divides <|endoftext|>;
- before the last of several white-space characters in a row, if no white space follows: this one belongs to what
  follows. Here the text must go on behind the cut. So this rule is for a text that is complete.
"""

import re
from collections.abc import Iterator

PIECE_CHARACTERS = 1 << 18  # some 25 ms of tokenizing

WHITE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"  # Unicode's White_Space
DIGITS = "0-9"
LETTERS = "A-Za-z\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"  # of Latin, Japanese, Chinese and Korean
SIGNS = r"!-&(-/:-@\[-`{}~\u2026\u3001-\u3003\u3008-\u3011\uff01-\uff0f\uff1a-\uff20"  # without the apostrophe

ANYWHERE = (
    f"[^{WHITE}](?=[{WHITE}])|[{LETTERS}](?=[{DIGITS}{SIGNS}'])|[{DIGITS}](?=[{LETTERS}{SIGNS}'])"
    f"|[{SIGNS}](?=[{LETTERS}{DIGITS}])"
)
IN_COMPLETE_TEXT = f"{ANYWHERE}|[{WHITE}](?=[{WHITE}][^{WHITE}])"


class Cutter:
    """Finds the ends of pieces: each is the last place to cut in `characters` characters, else the first one beyond.

    places: the regular expression of the character before a cut, ANYWHERE or IN_COMPLETE_TEXT.
    """

    def __init__(self, places: str):
        self._last, self._next = re.compile(f"(?s:.*)(?:{places})"), re.compile(places)

    def end_of_piece(self, text: str, start: int, characters: int) -> int:
        """Where the piece that begins at `start` ends; 0 if it needs no cut, or more text to find one.

        More text behind changes no place that was found.
        """
        stop = start + characters
        if len(text) <= stop:
            return 0
        found = self._last.match(text, start, stop + 1) or self._next.search(text, stop)
        return found.end() if found else 0


complete_text = Cutter(IN_COMPLETE_TEXT)


def pieces_of(text: str, characters: int = PIECE_CHARACTERS) -> Iterator[str]:
    """A complete text in pieces of about `characters` characters at most, where it has places to cut."""
    start = 0
    while end := complete_text.end_of_piece(text, start, characters):
        yield text[start:end]
        start = end
    yield text[start:]
