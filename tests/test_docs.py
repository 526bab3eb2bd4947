"""Every command block of the README and the docs runs, or a comment gives the reason why it does not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command import environment

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(?P<why><!-- not run[^>]*: [^>]+ -->\n)?```(?P<kind>\w*)\n(?P<text>.*?)```", re.S)


@pytest.mark.system  # minutes of commands
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_the_blocks_of_a_page_run(page: Path, folder: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    num_run = 0
    for block in BLOCK.finditer(page.read_text()):
        if block["kind"] == "python":
            name = re.match(r"# (\S+\.py)\n", block["text"])
            assert name, f"a Python block of {page.name} names its file in its first line"
            Path(name[1]).write_text(block["text"])
        elif block["kind"] == "bash" and not block["why"]:
            process = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", block["text"]],
                capture_output=True,
                text=True,
                env=environment(PATH=path),
                stdin=subprocess.DEVNULL,
            )
            assert process.returncode == 0, f"{block['text']}\n{process.stdout[-3000:]}\n{process.stderr[-3000:]}"
            num_run += 1
    assert num_run or "not run" in page.read_text()


def test_links_lead_to_existing_files() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.S)):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"
