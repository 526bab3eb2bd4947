"""What each study of the synthetic twin shows: drawn from (seed, study), so that any part of the twin can be made alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from drivetrain.tasks.cxr.twin.images import PlantedFinding
from drivetrain.tasks.cxr.vocabulary import CHEXPERT, NO_FINDING, SUPPORT_DEVICES, Label, chexpert_match

SIDES, ZONES = ("right", "left"), ("upper", "mid", "lower")
STUDIES_OF_PATIENTS = (1, 3, 2, 4)
"""Studies of four consecutive patients."""
ZONE_FINDINGS = ("consolidation", "lung opacity", "pneumonia", "lung nodule", "atelectasis")
"""Findings that fill a lung zone; no two of a study share one."""
OTHER_FINDINGS = (
    "cardiomegaly", "pulmonary edema", "widened mediastinum", "rib fracture", "pleural effusion", "pneumothorax", "pleural thickening",
)  # fmt: skip
DEVICES = ("endotracheal tube", "central venous catheter", "pacemaker")
FINDINGS = tuple(sorted((*ZONE_FINDINGS, *OTHER_FINDINGS), key=lambda name: chexpert_match(name) or 0))
"""All findings but devices, in the order of their CheXpert labels: the order in which reports name them."""
SUBCATEGORIES = {
    "LUNG_FIELD": ("lung findings", ("atelectasis", "consolidation", "pulmonary edema", "lung nodule", "lung opacity", "pneumonia")),
    "PLEURA": ("pleural findings", ("pleural effusion", "pneumothorax", "pleural thickening")),
    "HEART": ("cardiac findings", ("cardiomegaly",)),
    "MEDIASTINUM": ("mediastinal findings", ("widened mediastinum",)),
    "BONE": ("bone findings", ("rib fracture",)),
    "INFECTION": ("signs of infection", ("pneumonia", "consolidation")),
}
SUBCATEGORY_OF = {entity: name for name, (_, entities) in reversed(SUBCATEGORIES.items()) for entity in entities}
DEVICE_REGIONS = {
    "endotracheal tube": ("trachea",),
    "central venous catheter": ("superior vena cava", "upper mediastinum"),
    "pacemaker": ("left chest wall", "heart"),
}
FINDING_REGIONS = {
    "cardiomegaly": ("heart",), "pulmonary edema": ("lungs",), "widened mediastinum": ("upper mediastinum", "mediastinum"),
}  # fmt: skip
SIDED_REGIONS = {
    "pleural effusion": ("{} pleural space", "{} costophrenic angle"), "pneumothorax": ("{} pleural space", "{} upper lung zone"),
    "pleural thickening": ("{} pleural space",), "rib fracture": ("{} ribs",),
}  # fmt: skip
PARENT_REGIONS = {
    "superior vena cava": ("mediastinum",), "upper mediastinum": ("mediastinum",), "heart": ("mediastinum",),
    **{f"{side} {part}": (f"{side} lung", "lungs") for side in SIDES for part in [f"{z} lung zone" for z in ZONES]},
    **{f"{side} lung": ("lungs",) for side in SIDES},
    **{f"{side} costophrenic angle": (f"{side} pleural space",) for side in SIDES},
    **{f"{side} ribs": ("ribs",) for side in SIDES},
}  # fmt: skip
REGIONS = tuple(
    sorted(
        {"chest", "lungs", "mediastinum", "spine", "trachea", "ribs", "carina", "abdomen", "neck", "aortic arch"}
        | {r.format(side) for rs in SIDED_REGIONS.values() for r in rs for side in SIDES}
        | {r for rs in (*DEVICE_REGIONS.values(), *FINDING_REGIONS.values()) for r in rs}
        | {f"{side} {part}" for side in SIDES for part in ("lung", "hilum", "clavicle", "hemidiaphragm", "apex", "chest wall", "shoulder")}
        | {f"{side} {zone} lung zone" for side in SIDES for zone in ZONES}
    )
)


@dataclass(frozen=True)
class StudyPlan:
    """A study: whose it is, its images and what they show."""

    number: int
    patient: int
    study: int
    split: str
    findings: tuple[PlantedFinding, ...]
    devices: tuple[PlantedFinding, ...]
    has_artifact: bool
    has_low_volumes: bool
    views: tuple[str, ...]
    images: tuple[str, ...]
    """Identifiers of the images, one for each view."""
    labels: tuple[int, ...]
    """CheXpert labels."""

    @property
    def planted(self) -> tuple[PlantedFinding, ...]:
        return self.findings + self.devices


def patient_of(number: int) -> int:
    """Returns the number of the patient of a study."""
    fours, rest = divmod(number, sum(STUDIES_OF_PATIENTS))
    ends = np.cumsum(STUDIES_OF_PATIENTS)
    return fours * len(STUDIES_OF_PATIENTS) + int(np.searchsorted(ends, rest, side="right"))


def random_of(seed: int, *key: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, *key])))


def plan_study(seed: int, number: int) -> StudyPlan:
    """Returns study `number` of the twin with this seed."""
    rng = random_of(seed, 0, number)
    patient = patient_of(number)
    devices = tuple(PlantedFinding(name, is_uncertain=False) for name in DEVICES if rng.random() < 0.12)
    findings = () if rng.random() < 0.2 else _plant(rng)
    views: tuple[str, ...] = (("PA", "AP")[int(rng.random() < 0.4)],)
    if rng.random() < 0.45:
        views = (*views, "LATERAL")
    if rng.random() < 0.08:
        views = ("AP", *views)
    return StudyPlan(
        number=number,
        patient=(10 + patient % 10) * 1_000_000 + patient + 32,
        study=50_000_000 + number * 7 + 11,
        split={4: "validate", 2: "test", 9: "test"}.get(patient % 10, "train"),
        findings=findings,
        devices=devices,
        has_artifact=bool(rng.random() < 0.15),
        has_low_volumes=bool(rng.random() < 0.2),
        views=views,
        images=tuple("-".join(f"{word:08x}" for word in rng.integers(0, 2**32, 5)) for _ in views),
        labels=_labels(rng, findings, devices),
    )


def _plant(rng: np.random.Generator) -> tuple[PlantedFinding, ...]:
    """Returns one to four findings; those that fill a lung zone have different zones."""
    names = rng.choice(len(FINDINGS), size=int(rng.integers(1, 5)), replace=False)
    free = [(side, zone) for side in SIDES for zone in ZONES]
    planted: dict[str, PlantedFinding] = {}
    for entity in sorted((FINDINGS[i] for i in names), key=lambda name: name in ZONE_FINDINGS):
        severity, is_uncertain = int(rng.integers(1, 4)), bool(rng.random() < 0.12)
        side, zone = SIDES[int(rng.integers(2))], ZONES[int(rng.integers(3))]
        if entity in ZONE_FINDINGS:
            cells = [cell for cell in free if entity != "atelectasis" or cell[1] != "upper"] or free
            side, zone = cells[int(rng.integers(len(cells)))]
            free.remove((side, zone))
        elif entity in ("pleural effusion", "pneumothorax"):
            both = entity == "pleural effusion" and rng.random() < 0.3
            occupied = "lower" if entity == "pleural effusion" else "upper"
            side, zone = ("both" if both else side), ""
            free = [cell for cell in free if not (cell[1] == occupied and side in (cell[0], "both"))]
        elif entity != "rib fracture":
            zone, side = "", side if entity == "pleural thickening" else "middle"
        planted[entity] = PlantedFinding(entity, side, zone, severity, is_uncertain)
    return tuple(planted[name] for name in FINDINGS if name in planted)


def _labels(rng: np.random.Generator, findings: tuple[PlantedFinding, ...], devices: tuple[PlantedFinding, ...]) -> tuple[int, ...]:
    """Returns CheXpert labels: positive or uncertain where something is planted, else negative or missing."""
    labels = [int(Label.MISSING if rng.random() < 0.4 else Label.NEGATIVE) for _ in CHEXPERT]
    for finding in findings:
        match = chexpert_match(finding.entity)
        assert match is not None
        labels[match] = int(Label.UNCERTAIN if finding.is_uncertain else Label.POSITIVE)
    if devices:
        labels[SUPPORT_DEVICES] = int(Label.POSITIVE)
    if not findings:
        labels[NO_FINDING] = int(Label.POSITIVE)
    return tuple(labels)


def regions_of(finding: PlantedFinding) -> list[str]:
    """Returns the regions of a finding, the first one first."""
    if finding.entity in DEVICE_REGIONS:
        return list(DEVICE_REGIONS[finding.entity])
    if finding.entity in FINDING_REGIONS:
        return list(FINDING_REGIONS[finding.entity])
    if finding.entity in SIDED_REGIONS:
        return [region.format(side) for region in SIDED_REGIONS[finding.entity] for side in finding.sides]
    return [f"{finding.side} {finding.zone} lung zone"]


def regions_with_parents(finding: PlantedFinding) -> set[str]:
    """Returns the regions of a finding and those that contain them."""
    regions = set(regions_of(finding))
    for _ in range(2):
        regions |= {parent for region in regions for parent in PARENT_REGIONS.get(region, ())}
    return regions
