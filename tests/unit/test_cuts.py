"""gpt2/data/cuts.py: a text in pieces has the tokens that tiktoken finds in all of it, wherever the pieces end."""

import random
import re
from itertools import product

import pytest
import tiktoken

from gpt2.data import cuts
from gpt2.data import inputs as text_inputs
from gpt2.data.texts import tokens_of
from gpt2.data.tokenizers import load_tokenizer
from scripts.preparation import batches as prepare_batches
from tests.support.prepared import nonsense, use_vocabulary
from tests.unit.test_tokenizers import needs_vocabulary

LINE_ENDS = ["\n", "\r\n", "\r", "\x85", "\u2028", "\u3000", "。"]
# A character of every class, and what the tokenizer or Python treats on its own.
SOME = "a1! \n'sl.|\u3000字。é\u0301\x1c"


@pytest.fixture
def gpt2(monkeypatch):
    use_vocabulary(monkeypatch)
    return load_tokenizer("gpt2")


@needs_vocabulary
def test_no_cut_changes_a_token(gpt2):
    """Every text of up to three characters of SOME, and of a cut for any text also where the text ends soon after."""
    tokens = {text: gpt2.encode_ordinary(text) for n in range(4) for text in map("".join, product(SOME, repeat=n))}
    anywhere, complete = re.compile(cuts.ANYWHERE), re.compile(cuts.IN_COMPLETE_TEXT)
    found = 0
    for text in tokens:
        for cut in range(1, len(text)):
            if complete.match(text, cut - 1):
                assert tokens[text[:cut]] + tokens[text[cut:]] == tokens[text]
                found += 1
            if anywhere.match(text, cut - 1):
                assert all(
                    tokens[text[:cut]] + tokens[text[cut:end]] == tokens[text[:end]]
                    for end in range(cut + 1, len(text))
                )
    assert found > 2000


@pytest.mark.parametrize(
    ("pattern", "characters"), [(r"\s", cuts.WHITE), (r"\p{L}", cuts.LETTERS), (r"\p{N}", cuts.DIGITS)]
)
def test_characters_have_the_class_that_tiktoken_gives_them(pattern, characters):
    every = "".join(chr(code) for code in range(1 << 16) if not 0xD800 <= code < 0xE000)
    ranks = {bytes([value]): value for value in range(256)}
    encoding = tiktoken.Encoding(name="class", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    of_class = set(encoding.decode(encoding.encode_ordinary(every)))
    assert set(re.findall(f"[{characters}]", every)) <= of_class
    assert not set(re.findall(f"[{cuts.SIGNS}]", every)) & of_class
    if characters == cuts.WHITE:
        assert set(re.findall(f"[{characters}]", every)) == of_class


def prepared_tokens(path, border: int, encoding) -> dict[str, list[int]]:
    """By split, of a file that prepare.py reads."""
    found = {"train": [], "val": []}
    pieces = prepare_batches.read_pieces(text_inputs.file_of(path), "text")
    for batch in prepare_batches.batches(pieces, border):
        found[batch.split] += prepare_batches.tokenize(batch, encoding).tolist()
    return found


@needs_vocabulary
@pytest.mark.parametrize("line_end", LINE_ENDS)
def test_pieces_have_the_tokens_of_the_whole(tmp_path, monkeypatch, gpt2, line_end):
    """At drawn sizes of blocks and pieces, and with the border to validation at any character."""
    draw = random.Random(line_end)
    text = nonsense(150) + "".join("字" * draw.randint(0, 9) + line_end * draw.randint(1, 3) for _ in range(40))
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode())
    for _ in range(40):
        border = draw.randint(0, len(text))
        monkeypatch.setattr(text_inputs, "BLOCK_BYTES", draw.randint(1, 40))
        monkeypatch.setattr(prepare_batches, "BATCH_CHARACTERS", draw.randint(1, 40))
        expected = {"train": gpt2.encode_ordinary(text[:border]), "val": gpt2.encode_ordinary(text[border:])}
        assert prepared_tokens(path, border, gpt2) == expected
        pieces = list(cuts.pieces_of(text, draw.randint(1, 40)))
        assert [token for piece in pieces for token in gpt2.encode_ordinary(piece)] == gpt2.encode_ordinary(text)


@pytest.mark.parametrize("line_end", LINE_ENDS)
def test_a_long_text_without_spaces_is_cut(tmp_path, monkeypatch, line_end):
    monkeypatch.setattr(prepare_batches, "BATCH_CHARACTERS", 100)
    monkeypatch.setattr(prepare_batches, "LONGEST_RUN", 300)
    path = tmp_path / "a.txt"
    path.write_bytes((("字" * 70 + line_end) * 50).encode())
    pieces = [text for _, text in prepare_batches.read_pieces(text_inputs.file_of(path), "text")]
    assert max(map(len, pieces)) <= 100
    assert "".join(pieces) == path.read_bytes().decode()


@needs_vocabulary
@pytest.mark.parametrize("white", [" ", "\n"])
def test_more_white_space_than_tiktoken_takes(tmp_path, gpt2, white):
    """It fails at a million in a row that a word follows. The last belongs to the word, the others are one match."""
    text = "x" + white * 1_100_000 + "y"
    expected = gpt2.encode_ordinary(text[:-2]) + gpt2.encode_ordinary(text[-2:])
    assert tokens_of(text, gpt2).tolist() == expected
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode())
    assert prepared_tokens(path, len(text), gpt2)["train"] == expected
