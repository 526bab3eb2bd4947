"""Where runs execute: this machine, containers, machines behind SSH, Slurm. One file a kind.

- `base`: what every kind has (`Target`)          - `config`: targets from drivetrain.yaml
- `submission`: what a target is handed           - `archive`, `environment`: code and packages, by the digest of their content
- `submit`: submit runs and ask about them        - `record`: target.json, on the machine that submitted
- `host`, `host_program`: requests to a machine   - `errors`: what programs print, and the fix
- `transfer`, `host_checkpoints`: send a run to where it is missing
- `local`, `docker`, `ssh`, `slurm`: the kinds    - `slurm_script`, `layout`: pure knowledge of files
"""
