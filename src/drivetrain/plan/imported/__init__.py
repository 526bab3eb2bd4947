"""Files for `--plan`: a saved plan, accelerate's default_config.yaml or DeepSpeed's JSON.

- `read_file.read`: takes a path, returns `Imported`
- `keys`: rules for keys, and the `Draft` that applies them     - `accelerate`, `deepspeed`: the rules of each program
"""

from drivetrain.plan.imported.read_file import Imported, mapping_table, read

__all__ = ["Imported", "mapping_table", "read"]
