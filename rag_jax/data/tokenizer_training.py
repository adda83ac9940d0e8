"""Small tokenizers of BART's and BERT's form, trained on texts."""

from collections.abc import Iterable
from typing import Any

from rag_jax.data.text import Tokenizer

BART_SPECIALS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
BERT_SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def train_bart_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of BART's form, trained on `texts`; any string can be written with it.

    A text's first word is tokenized as if a space came before it, so that an answer has the same
    ids as the words of the passage that it repeats.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    backend = tokenizers.Tokenizer(models.BPE(unk_token=None))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(BART_SPECIALS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return Tokenizer(backend)


def train_bert_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """An uncased WordPiece vocabulary of BERT's form, trained on `texts`, which are read twice.

    The trainer numbers "##a", "##b", ... in the order of a hash table, which differs from call to
    call and decides between pieces of equal count (huggingface/tokenizers issue 1794). Handed to
    it as special tokens they have one order; the model is then made anew without them.
    """
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

    if iter(texts) is texts:
        texts = list(texts)
    normalizer = normalizers.BertNormalizer(lowercase=True)
    splitter = pre_tokenizers.BertPreTokenizer()

    def with_model(model: Any) -> Any:
        backend = tokenizers.Tokenizer(model)
        backend.normalizer, backend.pre_tokenizer = normalizer, splitter
        backend.decoder = decoders.WordPiece()
        return backend

    inner = {letter for text in texts
             for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text))
             for letter in word[1:]}
    trained = with_model(models.WordPiece(unk_token="[UNK]"))
    trained.train_from_iterator(texts, trainers.WordPieceTrainer(
        vocab_size=vocab_size, show_progress=False,
        special_tokens=[*BERT_SPECIALS, *(f"##{letter}" for letter in sorted(inner))]))
    backend = with_model(models.WordPiece(trained.get_vocab(), unk_token="[UNK]"))
    backend.add_special_tokens(list(BERT_SPECIALS))
    return Tokenizer(backend)
