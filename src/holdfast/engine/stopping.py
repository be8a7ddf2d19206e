"""When a continuation is over: stop tokens, stop strings, or the end of text.

- Nothing said: the base's end-of-text tokens stop. A list says instead what stops, end of text
  only if it is in the list; so an empty list stops nothing. As Tinker has it.
- What stops is kept. A stop token is the last token; a stop string ends in the last token,
  which is kept whole, so that decoding what was returned shows the string. Tinker's clients
  split the decoded text there; vLLM returns those tokens too and cuts only its text.
- A stop string is looked for in the decoded continuation, special tokens included; it may span
  tokens, and it may not begin in the prompt.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from holdfast.errors import Mistake

if TYPE_CHECKING:
    from holdfast.engine.base import Base

__all__ = ["MAX_STOPS", "Stop"]

MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1024


class Stop:
    """Decides, after each token of a continuation, whether it was the last."""

    def __init__(
        self,
        base: "Base",
        *,
        strings: Sequence[str] | None = None,
        tokens: Sequence[int] | None = None,
    ) -> None:
        _check(strings, tokens)
        base.check_tokens(tokens or [])
        self._base = base
        self._strings = tuple(strings or ())
        self._tokens = frozenset(tokens or ())
        if strings is None and tokens is None:
            self._tokens = base.eos_tokens
        # A token is at least one byte of text; the rest is for those that decode to nothing,
        # and for a character of which the window has only the end.
        self._window = 2 * max((len(text.encode()) for text in self._strings), default=0) + 8

    def after(self, tokens: Sequence[int]) -> bool:
        """Whether the last of these tokens ends it. Ask after every token."""
        if not tokens:
            return False
        if tokens[-1] in self._tokens:
            return True
        if not self._strings:
            return False
        text = self._base.tokenizer.decode(
            list(tokens[-self._window :]),
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )
        return any(string in text for string in self._strings)


def _check(strings: Sequence[str] | None, tokens: Sequence[int] | None) -> None:
    if strings is not None and tokens is not None:
        raise Mistake("give stop strings or stop tokens, not both")
    if isinstance(strings, str):
        raise Mistake("give a list of stop strings, not one string: its letters would stop")
    count = len(strings or tokens or ())
    if count > MAX_STOPS:
        raise Mistake(f"{count} stops are more than the {MAX_STOPS} that are looked for")
    if any(not 0 < len(text) <= MAX_STOP_CHARACTERS for text in strings or ()):
        raise Mistake(f"a stop string has 1 to {MAX_STOP_CHARACTERS} characters")
