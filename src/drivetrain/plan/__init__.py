"""The plan room: recipe settings and hardware in, a `Plan` with its reasons out.

| question | file |
|---|---|
| What is a plan, and what is its JSON? | `plan`, `choices` (allowed values), `pins` (`plan.KEY=VALUE`), `environment` (allowed variables) |
| Where does a plan come from? | `choose.choose` |
| What is known of a task? | `profile` (memory and work by micro-batch) |
| What is known of a machine? | `capacity` |
| Where is memory predicted? | `predict_memory.memory_by_part` |
| Where is time predicted? | `predict_time.step_seconds` |
| How do measurements correct predictions? | `fit` |
| Where is the choice made? | `search.Search.choose`, among the `Candidate`s of `candidates` |
| Where are the texts of the reasons? | `reasons`; of keys that no search decides: `choose` |
| What changes after out of memory? | `smaller` |
| Other sources of plans | `table` (the guide's table), `imported` (files of accelerate and DeepSpeed) |
| What does DeepSpeed run with? | `deepspeed` |
"""

from drivetrain.plan.pins import PINNABLE, read_pins
from drivetrain.plan.plan import HOST_SYNC_REASON, Plan
from drivetrain.plan.smaller import PlanChange, halve, halved_size

__all__ = ["HOST_SYNC_REASON", "PINNABLE", "Plan", "PlanChange", "halve", "halved_size", "read_pins"]
