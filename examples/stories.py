"""Shrink a language model, which teaches itself: text is only needed to measure it.

    python examples/stories.py FOLDER VALIDATION.txt --plan all:3 --steps 600

FOLDER is a causal language model of transformers with its tokenizer; texts are separated by blank lines.
"""

import argparse
import re
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM, AutoTokenizer

import dkm

BATCH, LENGTH, device = 64, 256, "cuda" if torch.cuda.is_available() else "cpu"
parser = argparse.ArgumentParser(description="Shrink a language model, which teaches itself.")
parser.add_argument("folder", type=Path)
parser.add_argument("validation", type=Path)
parser.add_argument("--plan", default="all:3")
parser.add_argument("--steps", type=int, default=600)
parser.add_argument("--lr", type=float, default=3e-4)
chosen = parser.parse_args()
torch.manual_seed(0)
model = AutoModelForCausalLM.from_pretrained(chosen.folder, dtype=torch.float32).to(device).eval()
tokenizer = AutoTokenizer.from_pretrained(chosen.folder)
begin, texts = tokenizer.bos_token_id, re.split(r"\n\s*\n", chosen.validation.read_text(encoding="utf-8").strip())
texts = [tokenizer.encode(text, add_special_tokens=False)[: LENGTH - 1] for text in texts]
texts = [torch.tensor([begin, *text], device=device) for text in texts]


@torch.no_grad()
def show_perplexity(when: str) -> None:
    with parametrize.cached():  # the weights do not change from text to text: cluster them once
        losses = [F.cross_entropy(model(text[None]).logits[0, :-1], text[1:], reduction="none") for text in texts]
    print(f"perplexity {torch.cat(losses).mean().exp().item():7.2f}  {when}", flush=True)


show_perplexity("before")
autocast = torch.autocast(device, torch.bfloat16, enabled=device == "cuda")
how = dict(do_sample=True, top_k=0, max_length=LENGTH, eos_token_id=None, pad_token_id=begin)
starts = torch.full((BATCH * chosen.steps, 1), begin, device=device).split(4096)
with torch.no_grad(), autocast:
    samples = torch.cat([model.generate(start, attention_mask=torch.ones_like(start), **how) for start in starts])
teacher = dkm.teacher(model)
dkm.compress_(model, chosen.plan, steps=chosen.steps)
show_perplexity("clustered, not trained")
optimizer = torch.optim.AdamW(model.train().parameters(), chosen.lr, weight_decay=0)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, chosen.steps)
for batch in samples.split(BATCH):
    with autocast:
        dkm.distill(model(batch, use_cache=False), teacher(batch, use_cache=False)).backward()
    optimizer.step(), schedule.step(), optimizer.zero_grad()
show_perplexity("trained, soft weights as in training")
model.eval()
show_perplexity("trained, snapped weights as in the file")
print(f"{dkm.save(model, 'stories.dkm'):,} bytes in stories.dkm, {4 * dkm.size(model).parameters:,} in float32")
