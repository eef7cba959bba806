"""A network that computes with the codes of its file, next to the same network with dense weights.

Time is measured in turns in this process, and memory in a process of its own for each of the two, which is this module:
`python -m benchmarks.packed packed resnet18 FILE.dkm 1` prints JSON.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import dkm

from .measure import alternate, peak_extra, resident
from .table import digits, note, ratio, table

PLANS, QUICK_PLANS = ["all:2/1", "all:4/1", "all:4/4", "all:8/8", "all:3/1 per 8x64 e4m3"], ["all:4/4"]
TOKENS = 32  # of a text that is measured, after the one that begins it


def run(device: str, quick: bool, language_model: Path | None = None) -> list[dict]:
    names = ["small"] if quick else ["resnet18", *([str(language_model)] if language_model else [])]
    with tempfile.TemporaryDirectory() as folder:
        plans = QUICK_PLANS if quick else PLANS
        return [_row(name, plan, Path(folder, "model.dkm"), 2 if quick else 9) for name in names for plan in plans]


def _row(name: str, plan: str, file: Path, rounds: int) -> dict:
    note(f"packed {Path(name).name} {plan}")
    torch.manual_seed(0)
    model = trained(name)
    dkm.compress_(model, plan, tau=1.0)
    row: dict = dict(name=Path(name).name, plan=plan, file=dkm.save(model, file))
    del model
    calls = {how: call(name, loaded(how, name, file)) for how in ("dense", "packed")}
    with torch.inference_mode():
        for each in calls.values():  # warm up
            each()
        times = alternate(calls, "cpu", rounds, slow=60.0)
    row["seconds"] = {how: seconds / (TOKENS if is_folder(name) else 1) for how, seconds in times.items()}
    row["memory"] = {how: _in_child(how, name, file) for how in calls}
    return row


def is_folder(name: str) -> bool:
    """Whether it is a language model."""
    return Path(name).is_dir()


def trained(name: str) -> nn.Module:
    """The network with values: those of the folder, or random ones."""
    if is_folder(name):
        import transformers  # imported here, because a smoke test does not need it

        return transformers.AutoModelForCausalLM.from_pretrained(name)
    if name == "small":
        layers = [nn.Conv2d(3, 32, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10)]
        return nn.Sequential(*layers)
    from torchvision.models import resnet18

    return resnet18()


def loaded(how: str, name: str, file: Path) -> nn.Module:
    """The network with the weights of the file, dense or packed.  The packed one has never had dense weights."""
    if how == "dense":
        return dkm.load(file, into=trained(name)).eval()
    if is_folder(name):
        from dkm.app.models import language_model_without_values

        return dkm.load(file, into=language_model_without_values(name), packed=True)
    with torch.device("meta"):
        model = trained(name)
    return dkm.load(file, into=model, packed=True)


def call(name: str, model: nn.Module) -> Callable[[], Tensor]:
    """One image, or a text of some tokens."""
    if not is_folder(name):
        return partial(model, torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(0)))
    begun = torch.tensor([[1]])
    options = dict(do_sample=False, max_new_tokens=TOKENS, min_new_tokens=TOKENS, pad_token_id=1)
    return lambda: model.generate(begun, attention_mask=torch.ones_like(begun), **options)


def _in_child(how: str, name: str, file: Path) -> dict:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.packed", how, name, str(file), str(torch.get_num_threads())],
        cwd=Path(__file__).parents[1],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def _child(how: str, name: str, file: str, threads: str) -> dict:
    """What the loaded network holds, and takes more while it computes."""
    torch.set_num_threads(int(threads))
    with torch.inference_mode():
        call("small", nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.LazyLinear(3)))()  # loads libraries
        if is_folder(name):
            call(name, tiny_language_model())()
        before = resident()
        model = loaded(how, name, Path(file))
        compute = call(name, model)
        compute()
        held = resident() - before
        extra, *_ = peak_extra(compute)
    return dict(held=held, extra=extra)


def tiny_language_model() -> nn.Module:
    """A Llama without much memory, so that a process has loaded what it needs."""
    import transformers

    sizes = dict(vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


def text(rows: list[dict]) -> str:
    """The section as Markdown."""
    header = ["network", "plan", "file", "dense, ms", "packed, ms", "ratio", "holds", "packed", "peak", "packed"]
    cells = []
    for row in rows:
        dense, packed = row["seconds"]["dense"], row["seconds"]["packed"]
        memory = [row["memory"][how]["held"] / 1e6 for how in ("dense", "packed")]
        memory += [row["memory"][how]["extra"] / 1e6 for how in ("dense", "packed")]
        times = [digits(1e3 * dense), digits(1e3 * packed), ratio(packed, dense)]
        cells.append([row["name"], row["plan"], digits(row["file"] / 1e6), *times, *map(digits, memory)])
    return "\n".join(
        [
            "### Packed networks",
            "",
            table(header, cells),
            "",
            "Times are per image at batch 1, or per token of a text. Sizes are in MB: the file; what the process holds",
            f"more than before the network was loaded, after one image or text of {TOKENS} tokens, dense and packed;",
            "and what it takes on top while it computes, dense and packed.",
        ]
    )


if __name__ == "__main__":
    print(json.dumps(_child(*sys.argv[1:])))
