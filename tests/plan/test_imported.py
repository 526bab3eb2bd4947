"""Files for --plan: every key is used, or listed as unused with the reason."""

from __future__ import annotations

import inspect
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.hardware.described import parse
from drivetrain.outcomes import Problem
from drivetrain.plan import Plan
from drivetrain.plan.choose import choose
from drivetrain.plan.imported import Imported, accelerate, deepspeed, mapping_table, read
from drivetrain.plan.imported.keys import flatten
from drivetrain.task import Task

GUIDE = """{
  "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": true}},
  "fp16": {"enabled": true},
  "activation_checkpointing": {"partition_activations": true}
}"""

FULL = """{
  "train_batch_size": 256, "train_micro_batch_size_per_gpu": 16, "gradient_accumulation_steps": 4,
  "gradient_clipping": 1.0, "steps_per_print": 100, "wall_clock_breakdown": false, "prescale_gradients": false,
  "zero_allow_untested_optimizer": true,
  "fp16": {"enabled": true, "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
  "bf16": {"enabled": false},
  "zero_optimization": {
    "stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": true, "buffer_count": 4},
    "allgather_partitions": true, "allgather_bucket_size": 2e8, "overlap_comm": true, "reduce_scatter": true,
    "reduce_bucket_size": 2e8, "contiguous_gradients": true, "round_robin_gradients": true
  },
  "optimizer": {"type": "AdamW", "params": {"lr": 5e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}},
  "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 5e-5, "warmup_num_steps": 500, "total_num_steps": "auto"}},
  "activation_checkpointing": {"partition_activations": true, "cpu_checkpointing": false, "contiguous_memory_optimization": false},
  "tensorboard": {"enabled": true, "output_path": "logs"}, "a_key_of_tomorrow": {"x": 1}, "elasticity": {}
}"""

MULTI_GPU = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: MULTI_GPU
downcast_bf16: 'no'
dynamo_config: {dynamo_backend: INDUCTOR, dynamo_mode: default, dynamo_use_dynamic: false, dynamo_use_fullgraph: false}
enable_cpu_affinity: false
gpu_ids: 0, 1,2,3
machine_rank: 1
main_process_ip: 10.0.0.1
main_process_port: 29501
main_training_function: main
mixed_precision: bf16
num_machines: 2
num_processes: 8
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""

FSDP = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_transformer_layer_cls_to_wrap: Block
  fsdp_version: 2
gpu_ids: all
machine_rank: 0
mixed_precision: 'no'
num_machines: 1
num_processes: 4
main_process_port: 29500
parallelism_config: {parallelism_config_dp_shard_size: 4, parallelism_config_tp_size: 1}
use_cpu: false
"""

DEEPSPEED = """
compute_environment: LOCAL_MACHINE
deepspeed_config:
  deepspeed_multinode_launcher: standard
  gradient_accumulation_steps: 4
  gradient_clipping: 1.0
  offload_optimizer_device: cpu
  offload_param_device: none
  zero3_init_flag: false
  zero3_save_16bit_model: true
  zero_stage: 3
distributed_type: DEEPSPEED
fp8_config: {backend: TE, margin: 0}
fsdp_config: {}
megatron_lm_config: {megatron_lm_tp_degree: 2}
mixed_precision: fp8
mpirun_config: {mpirun_hostfile: hosts}
num_processes: -1
tpu_name: null
"""


def load(folder: Path, text: str, name: str = "file.yaml") -> Imported:
    (folder / name).write_text(text)
    return read(folder / name)


def load_deepspeed(folder: Path, **values: Any) -> Imported:
    return load(folder, json.dumps(values), "ds.json")


@pytest.mark.parametrize(
    ("text", "name"), [(GUIDE, "ds.json"), (FULL, "ds.json"), (MULTI_GPU, "a.yaml"), (FSDP, "a.yaml"), (DEEPSPEED, "a.yaml")]
)
def test_every_key_is_used_or_listed_once(tmp_path: Path, text: str, name: str) -> None:
    imported = load(tmp_path, text, name)
    keys = [key for key, _ in flatten(json.loads(text) if name.endswith("json") else yaml.safe_load(text))]
    assert Counter([k for k, _ in imported.used] + [k for k, _ in imported.unused]) == Counter(keys)
    for _, target in imported.used:
        name = target.removeprefix("--").removeprefix("plan.").replace("-", "_")
        if target.startswith("plan."):
            assert name in imported.pins, target
        elif target.startswith("--"):
            assert name in imported.request, target
        else:
            assert name in imported.settings, target
    assert all(why and "\n" not in why for _, why in imported.unused)


def test_guide_004_as_printed(tmp_path: Path) -> None:
    imported = load(tmp_path, GUIDE, "ds.json")
    assert imported.kind == "deepspeed" and imported.plan is None
    assert imported.pins == {"strategy": "deepspeed", "zero_stage": 2, "offload": "optimizer", "activation_checkpointing": True}
    assert imported.settings == {"precision": "fp16"} and imported.request == {}
    assert imported.unused == (("zero_optimization.offload_optimizer.pin_memory", "offloaded state is always in pinned memory"),)


def test_a_full_deepspeed_configuration(tmp_path: Path) -> None:
    imported = load(tmp_path, FULL, "ds.json")
    assert imported.settings == {
        "global_batch": 256, "clip": 1.0, "precision": "fp16", "optim": "adamw", "learning_rate": 5e-5, "weight_decay": 0.01,
        "decay": "linear", "warmup": 500,
    }  # fmt: skip
    assert imported.pins.pop("deepspeed_config") == {
        "wall_clock_breakdown": False,
        "zero_optimization": {
            "offload_optimizer": {"buffer_count": 4}, "allgather_partitions": True, "allgather_bucket_size": 2e8, "overlap_comm": True,
            "reduce_scatter": True, "reduce_bucket_size": 2e8, "contiguous_gradients": True, "round_robin_gradients": True,
        },
    }  # fmt: skip
    assert imported.pins == {
        "strategy": "deepspeed",
        "zero_stage": 2,
        "offload": "optimizer",
        "activation_checkpointing": True,
        "micro_batch": 16,
    }
    unused = dict(imported.unused)
    assert "plan.micro_batch=16" in unused["gradient_accumulation_steps"]
    assert "left open" in unused["scheduler.params.total_num_steps"]
    assert "no key that is known" in unused["a_key_of_tomorrow.x"]


def test_keys_that_the_plan_decides_are_not_passed_to_deepspeed(tmp_path: Path) -> None:
    passed = {key for key, _ in flatten(load(tmp_path, FULL, "ds.json").pins["deepspeed_config"])}
    assert passed <= set(deepspeed.TUNING)
    keys_of_the_plan = {
        "train_batch_size",
        "zero_optimization.stage",
        "zero_optimization.offload_optimizer.device",
        "fp16.enabled",
        "gradient_clipping",
    }
    assert not keys_of_the_plan & set(deepspeed.TUNING)


def test_pins_of_a_file_make_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    for text, name in ((GUIDE, "ds.json"), (FULL, "ds.json"), (FSDP, "a.yaml"), (DEEPSPEED, "a.yaml"), (MULTI_GPU, "a.yaml")):
        imported = load(tmp_path, text, name)
        settings = Task(**imported.settings).settings()
        plan = choose(settings, parse("4xL4"), device="cuda", world_size=4, local_procs=4, pins=imported.pins)
        assert plan.strategy == imported.pins["strategy"]
        assert plan.deepspeed_config == imported.pins.get("deepspeed_config", {})
        assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


@pytest.mark.parametrize(
    ("values", "pins"),
    [
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}, {"zero_stage": 3, "offload": "all"}),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}}, {"zero_stage": 3, "offload": "all"}),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, {"zero_stage": 2}),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}}, {"zero_stage": 2}),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}}}, {"zero_stage": 2, "offload": "none"}),
        ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, {"zero_stage": 2, "offload": "optimizer"}),
        ({"zero_optimization": {"stage": 0, "overlap_comm": True, "offload_optimizer": {"device": "cpu"}}}, {}),
        ({"gradient_accumulation_steps": 4}, {"accumulation": 4}),
        ({"gradient_accumulation_steps": 1}, {}),
        ({"activation_checkpointing": {"partition_activations": False}}, {}),
    ],
)  # fmt: skip
def test_sharding_and_offload(tmp_path: Path, values: dict[str, Any], pins: dict[str, Any]) -> None:
    imported = load_deepspeed(tmp_path, **values)
    assert imported.pins == pins | ({"strategy": "deepspeed"} if "zero_stage" in pins else {})


@pytest.mark.parametrize(
    ("values", "settings"),
    [
        ({"bf16": {"enabled": True}}, {"precision": "bf16"}),
        ({"fp16": {"enabled": False}, "bf16": {"enabled": True}}, {"precision": "bf16"}),
        ({"fp16": {"enabled": False}, "bf16": {"enabled": False}}, {"precision": "fp32"}),
        ({"fp16": {"enabled": False}}, {"precision": "fp32"}),
        ({"fp16": {"enabled": "auto"}}, {}),
        ({"fp16": {"enabled": "auto"}, "bf16": {"enabled": False}}, {}),
        ({"torch_autocast": {"enabled": True, "dtype": "torch.bfloat16"}}, {"precision": "bf16"}),
        ({"torch_autocast": {"enabled": False, "dtype": "bfloat16"}}, {}),
        ({"optimizer": {"type": "Adam"}}, {"optim": "adamw"}),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}, {"optim": "adam"}),
        ({"optimizer": {"type": "Lamb", "params": {"lr": 0.1}}}, {"learning_rate": 0.1}),
        ({"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "scheduler": {"params": {"warmup_max_lr": 0.2}}}, {"optim": "sgd", "learning_rate": 0.2}),
        ({"scheduler": {"type": "WarmupCosineLR"}}, {"decay": "cosine"}),
        ({"scheduler": {"type": "OneCycle"}}, {}),
    ],
)  # fmt: skip
def test_settings_of_deepspeed(tmp_path: Path, values: dict[str, Any], settings: dict[str, Any]) -> None:
    assert load_deepspeed(tmp_path, **values).settings == settings


def test_a_global_batch_that_depends_on_the_number_of_processes_gets_a_note(tmp_path: Path) -> None:
    imported = load_deepspeed(tmp_path, train_micro_batch_size_per_gpu=8, gradient_accumulation_steps=4)
    assert imported.pins == {"micro_batch": 8} and "global_batch" not in imported.settings
    assert "global_batch=32 times them" in imported.notes[0]


def test_accelerate_on_several_machines(tmp_path: Path) -> None:
    imported = load(tmp_path, MULTI_GPU)
    assert imported.kind == "accelerate"
    assert imported.request == {"procs": 4, "nodes": 2, "node_rank": 1, "rendezvous": "10.0.0.1:29501", "gpus": "0,1,2,3"}
    assert imported.pins == {"strategy": "ddp", "compile": "on"} and imported.settings == {"precision": "bf16"}


def test_accelerate_with_fsdp_and_with_deepspeed(tmp_path: Path) -> None:
    imported = load(tmp_path, FSDP)
    assert imported.pins == {"strategy": "fsdp", "zero_stage": 3, "offload": "none", "activation_checkpointing": True}
    assert imported.request == {"procs": 4, "nodes": 1} and imported.settings == {"precision": "fp32"}
    imported = load(tmp_path, DEEPSPEED)
    assert imported.pins == {"strategy": "deepspeed", "zero_stage": 3, "offload": "optimizer", "accumulation": 4}
    assert imported.settings == {"clip": 1.0} and imported.request == {}
    assert "no fp8" in dict(imported.unused)["mixed_precision"]


@pytest.mark.parametrize(
    ("text", "pins", "request_"),
    [
        ("distributed_type: 'NO'\nnum_processes: 1", {}, {"procs": 1}),
        ("distributed_type: NO", {}, {"procs": 1}),
        ("distributed_type: MULTI_CPU\nnum_processes: 4\nuse_cpu: true", {}, {"procs": 4, "device": "cpu"}),
        ("distributed_type: MULTI_GPU\nnum_processes: 1", {}, {"procs": 1}),
        ("distributed_type: XLA\nnum_processes: 8", {}, {"procs": 8}),
        ("distributed_type: MEGATRON_LM\nmegatron_lm_config: {megatron_lm_tp_degree: 2}", {}, {}),
        ("distributed_type: MULTI_GPU\nfsdp_config: {fsdp_offload_params: true}", {"strategy": "ddp"}, {}),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: SHARD_GRAD_OP}", {"strategy": "fsdp", "zero_stage": 2}, {}),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: 2}", {"strategy": "fsdp", "zero_stage": 2}, {}),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_reshard_after_forward: false}", {"strategy": "fsdp", "zero_stage": 2}, {}),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: NO_SHARD, fsdp_offload_params: true}", {"strategy": "ddp"}, {}),
        ("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 0}", {"strategy": "ddp"}, {}),
        ("distributed_type: DEEPSPEED", {"strategy": "deepspeed"}, {}),
        ("distributed_type: MULTI_GPU\ndynamo_config: {dynamo_backend: CUDAGRAPHS}", {"strategy": "ddp", "capture": "on"}, {}),
        ("distributed_type: MULTI_GPU\nnum_machines: 2\nmain_process_ip: h", {"strategy": "ddp"}, {"nodes": 2, "rendezvous": "h:29500"}),
    ],
)
def test_kinds_of_accelerate_files(tmp_path: Path, text: str, pins: dict[str, Any], request_: dict[str, Any]) -> None:
    imported = load(tmp_path, text)
    assert (imported.pins, imported.request) == (pins, request_)


def test_yaml_reads_an_unquoted_no_as_false(tmp_path: Path) -> None:
    assert load(tmp_path, "distributed_type: MULTI_GPU\nmixed_precision: no").settings == {"precision": "fp32"}


def test_hybrid_sharding_gets_a_note(tmp_path: Path) -> None:
    for key in ("fsdp_sharding_strategy", "fsdp_reshard_after_forward"):
        imported = load(tmp_path, f"distributed_type: FSDP\nfsdp_config: {{{key}: HYBRID_SHARD}}")
        assert imported.pins["zero_stage"] == 3 and "over all processes" in imported.notes[0]


def test_the_deepspeed_file_that_accelerate_names_is_read(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(GUIDE)
    text = "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config: {deepspeed_config_file: ds.json, zero3_init_flag: true}"
    imported = load(tmp_path, text)
    assert imported.pins == {"strategy": "deepspeed", "zero_stage": 2, "offload": "optimizer", "activation_checkpointing": True}
    assert ("ds.json: fp16.enabled", "precision") in imported.used
    assert ("deepspeed_config.deepspeed_config_file", "plan.strategy") in imported.used
    (tmp_path / "ds.json").unlink()
    with pytest.raises(Problem, match=r"ds.json: No such file"):
        load(tmp_path, text)


def test_keys_of_the_installed_accelerate_are_known() -> None:
    pytest.importorskip("accelerate")
    from accelerate.commands import launch
    from accelerate.commands.config.config_args import ClusterConfig

    known = {key.name for key in accelerate.KEYS}
    known_groups = {name.partition(".")[0] for name in known}
    assert set(inspect.signature(ClusterConfig).parameters) <= known_groups
    flags = {o.removeprefix("--").replace("-", "_") for action in launch.launch_command_parser()._actions for o in action.option_strings}
    assert {f"fsdp_config.{f}" for f in flags if f.startswith("fsdp_")} <= known
    known_deepspeed_keys = {n.removeprefix("deepspeed_config.") for n in known if n.startswith("deepspeed_config.")}
    assert {f for f in flags if f.startswith(("deepspeed_", "offload_", "zero"))} <= known_deepspeed_keys


# --- saved plans ----------------------------------------------------------------------------


def example_plan() -> Plan:
    return choose(Task(global_batch=64).settings(), parse("2xL4"), device="cuda", world_size=2, local_procs=2, pins={"micro_batch": 8})


@pytest.mark.parametrize("form", ["bare", "plan --json", "run.json"])
def test_a_saved_plan_is_read_unchanged(tmp_path: Path, form: str) -> None:
    plan = example_plan()
    values: dict[str, Any] = plan.to_json()
    if form == "plan --json":
        values = {"format": 1, "task": "digits", "plan": values}
    elif form == "run.json":
        values = {
            "format": 1,
            "name": "r",
            "recipe": {"task": {"label": "digits", "path": "x"}, "settings": {}},
            "plan": values,
            "status": "finished",
        }
    imported = load(tmp_path, json.dumps(values), "plan.json")
    assert imported.kind == "plan" and imported.plan == plan
    assert imported.task == ("" if form == "bare" else "digits")
    assert imported.request == {"procs": 2, "nodes": 1, "device": "cuda"}
    assert imported.settings == {"global_batch": 64, "precision": "bf16", "deterministic": False} and imported.pins == {}
    assert [key for key, _ in imported.unused] == (["name", "recipe", "status"] if form == "run.json" else [])


def test_a_key_of_a_later_version_is_listed_as_unused(tmp_path: Path) -> None:
    imported = load(tmp_path, json.dumps(example_plan().to_json() | {"warp": 9}), "plan.json")
    assert imported.plan == example_plan() and imported.unused == (("warp", "no key of a plan"),)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"micro_batch": "many"}, r"plan.micro_batch: 'many' does not fit: it is a whole number"),
        ({"micro_batch": 0}, r"plan.micro_batch: 0 does not fit: it is a whole number of 1 or more"),
        ({"strategy": "magic"}, r"plan.strategy: 'magic' does not fit: it is one of single, ddp, fsdp, deepspeed"),
        ({"env": 3}, r"plan.env: 3 does not fit: it is an object"),
        ({"accumulation": 3}, r"do not make global_batch 64: accumulation must be 4"),
        ({"nodes": 3}, r"2 processes do not divide by 3 machines"),
        ({"format": 2}, r"a plan of format 2, and this version reads 1: create a new one"),
    ],
)
def test_a_malformed_plan_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(Problem, match=message):
        load(tmp_path, json.dumps(example_plan().to_json() | change), "plan.json")


# --- invalid files -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "{", "a.json is not valid JSON"),
        ("a.yaml", "a: [1", "a.yaml, line 1: not valid YAML"),
        ("a.yaml", "!!python/object/apply:os.system ['true']", "not valid YAML"),
        ("a.yaml", "- 1", r"holds a list, not a mapping of keys; --plan takes a plan .*accelerate's.*DeepSpeed"),
        ("a.yaml", "", "holds a NoneType"),
        ("a.yaml", "colour: red", "is no file that --plan knows: it takes a plan"),
        ("a.yaml", "task: digits\nepochs: 3", "is a recipe: drivetrain train"),
        ("a.yaml", "task: digits\nplan: {micro_batch: 8}", "is a recipe: drivetrain train"),
        ("a.json", '{"plan": {"strategy": "ddp"}}', "is no complete plan, it lacks device, world_size"),
        ("a.yaml", "distributed_type: FSPD", r"distributed_type: 'FSPD' does not fit: it is one of NO, MULTI_CPU"),
        ("a.yaml", "distributed_type: MULTI_GPU\nnum_processes: many", "num_processes: 'many' does not fit: it is a whole number"),
        ("a.yaml", "distributed_type: MULTI_GPU\nnum_machines: 0\nnum_processes: 3", "num_machines: 0 does not fit: it is a whole number of 1 or more"),
        ("a.yaml", "distributed_type: MULTI_GPU\nnum_processes: 3\nnum_machines: 2", r"a multiple of num_machines \(2\)"),
        ("a.yaml", "distributed_type: MULTI_GPU\nmixed_precision: int4", "one of no, fp16, bf16, fp8"),
        ("a.yaml", "distributed_type: FSDP\nfsdp_config: 3", "fsdp_config is a group of keys, not 3"),
        ("a.yaml", "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: HALF}", "true or false, or one of FULL_SHARD"),
        ("a.yaml", "distributed_type: NO\nnum_processes: 4", r"distributed_type and num_processes disagree on --procs \(1 and 4\)"),
        ("a.yaml", "compute_environment: AMAZON_SAGEMAKER\ndistributed_type: NO", "Amazon SageMaker.*accelerate config"),
        ("a.json", '{"zero_optimization": {"stage": 7}}', r"zero_optimization.stage: 7 does not fit: it is a whole number of 1 to 3"),
        ("a.json", '{"zero_optimization": true}', r"zero_optimization is a group of keys, not True"),
        ("a.json", '{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "tape"}}}', "one of none, cpu, nvme"),
        ("a.json", '{"fp16": {"enabled": true}, "bf16": {"enabled": true}}', "one of fp16 and bf16 only"),
        ("a.json", '{"train_batch_size": 0}', "train_batch_size: 0 does not fit: it is a whole number of 1 or more"),
        ("a.json", '{"gradient_clipping": [1]}', "gradient_clipping: .* does not fit: it is a number"),
    ],
)  # fmt: skip
def test_an_invalid_file_is_refused_with_the_fix(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(Problem, match=message):
        load(tmp_path, text, name)


def test_missing_files_and_files_that_are_not_text(tmp_path: Path) -> None:
    with pytest.raises(Problem, match=r"No such file or directory; it takes a plan"):
        read(tmp_path / "none.yaml")
    with pytest.raises(Problem, match="Is a directory"):
        read(tmp_path)
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(Problem, match=r"is no text"):
        read(tmp_path / "x.yaml")


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text("ab ", max_size=4) | st.sampled_from(["auto", "cpu", "NO"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text("ab", min_size=1, max_size=2), inner, max_size=2), max_leaves=4,
)  # fmt: skip


@settings(deadline=None)
@given(st.data())
def test_any_value_of_any_key_is_used_listed_or_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    keys = data.draw(st.sampled_from([accelerate.KEYS, deepspeed.KEYS]))
    names = data.draw(st.lists(st.sampled_from([k.name.partition(".") for k in keys if not k.name.endswith("*")]), min_size=1, max_size=5))
    values: dict[str, Any] = {}
    for top, dot, rest in names:
        if not dot:
            values[top] = data.draw(ANY)
        elif isinstance(values.setdefault(top, {}), dict):
            values[top][rest] = data.draw(ANY)
    try:
        imported = load_deepspeed(tmp_path_factory.getbasetemp(), **values)
    except Problem:
        return
    assert len(imported.used) + len(imported.unused) == len(list(flatten(values)))


def test_the_docs_table_names_every_key() -> None:
    table = mapping_table()
    for key in (*accelerate.KEYS, *deepspeed.KEYS):
        assert f"| `{key.name}` |" in table
    assert len({k.name for k in accelerate.KEYS}) == len(accelerate.KEYS) and len({k.name for k in deepspeed.KEYS}) == len(deepspeed.KEYS)
