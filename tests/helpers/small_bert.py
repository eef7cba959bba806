"""A small classifier of texts for the tests: a BERT of one layer with random weights, and a tokenizer of ten words."""

from pathlib import Path

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "very", "soup", "bread"]


def make_bert(folder: Path, *, outputs: int = 2) -> Path:
    """Write the model and its tokenizer, as `save_pretrained` does."""
    import transformers

    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=16,
        num_labels=outputs,
        initializer_range=0.2,
    )
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    return folder
