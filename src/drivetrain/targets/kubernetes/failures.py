"""Turns what kubectl prints, and what a cluster says of pods, into one line that names the fix."""

from __future__ import annotations

import re

from drivetrain.outcomes import Outcome, Problem
from drivetrain.targets.errors import Explanation, Unsure
from drivetrain.terminal import one_line


class NotFound(Problem):
    """The cluster has no object of this name."""


class AlreadyExists(Problem):
    """The cluster has an object of this name."""


NAMESPACE_MISSING = r'namespaces? "([^"]+)" not found'
KUBECTL = [
    Explanation(NAMESPACE_MISSING, "the cluster has no namespace {0}: kubectl create namespace {0}, or correct namespace: in the target"),
    Explanation(r'context "([^"]*)" does not exist|no context exists with the name: "([^"]*)"', "your kubeconfig has no context {0}{1}: kubectl config get-contexts lists them; correct context: in the target"),
    Explanation(r"stat (\S+): no such file or directory", "there is no kubeconfig {0}: correct KUBECONFIG, or copy the file that your cluster gave you to ~/.kube/config"),
    Explanation(r"server localhost:8080 was refused|no configuration has been provided|current-context is not set|current-context must exist", "kubectl knows no cluster: copy the kubeconfig that your cluster gave you to"
                " ~/.kube/config, or set KUBECONFIG (kubectl config view shows what there is)"),
    Explanation(r"error loading config file \"?([^\":]+)", "the kubeconfig {0} cannot be read: kubectl config view shows where it is wrong"),
    Explanation(r"The connection to the server (\S+) was refused|dial tcp (\S+): connect: connection refused", "the cluster at {0}{1} does not answer (connection refused): is it"
                " running? (Kind: kind get clusters, and docker start NAME-control-plane; minikube: minikube start)"),
    Explanation(r"no such host|lookup \S+ on|i/o timeout|TLS handshake timeout|context deadline exceeded|Unable to connect to the server.*(?:timeout|unreachable)|no route to host|ServiceUnavailable|etcdserver", "the"
                " cluster cannot be reached: is the network or VPN up, and is the server in the kubeconfig right? (kubectl cluster-info)"),
    Explanation(r"x509: certificate (?:has expired|is not valid)|certificate has expired or is not yet valid", "the cluster's certificate, or yours, has expired: renew it (kubeadm certs renew), or correct this machine's clock"),
    Explanation(r"x509: certificate signed by unknown authority|failed to verify certificate", "the cluster's certificate is not the one in your kubeconfig: was the cluster made again? Fetch its kubeconfig again"),
    Explanation(r"Unauthorized|must be logged in to the server|the server has asked for the client to provide credentials|token is expired|ExpiredToken|executable (\S+) not found|getting credentials", "the"
                " cluster refuses your login, or it has expired: log in again (EKS: aws eks update-kubeconfig; GKE: gcloud container clusters get-credentials; AKS: az aks get-credentials; OpenShift: oc login)"),
    Explanation(r"exceeded quota: ([^,\s]+)", "the namespace's quota {0} is used up: ask for less, wait until other jobs end, or ask for a larger quota (kubectl describe quota)"),
    Explanation(r'is forbidden: User "([^"]+)" cannot (\w+) resource "([^"]+)"', "you ({0}) may not {1} {2}: ask the cluster's administrator for a role with"
                " that right (kubectl auth can-i {1} {2})"),
    Explanation(r"violates PodSecurity \"?([^\":]+)", "the namespace allows only pods of the level {0}: ask for another namespace, or for a lower level (pod-security.kubernetes.io/enforce)"),
    Explanation(r"unable to validate against any security context constraint", "OpenShift refuses the pod's group or volumes: set fs_group: 0 in the target"),
    Explanation(r'strict decoding error: unknown field "spec\.runtimePatches', "this cluster's Kubeflow Trainer is older than 2.3 and has no runtimePatches: update it, or set job: pytorchjob in the target"),
    Explanation(r'strict decoding error: unknown field "([^"]+)"', "the cluster's operator does not know the field {0}: update the operator, or remove the setting that makes this field"),
    Explanation(r"the server could not find the requested resource|no matches for kind|the server doesn't have a resource type", "the cluster has no such kind of object: is the operator installed? (drivetrain doctor --on {target})"),
    Explanation(r"Object has been modified|the object has been modified|Operation cannot be fulfilled", "somebody else changed the object at the same time: repeat the command"),
    Explanation(r"error dialing backend|unable to upgrade connection|container not found|error: cannot exec|error: Internal error occurred: error (?:executing|attaching)", "the"
                " pod cannot be reached: it has just ended, or its node does not answer; what runs there goes on"),
]  # fmt: skip
NOT_SENT = r"dial tcp|TLS handshake|no such host|was refused|no route to host"
MAYBE_CARRIED_OUT = r"context deadline exceeded|Client\.Timeout|awaiting headers|request did not complete|request timed out|etcdserver|http2:|GOAWAY|ServiceUnavailable"
"""What kubectl prints when a request has left, but its answer did not arrive; unless the text has NOT_SENT too."""
TRANSIENT = ("does not answer", "cannot be reached", "has expired")
"""Parts of the lines for what may be over in a moment: a command that follows a run asks again."""

PAST_DEADLINE = r"DeadlineExceeded|active longer than specified deadline|exceeded its active deadline"
"""How Kubernetes, the training operator and Trainer say that `activeDeadlineSeconds` have passed."""
PODS = [
    Explanation(r"ErrImageNeverPull", "the nodes do not have the image {image}: kind load docker-image {image} (minikube image load {image}), or push it: drivetrain image build --push REGISTRY/NAME:TAG"),
    Explanation(r"InvalidImageName", "{image} is no name of an image: correct image: in the target"),
    Explanation(r"(?:ErrImagePull|ImagePullBackOff).*(?:unauthorized|denied|authentication required|403|401|no basic auth)", "the registry refuses the image {image}: set image_pull_secret: in the target (kubectl create secret docker-registry)"),
    Explanation(r"(?:ErrImagePull|ImagePullBackOff).*(?:toomanyrequests|429)", "the registry refuses more pulls of {image} for now: wait, or log in to it with image_pull_secret: in the target"),
    Explanation(r"(?:ErrImagePull|ImagePullBackOff)", "the image {image} cannot be pulled: is it pushed, and is its name right? (drivetrain image build --push REGISTRY/NAME:TAG, or image: in the target)"),
    Explanation(r'CreateContainerConfigError.*secret "([^"]+)" not found|secret "([^"]+)" not found', "there is no Secret {0}{1}: kubectl create secret generic {0}{1} --from-literal=KEY=VALUE, or correct secret_refs: in the target"),
    Explanation(r"couldn't find key (\S+) in Secret (\S+)", "the Secret {1} has no key {0}: correct secret_refs: in the target"),
    Explanation(r"CreateContainerConfigError|CreateContainerError|RunContainerError|StartError", "the container cannot be started: {message}"),
    Explanation(r'persistentvolumeclaim "([^"]+)" not found', "there is no PersistentVolumeClaim {0}: create it, or correct runs_volume:, data_volume: or code_volume: in the target"),
    Explanation(r"unbound immediate PersistentVolumeClaims?", "a PersistentVolumeClaim has no volume yet: kubectl get pvc shows which; its storage class must exist"),
    Explanation(r"Multi-Attach error|volume node affinity conflict", "the volume can be used on one node only: take a claim with ReadWriteMany for --nodes 2 or more, or one in the zone of the nodes"),
    Explanation(r"[Ii]nsufficient (\S*(?:gpu|mig-|habana|rdma)[^\s,.]*)", "no node has as many free {0} as a pod asks for: ask for fewer (--procs, gpus: in the target), wait until other jobs end, or add GPU nodes (drivetrain doctor --on {target})"),
    Explanation(r"[Ii]nsufficient (cpu|memory|ephemeral-storage)", "no node has as much free {0} as a pod asks for: ask for less (cpu:, memory: in the target), or wait until other jobs end"),
    Explanation(r"untolerated taint \{?([^\s:}]+)", "the nodes have the taint {0}: add it to tolerations: in the target"),
    Explanation(r"didn't match Pod's node affinity/selector", "no node has the labels of node_selector: in the target (kubectl get nodes --show-labels)"),
    Explanation(r"exceeded quota: ([^,\s]+)", "the namespace's quota {0} is used up: the pod starts when other jobs end (kubectl describe quota {0})"),
    Explanation(r"violates PodSecurity \"?([^\":]+)", "the namespace allows only pods of the level {0}: ask for another namespace"),
    Explanation(r"unable to validate against any security context constraint", "OpenShift refuses the pod's group or volumes: set fs_group: 0 in the target"),
    Explanation(r"error looking up service account (\S+?):|serviceaccount \"([^\"]+)\" not found", "there is no service account {0}{1}: correct service_account: in the target"),
    Explanation(r"no PriorityClass with name (\S+) was found", "there is no priority class {0}: correct priority_class: in the target (kubectl get priorityclass)"),
    Explanation(r"OOMKilled", "the pod's memory was full, and a process was killed: raise memory: in the target, or use less (plan.workers, plan.micro_batch)"),
    Explanation(r"Evicted.*(?:ephemeral|disk|storage)", "the node's disk was full, and the pod was removed: set runs_volume: in the target, so that runs are not on the node's disk"),
    Explanation(r"Evicted", "the node needed its memory or disk, and the pod was removed: set memory: in the target to what the run needs"),
    Explanation(r"NodeLost|NodeShutdown|Terminated.*node|node was shutdown", "its node was lost or shut down"),
    Explanation(PAST_DEADLINE, "its deadline passed: raise deadline: in the target; drivetrain resume continues it"),
    Explanation(r"0/0 nodes are available|no nodes available", "the cluster has no node: add one (drivetrain doctor --on {target})"),
]  # fmt: skip


def explain_kubectl(target: str, output: str, code: int) -> Problem:
    """Returns the problem that kubectl's output tells; for output that is not known, its last line."""
    for explanation in KUBECTL:
        if match := re.search(explanation.pattern, output, re.DOTALL):
            text = one_line(explanation.text.format(*(group or "" for group in match.groups()), target=target))
            is_unsure = re.search(MAYBE_CARRIED_OUT, output) is not None and re.search(NOT_SENT, output) is None
            return (Unsure if is_unsure else Problem)(text, Outcome.INFRA if any(part in text for part in TRANSIENT) else Outcome.USAGE)
    lines = [line for line in output.splitlines() if line.strip()] or [f"kubectl ended with code {code}"]
    last = one_line(lines[-1])[:300]
    if re.search(r"\(AlreadyExists\)|already exists", output):
        return AlreadyExists(f"{last}: another job has this name; choose another --name")
    if re.search(r"\(NotFound\)|not found", output):
        return NotFound(last)
    if re.search(f"connection reset|EOF|Timeout|broken pipe|{MAYBE_CARRIED_OUT}", output):
        return Unsure(f"{target}: the connection to the cluster broke: try again; what runs there goes on", Outcome.INFRA)
    return Problem(f"{target}: {last}")


def explain_pod(reason: str, message: str, image: str, target: str) -> str:
    """Returns one line about a pod that waits or has failed; for what is not known, the cluster's own words."""
    text = f"{reason}: {message}" if message else reason
    for explanation in PODS:
        if match := re.search(explanation.pattern, text, re.DOTALL):
            groups = (group or "" for group in match.groups())
            return one_line(explanation.text.format(*groups, image=image, target=target, message=message or reason))[:400]
    return one_line(text)[:300]
