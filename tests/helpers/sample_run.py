"""A run folder that no run has made, and its report, taken apart."""

import json
import math
from html.parser import HTMLParser
from pathlib import Path

from dkm.app import report
from dkm.foundation import jsonl

VOID = {"meta", "wbr"}
SECTIONS = {
    "Training",
    "Size by layer",
    "Weights through time",
    "Clustering",
    "The plan",
    "Run it again",
    "Environment",
}


class Page(HTMLParser):
    """Tags with their attributes, headings and the visible text; an error where the tags do not nest."""

    def __init__(self, text: str):
        super().__init__()
        self.open, self.tags, self.headings, self.text = [], [], [], ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str):
        assert self.open.pop() == tag

    def handle_data(self, data: str):
        if self.open[-1:] == ["h2"]:
            self.headings.append(data)
        if self.open[-1:] != ["style"]:
            self.text += data

    def count(self, tag: str) -> int:
        return sum(found == tag for found, _ in self.tags)


def write(folder: Path) -> Page:
    return Page(report.write(folder).read_text(encoding="utf-8"))


def write_run(
    folder: Path, layers: int = 3, steps: int = 200, finished: bool = True, word: str = "layer", older: bool = True
) -> Path:
    """A run folder of `layers` clustered tensors with a bias each, and `steps` steps, of which 50 are an epoch.

    An older one does not say what takes how many bytes of the file, nor what was known at the beginning.
    """
    folder.mkdir()
    model = json.dumps(f"zoo/{word}net", ensure_ascii=False)
    (folder / "config.toml").write_text(f"model = {model}\nepochs = 4\n", encoding="utf-8")
    rows = [
        dict(name=f"{word}{i}.{part}", shape=shape, bits=bits, dim=4 if bits else 1, reason=f"{word} why", bytes=size)
        for i in range(layers)
        for part, shape, bits, size in (("weight", [64, 256], 4, 2176), ("bias", [64], None, 128))
    ]
    total, dense = sum(row["bytes"] for row in rows), layers * 4 * (64 * 256 + 64)
    plan = dict(text=f"{word}*:4/4", rows=rows, bytes=total, dense_bytes=dense)
    file = {"dense/1.running_mean": 256, "header": 644}
    for row in rows:
        codes = row["bytes"] - 128 if row["bits"] else 0
        parts = {"codes": codes, "centroids": 128} if row["bits"] else {"dense": row["bytes"]}
        file |= {f"{part}/{row['name']}": size for part, size in parts.items()}
    before = dict(accuracy=92.5, standard_error=1.52, examples=300, loss=0.3)
    beginning = dict(model=f"{word}Net", date="2026-11-19T14:05:33Z", metric="accuracy", unit="images", before=before)
    plan |= {} if older else {"beginning": {**beginning, "file": file}}
    (folder / "plan.json").write_text(json.dumps(plan))
    for step in range(0, steps + 1, 10):
        cold = math.exp(-step / 100)
        numbers = dict(
            iterations=1 + round(4 * cold) if step else 0, tau=cold * 1e-3, gap=cold * 0.2, dead=1, entropy=3.5
        )
        tensors = {row["name"]: {**numbers, "changed": cold if step else None} for row in rows if row["bits"]}
        record = dict(kind="layers", step=step, tensors=tensors, total=dict(gap=cold * 0.2, changed=None, dead=3))
        jsonl.append(folder / "log.jsonl", record)
        if step:
            record = dict(kind="step", step=step, epoch=step / 50, loss=cold, lr=1e-3, per_second=1.0)
            jsonl.append(folder / "log.jsonl", record)
        if step % 50 == 0:
            soft = 91.0 - 20 * cold if step else None
            record = dict(kind="eval", step=step, epoch=step / 50, soft=soft, snapped=90.0 - 30 * cold, loss=cold)
            record |= {} if older else dict(standard_error=1.75, examples=300)
            jsonl.append(folder / "log.jsonl", record)
            bins = dict(edges=[-0.2, -0.1, 0, 0.1, 0.2], counts=[5, 40, 30, 6], centroids=[0.1 - cold / 10, -0.1])
            jsonl.append(folder / "log.jsonl", dict(kind="histogram", step=step, name=f"{word}0.weight", **bins))
    if finished:
        result = dict(accuracy_before=92.5, accuracy_after=88.25, bytes_dense=dense, bytes_paper=total)
        result |= dict(bytes_file=total + 900, ratio=dense / total, seconds=90, steps=steps, seed=7, finished=True)
        result |= dict(command=f"dkm compress --model {word}net", environment=dict(torch="2.15", device=word))
        after = before | dict(accuracy=88.25, standard_error=1.86)
        result |= (
            {} if older else dict(file=file, unit="images", before=before, after=after, date="2026-11-20T00:09:00Z")
        )
        (folder / "result.json").write_text(json.dumps(result))
    return folder
