"""Tokenizers of the shipped models: lower-casing, one token per digit, trained on the shipped text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

POSITIONS = 256  # tokens the shipped models can look at


def make_tokenizer(name: str, texts: Sequence[str], size: int) -> PreTrainedTokenizerFast:
    """A lower-casing tokenizer whose every digit is a token: WordPiece for tiny-bert, byte-level BPE for tiny-gpt."""
    from transformers import PreTrainedTokenizerFast

    if name == "tiny-bert":
        specials = {
            k: f"[{k[:-6].upper()}]" for k in ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
        }
        tokenizer = _wordpiece(texts, size, list(specials.values()))
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            model_max_length=POSITIONS,
            model_input_names=["input_ids", "token_type_ids", "attention_mask"],
            **specials,
        )
    end = "<|endoftext|>"
    tokenizer = _byte_pairs(texts, size, [end])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=POSITIONS,
        model_input_names=["input_ids", "attention_mask"],
        bos_token=end,
        eos_token=end,
        pad_token=end,
    )


def _wordpiece(texts: Sequence[str], size: int, specials: list[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    normalizer = normalizers.BertNormalizer(lowercase=True)
    splitter = pre_tokenizers.Sequence(
        [pre_tokenizers.BertPreTokenizer(), pre_tokenizers.Digits(individual_digits=True)]
    )
    # The library's own trainer breaks ties at random. Whole words by their count and single characters serve as well in
    # a world of some thirteen hundred words, and are the same every time.
    count = Counter(w for t in texts for w, _ in splitter.pre_tokenize_str(normalizer.normalize_str(t)))
    characters = [chr(c) for c in range(33, 127)]
    alphabet = [*characters, *(f"##{c}" for c in characters if c.isalnum())]
    room = max(0, size - len(specials) - len(alphabet))
    words = [w for w, _ in sorted(count.items(), key=lambda item: (-item[1], item[0])) if len(w) > 1][:room]
    vocabulary = {t: i for i, t in enumerate(dict.fromkeys([*specials, *alphabet, *words]))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=64))
    tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder = normalizer, splitter, decoders.WordPiece()
    cls, sep = (vocabulary[t] for t in ("[CLS]", "[SEP]"))
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", sep), ("[CLS]", cls))
    return tokenizer


def _byte_pairs(texts: Sequence[str], size: int, specials: list[str]) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Lowercase()
    pattern = Regex(r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pattern, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=2,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" " + t for t in texts], trainer)
    return tokenizer
