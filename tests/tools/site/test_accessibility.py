"""Pages of the site in a Chromium, judged by axe: no violation in either colour scheme.

Needs chromium in PATH and TILEWISE_AXE, the path of axe.min.js (`npm pack axe-core`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest

from tests.tools.site.test_site import site  # noqa: F401  a fixture

AXE = os.environ.get("TILEWISE_AXE", "")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PAGES = (
    "index", "guide/quickstart", "guide/attention", "guide/serve", "guide/clients-and-tools",
    "guide/models", "guide/recipes", "learn/index", "learn/blocks_and_forks",
    "learn/tiles_and_traffic", "reference/index", "reference/api/attention",
    "reference/api/engine", "reference/command-line", "reference/options",
    "design/architecture", "design/hopper", "results/index", "results/hopper",
)  # fmt: skip
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (AXE and CHROMIUM), reason="needs chromium and TILEWISE_AXE"),
]
RUN = """<script>{axe}</script><script>
addEventListener("load", () => setTimeout(() => axe.run().then(found => {{
  const text = JSON.stringify(found.violations.map(v => [v.id, v.impact,
    v.nodes.map(n => n.target.join(" ") + ": " + n.failureSummary).slice(0, 3)]));
  const told = document.createElement("axe-result");
  told.textContent = text;
  document.body.append(told);
}}), 500));
</script></body>"""


def violations(page: Path, *, is_dark: bool) -> list[list]:
    """What axe finds in a page: rule, impact, and some places."""
    script = RUN.format(axe=Path(AXE).read_text(encoding="utf-8"))
    copy = page.with_name(f"axe-{page.name}")
    copy.write_text(page.read_text(encoding="utf-8").replace("</body>", script), encoding="utf-8")
    scheme = f"--blink-settings=preferredColorScheme={0 if is_dark else 1}"
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1280,1600",
         "--virtual-time-budget=20000", scheme, "--dump-dom", copy.as_uri()],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    copy.unlink()
    (told,) = re.findall(r"<axe-result>(.*?)</axe-result>", done.stdout, re.DOTALL)
    assert f'data-md-color-scheme="{"slate" if is_dark else "default"}"' in done.stdout
    return json.loads(unescape(told))


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_axe_finds_nothing(site, name, is_dark):  # noqa: F811
    assert violations(site / f"{name}.html", is_dark=is_dark) == []
