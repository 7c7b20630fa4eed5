"""Templates and label words."""

from __future__ import annotations

from pathlib import Path

import pytest

from budwood.data.prompt import causal_parts, label_word_ids, masked_parts, parse, render
from budwood.data.task import Row, Template
from budwood.errors import DataError
from tests.data.tokenizers_for_tests import NAMES, make

PAIR = Row("p", "He sleeps.", "The man is asleep.")


def test_slots_filters_and_wording_come_apart() -> None:
    parts = parse("{text|chop} ? {mask} , {pair|lower}")
    assert [p.kind for p in parts] == ["text", "literal", "mask", "literal", "pair"]
    assert [p.wording for p in parts if p.kind == "literal"] == [" ? ", " , "]
    assert parts[0].filters == ("chop",) and parts[4].filters == ("lower",)


def test_filters_change_the_first_or_last_letter_only() -> None:
    shown = render(Template(masked="{text|chop} ? {mask} , {pair|lower}"), PAIR, "<mask>", causal=False)
    assert shown == "He sleeps ? <mask> , the man is asleep."


@pytest.mark.parametrize("wording", ["{text} It is ", "{text} It is {mask}", "{text} It is \n {mask}"])
def test_a_causal_prompt_never_ends_in_a_space(wording: str) -> None:
    shown = render(Template(causal=wording), Row("r", "Fine. "), "", causal=True)
    assert shown == "Fine. It is"


def test_a_document_at_the_end_is_stripped_too() -> None:
    assert render(Template(causal="Say: {text} {mask}"), Row("r", " Fine. "), "", causal=True) == "Say: Fine."


@pytest.mark.parametrize(
    ("wording", "says"),
    [
        ("{txt} {mask}", "Did you mean 'text'"),
        ("{text|lowr} {mask}", "Did you mean 'lower'"),
        ("{text} {text} {mask}", "twice"),
        ("{text} was", "exactly one {mask}"),
        ("", "exactly one {mask}"),
    ],
)
def test_a_bad_masked_template_is_refused_by_name(wording: str, says: str) -> None:
    with pytest.raises(DataError, match="template") as e:
        masked_parts(Template(masked=wording))
    assert says in str(e.value)


def test_a_bad_causal_template_is_refused() -> None:
    with pytest.raises(DataError, match="at the end"):
        causal_parts(Template(causal="{text} It was {mask} ."))
    with pytest.raises(DataError, match="no causal template"):
        causal_parts(Template(masked="{text} {mask}"))


def test_a_missing_second_text_names_the_row() -> None:
    with pytest.raises(DataError, match="row 'r7'"):
        render(Template(masked="{text} {mask} {pair}"), Row("r7", "a"), "[MASK]", causal=False)


@pytest.mark.parametrize("name", NAMES)
def test_label_words_are_the_tokens_that_follow_text(name: str) -> None:
    tokenizer = make(name)
    ids = label_word_ids(tokenizer, ["great", " terrible"])
    for word, token in zip(["great", "terrible"], ids, strict=True):
        whole = tokenizer(f"the film was {word}", add_special_tokens=False)["input_ids"]
        assert whole[-1] == token
        assert tokenizer.decode([token]).strip().lstrip("▁") == word


@pytest.mark.parametrize("name", NAMES)
def test_words_of_several_tokens_are_refused_with_their_pieces(name: str) -> None:
    with pytest.raises(DataError, match="'terribleacting'") as e:
        label_word_ids(make(name), ["great", "terribleacting"])
    assert "tokens" in str(e.value) and "template" in str(e.value)
    assert "--mode head" in str(e.value)


def test_unknown_and_equal_words_are_refused() -> None:
    with pytest.raises(DataError, match="unknown"):
        label_word_ids(make("bert"), ["great", "日"])
    with pytest.raises(DataError, match="'great' and 'Great' are the same token"):
        label_word_ids(make("bert"), ["great", "Great"])


def test_real_tokenizers(shared: Path) -> None:
    from transformers import AutoTokenizer

    bert = AutoTokenizer.from_pretrained(shared / "models" / "minilm-l6-mlm")
    assert label_word_ids(bert, ["terrible", "great"]) == [6659, 2307]
    llama = AutoTokenizer.from_pretrained(shared / "models" / "stories260K")
    with pytest.raises(DataError, match="'great' is 3 tokens"):
        label_word_ids(llama, ["great"])
    (was,) = label_word_ids(llama, ["was"])
    assert llama.convert_ids_to_tokens(was) == "▁was"
