"""The page of ``penstock bench`` in a browser: no errors, no requests, and pictures that show, also small or dark."""

import io
import re
import shutil
import subprocess
from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import Image

from penstock.cli.main import main

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")

DARK = "--blink-settings=preferredColorScheme=0"
BLUE = {"light": (0x0B, 0x6B, 0xCB), "dark": (0x6C, 0xB2, 0xFF)}
# What the browser asks of its maker, whatever the page.
ITS_OWN = re.compile(r"https?://[\w.-]*\.(google|gvt1|googleapis|gstatic)\.com[:/]")
# How wide the page came out, and how wide its window is, as it says itself. A frame may be narrower than a window.
MEASURED = (
    """<script>parent.postMessage(document.documentElement.scrollWidth + "/" + innerWidth, "*")</script></body>"""
)
FRAME = """<body><script>onmessage = told => document.body.setAttribute("data-measured", told.data)</script>
<iframe src="measured.html" width="{}" height="2000" style="border: 0"></iframe></body>"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    with h5py.File(folder / "a.h5", "w") as file:
        file["betas"] = np.zeros((600, 50, 40), np.int16)
    arguments = ["--batch-size", "8", "--memory", "64MiB", "--html", str(folder / "report.html")]
    assert main(["bench", str(folder / "a.h5"), *arguments]) == 0
    return folder / "report.html"


def browse(page: Path, *options: str) -> tuple[str, list[str]]:
    """What the browser prints, and what its console says and its network is asked for."""
    assert CHROMIUM is not None
    log = page.with_suffix(".json")
    done = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr",
            f"--user-data-dir={page.parent / 'profile'}", "--host-resolver-rules=MAP * ~NOTFOUND",
            "--disable-background-networking", f"--log-net-log={log}", *options, page.as_uri(),
        ],
        capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    asked = [url for url in re.findall(r'"url":"(http[^"]*)', log.read_text()) if not ITS_OWN.match(url)]
    return done.stdout, re.findall(r"CONSOLE[^\n]*", done.stderr) + asked


def changed(report: Path, name: str, end: str) -> Path:
    page = report.with_name(name)
    page.write_text(report.read_text().replace("</body>", end))
    return page


def test_no_errors_and_nothing_is_fetched(report: Path) -> None:
    page, said = browse(report, "--dump-dom")
    assert said == []
    assert page.count("<svg") == 5


def test_errors_and_requests_would_be_noticed(report: Path) -> None:
    bad = '<img src="http://example.com/x.png"/><script>nothing()</script></body>'
    _, said = browse(changed(report, "bad.html", bad), "--dump-dom")
    assert "nothing is not defined" in said[0]
    assert "http://example.com/x.png" in said


@pytest.mark.parametrize(("wide", "colours"), [(390, "dark"), (1100, "light")])
def test_pictures_show(report: Path, wide: int, colours: str) -> None:
    options = [f"--window-size={wide},2000", *([DARK] if colours == "dark" else [])]
    picture = report.with_suffix(".png")
    browse(report, f"--screenshot={picture}", *options)
    pixels = np.asarray(Image.open(io.BytesIO(picture.read_bytes())).convert("RGB")).astype(int)
    assert pixels.shape[1] == wide
    blue = (abs(pixels - BLUE[colours]).max(axis=2) < 40).sum(axis=1)
    rows = np.flatnonzero(blue)
    # The bar of the rate is above, the marks of reads and samples are far below it.
    assert blue.max() > 0.3 * wide
    assert len(rows[rows > rows[0] + 200]) > 100
    paper = pixels[-1, 0]
    assert paper.max() < 60 if colours == "dark" else paper.min() > 200


@pytest.mark.parametrize("wide", [360, 1100])
def test_nothing_sticks_out(report: Path, wide: int) -> None:
    changed(report, "measured.html", MEASURED)
    frame = report.with_name("frame.html")
    frame.write_text(FRAME.format(wide))
    page, _ = browse(frame, "--dump-dom", "--window-size=1200,2100")
    assert f'data-measured="{wide}/{wide}"' in page
