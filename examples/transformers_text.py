"""Shrink a small BERT with transformers' Trainer.  About half a minute on one core.

    pip install -e ".[transformers]"
    python examples/transformers_text.py --out transformers-output

It reads reviews such as "the soup was not cold but we found the waiter very rude" and says what was liked: both things,
the first, the second, or neither.  dkm adds only the callback in `compress`.
"""

import argparse
import copy
import random
from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, logging, set_seed

import dkm
from dkm.integrations.transformers import DKMCallback

THINGS = ["soup", "bread", "waiter", "cook", "table", "room", "music", "wine", "fish", "salad", "view", "menu"]
GOOD = ["good", "warm", "kind", "fresh", "lovely", "clean", "quiet", "fair", "fine", "great"]
BAD = ["bad", "cold", "rude", "stale", "ugly", "dirty", "loud", "steep", "dull", "poor"]
WORDS = ["[PAD]", "the", "was", "we", "found", "not", "very", "quite", "but", "and", *THINGS, *GOOD, *BAD]
TOKENS = {word: token for token, word in enumerate(WORDS)}
LENGTH = 15
PLAN = "bert.encoder.*:4/4, emb:4, bert.pooler.dense:4/2"  # 1 bit per weight in the encoder, more elsewhere


def clause(rng: random.Random) -> tuple[str, bool]:
    """Some words about a thing, and whether they praise it."""
    liked, negated = rng.random() < 0.5, rng.random() < 0.25
    adjective = rng.choice(GOOD if liked != negated else BAD)
    adverbs = " ".join(["not"] * negated + [rng.choice(["very", "quite"])] * (rng.random() < 0.5))
    form = rng.choice(["the {} was {} {}", "we found the {} {} {}"])
    return form.format(rng.choice(THINGS), adverbs, adjective), liked


def reviews(count: int, seed: int) -> list[dict]:
    rng, examples = random.Random(seed), []
    for _ in range(count):
        (first, liked), (second, liked_too) = clause(rng), clause(rng)
        tokens = [TOKENS[word] for word in f"{first} {rng.choice(['but', 'and'])} {second}".split()]
        padding = [0] * (LENGTH - len(tokens))
        mask = [1] * len(tokens) + padding
        examples.append({"input_ids": tokens + padding, "attention_mask": mask, "labels": 2 * liked + liked_too})
    return examples


def network() -> BertForSequenceClassification:
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=192,
        max_position_embeddings=LENGTH,
        num_labels=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.1,  # BERT's 0.02 is for layers 8 times as wide
    )
    return BertForSequenceClassification(config)


def trainer(model: BertForSequenceClassification, out: Path, epochs: int, count: int, callbacks=None) -> Trainer:
    """A Trainer as always, without dkm."""
    arguments = TrainingArguments(
        str(out),
        num_train_epochs=epochs,
        per_device_train_batch_size=64,
        per_device_eval_batch_size=250,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        warmup_steps=20,
        logging_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        disable_tqdm=True,
        report_to="none",
        use_cpu=True,
    )
    data = {"train_dataset": reviews(count, seed=1), "eval_dataset": reviews(1000, seed=2)}
    return Trainer(model, arguments, compute_metrics=accuracy, callbacks=callbacks, **data)


def accuracy(prediction) -> dict[str, float]:
    return {"accuracy": 100 * float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def compress(model: BertForSequenceClassification, out: Path, epochs: int, count: int) -> float:
    """Train with dkm and write out/model.dkm."""
    training = trainer(model, out, epochs, count, callbacks=[DKMCallback(PLAN)])
    training.train()  # after a crash: training.train(resume_from_checkpoint=True)
    return training.evaluate()["eval_accuracy"]


def run(out: Path, epochs: int = 4, count: int = 4000) -> tuple[float, float, float]:
    """Accuracies in percent: before compression, compressed, and read back from the file."""
    logging.disable_progress_bar()
    set_seed(0)
    model = network()
    plain = trainer(model, out / "plain", epochs, count)
    plain.train()
    before = plain.evaluate()["eval_accuracy"]

    compressed = copy.deepcopy(model)
    after = compress(compressed, out / "compressed", -(-epochs // 2), count)
    size = dkm.size(compressed)
    loaded = dkm.load(out / "compressed" / "model.dkm", into=network())  # a plain BERT, with dense weights
    again = trainer(loaded, out / "loaded", epochs, count).evaluate()["eval_accuracy"]

    print(f"\n{size.summary()}")
    print(f"float32     {before:.1f} %  {4 * size.parameters:,} bytes")
    print(f"compressed  {after:.1f} %  {size.file_bytes:,} bytes; read back from the file {again:.1f} %")
    return before, after, again


def main() -> None:
    parser = argparse.ArgumentParser(description="Shrink a small BERT with transformers' Trainer.")
    parser.add_argument("--out", type=Path, default=Path("transformers-output"), help="folder for the files")
    parser.add_argument("--epochs", type=int, default=4, help="of training; compression takes half as many")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the network is small
    run(arguments.out, arguments.epochs)


if __name__ == "__main__":
    main()
