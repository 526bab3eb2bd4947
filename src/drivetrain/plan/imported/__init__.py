"""Files for `--plan`: a saved plan, accelerate's default_config.yaml, DeepSpeed's JSON or guide 004's YAML.

- `read_file.read`: takes a path, returns `Imported`
- `keys`: rules for keys, and the `Draft` that applies them     - `accelerate`, `deepspeed`, `guide`: the rules of each program
"""

from drivetrain.plan.imported.read_file import Imported, mapping_table, read

__all__ = ["Imported", "mapping_table", "read"]
