"""Text into token ids and back, for one model."""

from collections.abc import Sequence
from pathlib import Path

import tokenizers
from tokenizers import AddedToken

from scheduler_svc.errors import ConfigError
from scheduler_svc.service.text.detokenizer import Detokenizer, new_detokenizer
from scheduler_svc.service.text.gguf_header import read_gguf_header
from scheduler_svc.service.text.gguf_tokenizer import build_gguf_tokenizer
from scheduler_svc.service.text.special_text import MARK, SpecialText
from scheduler_svc.service.text.token_bound import read_token_bound
from scheduler_svc.service.text.token_pieces import read_pieces, token_bytes


class Tokenizer:
    """A model's tokenizer. It does not change, and may be used from several threads.

    Cost: encoding takes 0.5 s per megabyte of English, during which other threads run.
    """

    __slots__ = (
        "_backend",
        "_bound",
        "_chat_backend",
        "_chat_ids",
        "_pieces",
        "bos_id",
        "special_text",
        "vocab_size",
    )

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        """Take over a tokenizer of the `tokenizers` library.

        Raises: ConfigError if its decoder is of no known family.
        """
        # Files may ask for truncation, which would shorten prompts without a word.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._pieces = read_pieces(backend)
        self._bound = read_token_bound(backend, self._pieces)
        added = backend.get_added_tokens_decoder()
        self.special_text = SpecialText([t.content for t in added.values() if t.special])
        self._chat_backend, self._chat_ids = _aliased(backend, self.special_text)

        self.vocab_size: int = len(self._pieces.all)
        """Ids are below this. The model's embedding may have more rows."""

        probe = backend.encode("a", add_special_tokens=True)
        self.bos_id: int | None = probe.ids[0] if probe.special_tokens_mask[:1] == [1] else None
        """The token that `encode` puts before a text. None: it puts none."""

    @classmethod
    def from_path(cls, path: Path) -> "Tokenizer":
        """Read `tokenizer.json` of a Hugging Face directory, or rebuild a GGUF file's tokenizer.

        Raises: ConfigError naming the file and what is wrong with it.
        Cost: 0.4 s for a GGUF file with 49,152 tokens.
        """
        if not path.is_dir():
            return cls(build_gguf_tokenizer(read_gguf_header(path).fields))
        file = path / "tokenizer.json"
        if not file.exists():
            raise ConfigError(f"{file} is missing; tokenizers of other formats are not read")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:
            # The library raises bare Exception for whatever it finds wrong.
            raise ConfigError(f"{file}: {error}") from error
        try:
            return cls(backend)
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}") from error

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text; special tokens written out in it become their ids.

        A text that already begins with BOS gets no second one.
        """
        ids = _encode(self._backend, text, add_special_tokens=add_special_tokens)
        if add_special_tokens and self.bos_id is not None and ids[:2] == [self.bos_id] * 2:
            return ids[1:]
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Return the ids of a piece of text; none are added."""
        return _encode(self._backend, text, add_special_tokens=False)

    def piece(self, token_id: int) -> bytes:
        """Return a token's own text, which may be no valid character. Empty: it has none."""
        return token_bytes(self._pieces, token_id)

    def encode_chat(self, rendered: str) -> list[int]:
        """Return the ids of a rendered chat, user strings of which went through `special_text`.

        The template is the whole prompt, as in transformers: nothing is added, BOS neither.
        Special tokens in the template become their ids, those in user strings plain text.
        Words are cut and merged over the whole, as if users' special text were any other.
        """
        if MARK not in rendered:
            return self.encode(rendered, add_special_tokens=False)
        aliased = self.special_text.alias(rendered)
        ids = _encode(self._chat_backend, aliased, add_special_tokens=False)
        return [self._chat_ids.get(id_, id_) for id_ in ids]

    def fewest_tokens(self, text: str) -> int:
        """Return a number of tokens that a text or rendered chat has at least.

        0 if nothing is known. Nothing is encoded: 3 ms for a megabyte.
        """
        return self._bound.fewest_tokens(text.replace(MARK, "").encode())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ids, each of which is at least 0."""
        detokenizer = self.new_detokenizer(skip_special_tokens=skip_special_tokens)
        return detokenizer.push(token_ids) + detokenizer.finish()

    def new_detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """Return a detokenizer for one output, at its start."""
        return new_detokenizer(self._pieces, skip_special_tokens=skip_special_tokens)


def _encode(backend: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    # The batch call keeps no offsets: half the time for a long text, and it holds the
    # interpreter lock for 1 ms instead of 30 ms per megabyte.
    return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


def _aliased(
    backend: tokenizers.Tokenizer, special_text: SpecialText
) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
    """Return a tokenizer that knows special tokens by alias only, and its ids where they differ.

    It shares the model with `backend`, so it costs neither time nor memory.
    """
    aliased = tokenizers.Tokenizer(backend.model)
    aliased.normalizer = backend.normalizer
    aliased.pre_tokenizer = backend.pre_tokenizer
    added = sorted(backend.get_added_tokens_decoder().items())
    content_by_id = {
        id_: special_text.alias_by_text[token.content] if token.special else token.content
        for id_, token in added
    }
    aliased.add_tokens(
        [
            AddedToken(
                content_by_id[id_],
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized,
                special=token.special,
            )
            for id_, token in added
        ]
    )
    aliased_vocab = aliased.get_vocab(with_added_tokens=True)
    return aliased, {aliased_vocab[content]: id_ for id_, content in content_by_id.items()}
