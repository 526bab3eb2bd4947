"""`drivetrain plan` and `train --plan`, run as commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drivetrain.launch import plan_cache
from tests.command import TASK, expect_error, run_ok, write_task

CACHE = {"XDG_CACHE_HOME": ""}


@pytest.fixture(autouse=True)
def _own_cache(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Gives all tests of this file one cache, so that the task is surveyed once."""
    CACHE["XDG_CACHE_HOME"] = str(tmp_path_factory.getbasetemp() / "cache")
    write_task()


def plan(*words: str) -> dict[str, Any]:
    return dict(json.loads(run_ok("plan", "small.py", *words, "--json", **CACHE)))


def test_a_plan_shows_memory_time_and_cost_and_is_cached() -> None:
    text = run_ok("plan", "small.py", "--hardware", "4xL4-24GB", "--price", "0.8", **CACHE)
    for part in (
        "4 processes (ddp, nccl), bf16",
        "GiB predicted: ",
        "ms a step predicted (work",
        "samples/s",
        "$",
        "rejected",
        "fsdp (ZeRO-3)",
    ):
        assert part in text
    assert [f.name.partition("-")[0] for f in (Path(CACHE["XDG_CACHE_HOME"]) / "drivetrain" / "plans").iterdir()].count("profile") >= 1


def test_the_plan_of_another_machine_is_another() -> None:
    plans = [plan("--hardware", words) for words in ("1xH100-80GB", "8xH100-80GB", "1xT4-16GB", "cpu, 4 cores, 16GB RAM")]
    assert [plan_["plan"]["world_size"] for plan_ in plans] == [1, 8, 1, 1]
    assert [plan_["plan"]["precision"] for plan_ in plans] == ["bf16", "bf16", "fp16", "fp32"]
    assert len({plan_["plan"]["reasons"]["strategy"] for plan_ in plans}) == 4
    assert plans[0]["total"]["steps"] == 28


def test_a_saved_plan_runs_and_only_for_its_task() -> None:
    Path("plan.json").write_text(json.dumps(plan("plan.micro_batch=25")))
    run_ok("train", "small.py", "--plan", "plan.json", "--name", "saved")
    plan_of_run = json.loads(Path("runs/saved/run.json").read_text())["plan"]
    assert (plan_of_run["micro_batch"], plan_of_run["accumulation"]) == (25, 4)
    write_task("other.py")
    assert "is for small, not for other" in expect_error("train", "other.py", "--plan", "plan.json")
    assert "is for 1 processes on 1 machines" in expect_error("train", "small.py", "--plan", "plan.json", "--procs", "2")
    assert "was made with global_batch=100" in expect_error("train", "small.py", "global_batch=50", "--plan", "plan.json")


def test_an_accelerate_file_is_applied_and_the_command_line_wins() -> None:
    Path("a.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nmixed_precision: bf16\nnum_processes: 2\nuse_cpu: true\nmain_training_function: main\n"
    )
    output = run_ok("train", "small.py", "--plan", "a.yaml", "--name", "a", "epochs=1")
    run_info = json.loads(Path("runs/a/run.json").read_text())
    assert (run_info["plan"]["world_size"], run_info["plan"]["precision"]) == (2, "bf16")
    assert "main_training_function is not used" in output
    run_ok("train", "small.py", "--plan", "a.yaml", "--name", "b", "epochs=1", "precision=fp32", "--procs", "1")
    assert json.loads(Path("runs/b/run.json").read_text())["plan"]["precision"] == "fp32"


def test_a_deepspeed_file_is_applied() -> None:
    pytest.importorskip("deepspeed")
    config = {
        "train_batch_size": 60,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 50000},
        "steps_per_print": 7,
    }
    Path("ds.json").write_text(json.dumps(config))
    run_ok("train", "small.py", "--plan", "ds.json", "--name", "ds", "--procs", "2", "epochs=1")
    run_info = json.loads(Path("runs/ds/run.json").read_text())
    assert (run_info["plan"]["strategy"], run_info["plan"]["zero_stage"], run_info["plan"]["global_batch"]) == ("deepspeed", 2, 60)
    assert run_info["recipe"]["settings"]["clip"] == 1.0
    assert json.loads(Path("runs/ds/deepspeed.json").read_text())["zero_optimization"]["reduce_bucket_size"] == 50000


def test_the_guides_table_sets_the_global_batch_and_a_notice_says_so() -> None:
    output = run_ok("train", "small.py", "--planner", "table", "--name", "table", "epochs=1")
    run_info = json.loads(Path("runs/table/run.json").read_text())
    assert run_info["plan"]["global_batch"] == run_info["recipe"]["settings"]["global_batch"] == 32
    assert run_info["recipe"]["origin"]["global_batch"] == "the guide's table"
    assert "global_batch=32, not 100" in output
    text = run_ok("plan", "small.py", "--hardware", "4xT4-16GB", "--compare", **CACHE)
    assert "global_batch              240" in text
    assert "times as fast" in text


def test_the_users_variables_win_and_are_recorded() -> None:
    run_ok("train", "small.py", "--name", "v", "epochs=1", GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1", TORCH_SHOW_CPP_STACKTRACES="0")
    plan_of_run = json.loads(Path("runs/v/run.json").read_text())["plan"]
    assert plan_of_run["env"]["GLOO_SOCKET_IFNAME"] == "lo" and plan_of_run["env"]["TORCH_SHOW_CPP_STACKTRACES"] == "0"
    assert (plan_of_run["env"]["OMP_NUM_THREADS"], plan_of_run["threads"]) == ("1", 1)


def test_the_location_of_data_can_be_pinned_and_changes_no_result() -> None:
    for location in ("device", "loader"):
        run_ok("train", "small.py", "epochs=1", f"plan.data={location}", "--name", location)
        assert json.loads(Path(f"runs/{location}/run.json").read_text())["plan"]["reasons"]["data"] == "pinned"
    assert Path("runs/device/model/model.safetensors").read_bytes() == Path("runs/loader/model/model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hardware", "4xL5"], "there is no GPU 'L5' in the table"),
        (["--hardware", "8xH100-80GB", "global_batch=4"], "less than one sample for each of 8 processes"),
        (["--hardware", "1xT4-16GB", "--measure"], "--measure needs the machine itself"),
        (["plan.stragety=ddp"], "did you mean strategy"),
        (["--hardware", "1xT4-16GB", "plan.strategy=ddp"], "does not go with 1 process"),
        (["--hardware", "1x0.1GB", "hidden=4000000"], "the model fits nowhere"),
        (["--hardware", "2 nodes x 4xL4-24GB", "--nodes", "3"], "do not agree"),
        (["--price", "-1"], "price"),
    ],
)
def test_errors_name_the_fix(words: list[str], message: str) -> None:
    assert message in expect_error("plan", "small.py", *words, **CACHE)


def test_cached_profiles_depend_on_the_tasks_modules_and_data(folder: Path) -> None:
    write_task("moved.py", ("self.hidden", "widths.HIDDEN"), "import widths\n" + TASK)

    def parameters(width: int) -> float:
        Path("widths.py").write_text(f"HIDDEN = {width}\n")
        facts = json.loads(run_ok("plan", "moved.py", "--hardware", "1xL4-24GB", "--json", **CACHE))
        return float(facts["plan"]["predicted"]["memory_bytes"]["parameters"])

    assert parameters(3200) > 50 * parameters(32)
    Path("rows/train").mkdir(parents=True)
    before = plan_cache.file_stamps({"data_dir": "rows", "hidden": 3})
    Path("rows/train/new").mkdir()
    assert plan_cache.file_stamps({"data_dir": "rows", "hidden": 3}) != before


def test_a_plan_says_that_a_model_cannot_be_traced() -> None:
    text = "        if x.sum().item() > 1e9: raise RuntimeError('never')\n        return F.cross_entropy(model(x), y)"
    write_task("values.py", ("        return F.cross_entropy(model(x), y)", text))
    facts = json.loads(run_ok("plan", "values.py", "--hardware", "1xL4-24GB", "--json", **CACHE))
    assert facts["plan"]["predicted"], "predicted from real steps on a few samples"
    broken = "        raise RuntimeError('rubbish')"
    write_task("broken.py", ("        return F.cross_entropy(model(x), y)", broken))
    facts = json.loads(run_ok("plan", "broken.py", "--hardware", "1xL4-24GB", "--json", **CACHE))
    assert "could not be traced: RuntimeError: rubbish" in facts["plan"]["reasons"]["predicted"]
