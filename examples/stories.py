"""Shrink a language model, which teaches itself: text is only needed to measure it.

    pip install -e ".[transformers]"
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

BATCH, LENGTH, LR = 64, 256, 1e-3
parser = argparse.ArgumentParser(description="Shrink a language model, which teaches itself.")
parser.add_argument("folder", type=Path)
parser.add_argument("validation", type=Path)
parser.add_argument("--plan", default="all:3")
parser.add_argument("--steps", type=int, default=600)
arguments = parser.parse_args()
device, count = "cuda" if torch.cuda.is_available() else "cpu", BATCH * arguments.steps
torch.manual_seed(0)
model = AutoModelForCausalLM.from_pretrained(arguments.folder, dtype=torch.float32).to(device).eval()
tokenizer = AutoTokenizer.from_pretrained(arguments.folder)
begin = tokenizer.bos_token_id
texts = [text for text in re.split(r"\n\s*\n", arguments.validation.read_text(encoding="utf-8")) if text.strip()]
texts = [[begin, *tokenizer.encode(text.strip(), add_special_tokens=False)][:LENGTH] for text in texts]


@torch.no_grad()
def show_perplexity(when: str) -> None:
    rows = [torch.tensor(text, device=device) for text in texts]
    with parametrize.cached():  # the weights do not change from text to text: cluster them once
        losses = [F.cross_entropy(model(row[None]).logits[0, :-1], row[1:], reduction="none") for row in rows]
    print(f"perplexity {torch.cat(losses).mean().exp().item():7.2f}  {when}", flush=True)


show_perplexity("before")
autocast = torch.autocast(device, torch.bfloat16, enabled=device == "cuda")
draw = dict(do_sample=True, top_k=0, max_length=LENGTH, eos_token_id=None, pad_token_id=begin)
starts = torch.full((count, 1), begin, device=device).split(4096)
with torch.no_grad(), autocast:
    samples = torch.cat([model.generate(start, attention_mask=torch.ones_like(start), **draw) for start in starts])
teacher = dkm.teacher(model)
dkm.compress_(model, arguments.plan, steps=arguments.steps)
show_perplexity("clustered, not trained")
optimizer = torch.optim.AdamW(model.train().parameters(), LR, weight_decay=0)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, arguments.steps))
for batch in samples.split(BATCH):
    with autocast:
        loss = dkm.distill(model(batch, use_cache=False), teacher(batch, use_cache=False))
    loss.backward()
    optimizer.step(), schedule.step(), optimizer.zero_grad()
show_perplexity("trained, soft weights as in training")
model.eval()
show_perplexity("trained, snapped weights as in the file")
print(f"{dkm.save(model, 'stories.dkm'):,} bytes in stories.dkm, {4 * dkm.size(model).parameters:,} in float32")
