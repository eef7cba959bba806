"""dkm sweep and dkm compare, as a user types them."""

import json
import tomllib
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("accelerate")
from command_place import call, flags, make_place
from sample_run import Page, write_run

from dkm.app import run
from dkm.app.sweep import folder_name


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to be in, with pictures, a network and its weights."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    make_place(tmp_path)
    return tmp_path


def sweep(*more: str, code: int = 0, **options: str | None) -> None:
    call("sweep", *flags(plan=None, out="sweep", epochs="0", **options), *more, code=code)


def test_a_sweep_makes_the_runs_goes_on_after_a_failure_and_compares(place: Path, capsys: pytest.CaptureFixture):
    sweep("--plan", "0:2, 4:2", "--plan", "nothing:2", "--plan", "0:3", "--target-size", "1B", code=2)
    printed = capsys.readouterr()
    assert {path.name for path in Path("sweep").iterdir()} == {"0-2_4-2", "0-3", "sweep.toml", "comparison.html"}
    nothing, too_small, last = printed.err.splitlines()
    assert nothing.startswith("dkm: nothing-2: unknown selector 'nothing'")
    assert too_small.startswith("dkm: 1B: ")
    assert last == "dkm: 2 of 4 runs failed: nothing-2, 1B; dkm sweep --resume --out sweep tries them again"
    table = printed.out[printed.out.rindex("run ") :]
    assert table.splitlines()[0].split()[:5] == ["run", "size", "smaller", "accuracy", "change"]
    assert max(map(len, table.splitlines())) <= 80
    for folder in ("0-2_4-2", "0-3"):
        result = json.loads(Path("sweep", folder, "result.json").read_text())
        (line,) = (line for line in table.splitlines() if line.startswith(f"{folder} "))
        assert f"{result['accuracy_after']:.2f} %" in line
        assert f"{result['ratio']:.1f}x" in line


def test_a_sweep_goes_on_where_it_was_stopped_from_any_folder(
    place: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """Finished runs stay as they are, and new plans may be added."""
    compress, count = run.compress, []

    def stop_in_the_second(*arguments, **options):
        count.append(1)
        if len(count) == 2:
            raise run.Stopped
        return compress(*arguments, **options)

    monkeypatch.setattr(run, "compress", stop_in_the_second)
    sweep("--plan", "0:2", "--plan", "0:3", "--plan", "4:2", code=130)
    assert "go on with: dkm sweep --resume --out sweep" in capsys.readouterr().err
    assert {path.name for path in Path("sweep").iterdir()} == {"0-2", "sweep.toml"}
    before = Path("sweep/0-2/result.json").read_bytes()
    monkeypatch.chdir("images")
    call("sweep", "--resume", "--out", "../sweep", "--plan", "0:4", "--data", "../images")
    assert tomllib.loads(Path("../sweep/sweep.toml").read_text())["plan"] == ["0:2", "0:3", "4:2", "0:4"]
    assert {path.parent.name for path in Path("../sweep").glob("*/result.json")} == {"0-2", "0-3", "4-2", "0-4"}
    assert Path("../sweep/0-2/result.json").read_bytes() == before
    assert len(count) == 5


def test_an_allocator_is_for_the_sizes_of_a_sweep(place: Path):
    sweep("--plan", "0:2, 4:2", "--target-size", "300B paper", "--allocator", "haq", "--episodes", "3")
    settings = [tomllib.loads(Path("sweep", name, "config.toml").read_text()) for name in ("0-2_4-2", "300B-paper")]
    assert [each["allocator"] for each in settings] == ["dkm", "haq"]
    assert [each.get("episodes") for each in settings] == [None, 3]


def test_methods_and_seeds_make_one_table_with_their_mean_and_spread(place: Path, capsys: pytest.CaptureFixture):
    """Equal data and seeds for all; what a method cannot do is a row that says why, and not a failure."""
    words = ["--method", "dkm", "--method", "bwn lr=0.01", "--method", "gumbel tau=1e-3", "--seed", "0", "--seed", "1"]
    sweep("--plan", "0:2, 4:2", "--plan", "bwn=0:1 scaled, 4:1", *words)
    printed = capsys.readouterr().out
    folders = {path.parent.name for path in Path("sweep").glob("*/result.json")}
    names = ["0-2_4-2", "0-2_4-2_gumbel-tau-1e-3", "0-1-scaled_4-1_bwn-lr-0.01"]
    assert folders == {*names, *(f"{name}_seed-1" for name in names)}
    configs = {name: tomllib.loads(Path("sweep", name, "config.toml").read_text()) for name in folders}
    assert [configs[name]["method"] for name in names] == ["dkm", "gumbel", "bwn"]
    assert [configs[name]["tau"] for name in names] == ["auto", "0.001", "auto"]
    assert configs[names[2]]["lr"] == 0.01
    assert {config["seed"] for name, config in configs.items() if name.endswith("seed-1")} == {1}

    table = printed[printed.rindex("run ") :]
    assert table.count("(2 seeds)") == 3
    assert set(json.loads(Path("sweep/refused.json").read_text())) == {"0-2_4-2_bwn-lr-0.01"}  # once, not for each seed
    why = Page(Path("sweep/comparison.html").read_text(encoding="utf-8")).text
    assert 'method="bwn" has 1 bit per weight at most' in why

    call("sweep", "--resume", "--out", "sweep", "--method", "hard")  # goes on with all seeds and all plans
    new = {path.parent.name for path in Path("sweep").glob("*/result.json")} - folders
    assert new == {"0-2_4-2_hard", "0-2_4-2_hard_seed-1"}


WRONG = {
    "nothing to make": ([], {}, "how small? give --plan or --target-size"),
    "no folder": (["--plan", "0:2"], {"out": None}, "where to? give --out FOLDER"),
    "something in the folder": (["--plan", "0:2"], {"out": "images"}, "images exists: choose another --out"),
    "a wrong setting": (["--plan", "0:2"], {"optimizer": "lion"}, "must be one of adamw"),
    "a wrong setting of a method": (["--plan", "0:2", "--method", "dkm lr"], {}, "--method is NAME and SETTING=VALUE"),
    "a plan for no method": (["--plan", "bwn=0:1"], {}, "is for the method bwn: give --method bwn too"),
    "a wrong method": (["--plan", "0:2"], {"method": "dkn"}, "method must be one of"),
    "no sweep to resume": (["--plan", "0:2", "--resume"], {"model": None}, "there is no sweep in sweep to go on with"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said_before_the_first_run(place: Path, capsys: pytest.CaptureFixture, case: str):
    words, options, sentence = WRONG[case]
    call("sweep", *flags(**{"plan": None, "out": "sweep"} | options), *words, code=2)
    printed = capsys.readouterr()
    assert sentence in printed.err
    assert not printed.out
    assert not Path("sweep").exists()


def test_a_resumed_sweep_keeps_its_settings(place: Path, capsys: pytest.CaptureFixture):
    sweep("--plan", "0:2")
    call("sweep", "--resume", "--out", "sweep", "--lr", "0.5", code=2)
    assert "sweep was started with another --lr: leave it out to go on" in capsys.readouterr().err


def test_two_plans_that_differ_in_signs_only_have_two_folders(place: Path):
    sweep("--plan", "0:2/1", "--plan", "0: 2/1", "--plan", "0:2")
    assert {path.parent.name for path in Path("sweep").glob("*/result.json")} == {"0-2-1", "0-2-1-2", "0-2"}


@pytest.mark.parametrize(
    ("value", "name"), [("cv:4/4, fc:8", "cv-4-4_fc-8"), ("1.0MB", "1.0MB"), ("../*", "run"), ("x" * 300, "x" * 60)]
)
def test_names_of_folders(value: str, name: str):
    assert folder_name(value) == name


# --- dkm compare ---------------------------------------------------------------------------------


def write_runs(folder: Path, **options: dict) -> None:
    """Runs that nobody has made: `after` is the accuracy, and `size` the bytes of the file."""
    folder.mkdir()
    for name, given in options.items():
        write_run(folder / name, finished=given.get("finished", True), word=given.get("word", "layer"))
        file = folder / name / "config.toml"
        own = f'plan = "{given.get("plan", name)}"\nlr = {given.get("lr", 0.1)}\n'
        own += f"seed = {given['seed']}\n" if "seed" in given else ""
        file.write_text(file.read_text() + own)
        if given.get("finished", True):
            result = json.loads((folder / name / "result.json").read_text())
            result |= dict(accuracy_after=given["after"], bytes_file=given["size"], unit="images", date="2026-11-19T")
            result |= dict(after=dict(standard_error=1.25, examples=640), before=dict(standard_error=0.75))
            (folder / name / "result.json").write_text(json.dumps(result))


def test_a_comparison_has_every_run_its_error_and_what_differs(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    write_runs(
        tmp_path / "runs",
        fine=dict(after=91.5, size=20_000),
        coarse=dict(after=85.25, size=5_000, lr=0.2),
        worse=dict(after=80.0, size=9_000),
        going=dict(finished=False),
    )
    call("compare", str(tmp_path / "runs"))
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == str(tmp_path / "runs" / "comparison.html")
    lines = {line.split()[0]: line for line in printed.splitlines() if line}
    assert "92.50 % ± 0.75" in lines["not"]  # not compressed
    assert "91.50 % ± 1.25" in lines["fine"]
    assert lines["fine"].endswith("fine, lr=0.1")
    assert lines["coarse"].endswith("coarse, lr=0.2")
    assert "(not finished)" in lines["going"]
    assert "Of a run that is not finished" in printed

    text = (tmp_path / "runs" / "comparison.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.headings == ["Accuracy and size", "The runs", "Training", "Run them again"]
    assert "The best run, fine, gives 91.50\xa0% in 20.0\xa0kB" in page.text
    assert "The smallest, coarse, gives 85.25\xa0% in 5.0\xa0kB" in page.text
    assert "2026-11-19" in page.text
    assert page.count("tr") == 1 + 1 + 4
    assert sum(tag == "path" and "error" in given["class"] for tag, given in page.tags if "class" in given) == 2 * 3
    assert not any(word in text for word in ("<script", "<link", "<img", "http:"))

    call("compare", str(tmp_path / "runs" / "fine"), str(tmp_path / "runs" / "coarse"))  # replaces the page
    assert Page((tmp_path / "runs" / "comparison.html").read_text(encoding="utf-8")).count("tr") == 1 + 1 + 2


def test_seeds_are_one_row_with_their_mean_and_standard_deviation(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    write_runs(
        tmp_path / "runs",
        a=dict(after=80.0, size=20_000, plan="all:2", seed=0),
        b=dict(after=83.0, size=22_000, plan="all:2", seed=1),
        c=dict(after=86.0, size=24_000, plan="all:2", seed=2),
        d=dict(after=85.0, size=9_000, plan="all:1", seed=0),
    )
    (tmp_path / "runs" / "refused.json").write_text('{"e": "it cannot"}')
    call("compare", str(tmp_path / "runs"))
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert lines["a"].startswith("a (3 seeds)")
    assert "83.00 % ± 3.00" in lines["a"]
    assert "22.0 kB" in lines["a"]
    assert lines["a"].endswith(" all:2")
    assert "85.00 % ± 1.25" in lines["d"]
    assert lines["e"].endswith("it cannot")
    assert not {"b", "c"} & set(lines)
    page = Page((tmp_path / "runs" / "comparison.html").read_text(encoding="utf-8"))
    assert page.count("tr") == 1 + 1 + 3
    assert "The best run, d, gives 85.00" in page.text  # and not c, which was lucky


def test_a_comparison_warns_of_different_models_and_data(tmp_path: Path, capsys):
    write_runs(tmp_path / "runs", a=dict(after=91, size=20_000), b=dict(after=90, size=10_000, word="other"))
    with open(tmp_path / "runs" / "a" / "config.toml", "a") as config:
        config.write('data = ["here"]\n')
    call("compare", str(tmp_path / "runs"))
    printed = capsys.readouterr().out
    assert "The runs compress different models." in printed
    assert "The runs have different data" in printed


def test_what_cannot_be_compared(tmp_path: Path, capsys):
    write_runs(tmp_path / "runs", a=dict(after=91, size=20_000), b=dict(after=90, size=10_000))
    a, b = str(tmp_path / "runs" / "a"), str(tmp_path / "runs" / "b")
    call("compare", a, code=2)
    assert "there is 1 run to compare: name two or more" in capsys.readouterr().err
    call("compare", a, a, code=2)
    assert "there is 1 run to compare" in capsys.readouterr().err
    call("compare", a, str(tmp_path / "nowhere"), code=2)
    assert "there is no run folder" in capsys.readouterr().err
    (tmp_path / "mine.html").write_text("my page")
    call("compare", a, b, "--out", str(tmp_path / "mine.html"), code=2)
    assert "mine.html exists and is not a comparison that dkm wrote" in capsys.readouterr().err
    assert (tmp_path / "mine.html").read_text() == "my page"
    result = json.loads(Path(b, "result.json").read_text())
    Path(b, "result.json").write_text(json.dumps(result | dict(metric="perplexity", perplexity_after=3.0)))
    call("compare", a, b, code=2)
    assert "the accuracy of a and the perplexity of b cannot be compared" in capsys.readouterr().err
