"""The questions, answers and scene graphs of the synthetic twin, in the form of MIMIC-Ext-CXR-QBA."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from drivetrain.tasks.cxr.twin.images import PlantedFinding
from drivetrain.tasks.cxr.twin.plan import (
    DEVICE_REGIONS,
    DEVICES,
    FINDINGS,
    REGIONS,
    SUBCATEGORIES,
    SUBCATEGORY_OF,
    StudyPlan,
    regions_of,
    regions_with_parents,
)  # fmt: skip
from drivetrain.tasks.cxr.vocabulary import GRADES, SEVERITIES

Boxes = dict[str, list[list[float]]]
"""Boxes in pixels by image."""
Json = dict[str, Any]
SEVERITY_NAMES = (("mild", "small", "minimal"), ("moderate",), ("severe", "marked", "large"))
GRADE_LIMITS = (0.12, 0.14, 0.17, 0.40, 0.65, 0.80)
"""Cumulative shares of the grades but the last one."""
STRATEGIES = {"A": "indication", "B": "abnormal", "C": "region_abnormal", "D": "finding"}
ASKED_REGIONS = ("lungs", "heart", "mediastinum", "right lung", "left lung")
SYMPTOMS = ("cough", "fever", "chest pain", "shortness of breath", "fall", "weakness")


class StudyTexts:
    """The texts of a study: its scene graph and its questions."""

    def __init__(self, plan: StudyPlan, boxes: Mapping[PlantedFinding, Boxes], regions: Mapping[str, Boxes], rng: np.random.Generator):
        self.plan, self.boxes, self.regions, self.rng = plan, boxes, regions, rng
        self.present = {finding.entity: finding for finding in plan.planted}
        self.absent = [name for name in FINDINGS if name not in self.present]
        self.number_of = {finding.entity: f"O{number:02d}" for number, finding in enumerate(plan.planted, 1)}

    # --- scene graph -----------------------------------------------------------------------------

    def scene_graph(self) -> Json:
        observations = {self.number_of[f.entity]: self._observation(f) for f in self.plan.planted}
        for name in self.absent[:3]:
            number = f"O{len(observations) + 1:02d}"
            observations[number] = self._absence(name) | {"obs_id": number}
        named = {region for observation in observations.values() for region in (r["region"] for r in observation["regions"])}
        regions = sorted(named | {"lungs", "heart"})
        return {
            "patient_id": f"p{self.plan.patient}",
            "study_id": f"s{self.plan.study}",
            "sentences": {
                f"S{number:02d}": {"sent_id": f"S{number:02d}", "section": "FINDINGS", "section_type": "FINDINGS", "sentence": o["summary_sentence"]}
                for number, o in enumerate(observations.values(), 1)
            },
            "top_level_obs_ids": list(observations),
            "observations": observations,
            "regions": {name: {"region": name, "laterality": _laterality([name]), "localization": _localization(self.regions.get(name, {}), [name])} for name in regions},
            "located_at_relations": [
                {"region": region["region"], "observation_id": number, "distances": [], "where_specified": "direct"}
                for number, observation in observations.items()
                for region in observation["regions"]
            ],
            "obs_relations": [],
            "region_region_relations": [],
        }  # fmt: skip

    def _observation(self, finding: PlantedFinding) -> Json:
        regions = regions_of(finding)
        return {
            "obs_id": self.number_of[finding.entity],
            "name": finding.entity,
            "summary_sentence": self._sentence(finding),
            "child_level": 0,
            "regions": [{"region": region, "distances": []} for region in regions],
            "laterality": _laterality(regions),
            "obs_entities": [finding.entity],
            "obs_categories": _categories(finding.entity),
            "obs_subcategories": [SUBCATEGORY_OF.get(finding.entity, "DEVICE")],
            "probability": "possible" if finding.is_uncertain else "positive",
            "certainty": "uncertain" if finding.is_uncertain else "certain",
            "positiveness": "pos",
            "modifiers": {"severity": [SEVERITIES[finding.severity]] if finding.entity not in DEVICES else [], "spread": []},
            "from_report": True,
            "localization": _localization(self.boxes[finding], regions),
        }

    def _absence(self, entity: str) -> Json:
        region = "lungs"
        return {
            "name": f"no {entity}",
            "summary_sentence": f"There is no {entity}.",
            "child_level": 0,
            "regions": [{"region": region, "distances": []}],
            "laterality": "bilateral",
            "obs_entities": [entity],
            "obs_categories": _categories(entity),
            "obs_subcategories": [SUBCATEGORY_OF[entity]],
            "probability": "negative",
            "certainty": "certain",
            "positiveness": "neg",
            "modifiers": {"severity": [], "spread": []},
            "from_report": False,
            "localization": _localization(self.regions.get(region, {}), [region]),
        }

    def _sentence(self, finding: PlantedFinding) -> str:
        degree = "" if finding.entity in DEVICES else f"{SEVERITIES[finding.severity]} "
        place = regions_of(finding)[0]
        return f"There is {'possible ' if finding.is_uncertain else ''}{degree}{finding.entity} in the {place}."

    # --- questions -------------------------------------------------------------------------------

    def questions(self) -> Json:
        questions = list(self._all_questions())
        for number, question in enumerate(questions):
            question["question_id"] = f"{self.plan.study}{number:04d}"
        return {"patient_id": f"p{self.plan.patient}", "study_id": f"s{self.plan.study}", "questions": questions}

    def _all_questions(self) -> Iterator[Json]:
        yield from self._indication()
        yield from self._whole_study()
        yield from self._subcategories()
        yield from self._devices()
        yield from self._acquisition()
        for region in self._asked_regions():
            yield from self._region(region)
        present = [finding.entity for finding in self.plan.findings]
        count = min(max(len(present), 2), len(self.absent))
        absent = [self.absent[i] for i in self.rng.choice(len(self.absent), size=count, replace=False)]
        for entity in (*present, *absent):
            yield from self._finding(entity)
        for device in DEVICES:
            yield from self._device(device)

    def _question(self, kind: str, text: str, answers: Sequence[Json], variables: Json | None = None) -> Json:
        """Returns a question; the first answer is the main one, unless answers say otherwise."""
        entities = {entity for answer in answers for entity in answer["obs_entities"]}
        grade = GRADES[bisect.bisect(GRADE_LIMITS, self.rng.random())]
        level = {"A++": 5, "A+": 4, "A": 3, "B": 2, "C": 1, "D": 0}.get(grade, 5)
        return {
            "question_type": kind,
            "question_strategy": STRATEGIES[kind[0]],
            "variables": variables or {},
            "obs_ids": [self.number_of[entity] for entity in sorted(entities) if entity in self.number_of],
            "contains_report_answers": len(answers) > 1,
            "contains_template_answers": True,
            "extraction_quality": {"general_issue_level": level},
            "question": text,
            "answers": list(answers),
            "question_quality": {} if grade == GRADES[0] else {"rating": grade},
        }

    def _template(
        self, text: str, positive: bool, entities: Iterable[str] = (), regions: Iterable[str] = (), boxes: Boxes | None = None
    ) -> Json:
        entities, regions = list(entities), list(regions)
        return {
            "answer_type": "main_answer", "answer_level": 0, "text": text, "name_tag": text.rstrip(".").lower(),
            "laterality": _laterality(regions), "regions": regions, "obs_entities": entities,
            "obs_categories": _categories(entities[0]) if entities else [], "certainty": "certain",
            "positiveness": "pos" if positive else "neg", "modifiers": [], "localization": _localization(boxes or {}, regions),
            "sub_answers": [], "from_report": False, "answer_quality": {"clarity": "OPTIMAL"},
        }  # fmt: skip

    def _report(self, finding: PlantedFinding, main: bool) -> Json:
        """Returns the answer that describes a finding."""
        answer = self._template(self._sentence(finding), True, [finding.entity], regions_of(finding), self.boxes[finding])
        is_device = finding.entity in DEVICES
        names = SEVERITY_NAMES[finding.severity - 1]
        return answer | {
            "answer_type": "main_answer" if main else "details",
            "name_tag": finding.entity,
            "certainty": "uncertain" if finding.is_uncertain else "certain",
            "modifiers": [] if is_device else [["severity", names[self.plan.number % len(names)]]],
            "from_report": True,
        }

    def _describe(
        self, kind: str, text: str, findings: Sequence[PlantedFinding], empty: str, regions: Sequence[str] = (), **variables: str
    ) -> Json:
        """Returns a question whose main answers are findings, or that there are none."""
        answers = [self._report(finding, main=True) for finding in findings]
        boxes = self.regions.get(regions[0]) if regions else None
        return self._question(kind, text, answers or [self._template(empty, False, (), regions, boxes)], dict(variables))

    def _yes_no(self, kind: str, text: str, findings: Sequence[PlantedFinding], what: str, **variables: str) -> Json:
        """Returns a yes-no question; a positive answer reports findings, also where the question is whether all is normal."""
        has_findings, asks_normal = bool(findings), "_is_normal" in kind
        text_of_answer = f"{'No' if has_findings == asks_normal else 'Yes'}, there {'are' if has_findings else 'are no'} {what}."
        details = [self._report(finding, main=False) for finding in findings]
        entities = [finding.entity for finding in findings]
        regions = [region for finding in findings for region in regions_of(finding)]
        boxes = self.boxes[findings[0]] if findings else None
        return self._question(
            kind, text, [self._template(text_of_answer, has_findings, entities, regions, boxes), *details], dict(variables)
        )

    def _indication(self) -> Iterator[Json]:
        entity = FINDINGS[int(self.rng.integers(len(FINDINGS)))]
        symptom = SYMPTOMS[int(self.rng.integers(len(SYMPTOMS)))]
        text = f"Patient with {symptom}. Evaluate for {entity}."
        findings = self.present.get(entity)
        empty = self._template(f"There is no evidence of {entity}.", False, [entity])
        yield self._question("A_indication", text, [self._report(findings, main=True)] if findings else [empty], {"indication": symptom})

    def _whole_study(self) -> Iterator[Json]:
        findings = self.plan.findings
        yield self._describe("B01_describe_all", "Describe the given study.", findings, "There are no abnormal findings.")
        yield self._describe(
            "B02_describe_abnormal", "Describe the abnormal findings of the study.", findings, "There are no abnormal findings."
        )
        yield self._yes_no("B03_is_abnormal", "Is the study abnormal?", findings, "abnormal findings")
        yield self._yes_no("B04_is_normal", "Is the study normal?", findings, "abnormal findings")

    def _subcategories(self) -> Iterator[Json]:
        for subcategory, (words, entities) in SUBCATEGORIES.items():
            findings = [finding for finding in self.plan.findings if finding.entity in entities]
            variables = {"subcategory": subcategory}
            yield self._describe("B08_describe_subcat", f"Describe the {words}.", findings, f"There are no {words}.", **variables)
            yield self._describe(
                "B09_describe_abnormal_subcat", f"Describe the abnormal {words}.", findings, f"There are no {words}.", **variables
            )
            yield self._yes_no("B10_is_abnormal_subcat", f"Are there any {words}?", findings, words, **variables)
            yield self._yes_no("B11_is_normal_subcat", f"Is the study normal with regard to {words}?", findings, words, **variables)

    def _devices(self) -> Iterator[Json]:
        findings = self.plan.devices
        yield self._describe("B12_describe_device", "Describe the devices in the study.", findings, "There are no devices.")
        yield self._yes_no("B13_has_devices", "Are there any devices?", findings, "devices")

    def _acquisition(self) -> Iterator[Json]:
        low, artifact = self.plan.has_low_volumes, self.plan.has_artifact
        text = "The lung volumes are low." if low else "The lungs are well inflated."
        yield self._question(
            "B14_describe_acquisition",
            "Describe the acquisition.",
            [self._template(text, low, ["low lung volumes"] * low, ["lungs"], self.regions["lungs"])],
        )
        text = "There are motion artifacts." if artifact else "There are no imaging artifacts."
        answers = [self._template(text, artifact, ["motion artifact"] * artifact)]
        yield self._question("B15_describe_imaging_artifacts", "Describe the imaging artifacts.", answers)
        yield self._question("B16_has_imaging_artifacts", "Are there any imaging artifacts?", answers)

    def _asked_regions(self) -> list[str]:
        """Returns a few regions: those of findings and devices, and others."""
        own = [region for finding in self.plan.findings for region in regions_of(finding)[:1]]
        other = [REGIONS[i] for i in self.rng.choice(len(REGIONS), size=3, replace=False)]
        fixed = ASKED_REGIONS[int(self.rng.integers(len(ASKED_REGIONS)))]
        devices = list(DEVICE_REGIONS.values())
        of_devices = [regions_of(device)[0] for device in self.plan.devices] + [devices[int(self.rng.integers(len(devices)))][0]]
        return list(dict.fromkeys((*own, fixed, *other, *of_devices)))

    def _region(self, region: str) -> Iterator[Json]:
        findings = [finding for finding in self.plan.findings if region in regions_with_parents(finding)]
        devices = [finding for finding in self.plan.devices if region in regions_with_parents(finding)]
        normal = f"The {region} is normal."
        yield self._describe("C01_describe_region", f"Describe the {region}.", findings, normal, [region], region=region)
        yield self._describe(
            "C02_describe_abnormal_region", f"Describe abnormal findings of the {region}.", findings, normal, [region], region=region
        )
        yield self._yes_no("C03_is_abnormal_region", f"Is the {region} abnormal?", findings, f"findings in the {region}", region=region)
        yield self._yes_no("C04_is_normal_region", f"Is the {region} normal?", findings, f"findings in the {region}", region=region)
        yield self._describe(
            "C07_describe_region_device",
            f"Describe devices in the {region}.",
            devices,
            f"There are no devices in the {region}.",
            region=region,
        )
        yield self._yes_no(
            "C08_has_region_device", f"Are there devices in the {region}?", devices, f"devices in the {region}", region=region
        )

    def _finding(self, entity: str) -> Iterator[Json]:
        findings = [self.present[entity]] if entity in self.present else []
        absent = self._template(f"There is no {entity}.", False, [entity])
        answers = [self._report(finding, main=True) for finding in findings] or [absent]
        yield self._question("D01_describe_finding", f"Describe the {entity}.", answers, {"finding": entity})
        yield self._yes_no("D02_has_finding", f"Is there {entity}?", findings, entity, finding=entity)
        yield self._question("D03_where_is_finding", f"Where is the {entity}?", answers, {"finding": entity})
        yield self._question("D04_how_severe_is_finding", f"How severe is the {entity}?", answers, {"finding": entity})

    def _device(self, device: str) -> Iterator[Json]:
        findings = [self.present[device]] if device in self.present else []
        if not findings and self.rng.random() < 0.6:
            return
        answers = [self._report(finding, main=True) for finding in findings] or [self._template(f"There is no {device}.", False, [device])]
        yield self._question("D05_describe_device", f"Describe the {device}.", answers, {"device": device})
        yield self._yes_no("D06_has_device", f"Is there a {device}?", findings, device, device=device)
        yield self._question("D07_where_is_device", f"Where is the {device}?", answers, {"device": device})


def _categories(entity: str) -> list[str]:
    return ["DEVICE"] if entity in DEVICE_REGIONS else ["ANATOMICAL_FINDING", "DISEASE"]


def _laterality(regions: Sequence[str]) -> str | None:
    sides = {word for region in regions for word in region.split() if word in ("right", "left")}
    return None if not regions else "bilateral" if len(sides) != 1 else sides.pop()


def _localization(boxes: Boxes, regions: Sequence[str]) -> Json:
    return {
        image: {"image_id": image, "localization_reference_ids": list(regions[:1]), "bboxes": image_boxes, "missing_localization": [], "is_fallback": False}
        for image, image_boxes in boxes.items()
    }  # fmt: skip
