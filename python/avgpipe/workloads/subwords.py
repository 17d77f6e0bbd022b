"""Pieces of words, learnt from text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from avgpipe.workloads.libraries import library

_BYTES = 256


class Subwords:
    """Pieces learnt from text with the tokenizers library: byte-level BPE, so every text can be written in them.

    Byte-pair encoding: Sennrich, Haddow, Birch, ACL 2016, arXiv 1508.07909. A word and the space before it belong
    together; the first word of a line has one too, so that a word has the same pieces everywhere.
    """

    SPECIAL = ("<pad>", "<s>", "</s>", "<mask>")
    pad, begin, end, mask = range(4)

    def __init__(self, tokenizer: Any) -> None:
        """Of a ``tokenizers.Tokenizer``; see :meth:`learn`."""
        tokenizer.encode_special_tokens = True  # "<s>" in a text is three signs, not the beginning
        self._tokenizer = tokenizer

    def __reduce__(self) -> tuple[Any, ...]:
        return Subwords, (self._tokenizer,)  # a pickled tokenizer forgets the switch above

    @classmethod
    def learn(cls, lines: Iterable[str], size: int, *, lowercase: bool = False) -> Subwords:
        """Learn from lines. The same lines give the same pieces in every process.

        Args:
            lines: what to learn from.
            size: how many pieces, the special ones and one for each byte among them; a short text gives fewer.
            lowercase: whether all text is lower-cased first.

        Raises:
            ValueError: a size without room for the bytes.
            avgpipe.workloads.libraries.LibraryNotFound: tokenizers is not installed.
        """
        least = len(cls.SPECIAL) + _BYTES
        if size < least:
            raise ValueError(
                f"size must be at least {least}, the {len(cls.SPECIAL)} special pieces and {_BYTES} bytes, "
                f"got {size}"
            )
        tokenizers = library("tokenizers", "a vocabulary of subwords")
        normalizers = tokenizers.normalizers
        prepend = normalizers.Prepend(" ")
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.normalizer = (
            normalizers.Sequence([normalizers.Lowercase(), prepend]) if lowercase else prepend
        )
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=list(cls.SPECIAL),
            initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        tokenizer.train_from_iterator(lines, trainer)
        return cls(tokenizer)

    def __len__(self) -> int:
        return int(self._tokenizer.get_vocab_size())

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """The numbers of each line's pieces, without special ones. An empty line has none."""
        return [encoded.ids for encoded in self._tokenizer.encode_batch(list(lines))]

    def decode(self, rows: Iterable[Sequence[int]]) -> list[str]:
        """The text of each row; special pieces are left out, and bytes that are no UTF-8 become U+FFFD.

        ``decode(encode(lines))`` are the lines again, in lower case where the pieces are.
        """
        texts = self._tokenizer.decode_batch([list(row) for row in rows], skip_special_tokens=True)
        return [text.removeprefix(" ") for text in texts]
