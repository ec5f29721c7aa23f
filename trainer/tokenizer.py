"""The character tokenizer: printable ASCII and the newline, one token each, plus three special tokens.

Every text can be encoded. A character outside the vocabulary becomes `UNKNOWN`, so `decode(encode(text))` is `text` only
for texts of known characters; whoever records a prompt records the text itself, not the decoded tokens.
"""

PAD = 0
EOS = 1
UNKNOWN = 2

_CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))
_ID_OF = {character: index for index, character in enumerate(_CHARACTERS, start=UNKNOWN + 1)}
_TEXT_OF = ["", "", "\N{REPLACEMENT CHARACTER}", *_CHARACTERS]

VOCABULARY_SIZE = len(_TEXT_OF)


def encode(text: str) -> list[int]:
    return [_ID_OF.get(character, UNKNOWN) for character in text]


def decode(tokens: list[int]) -> str:
    """Return the text of `tokens`; `PAD` and `EOS` have none, `UNKNOWN` is U+FFFD."""
    return "".join(_TEXT_OF[token] for token in tokens)
