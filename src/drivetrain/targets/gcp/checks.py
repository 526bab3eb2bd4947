"""What `doctor --on` shows of Google Cloud: programs, logins, the project, its API and its quotas."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from drivetrain.outcomes import Problem
from drivetrain.targets.base import Check
from drivetrain.targets.gcp.cloud import run_program
from drivetrain.targets.gcp.deployment import Deployment
from drivetrain.targets.gcp.failures import explain_cloud
from drivetrain.targets.gcp.settings import GcpSettings, num_machines, region

QUOTAS = {
    "nvidia-tesla-t4": "NVIDIA_T4_GPUS", "nvidia-tesla-v100": "NVIDIA_V100_GPUS", "nvidia-tesla-p100": "NVIDIA_P100_GPUS", "nvidia-tesla-p4": "NVIDIA_P4_GPUS",
    "nvidia-l4": "NVIDIA_L4_GPUS", "nvidia-tesla-a100": "NVIDIA_A100_GPUS", "nvidia-a100-80gb": "NVIDIA_A100_80GB_GPUS",
}  # fmt: skip
ALL_GPUS = "GPUS_ALL_REGIONS"


def cloud_checks(settings: GcpSettings, deployment: Deployment) -> Iterator[Check]:
    """Yields the checks; after one that the others need, none."""
    for check in (terraform_check, login_check, default_login_check):
        yield _guarded(check)
    project = _guarded(lambda: project_check(deployment))
    yield project
    if project.verdict == "fault":
        return
    api = _guarded(lambda: api_check(deployment))
    yield api
    if settings.state_bucket:
        yield _guarded(lambda: bucket_check(deployment, settings.state_bucket))
    if api.verdict == "ok" and settings.use_gpu:
        try:
            yield from quota_checks(settings, deployment)
        except Problem as problem:
            yield fault("quota", problem)


def fault(subject: str, problem: Problem) -> Check:
    """Returns the check of a problem, whose text names the fix after a colon."""
    text, _, fix = str(problem).partition(": ")
    return Check(subject, "fault", text, fix)


def _guarded(check: Callable[[], Check]) -> Check:
    try:
        return check()
    except Problem as problem:
        return fault(getattr(check, "__name__", "").removesuffix("_check").replace("<lambda>", "project"), problem)


def terraform_check() -> Check:
    version = run_program(["terraform", "version"]).out.splitlines()[:1]
    return Check("terraform", "ok", version[0] if version else "is there")


def login_check() -> Check:
    done = run_program(["gcloud", "auth", "list", "--filter=status:ACTIVE", "--format=value(account)", "--quiet"])
    if account := done.out.strip():
        return Check("login", "ok", f"gcloud: {account}")
    return Check("login", "fault", "gcloud has no login on this machine", "gcloud auth login")


def default_login_check() -> Check:
    """Terraform has a login of its own. The token that gcloud prints is not kept."""
    done = run_program(["gcloud", "auth", "application-default", "print-access-token", "--quiet"])
    if done.code == 0:
        return Check("terraform login", "ok", "application-default credentials are there")
    return fault("terraform login", explain_cloud("gcloud", done.err, done.code, ""))


def project_check(deployment: Deployment) -> Check:
    facts = deployment.cloud.gcloud("projects", "describe", deployment.project) or {}
    if facts.get("lifecycleState", "ACTIVE") != "ACTIVE":
        return Check(
            "project", "fault", f"{deployment.project} is being deleted", "gcloud projects undelete, or another project: in the target"
        )
    return Check("project", "ok", deployment.project)


def api_check(deployment: Deployment) -> Check:
    rows = deployment.cloud.gcloud("services", "list", "--enabled", "--filter=config.name=compute.googleapis.com") or []
    if rows:
        return Check("API", "ok", "compute.googleapis.com is on")
    return Check(
        "API", "fault", "compute.googleapis.com is off", f"gcloud services enable compute.googleapis.com --project={deployment.project}"
    )


def bucket_check(deployment: Deployment, bucket: str) -> Check:
    deployment.cloud.gcloud("storage", "buckets", "describe", f"gs://{bucket}")
    return Check("state bucket", "ok", f"gs://{bucket}")


def quota_checks(settings: GcpSettings, deployment: Deployment) -> Iterator[Check]:
    need = num_machines(settings) * settings.gpus_per_machine
    here = region(settings)
    metric = ("PREEMPTIBLE_" if settings.spot else "") + QUOTAS.get(settings.accelerator_type, "")
    for where, name, facts in (
        (here, metric, deployment.cloud.gcloud("compute", "regions", "describe", here)),
        ("all regions", ALL_GPUS, deployment.cloud.gcloud("compute", "project-info", "describe")),
    ):
        yield quota_check(name, where, need, (facts or {}).get("quotas") or [], deployment.project)


def quota_check(name: str, where: str, need: int, quotas: Sequence[Mapping[str, Any]], project: str) -> Check:
    """Returns whether a quota allows so many GPUs."""
    entry = next((quota for quota in quotas if quota.get("metric") == name), None)
    if entry is None:
        return Check(
            f"quota {name}",
            "warning",
            f"Google Cloud does not list it for {where}",
            "gcloud compute regions describe REGION shows the quotas",
        )
    limit, usage = float(entry["limit"]), float(entry["usage"])
    evidence = f"{usage:g} of {limit:g} used in {where}, {need} wanted"
    if limit >= need:
        return Check(f"quota {name}", "ok", evidence)
    return Check(f"quota {name}", "fault", evidence, f"ask for more: https://console.cloud.google.com/iam-admin/quotas?project={project}")
