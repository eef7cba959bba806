"""Shrink a language model, which teaches itself: no text is needed to train it, only some to measure it.

    pip install -e ".[transformers]"
    python examples/stories.py FOLDER VALIDATION.txt --plan all:3 --steps 600

FOLDER is a causal language model of transformers with its tokenizer; the texts are separated by blank lines.
"""

import argparse
import re
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

import dkm

parser = argparse.ArgumentParser(description="Shrink a language model, which teaches itself.")
parser.add_argument("folder", type=Path)
parser.add_argument("validation", type=Path)
parser.add_argument("--plan", default="all:3")
parser.add_argument("--steps", type=int, default=600)
parser.add_argument("--batch", type=int, default=64, help="texts in a step")
parser.add_argument("--lr", type=float, default=1e-3)
arguments = parser.parse_args()
LENGTH, device = 256, "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = AutoModelForCausalLM.from_pretrained(arguments.folder, dtype=torch.float32).to(device).eval()
tokenizer = AutoTokenizer.from_pretrained(arguments.folder)


@torch.no_grad()
def perplexity() -> float:
    texts = filter(None, map(str.strip, re.split(r"\n\s*\n", arguments.validation.read_text(encoding="utf-8"))))
    tokens = [[tokenizer.bos_token_id, *tokenizer.encode(text, add_special_tokens=False)][:LENGTH] for text in texts]
    losses = [F.cross_entropy(model(row[None]).logits[0, :-1], row[1:], reduction="none")
              for row in (torch.tensor(row, device=device) for row in tokens)]  # fmt: skip
    return torch.cat(losses).mean().exp().item()


def autocast() -> torch.autocast:
    return torch.autocast(device, torch.bfloat16, enabled=device == "cuda")


draw = dict(do_sample=True, top_k=0, max_length=LENGTH, eos_token_id=None, pad_token_id=tokenizer.bos_token_id)
begin, count = torch.full((1, 1), tokenizer.bos_token_id, device=device), arguments.steps * arguments.batch
with torch.no_grad(), autocast():
    own = torch.cat([model.generate(begin.expand(min(4096, count - at), 1), **draw) for at in range(0, count, 4096)])
print(f"before: perplexity {perplexity():.2f}; the model has written {count:,} texts to train on")

teacher = dkm.teacher(model)
dkm.compress_(model, arguments.plan, steps=arguments.steps)
print(f"k-means, not trained: perplexity {perplexity():.2f}")
optimizer = torch.optim.AdamW(model.train().parameters(), arguments.lr, weight_decay=0)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.steps)
for step, tokens in enumerate(own.split(arguments.batch)):
    with autocast():
        loss = dkm.distill(model(tokens), teacher(tokens))
    loss.backward()
    optimizer.step(), schedule.step(), optimizer.zero_grad()
    if step % 100 == 0:
        print(f"step {step}: loss {loss.item():.4f}")
print(f"trained, weights as in training: perplexity {perplexity():.2f}")
model.eval()
print(f"trained, snapped: perplexity {perplexity():.2f}\n{dkm.save(model, 'stories.dkm')}")
