"""Where runs execute: this machine, containers, machines behind SSH, Slurm, Kubernetes, clouds.

- `base`: what every kind has (`Target`)            - `config`: targets from drivetrain.yaml
- `submission`: what a target is handed             - `archive`, `environment`: code and packages, by the digest of their content
- `submit`: submit runs and ask about them          - `record`: target.json, on the machine that submitted
- `consent`: the price of machines, and the answer  - `errors`: what programs print, and the fix
- `transfer`: send a run to where it is missing     - `layout`: where files are there
- `host/`: requests to a machine                    - `host_checks`: what `doctor` asks a machine
- `image/`: the image of containers
- the kinds: `local`, `ssh`, `docker/`, `slurm/`, `kubernetes/`, `gcp/`, `sky/`
"""
