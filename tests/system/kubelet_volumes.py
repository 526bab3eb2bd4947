"""Resolves what a pod's containers refer to, for the stand-in kubelet: volumes, environment variables, config maps and secrets."""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.system.cluster_api import Api, Object
from tests.system.kubelet_container import IMAGE_ENV, Mount, expand


class NotReady(Exception):
    """The pod refers to something that is not there, or not yet."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


# --- volumes -----------------------------------------------------------------------------------


def make_volumes(api: Api, pod: Object, folder: Path, claims: Path) -> dict[str, Mount]:
    """Creates the pod's volumes; returns their sources by name. Raises NotReady for one that cannot be mounted."""
    made = {}
    for volume in pod["spec"].get("volumes", ()):
        name, namespace = volume["name"], pod["metadata"]["namespace"]
        if "emptyDir" in volume:
            empty = volume["emptyDir"] or {}
            size = str(number_of(empty["sizeLimit"])) if "sizeLimit" in empty else "50%"
            source = "" if empty.get("medium") == "Memory" else str(_folder(folder / name))
            made[name] = Mount("", source, size=size)
        elif "configMap" in volume or "secret" in volume:
            made[name] = Mount("", str(_write_keys(api, namespace, volume, folder / name)), read_only=True)
        elif "persistentVolumeClaim" in volume:
            claim = volume["persistentVolumeClaim"]["claimName"]
            if api.find(f"/api/v1/namespaces/{namespace}/persistentvolumeclaims/{claim}") is None:
                raise NotReady("FailedScheduling", f'persistentvolumeclaim "{claim}" not found')
            made[name] = Mount("", str(_folder(claims / namespace / claim)))
        elif "hostPath" in volume:
            made[name] = Mount("", volume["hostPath"]["path"])
        else:
            raise NotReady("FailedMount", f"the stand-in kubelet has no volumes of the kind {sorted(set(volume) - {'name'})}")
    group = pod["spec"].get("securityContext", {}).get("fsGroup")
    for mount in made.values():
        if group is not None and mount.source and not mount.read_only:
            os.chown(mount.source, -1, group)
            os.chmod(mount.source, 0o2775)
    return made


def _folder(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(0o777)
    return path


def _write_keys(api: Api, namespace: str, volume: Object, folder: Path) -> Path:
    """Writes the keys of a config map or a secret as files."""
    kind, source = ("configmap", volume["configMap"]) if "configMap" in volume else ("secret", volume["secret"])
    name = source.get("name") or source.get("secretName")
    found = api.find(f"/api/v1/namespaces/{namespace}/{kind}s/{name}")
    if found is None:
        raise NotReady("FailedMount", f'MountVolume.SetUp failed for volume "{volume["name"]}" : {kind} "{name}" not found')
    keys = all_keys(kind, found)
    items = source.get("items") or [{"key": key, "path": key} for key in keys]
    for item in items:
        if item["key"] not in keys:
            message = f'MountVolume.SetUp failed for volume "{volume["name"]}" : {kind} references non-existent {kind} key: {item["key"]}'
            raise NotReady("FailedMount", message.replace("configmap key", "config key"))
        path = folder / item["path"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(keys[item["key"]])
        path.chmod(item.get("mode", source.get("defaultMode", 0o644)))
    return folder


def all_keys(kind: str, found: Object) -> dict[str, bytes]:
    encoded = (found.get("data") if kind == "secret" else found.get("binaryData")) or {}
    keys = {key: base64.b64decode(value) for key, value in encoded.items()}
    if kind == "configmap":
        keys |= {key: value.encode() for key, value in (found.get("data") or {}).items()}
    return keys


def container_mounts(spec: Object, volumes: Mapping[str, Mount]) -> list[Mount]:
    mounts = []
    for mount in spec.get("volumeMounts", ()):
        volume = volumes[mount["name"]]
        source = str(Path(volume.source, mount["subPath"])) if mount.get("subPath") else volume.source
        if mount.get("subPath") and not volume.read_only:
            _folder(Path(source))
        mounts.append(Mount(mount["mountPath"], source, volume.read_only or mount.get("readOnly", False), volume.size))
    return mounts


def number_of(quantity: str | int | float) -> int:
    """Returns the value of a quantity such as 2Gi, 500M or 3, in whole units."""
    match = re.fullmatch(r"([\d.]+)([a-zA-Z]*)", str(quantity))
    assert match is not None, quantity
    factors = {"": 1, "m": 0.001, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
    return int(float(match[1]) * factors[match[2]])


# --- the environment ---------------------------------------------------------------------------


def container_env(api: Api, pod: Object, spec: Object, address: str) -> dict[str, str]:
    """Returns a container's environment: the image's, then `envFrom`, then `env`. Raises NotReady for a reference to nothing."""
    namespace = pod["metadata"]["namespace"]
    env = dict(IMAGE_ENV)
    if not env["PYTHONPATH"]:
        del env["PYTHONPATH"]
    env |= {"HOSTNAME": pod["metadata"]["name"], "HOME": "/root", "KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "443"}
    for source in spec.get("envFrom", ()):
        kind, reference = ("secret", source["secretRef"]) if "secretRef" in source else ("configmap", source["configMapRef"])
        keys = _referred(api, namespace, kind, reference)
        env |= {source.get("prefix", "") + key: value.decode() for key, value in keys.items()}
    for variable in spec.get("env", ()):
        value = _value(api, pod, variable, env, address)
        if value is not None:
            env[variable["name"]] = value
    return env


def _value(api: Api, pod: Object, variable: Object, env: Mapping[str, str], address: str) -> str | None:
    source = variable.get("valueFrom")
    if not source:
        return expand(variable.get("value", ""), env)
    if "fieldRef" in source:
        return _field(pod, source["fieldRef"]["fieldPath"], address)
    if "resourceFieldRef" in source:
        return "1"
    kind, reference = ("secret", source["secretKeyRef"]) if "secretKeyRef" in source else ("configmap", source["configMapKeyRef"])
    keys = _referred(api, pod["metadata"]["namespace"], kind, reference)
    if reference["key"] not in keys:
        if reference.get("optional"):
            return None
        noun = "Secret" if kind == "secret" else "ConfigMap"
        raise NotReady(
            "CreateContainerConfigError",
            f"couldn't find key {reference['key']} in {noun} {pod['metadata']['namespace']}/{reference['name']}",
        )
    return keys[reference["key"]].decode()


def _referred(api: Api, namespace: str, kind: str, reference: Object) -> dict[str, bytes]:
    found = api.find(f"/api/v1/namespaces/{namespace}/{kind}s/{reference['name']}")
    if found is None and not reference.get("optional"):
        raise NotReady("CreateContainerConfigError", f'{kind} "{reference["name"]}" not found')
    return all_keys(kind, found) if found else {}


def _field(pod: Object, path: str, address: str) -> str:
    match = re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path)
    if match is not None:
        return str(pod["metadata"].get(match[1], {}).get(match[2], ""))
    if path in ("status.podIP", "status.podIPs"):
        return address
    if path == "status.hostIP":
        return "127.0.0.1"
    value: Any = pod
    for part in path.split("."):
        value = value.get(part, "")
    return str(value)
