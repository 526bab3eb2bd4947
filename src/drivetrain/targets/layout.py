"""Where things are on a machine: drivetrain's folder there, and the folders of one run."""

from __future__ import annotations

from dataclasses import dataclass

from drivetrain.targets.host.library import PROJECT_MARK

DEFAULT_BASE = "~/.drivetrain"


@dataclass(frozen=True)
class Layout:
    base: str
    project: str
    """Keeps runs of the same name apart that come from different folders."""
    run: str
    """The run's name."""

    @property
    def folder(self) -> str:
        """The working folder of the project's commands there."""
        return f"{self.base}/projects/{self.project}"

    @property
    def mark(self) -> str:
        """The file that tells `down` that the folder is drivetrain's own."""
        return f"{self.folder}/{PROJECT_MARK}"

    @property
    def run_dir(self) -> str:
        return f"{self.folder}/runs/{self.run}"

    def job(self, node_rank: int = 0) -> str:
        """The folder of a machine's job: machines may share the folder."""
        return f"{self.folder}/jobs/{self.run}/{node_rank}"

    def output(self, node_rank: int = 0) -> str:
        """The file with what the command of a machine prints."""
        return f"{self.run_dir}/logs/output{f'-{node_rank}' if node_rank else ''}.log"

    def code(self, digest: str) -> str:
        return f"{self.base}/code/{digest}"

    def environment_python(self, digest: str) -> str:
        return f"{self.base}/environments/{digest}/bin/python"
