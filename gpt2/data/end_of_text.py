"""GPT-2's end-of-text written out in a text, as in TinyStories. It is ordinary text, unless --split-documents is given.

Then a document ends there. The end-of-text itself is no part of either document.
"""

from collections.abc import Iterable, Iterator

from gpt2.data.tokenizers import END_OF_TEXT

SPLIT_HELP = f"end a document at each {END_OF_TEXT} in the text (else it is ordinary text)"
READ_AS_TEXT = f"{END_OF_TEXT} is read as ordinary text; with --split-documents a document ends there"

OF_THE_FILES = "of the files"  # for Remarks


def split_documents(chunks: Iterable[tuple[bool, str]]) -> Iterator[tuple[bool, str]]:
    """Begin a document after each end-of-text. chunks: as gpt2/data/documents.py describes them.

    What may be the beginning of an end-of-text is held back until the next chunk.
    """
    begins, held = False, ""
    for begins_document, chunk in chunks:
        if begins_document:
            if begins or held:
                yield begins, held
            begins, held = True, ""
        *ended, held = (held + chunk).split(END_OF_TEXT)
        for text in ended:
            yield begins, text
            begins = True
        complete = len(held) - unfinished(held)
        if complete:
            yield begins, held[:complete]
            begins, held = False, held[complete:]
    if begins or held:
        yield begins, held


def unfinished(text: str) -> int:
    """How many characters at the end of the text an end-of-text may begin with."""
    longest = min(len(text), len(END_OF_TEXT) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(END_OF_TEXT[:size])), 0)
