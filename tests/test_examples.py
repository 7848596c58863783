"""The examples run as they say: to the end, killed and resumed bit by bit, and on other numbers of processes."""

import importlib.util
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import streampack
from streampack.lane_state import COUNTS

EXAMPLES = Path(__file__).parents[1] / "examples"
STEPS = 24
TINY = f"--steps {STEPS} --seq-len 256 --global-batch 4 --lr 1e-3 --save-every 5 --max-files 60".split()
ONE = (sys.executable,)
TWO = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
PATIENCE_SECONDS = 240


def environment() -> dict[str, str]:
    package = str(Path(streampack.__file__).parents[1])
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


@contextmanager
def started(*command: object) -> Iterator[subprocess.Popen[str]]:
    """A running process, which does not outlive the block."""
    process = subprocess.Popen(
        list(map(str, command)),
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun passes it on to its processes
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
        assert process.stdout is not None
        process.stdout.close()


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    return output


def run(*command: object) -> str:
    with started(*command) as process:
        output = finish(process)
    assert process.returncode == 0, output
    return output


def wait_for_step(process: subprocess.Popen[str], out: Path, step: int) -> None:
    """Until the log has the line of a step of this process."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(log_lines(out)) < step:
        if process.poll() is not None:
            raise AssertionError(finish(process))
        assert time.monotonic() < deadline, f"no step {step} within {PATIENCE_SECONDS} s"
        time.sleep(0.005)


def log_lines(out: Path) -> list[str]:
    path = out / "losses.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def log(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log_lines(out)]


def checkpoints(out: Path) -> list[str]:
    return sorted(path.name for path in out.glob("step-*.pt"))


def last_checkpoint(out: Path) -> dict[str, Any]:
    return torch.load(out / checkpoints(out)[-1])


def assert_same(one: Any, other: Any) -> None:
    """Equal, tensors bit by bit."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for inner, inner_other in zip(one, other, strict=True):
            assert_same(inner, inner_other)
    else:
        assert one == other


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data that train.py makes at its first run; all runs of this file share it."""
    return tmp_path_factory.mktemp("examples") / "data"


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, data: Path) -> tuple[Path, str]:
    """(folder, output) of a run of one process from the first step to the last."""
    out = tmp_path_factory.mktemp("examples") / "uninterrupted"
    return out, run(*ONE, EXAMPLES / "train.py", *TINY, "--data", data, "--out", out)


def train(data: Path, out: Path, *, on: Sequence[str] = ONE) -> list[object]:
    return [*on, EXAMPLES / "train.py", *TINY, "--data", data, "--out", out, "--resume"]


def test_quickstart_runs() -> None:
    output = run(*ONE, EXAMPLES / "quickstart.py")
    losses = [float(line.split()[-1]) for line in output.splitlines() if line.startswith("step")]
    assert len(losses) == 20
    assert losses[-1] < losses[0]
    assert "resumed with the next batch" in output


def test_train_learns_and_says_what_packing_saved(uninterrupted: tuple[Path, str]) -> None:
    out, output = uninterrupted
    lines = log(out)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert lines[-1]["loss"] < lines[0]["loss"] - 1
    assert len({line["rows"] for line in lines}) == STEPS
    assert checkpoints(out) == ["step-00000020.pt", "step-00000024.pt"]

    rows = [row for line in lines for row in line["lengths"]]
    lengths = [length for row in rows for length in row]
    assert len(rows) == STEPS * 4
    assert max(map(sum, rows)) == 256
    padded = sum(len(group) * max(group) for group in (lengths[at : at + 4] for at in range(0, len(lengths), 4)))
    assert f"packed: {STEPS * 4 * 256:,} cells for {sum(lengths):,} tokens of {len(lengths):,} examples" in output
    assert f"as they come: {padded:,} cells" in output
    assert padded > STEPS * 4 * 256


@pytest.mark.slow
@pytest.mark.parametrize("workers", [(0, 0, 0), (2, 0, 3)])
def test_a_killed_run_resumes_bit_by_bit_with_any_number_of_workers(
    tmp_path: Path, data: Path, uninterrupted: tuple[Path, str], workers: tuple[int, int, int]
) -> None:
    first = random.randrange(1, STEPS - 6)
    steps = (first, random.randrange(first + 1, STEPS - 2))
    for step, number in zip(steps, workers, strict=False):
        with started(*train(data, tmp_path), "--workers", number) as process:
            wait_for_step(process, tmp_path, step)
            process.kill()
            process.wait()
        assert process.returncode == -signal.SIGKILL, f"was over before it could be killed at step {step}"
    run(*train(data, tmp_path), "--workers", workers[-1])
    assert_same(last_checkpoint(tmp_path), last_checkpoint(uninterrupted[0]))
    assert log_lines(tmp_path) == log_lines(uninterrupted[0])


def test_an_interrupted_run_saves_and_resumes(tmp_path: Path, data: Path, uninterrupted: tuple[Path, str]) -> None:
    with started(*train(data, tmp_path)) as process:
        wait_for_step(process, tmp_path, 7)
        process.send_signal(signal.SIGINT)
        output = finish(process)
    assert process.returncode == 0, output
    step = len(log_lines(tmp_path))
    assert 7 <= step < STEPS
    assert checkpoints(tmp_path)[-1] == f"step-{step:08d}.pt"
    run(*train(data, tmp_path))
    assert_same(last_checkpoint(tmp_path), last_checkpoint(uninterrupted[0]))
    assert log_lines(tmp_path) == log_lines(uninterrupted[0])


@pytest.mark.slow
def test_two_processes_go_on_with_the_run_of_one_and_back(
    tmp_path: Path, data: Path, uninterrupted: tuple[Path, str]
) -> None:
    for processes, step in ((ONE, 7), (TWO, 15)):
        with started(*train(data, tmp_path, on=processes)) as process:
            wait_for_step(process, tmp_path, step)
            process.send_signal(signal.SIGTERM)
            output = finish(process)
        done = len(log_lines(tmp_path))
        assert step <= done < STEPS, output
        assert checkpoints(tmp_path)[-1] == f"step-{done:08d}.pt", output
    run(*train(data, tmp_path))
    lines, expected = log(tmp_path), log(uninterrupted[0])
    for key in ("step", "rows", "lengths"):
        assert [line[key] for line in lines] == [line[key] for line in expected]
    for key, tolerance in (("loss", {"abs": 2e-5}), ("gradient_norm", {"rel": 1e-4})):
        assert [line[key] for line in lines] == pytest.approx([line[key] for line in expected], **tolerance)


@pytest.mark.usefixtures("uninterrupted")  # which makes the tokenizer
def test_train_on_files_of_ones_own(tmp_path: Path, data: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"content": f"{n} squared is {n * n}"}) + "\n" for n in range(2000)))
    own = ("--dataset", file, "--text-column", "content", "--tokenizer", data / "tokenizer", "--workers", 2)
    sizes = ("--steps", 2, "--seq-len", 64, "--global-batch", 2)
    run(*ONE, EXAMPLES / "train.py", *own, *sizes, "--out", tmp_path / "out")
    assert [len(line["lengths"]) for line in log(tmp_path / "out")] == [2, 2]


def load_train(monkeypatch: pytest.MonkeyPatch, *, world_size: int) -> ModuleType:
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    spec = importlib.util.spec_from_file_location("train", EXAMPLES / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("arguments", "world_size", "message"),
    [
        (["--dataset", "some/dataset"], 1, "--dataset needs --tokenizer"),
        (["--global-batch", "8"], 3, "--global-batch 8 rows cannot be dealt evenly to 3 processes"),
        ([], 1, "holds step-00000003.pt: --resume it, or use another --out"),
    ],
)
def test_arguments_that_cannot_be_used_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    world_size: int,
    message: str,
) -> None:
    (tmp_path / "step-00000003.pt").touch()
    module = load_train(monkeypatch, world_size=world_size)
    monkeypatch.setattr(sys, "argv", ["train.py", "--out", str(tmp_path), *arguments])
    with pytest.raises(SystemExit):
        module.parse_arguments()
    assert message in capsys.readouterr().err


def test_arguments_reach_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load_train(monkeypatch, world_size=1)
    asked = []
    monkeypatch.setattr(module, "load_dataset", lambda *names, **options: asked.append((names, options)))
    arguments = "--dataset some/dataset --dataset-config small --split test --revision abc --tokenizer some/model"
    monkeypatch.setattr(sys, "argv", ["train.py", "--out", str(tmp_path), *arguments.split()])
    module.open_stream(module.parse_arguments())
    assert asked == [(("some/dataset", "small"), {"split": "test", "revision": "abc", "streaming": True})]


# ---- finetune_trainer.py ---------------------------------------------------------------------------------------------

FEW = ["--conversations", "400", "--epochs", "2", "--save-every", "3"]


def finetune(out: Path, *more: object, on: Sequence[str] = ONE) -> list[object]:
    return [*on, EXAMPLES / "finetune_trainer.py", *FEW, "--out", out, *more]


def held_out_losses(output: str) -> list[float]:
    """After each epoch, and at the end."""
    return [float(loss) for loss in re.findall(r"'eval_loss': '?([0-9.]+)", output)]


def wait_for_checkpoint(process: subprocess.Popen[str], out: Path, step: int) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (out / f"checkpoint-{step}" / "trainer_state.json").exists():
        assert process.poll() is None, finish(process)
        assert time.monotonic() < deadline, f"no checkpoint {step} within {PATIENCE_SECONDS} s"
        time.sleep(0.005)


def kill_all(process: subprocess.Popen[str]) -> None:
    """A launcher and the processes that it started."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture(scope="module")
def finetuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """(folder, output) of an uninterrupted run."""
    out = tmp_path_factory.mktemp("examples") / "finetuned"
    return out, run(*finetune(out))


def test_finetune_trainer_trains_on_each_conversation_in_each_epoch(finetuned: tuple[Path, str]) -> None:
    out, output = finetuned
    losses = held_out_losses(output)
    assert len(losses) == 3
    assert losses[1] < losses[0] - 0.5
    assert losses[2] == losses[1]
    assert "Sort python! " in output
    stream = json.loads((out / "checkpoint-10" / "stream.json").read_text())
    counts = [json.loads(lane)[3] for lane in stream["lanes"].values()]
    assert stream["pass"] == [1, 2]
    assert sum(count[COUNTS.index("examples")] for count in counts) == 400 - stream["totals"]["examples"] + 400
    assert "10 steps, held-out loss " in output


@pytest.mark.slow
def test_a_killed_fine_tuning_goes_on_bit_by_bit(tmp_path: Path, finetuned: tuple[Path, str]) -> None:
    for step in (3, 6):
        with started(*finetune(tmp_path)) as process:
            wait_for_checkpoint(process, tmp_path, step)
            kill_all(process)
    newest = max(tmp_path.glob("checkpoint-*/trainer_state.json"), key=lambda path: int(path.parent.name[11:]))
    newest.write_text(newest.read_text()[:100])  # as if it had been killed just then
    output = run(*finetune(tmp_path))
    assert "goes on from " in output
    assert f"goes on from {newest.parent}" not in output
    model = "checkpoint-10/model.safetensors"
    assert (tmp_path / model).read_bytes() == (finetuned[0] / model).read_bytes()
    assert held_out_losses(output)[-1] == held_out_losses(finetuned[1])[-1]


@pytest.mark.slow
def test_the_fine_tuning_of_two_processes_goes_on_in_one(tmp_path: Path, finetuned: tuple[Path, str]) -> None:
    with started(*finetune(tmp_path, "--batch-size", 2, on=TWO)) as process:
        wait_for_checkpoint(process, tmp_path, 6)
        kill_all(process)
    output = run(*finetune(tmp_path))
    assert held_out_losses(output)[-1] == pytest.approx(held_out_losses(finetuned[1])[-1], abs=2e-3)


# ---- pretrain_fsdp.py ------------------------------------------------------------------------------------------------


def pretrain(data: Path, out: Path, processes: int, steps: int = 60) -> list[object]:
    launcher = [*TWO[:-1], str(processes)]
    # A low rate, so that differences in rounding do not grow from step to step.
    sizes = f"--steps {steps} --seq-len 128 --max-files 60 --save-every 5 --lr 3e-4".split()
    return [*launcher, EXAMPLES / "pretrain_fsdp.py", *sizes, "--data", data, "--out", out]


@pytest.mark.slow
def test_pretraining_killed_on_four_ranks_then_on_two_goes_on_on_one_as_if_nothing_had_been(
    tmp_path: Path, data: Path
) -> None:
    whole, elastic = tmp_path / "whole", tmp_path / "elastic"
    run(*pretrain(data, whole, 1))
    for processes, steps in ((4, 20), (2, 40)):
        with started(*pretrain(data, elastic, processes)) as process:
            wait_for_step(process, elastic, steps)
            kill_all(process)
        assert process.returncode == -signal.SIGKILL, f"was over before it could be killed on {processes} ranks"
        assert steps <= len(log_lines(elastic)) < 60
    run(*pretrain(data, elastic, 1))
    lines, expected = log(elastic), log(whole)
    assert [line["step"] for line in lines] == list(range(1, 61))
    assert [line["rows"] for line in lines] == [line["rows"] for line in expected]
    assert len({line["rows"] for line in lines}) == 60
    assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in expected], abs=1e-4)
    assert expected[-1]["loss"] < expected[0]["loss"] - 1
