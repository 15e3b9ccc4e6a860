"""The text of one output: token ids in, text that is certain out."""

from collections.abc import Sequence

from scheduler_svc.service.text.stop_strings import StopMatcher, TextDelta
from scheduler_svc.service.text.tokenizer import Tokenizer


class OutputText:
    """Decodes one output and ends it at a stop string.

    Invariant: the texts of all deltas and of `finish`, joined, do not depend on how the ids
        were spread over `push` calls.
    """

    __slots__ = ("_detokenizer", "_matcher")

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
    ) -> None:
        """Begin an output.

        Raises: ValueError if a stop string is empty, or they are too long together.
        """
        self._detokenizer = tokenizer.new_detokenizer(skip_special_tokens=skip_special_tokens)
        self._matcher = (
            StopMatcher(stops, include_stop=include_stop, min_tokens=min_tokens) if stops else None
        )

    def begin_with(self, prompt: Sequence[int]) -> str:
        """Put the prompt in front of the output and return its text, as far as it is certain.

        It is not searched for stop strings. Nothing was pushed before.
        """
        return self._detokenizer.push(prompt)

    def push(self, token_ids: Sequence[int], *, ends_with_stop_token: bool = False) -> TextDelta:
        """Take the next ids and return what they add to the text.

        `ends_with_stop_token` says that the last id ended the output, as EOS or as one of
        the request's stop token ids: it is a token of the output, but never text.

        Cost: 0.1 us a token, or 2 us with stop strings, and 1 us a call.
        """
        if ends_with_stop_token:
            token_ids = token_ids[:-1]
        if self._matcher is None:
            return TextDelta(self._detokenizer.push(token_ids), None)
        # Token by token, since the match must tell which token completed it.
        texts = []
        for id_ in token_ids:
            text, stop = self._matcher.push(self._detokenizer.push((id_,)))
            texts.append(text)
            if stop:
                return TextDelta("".join(texts), stop)
        return TextDelta("".join(texts), None)

    def finish(self) -> str:
        """Return the rest of the text, once no more ids come.

        An unfinished character in it is U+FFFD, and not searched for stop strings: no token
        completed one. After a match the rest is empty.
        """
        rest = self._detokenizer.finish()
        return rest if self._matcher is None else self._matcher.finish(rest)
