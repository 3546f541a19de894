"""The site in a browser: no console errors, nothing from other hosts, nothing wider than a phone.

Needs the site as `make docs` builds it, and Chromium; .ci/run has both.
"""

import functools
import http.server
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

SITE = Path(__file__).parents[2] / "site"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here"),
    pytest.mark.skipif(not (SITE / "index.html").exists(), reason="no site here: make docs"),
]

PAGES = ["index.html", "tutorials/own-hdf5.html", "benchmarks.html"]
# A frame may be narrower than a window; it says how wide its content is.
FRAME = """<body><iframe src="/{page}" width="{wide}" height="900" style="border: 0"
onload="const d = this.contentDocument.documentElement;
document.body.setAttribute('data-measured', d.scrollWidth + '/' + d.clientWidth)"></iframe></body>"""


class Handler(http.server.SimpleHTTPRequestHandler):
    def do_GET(self) -> None:
        if found := re.fullmatch(r"/frame/(\d+)/(.*)", self.path):
            content = FRAME.format(wide=found[1], page=found[2]).encode()
        elif self.path == "/bad":
            content = b"<script>nothing()</script>"
        else:
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    handler = functools.partial(Handler, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def browse(url: str, folder: Path, *options: str) -> tuple[str, list[str]]:
    """The page as it came out, and what the console said."""
    assert CHROMIUM is not None
    done = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            "--enable-logging=stderr", "--hide-scrollbars", f"--user-data-dir={folder / 'profile'}",
            "--virtual-time-budget=5000", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
            "--dump-dom", *options, url,
        ],
        capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    return done.stdout, re.findall(r"CONSOLE[^\n]*", done.stderr)


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_no_console_errors(page: str, dark: bool, address: str, tmp_path: Path) -> None:
    options = ["--blink-settings=preferredColorScheme=0"] if dark else []
    shown, said = browse(f"{address}/{page}", tmp_path, *options)
    assert said == []
    scheme = re.search(r'<body[^>]* data-md-color-scheme="(\w+)"', shown)
    assert scheme is not None
    assert scheme[1] == ("slate" if dark else "default")


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("wide", [390, 1280])
def test_nothing_sticks_out(page: str, wide: int, address: str, tmp_path: Path) -> None:
    shown, _ = browse(f"{address}/frame/{wide}/{page}", tmp_path, "--window-size=1400,1000")
    assert f'data-measured="{wide}/{wide}"' in shown


def test_console_errors_would_be_noticed(address: str, tmp_path: Path) -> None:
    _, said = browse(f"{address}/bad", tmp_path)
    assert "nothing is not defined" in said[0]
