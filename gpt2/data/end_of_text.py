"""Split documents at GPT-2's end-of-text where a text spells it out, as TinyStories does.

It is ordinary text, unless --split-documents is given: then a document ends there, and neither document includes it.
"""

from collections.abc import Iterable, Iterator

from gpt2.data.tokenizers import END_OF_TEXT

SPLIT_HELP = f"end a document at each {END_OF_TEXT} in the text (else it is ordinary text)"
READ_AS_TEXT = f"{END_OF_TEXT} is read as ordinary text; with --split-documents a document ends there"

OF_THE_FILES = "of the files"  # for Remarks


def split_documents(chunks: Iterable[tuple[bool, str]]) -> Iterator[tuple[bool, str]]:
    """Yield chunks in which each end-of-text begins a new document. chunks: as in gpt2/data/documents.py.

    A possible beginning of an end-of-text is held back until the next chunk.
    """
    begins = False
    held = ""
    for begins_document, chunk in chunks:
        if begins_document:
            if begins or held:
                yield begins, held
            begins = True
            held = ""
        *ended, held = (held + chunk).split(END_OF_TEXT)
        for text in ended:
            yield begins, text
            begins = True
        complete = len(held) - unfinished(held)
        if complete:
            yield begins, held[:complete]
            begins = False
            held = held[complete:]
    if begins or held:
        yield begins, held


def unfinished(text: str) -> int:
    """Return how many characters at the end of the text may begin an end-of-text."""
    longest = min(len(text), len(END_OF_TEXT) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(END_OF_TEXT[:size])), 0)
