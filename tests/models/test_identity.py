"""What a tokenizer is known by: its rules, not what the last call asked of it."""

from __future__ import annotations

from budwood.models.identity import tokenizer_rules_hash
from budwood.models.load import load
from budwood.models.reference import resolve


def test_padding_and_truncation_of_the_last_call_change_nothing_and_a_new_token_does() -> None:
    tokenizer = load(resolve("tiny-bert"), "mlm").tokenizer
    plain = tokenizer_rules_hash(tokenizer)
    before = tokenizer.backend_tokenizer.to_str()
    tokenizer(["one text", "and a longer one"], padding="max_length", truncation=True, max_length=16)
    assert tokenizer.backend_tokenizer.to_str() != before
    assert tokenizer_rules_hash(tokenizer) == plain
    tokenizer.add_tokens(["quincunx"])
    assert tokenizer_rules_hash(tokenizer) != plain
