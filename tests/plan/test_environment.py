"""A plan may set only environment variables that tune speed, not those that load code or name files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from drivetrain.outcomes import Problem
from drivetrain.plan import Plan
from drivetrain.plan.environment import allowed_variables, check_environment
from drivetrain.plan.imported import read

REFUSED = [
    "PYTHONPATH",
    "PYTHONSTARTUP",
    "PYTHONHOME",
    "LD_PRELOAD",
    "LD_LIBRARY_PATH",
    "PATH",
    "HOME",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_INJECTION64_PATH",
    "CUDA_CACHE_PATH",
    "NCCL_NET",
    "NCCL_NET_PLUGIN",
    "NCCL_TUNER_PLUGIN",
    "NCCL_PROFILER_PLUGIN",
    "NCCL_CONF_FILE",
    "NCCL_TOPO_FILE",
    "NCCL_DEBUG_FILE",
    "OMP_TOOL_LIBRARIES",
    "TORCH_LOGS",
    "TORCH_HOME",
    "TORCH_EXTENSIONS_DIR",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
    "TORCHINDUCTOR_CACHE_DIR",
    "DRIVETRAIN_FAULTS",
    "RANK",
    "MASTER_ADDR",
    "omp_num_threads",
]


@pytest.mark.parametrize("name", REFUSED)
def test_variables_that_load_code_or_name_files_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(Problem, match=f"'{name}' is no variable that a plan may set"):
        Plan.from_json({"env": {name: "x"}})  # the rendezvous, a worker and a resumed run read a plan like this
    with pytest.raises(Problem, match="leave it out of the plan"):
        replace(Plan(), env={name: "x"})
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(Plan().to_json() | {"env": {name: "x"}}))
    with pytest.raises(Problem, match=name):  # `--plan FILE` reads a plan like this
        read(file)


@pytest.mark.parametrize("value", [3, None, ["1"], "a\nb", "\x1b[2J", "x" * 2000, "\0", "ü"])
def test_values_are_short_plain_text(value: object) -> None:
    with pytest.raises(Problem, match=r"plan.env: OMP_NUM_THREADS: .* does not fit"):
        check_environment({"OMP_NUM_THREADS": value})


@pytest.mark.parametrize("env", [None, [], "OMP_NUM_THREADS=1", 3])
def test_an_environment_is_an_object(env: object) -> None:
    with pytest.raises(Problem, match="it is an object"):
        check_environment(env)


def test_tuning_variables_are_allowed_and_others_are_filtered_out() -> None:
    tuning = {
        "OMP_NUM_THREADS": "2",
        "NCCL_SOCKET_IFNAME": "^lo,docker",
        "KMP_BLOCKTIME": "0",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }
    assert Plan(env=tuning).env == check_environment(tuning) == tuning
    assert allowed_variables(tuning | {"NCCL_NET_PLUGIN": "x", "PATH": "/bin", "OMP_PLACES": "a\tb"}) == tuning
