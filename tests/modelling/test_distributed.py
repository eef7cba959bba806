"""Several processes on the CPU, with DDP and with fully_shard.  What they do is in distributed/scenarios.py."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="a PyTorch without torch.distributed")

SCRIPT = Path(__file__).parent / "distributed" / "scenarios.py"
ALL = re.findall(r"^def ((?:ddp|fsdp|saved)_\w+)", SCRIPT.read_text(), re.MULTILINE)
# What depends on the number of ranks; and what writes the checkpoint that 2 ranks then read.
FOUR = [
    "ddp_default",
    "fsdp_equals_one_process",
    "fsdp_every_way_to_split_vectors",
    "fsdp_learned_temperature",
    "fsdp_scales_and_groups",
    "fsdp_learned_temperature_and_other_options_of_groups",
    "fsdp_every_group_on_one_rank",
    "fsdp_diverged_weights_of_groups",
    "fsdp_every_rank_clusters_its_own_shard",
    "fsdp_replicated_shards",
    "fsdp_frozen_weights",
    "fsdp_accumulation_without_sync",
    "fsdp_mixed_precision",
    "fsdp_converted_afterwards",
    "fsdp_checksum_is_that_of_the_whole_weight",
    *(name for name in ALL if name.startswith("saved_")),
]
LAUNCHES = {4: FOUR, 2: ALL}


@pytest.fixture(scope="session")
def results(tmp_path_factory) -> dict[tuple[int, str], str]:
    """(ranks, scenario) -> what was wrong.

    All scenarios of a number of ranks run in one launch, because starting takes most of the time.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # all workers share it: the first to get here launches, the others wait
    folder /= "distributed"
    try:
        folder.mkdir()
    except FileExistsError:
        while not (folder / "done").exists():
            time.sleep(0.2)
    else:
        try:
            for ranks, names in LAUNCHES.items():
                launch(ranks, folder, names)
        finally:
            (folder / "done").touch()  # the others wait for it, whatever happened here
    return {
        (ranks, name): "\n".join(verdict(folder, ranks, rank, name) for rank in range(ranks)).strip()
        for ranks, names in LAUNCHES.items()
        for name in names
    }


def launch(ranks: int, folder: Path, names: list[str]) -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        SCRIPT,
        folder,
        *names,
    ]
    with open(folder / f"{ranks}.log", "w") as log:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        # the limit is for ranks that wait for each other for ever, not for a slow machine
        subprocess.run(command, stdout=log, stderr=log, timeout=3600, check=False, env=environment)


def verdict(folder: Path, ranks: int, rank: int, name: str) -> str:
    file = folder / f"{ranks}.{rank}.json"
    verdicts = json.loads(file.read_text()) if file.exists() else {}
    return verdicts.get(name, f"rank {rank} did not get here:\n" + (folder / f"{ranks}.log").read_text()[-4000:])


@pytest.mark.parametrize(("ranks", "scenario"), [(ranks, name) for ranks, names in LAUNCHES.items() for name in names])
def test_scenario(results, ranks, scenario):
    assert results[ranks, scenario] == ""
