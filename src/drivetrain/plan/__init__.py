"""The plan: takes a recipe's settings and hardware, returns a `Plan` with reasons.

| question | file |
|---|---|
| What is a plan, and what is its JSON? | `plan`, `choices` (allowed values), `pins` (`plan.KEY=VALUE`), `environment` (allowed variables) |
| Where does a plan come from? | `choose.choose` |
| What does the planner know about a task? | `profile` (memory and work by micro-batch) |
| What does the planner know about a machine? | `capacity` |
| Where is memory predicted? | `predict_memory.memory_by_part` |
| Where is time predicted? | `predict_time.step_seconds` |
| How do measurements correct predictions? | `fit` |
| Where is the choice made? | `search.Search.choose`, among the `Candidate`s of `candidates` |
| Where are the texts of the reasons? | `reasons`; for keys that the search does not decide: `choose` |
| What changes after out of memory? | `smaller` |
| Other sources of plans | `table` (the guide's table), `imported` (files of accelerate and DeepSpeed) |
| What does DeepSpeed run with? | `deepspeed` |
"""

from drivetrain.plan.pins import PINNABLE, read_pins
from drivetrain.plan.plan import HOST_SYNC_REASON, Plan
from drivetrain.plan.smaller import PlanChange, halve, halved_size

__all__ = ["HOST_SYNC_REASON", "PINNABLE", "Plan", "PlanChange", "halve", "halved_size", "read_pins"]
