"""Conversations through a chat template: which tokens the assistant wrote."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.align.data.prompt_files import Message
from forerun.errors import InvalidRequest
from forerun.models.tokenizers import Tokenizer

__all__ = ["learned_text"]


def learned_text(
    messages: Sequence[Message], tokenizer: Tokenizer
) -> tuple[list[int], list[tuple[int, int]]]:
    """A conversation as tokens, and the ranges of the assistant's answers.

    What is asked and what is answered are made into tokens one by one, so that tokens end where a
    prompt ends, as they do when the draft is used. An answer includes the token that ends it. A
    template may render an early answer otherwise once others follow (without its thoughts, say):
    such answers are context and not learned.

    Args:
        messages: ends with an answer.
        tokenizer: with a chat template.

    Raises:
        InvalidRequest: the template renders the last answer's prompt otherwise than the answer's.
    """
    whole = tokenizer.render_chat(messages, with_answer_begun=False)
    ids: list[int] = []
    spans: list[tuple[int, int]] = []
    done = 0
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        asked = tokenizer.render_chat(messages[:index])
        answered = tokenizer.render_chat(messages[: index + 1], with_answer_begun=False)
        if not (whole.startswith(answered) and answered.startswith(asked)):
            continue
        ids += tokenizer.encode(whole[done : len(asked)], add_special_tokens=False)
        answer = tokenizer.encode(whole[len(asked) : len(answered)], add_special_tokens=False)
        length = length_to_end(answer, tokenizer.eos_token_id)
        spans.append((len(ids), len(ids) + length))
        ids += answer
        done = len(answered)
    if done < len(whole):
        raise InvalidRequest(
            "the chat template does not render the answer behind its prompt, so that the answer's "
            "tokens cannot be told; give prompts without answers"
        )
    return ids, spans


def length_to_end(answer: Sequence[int], eos_token_id: int | None) -> int:
    """Tokens of an answer up to the one that ends it; templates may put a line end behind."""
    if eos_token_id in answer:
        return answer.index(eos_token_id) + 1
    return len(answer)
