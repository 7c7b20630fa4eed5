"""Small fast tokenizers of every family, trained in memory on a few sentences."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

TEXT = [
    "the film was great and the acting was terrible but it was a great story",
    "It was great . It was terrible . This is correct ? yes , no , maybe",
    "a man in Paris eats bread while the duke of Normandy reads 1 2 3 4 5 6 7 8 9 0 books",
    "what country is this in ? the question is about the duke and the film",
    "Topic : sports world business tech + - = 12 345 6789",
] * 5
NAMES = ("bert", "roberta", "albert", "deberta", "gpt2", "llama")


@cache
def make(name: str) -> PreTrainedTokenizerBase:
    made = {"bert": _bert, "roberta": _roberta, "albert": _albert, "deberta": _deberta, "gpt2": _gpt2, "llama": _llama}
    return made[name]()


def _train(tok: Tokenizer, trainer: trainers.Trainer) -> Tokenizer:
    tok.train_from_iterator(TEXT, trainer)
    return tok


def _template(tok: Tokenizer, single: str, pair: str, names: tuple[str, ...]) -> None:
    tok.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[(n, tok.token_to_id(n)) for n in names]
    )


def _bert() -> PreTrainedTokenizerBase:
    tok = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tok.normalizer = normalizers.BertNormalizer(lowercase=True)
    tok.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    _train(tok, trainers.WordPieceTrainer(vocab_size=160, special_tokens=special, show_progress=False))
    _template(tok, "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", ("[CLS]", "[SEP]"))
    tok.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(
        tokenizer_object=tok,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def _bytes(special: list[str], trim: bool) -> Tokenizer:
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    size = 360
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    _train(tok, trainer)
    tok.post_processor = processors.ByteLevel(trim_offsets=trim)
    tok.decoder = decoders.ByteLevel()
    return tok


def _roberta() -> PreTrainedTokenizerBase:
    tok = _bytes(["<s>", "<pad>", "</s>", "<unk>"], trim=True)
    tok.post_processor = processors.RobertaProcessing(
        ("</s>", 2), ("<s>", 0), trim_offsets=True, add_prefix_space=False
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tok,
        bos_token="<s>",
        eos_token="</s>",
        cls_token="<s>",
        sep_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        mask_token=AddedToken("<mask>", lstrip=True, special=True),
        model_input_names=["input_ids", "attention_mask"],
    )


def _gpt2() -> PreTrainedTokenizerBase:
    tok = _bytes(["<|endoftext|>"], trim=False)
    end = "<|endoftext|>"
    names = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=tok, bos_token=end, eos_token=end, model_input_names=names)


def _unigram(special: list[str]) -> Tokenizer:
    words = sorted({w for line in TEXT for w in line.lower().split() if len(w) > 1})
    letters = sorted({c for line in TEXT for c in line.lower()} - {" "})
    vocab = [(s, 0.0) for s in special] + [(f"▁{w}", -8.0) for w in words] + [(c, -9.0) for c in ["▁", *letters]]
    tok = Tokenizer(models.Unigram(vocab, unk_id=1))
    tok.normalizer = normalizers.Lowercase()
    tok.pre_tokenizer = pre_tokenizers.Metaspace()
    tok.add_special_tokens(special)
    _template(tok, "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", ("[CLS]", "[SEP]"))
    tok.decoder = decoders.Metaspace()
    return tok


def _albert(lstrip: bool = True) -> PreTrainedTokenizerBase:
    return PreTrainedTokenizerFast(
        tokenizer_object=_unigram(["[PAD]", "[UNK]", "[CLS]", "[SEP]"]),
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token=AddedToken("[MASK]", lstrip=lstrip, special=True),
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def _deberta() -> PreTrainedTokenizerBase:
    return _albert(lstrip=False)  # its mask does not swallow the space before it


def _llama() -> PreTrainedTokenizerBase:
    tok = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=False))
    tok.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tok.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    _train(tok, trainers.BpeTrainer(vocab_size=150, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False))
    tok.pre_tokenizer = None
    _template(tok, "<s> $A", "<s> $A <s>:1 $B:1", ("<s>",))
    names = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=tok, bos_token="<s>", eos_token="</s>", unk_token="<unk>", model_input_names=names
    )
