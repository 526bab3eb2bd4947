"""Turns what gcloud and terraform print when they fail into one line that names the fix."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from drivetrain.outcomes import Outcome, Problem
from drivetrain.terminal import one_line


class NoCapacity(Problem):
    """A zone has no machine of this kind at present."""

    def __init__(self, message: str, zone: str) -> None:
        super().__init__(message, Outcome.INFRA)
        self.zone = zone


class ApiOff(Problem):
    """An API is off in the project."""


class CloudFailure(NamedTuple):
    pattern: str
    """A regular expression for the program's output, in which each run of spaces and line breaks is one space."""
    text: str
    """What is wrong, and the fix; {0} is the pattern's first group, {project} the project, {folder} Terraform's folder, {roles} what a permission in the groups needs."""
    outcome: Outcome = Outcome.USAGE
    kind: type[Problem] = Problem


CAPACITY = re.compile(
    r"ZONE_RESOURCE_POOL_EXHAUSTED|does not have enough resources available to fulfill the request|(?:VM instance|Machine type \S+) is currently unavailable in the"
)
CAPACITY_ZONE = re.compile(r"zones/([a-z0-9-]+)|unavailable in the ([a-z0-9-]+) zone")
REFUSED = re.compile(r"\n\s*\n((?:(?!\n\s*\n).)+)\n\s*\n\s*This was checked by the validation rule", re.DOTALL)
"""The paragraph in which Terraform says why a variable's value cannot be."""
LOGIN = "gcloud auth login && gcloud auth application-default login"
ROLES = {
    "compute": "Compute Admin (roles/compute.admin)",
    "iam.serviceAccounts.actAs": "Service Account User (roles/iam.serviceAccountUser)",
    "iam": "Service Account Admin (roles/iam.serviceAccountAdmin)",
    "storage": "Storage Admin (roles/storage.admin)",
    "artifactregistry": "Artifact Registry Administrator (roles/artifactregistry.admin)",
    "serviceusage": "Service Usage Admin (roles/serviceusage.serviceUsageAdmin)",
}
"""What `up` needs: the role of each permission, or of each service's other permissions."""
OTHER_ROLES = {
    "iap": "IAP-secured Tunnel User (roles/iap.tunnelResourceAccessor)",
    "resourcemanager": "Project IAM Admin (roles/resourcemanager.projectIamAdmin)",
    "cloudbuild": "Cloud Build Editor (roles/cloudbuild.builds.editor)",
    "billing": "Billing Account Costs Manager (roles/billing.costsManager), on the billing account",
}
"""What some commands and settings need: ssh through the proxy, cloud_build_user, Cloud Build, a budget."""
FAILURES = [
    CloudFailure(r"Quota '([A-Z0-9_]+)' exceeded\. Limit: ([\d.]+) (?:in region )?(\w[\w-]*)", "the quota {0} of the project {project} is {1} ({2}): ask for more at"
                 " https://console.cloud.google.com/iam-admin/quotas?project={project} (in a new project those of GPUs are 0), or use fewer machines or CPUs (use_gpu: false)"),
    CloudFailure(r"Quota exceeded for quota metric '([^']+)'|rateLimitExceeded", "Google Cloud refuses so many requests in a minute ({0}): wait a minute and repeat the command", Outcome.INFRA),
    CloudFailure(r"QUOTA_EXCEEDED", "a quota of the project {project} is used up: https://console.cloud.google.com/iam-admin/quotas?project={project}"),
    CloudFailure(r"You do not currently have an active account selected|no credentialed accounts", "gcloud has no login on this machine: " + LOGIN),
    CloudFailure(r"could not find default credentials|[Dd]efault credentials were not found|No credentials loaded|Attempted to load application default credentials", "Terraform has"
                 " no login on this machine: gcloud auth application-default login"),
    CloudFailure(r"Reauthentication failed|reauth related error|invalid_grant|invalid_rapt|Token has been expired or revoked|There was a problem refreshing your current auth tokens",
                 "the login to Google Cloud has expired: " + LOGIN),
    CloudFailure(r"[Bb]illing (?:must be enabled|account for project \S+ is not found|account \S+ is closed)|BILLING_DISABLED|UREQ_PROJECT_BILLING_NOT_FOUND|requires billing to be enabled|project billing is disabled",
                 "the project {project} has no billing account: link one at https://console.cloud.google.com/billing/linkedaccount?project={project}"),
    CloudFailure(r"apis/api/([a-z]+\.googleapis\.com)", "the API {0} is off in the project {project}: gcloud services enable {0} --project={project}, and wait a minute", kind=ApiOff),
    CloudFailure(r"SERVICE_DISABLED|accessNotConfigured|API has not been used in project", "the Compute Engine API is off in the project {project}:"
                 " gcloud services enable compute.googleapis.com --project={project}, and wait a minute", kind=ApiOff),
    CloudFailure(r"Error acquiring the state lock.*? ID: (\S+).*? Who: (\S+)", "another terraform works on these machines (lock of {1}): wait for it; if it was killed:"
                 " terraform -chdir={folder} force-unlock {0}", Outcome.INFRA),
    CloudFailure(r"Error acquiring the state lock", "another terraform works on these machines: wait for it, and repeat the command", Outcome.INFRA),
    CloudFailure(r"The project property is set to the empty string|project property must be set|project: required field is not set", "no project of Google Cloud: write `project: ID` in the"
                 " target, or gcloud config set project ID"),
    CloudFailure(r"(?:Failed to find project|[Uu]nknown project id:?|The resource 'projects/)\s?([\w:.-]+)'?(?: was not found)?(?=[ ,.]|$)", "there is no project {0}, or your account does not see it:"
                 " correct project: in the target (gcloud projects list)"),
    CloudFailure(r"bucket doesn't exist|[Bb]ucket does not exist|The specified bucket does not exist", "the bucket of Terraform's state does not exist: gcloud storage buckets create gs://BUCKET"
                 " --project={project}, with the BUCKET of state_bucket:"),
    CloudFailure(r"Required '([\w.]+)' permission|Permission '([\w.]+)' denied|does not have ([\w.]+) access", "your account lacks the permission {0}{1}{2} in the project {project}: ask its owner for"
                 " {roles}, or log in as another account (gcloud auth login)"),
    CloudFailure(r"does not have permission to access projects|PERMISSION_DENIED|Error 403: .*[Ff]orbidden|The caller does not have permission", "your account may not do this in"
                 " the project {project}: ask its owner for {roles}, or log in as another account (gcloud auth login)"),
    CloudFailure(r"'([^']+)' already exists", "{0} is in the project already, but not in Terraform's state: `drivetrain down --orphans` shows and removes what a crash left behind"),
    CloudFailure(r"Error 409: ([^,]*? already [^,.]*)", "a resource of this deployment is in the project already, but not in Terraform's state ({0}): `drivetrain down --orphans` shows and removes what a crash"
                 " left behind"),
    CloudFailure(r"[Cc]ould not find image or family (\S+?)[. ]|Error resolving image name '([^']+)'|'projects/\S+?/global/images/(?:family/)?([\w-]+)' was not found|[Ff]ailed to pull image \"?(\S+?)\"?[: ]",
                 "the image {0}{1}{2}{3} cannot be read: correct its name, and check that the project may read it"),
    CloudFailure(r"acceleratorTypes/([\w-]+)' was not found|does not exist in zone (\S+?)[. ]", "the zone has no {0}{1}: gcloud compute accelerator-types list shows the zones of each GPU"),
    CloudFailure(r"build (\S+) completed with status \"(\w+)\"", "the build ended with {1}; its log: gcloud beta builds log {0} --project={project}", Outcome.INFRA),
    CloudFailure(r"Failed to query available provider packages", "Terraform cannot load Google's provider from its registry: is the network up?", Outcome.INFRA),
    CloudFailure(r"no such host|dial tcp|Could not resolve host|Failed to establish a new connection|NewConnectionError|Unable to find the server at|network is unreachable|TLS handshake timeout",
                 "Google Cloud cannot be reached: is the network up?", Outcome.INFRA),
]  # fmt: skip
"""The first that fits counts."""


def explain_cloud(program: str, output: str, code: int, project: str, folder: Path | None = None) -> Problem:
    """Returns the problem that a program's output tells; for output that is not known, its first error."""
    text = plain(output)
    if refused := REFUSED.search(output.replace("│", " ")):
        return Problem(f"Terraform refuses a setting of the target: {plain(refused[1])}")
    if CAPACITY.search(text):
        match = CAPACITY_ZONE.search(text)
        zone = (match[1] or match[2]) if match else ""
        return NoCapacity(f"{zone or 'the zone'} has no machine of this kind at present", zone)
    for failure in FAILURES:
        if match := re.search(failure.pattern, text):
            groups = [group or "" for group in match.groups()]
            text = failure.text.format(*groups, project=project, folder=folder or "FOLDER", roles=roles_for("".join(groups)))
            return failure.kind(one_line(text), failure.outcome)
    errors = [line for line in output.splitlines() if re.match(r"[│ ]*(?:Error|ERROR)\b", line)]
    lines = errors or [line for line in output.splitlines() if line.strip(" │╷╵")] or [f"it ended with code {code}"]
    return Problem(f"{program}: {one_line(lines[0].strip(' │'))[:300]}", Outcome.INFRA)


def roles_for(permission: str) -> str:
    """Returns the role that has a permission; for one that is not known, all roles that `up` needs."""
    known = ROLES | OTHER_ROLES
    role = known.get(permission) or known.get(permission.partition(".")[0])
    return f"the role {role}" if role else f"the roles {', '.join(ROLES.values())}"


def plain(output: str) -> str:
    """Returns a program's output on one line, without the frame that terraform draws around an error."""
    return re.sub(r"\s+", " ", re.sub(r"\x1b\[[0-9;]*m", "", output).replace("│", " ")).strip()
