"""Word lists that speak for the labels of a task, and the tokens they are for one tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from budwood.data.task import Task
from budwood.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SENTIMENT = {
    "subset": ":) :( great charming flawed classic interesting boring sad happy terrible fantastic exciting strong",
    "class": ":) :(",
    "posneg": "positive negative",
}
NEWS = {
    "subset": "world politics sports business science financial market foreign technology international stock company "
    "tech technologies",
    "class": "foreign sports financial scientific",
}
TINY_SENTIMENT = {
    "subset": "great terrible wonderful excellent horrible hopeless lovely delightful boring dreary good bad superb "
    "awful dull charming",
    "class": "great terrible",
    "posneg": "good bad",
}
LISTS: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(("sst2", "sst5", "sst2-6920", "mpqa", "cr", "imdb", "mr"), SENTIMENT),
    "agnews": NEWS,
    "tiny-sentiment": TINY_SENTIMENT,
}


@dataclass(frozen=True)
class WordList:
    """Words as tokens: `spelled` and `ids` in step; `dropped` are words of a shipped list that are not one token."""

    spelled: tuple[str, ...]
    ids: tuple[int, ...]
    dropped: tuple[str, ...] = ()


def word_list(name: str, task: Task, given: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> WordList:
    """The words of list `name`: the user's own, else the task's shipped list, else (for `class`) its label words.

    A word counts in each form that is one token: after a space, bare, and before a space. A word of the user that is
    none is refused by name; one of a shipped list is left out and told.
    """
    own = tuple(given)
    shipped = tuple(LISTS.get(task.name, {}).get(name, "").split())
    if not own and not shipped and name == "class" and task.template:
        shipped = task.template.causal_words or task.template.words
    if not own and not shipped:
        raise DataError(
            f"No list of words is known for the features '{name}' of task '{task.name}'. Give one with "
            f"--{name}-words, for example the words by which a reader would tell its labels "
            f"({', '.join(task.labels[:4])})."
        )
    spelled: list[str] = []
    ids: list[int] = []
    dropped: list[str] = []
    for word in own or shipped:
        found = _tokens(word, tokenizer)
        if not found and own:
            parts = tokenizer.convert_ids_to_tokens(tokenizer(f" {word}", add_special_tokens=False)["input_ids"])
            raise DataError(
                f"The word '{word}' of --{name}-words is {len(parts)} tokens for this tokenizer "
                f"({' '.join(map(repr, parts))}), but a feature is the score of one token. Choose words of one token."
            )
        if not found:
            dropped.append(word)
        new = [i for i in found if i not in ids]
        ids += new
        spelled += [word] * len(new)
    if not ids:
        raise DataError(
            f"None of the words of list '{name}' ({', '.join(shipped)}) is one token for this tokenizer. Give your own "
            f"with --{name}-words."
        )
    return WordList(tuple(spelled), tuple(ids), tuple(dropped))


def _tokens(word: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids of the forms of a word that are one known token."""
    found: list[int] = []
    for form in (f" {word}", word, f"{word} "):
        ids = tokenizer(form, add_special_tokens=False)["input_ids"]
        if len(ids) == 1 and ids[0] != tokenizer.unk_token_id and ids[0] not in found:
            found.append(int(ids[0]))
    return found
