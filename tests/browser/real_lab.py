"""A real JupyterLab in a real Chromium, as a person uses it: a server, a page, what its cells show."""

import contextlib
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import nbformat

ROOT = Path(__file__).parents[2]
NAMES = ("chromium", "chromium-browser", "google-chrome")
LAPTOP = {"width": 1366, "height": 768}
SETTINGS = {
    "@jupyterlab/apputils-extension/notification": {
        "fetchNews": "false",
        "checkForUpdates": False,
    },
    # all cells are there to be measured
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},
}


def chromium():
    """Path of a Chromium, from $CHROMIUM or PATH; None where there is none."""
    asked = os.environ.get("CHROMIUM")
    return shutil.which(asked) if asked else next(filter(None, map(shutil.which, NAMES)), None)


def what_is_missing():
    """One line for the person who runs the tests, '' where nothing is missing."""
    missing = []
    if chromium() is None:
        missing.append("Chromium (`apt-get install chromium`, or CHROMIUM=<path>)")
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        missing.append("Playwright (`pip install playwright`; not its own browser)")
    return f"missing: {' and '.join(missing)}" if missing else ""


def wait_for(what, *, seconds=30, words="it", every=0.05):
    """What `what()` returns once that is true. Raises AssertionError after some seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := what():
            return found
        time.sleep(every)
    raise AssertionError(f"waited {seconds} s for {words}")


class Server:
    """JupyterLab on a free port, its root a folder of its own, without network, in the smoke profile."""

    def __init__(self, folder):
        self.root = folder / "root"
        self.runs = self.root / "runs"
        (self.root / "notebooks").mkdir(parents=True)
        self.runs.mkdir()
        # measurements that notebooks show
        (self.root / "benchmarks").symlink_to(ROOT / "benchmarks")
        for name, settings in SETTINGS.items():
            path = folder / "settings" / f"{name}.jupyterlab-settings"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(settings))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.token = secrets.token_hex(16)
        self.url = f"http://127.0.0.1:{self.port}/"
        environment = {
            **os.environ,
            "KIT_PROFILE": "smoke",
            "KIT_RUNS": str(self.runs),
            "PYTHONPATH": os.pathsep.join(
                filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
            ),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
            "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
            "JUPYTER_CONFIG_DIR": str(folder / "config"),
            "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        }
        environment.pop("KIT_RUN_FOLDER", None)
        self.log = folder / "server.log"
        options = [
            "--no-browser",
            "--allow-root",
            "--expose-app-in-browser",
            f"--port={self.port}",
            "--ServerApp.port_retries=0",
            f"--ServerApp.root_dir={self.root}",
            f"--IdentityProvider.token={self.token}",
        ]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *options],
            env=environment,
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
            cwd=self.root,
        )
        wait_for(
            self._answers,
            seconds=60,
            words=f"JupyterLab to answer:\n{self.log.read_text()[-2000:]}",
        )

    def _answers(self):
        with contextlib.suppress(OSError):
            return (
                urllib.request.urlopen(f"{self.url}api?token={self.token}", timeout=2).status
                == 200
            )
        return False

    def ask(self, path, method="GET"):
        """What the server's API answers."""
        asked = urllib.request.Request(
            f"{self.url}api/{path}?token={self.token}", method=method
        )
        return json.load(urllib.request.urlopen(asked, timeout=30))

    def close(self):
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def add(self, name):
        """A copy of one of the repository's notebooks, as committed."""
        return shutil.copy(ROOT / "notebooks" / name, self.root / "notebooks" / name)

    def write(self, name, *cells):
        """A notebook of these code cells, beside the others."""
        notebook = nbformat.v4.new_notebook(
            cells=[nbformat.v4.new_code_cell(text) for text in cells]
        )
        notebook.metadata = nbformat.read(
            ROOT / "notebooks/05_train_full.ipynb", as_version=4
        ).metadata
        nbformat.write(notebook, self.root / "notebooks" / name)


# [contrast as in WCAG 2, text] of each element in an HTML output that has text of its own, drawings apart.
_CONTRASTS = """
() => {
  const parse = colour => colour.match(/[\\d.]+/g).map(Number);
  const light = rgb => rgb.slice(0, 3).map(v => v / 255)
    .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = e => {
    for (; e; e = e.parentElement) {
      const [r, g, b, a = 1] = parse(getComputedStyle(e).backgroundColor);
      if (a > 0.5) return [r, g, b];
    }
    return [255, 255, 255];
  };
  const own = e => [...e.childNodes].filter(n => n.nodeType === 3).map(n => n.data.trim()).join(" ").trim();
  return [...document.querySelectorAll(".jp-OutputArea-output.jp-RenderedHTMLCommon *")]
    .filter(e => own(e) && !["SCRIPT", "STYLE"].includes(e.tagName) && !e.closest("svg") && e.checkVisibility())
    .map(e => {
      const [a, b] = [light(parse(getComputedStyle(e).color)), light(behind(e))];
      return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), own(e).slice(0, 60)];
    });
}
"""


# [pixels of its letters, text] of each text in a drawing, as the page has scaled it.
_LETTERS = """
() => [...document.querySelectorAll(".jp-OutputArea-output svg text")].map(e =>
  [parseFloat(getComputedStyle(e).fontSize) * e.getScreenCTM().a, e.textContent])
"""

# How elements begin that hide a part of their text: cut off with dots, or scrolled sideways.
_CUT = """
() => [...document.querySelectorAll(".jp-OutputArea-output.jp-RenderedHTMLCommon *")]
  .filter(e => e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).overflowX !== "visible" && e.clientWidth)
  .map(e => (e.innerText || e.tagName).slice(0, 80))
"""


class Page:
    """One notebook in one tab, 1366 x 768."""

    def __init__(self, server, browser, name, *, dark=False):
        self.server, self.name = server, name
        self.tab = browser.new_context(viewport=LAPTOP).new_page()
        self.tab.set_default_timeout(30_000)
        theme = {"raw": json.dumps({"theme": f"JupyterLab {'Dark' if dark else 'Light'}"})}
        where = "lab/api/settings/@jupyterlab/apputils-extension:themes"
        self.tab.request.put(f"{server.url}{where}?token={server.token}", data=theme)
        self.open()

    def open(self):
        """Load the page, again too."""
        self.tab.goto(
            f"{self.server.url}lab/tree/notebooks/{self.name}?token={self.server.token}&reset"
        )
        self.tab.wait_for_selector(".jp-Notebook .jp-Cell")
        kernel = "window.jupyterapp.shell.currentWidget?.sessionContext?.session?.kernel"
        # else running asks which kernel
        self.tab.wait_for_function(f"{kernel}?.connectionStatus === 'connected'")

    def close_and_open(self):
        """The notebook's tab within Lab's page; its kernel goes on."""
        self.tab.evaluate("window.jupyterapp.shell.currentWidget.dispose()")
        self.tab.locator(".jp-Notebook").wait_for(state="detached")
        self.tab.evaluate(
            "path => window.jupyterapp.commands.execute('docmanager:open', {path})",
            f"notebooks/{self.name}",
        )
        self.tab.wait_for_selector(".jp-Notebook .jp-Cell")

    def close(self):
        self.do("notebook:shutdown-kernel")
        self.tab.wait_for_timeout(300)
        self.tab.context.close()

    def do(self, command):
        """One of Lab's commands; it is not waited for."""
        run = "window.jupyterapp.commands.execute(name)"
        count = "window.kitRunning = (window.kitRunning || 0)"
        self.tab.evaluate(
            f"name => {{ {count} + 1; {run}.finally(() => {{ {count} - 1; }}); }}", command
        )

    def run_all(self):
        self.do("notebook:run-all-cells")

    def run_cell(self, number):
        self.cell(number).locator(".jp-InputPrompt").click()
        self.do("notebook:run-cell")

    def cell(self, number):
        """The code cell of this number, from 0."""
        return self.tab.locator(".jp-CodeCell").nth(number)

    def wait_until_done(self, *, seconds=60):
        """Until what `do` asked for is done, and the kernel idle."""
        self.tab.wait_for_function("!window.kitRunning", timeout=1000 * seconds)
        idle = ".jp-Notebook-ExecutionIndicator[data-status=idle]"
        self.tab.wait_for_selector(idle, timeout=1000 * seconds, state="attached")

    def press_stop(self):
        """The square in the notebook's toolbar."""
        self.tab.locator('[data-jp-item-name="interrupt"]').click()

    def save(self):
        """The notebook as it is then in its file."""
        self.do("docmanager:save")
        self.tab.wait_for_timeout(1500)
        return nbformat.read(self.path, as_version=4)

    @property
    def path(self):
        return self.server.root / "notebooks" / self.name

    @property
    def panel(self):
        """The row of buttons under the chart."""
        return self.tab.locator("[data-kit-panel]")

    @property
    def said(self):
        """What the line under the buttons says."""
        return self.tab.locator("[data-kit-status]").inner_text()

    @property
    def shown_step(self):
        """The step in the line above the chart."""
        return int(
            re.search(r"step (\d+)/", self.tab.locator("[data-kit-progress]").inner_text())[1]
        )

    def press(self, button):
        self.panel.get_by_role("button", name=button, exact=True).click()

    def set(self, label, text):
        field = self.panel.get_by_label(label)
        field.fill(text)
        field.press("Enter")

    def too_wide(self):
        """Outputs wider than what they stand in: the pixels, and how each begins."""
        areas = "[...document.querySelectorAll('.jp-OutputArea-output')]"
        wider = "e => [e.scrollWidth - e.clientWidth, e.innerText.slice(0, 80)]"
        return self.tab.evaluate(f"{areas}.map({wider}).filter(([pixels]) => pixels > 0)")

    def hard_to_read(self, *, least=4.5):
        """Texts in HTML outputs whose contrast with what is behind them is too low: (contrast, how each begins)."""
        return [[round(c, 1), text] for c, text in self.tab.evaluate(_CONTRASTS) if c < least]

    def letters(self):
        """The smallest letters of the drawings, in pixels."""
        return min(size for size, _ in self.tab.evaluate(_LETTERS))

    def cut(self):
        """How each element of an HTML output begins that hides a part of its line."""
        return self.tab.evaluate(_CUT)

    def resize(self, width):
        """Another width of the window; back to LAPTOP's with its own."""
        self.tab.set_viewport_size(LAPTOP | {"width": width})
        self.tab.wait_for_timeout(500)

    def height(self):
        """Pixels of the notebook's outputs."""
        areas = "[...document.querySelectorAll('.jp-OutputArea')]"
        return self.tab.evaluate(
            f"{areas}.reduce((all, e) => all + e.getBoundingClientRect().height, 0)"
        )

    def picture(self, name, *, cell=None):
        """What is seen now, or at the code cell of this number, to be looked at: in the server's folder."""
        if cell is not None:
            self.cell(cell).evaluate("e => e.scrollIntoView()")
        self.tab.screenshot(path=self.server.root.parent / f"{name}.png")


def red_boxes(notebook):
    """What the notebook would show as errors or on red: error outputs and streams on stderr."""
    outputs = [
        (n, out) for n, cell in enumerate(notebook.cells) for out in cell.get("outputs", [])
    ]
    return [
        (n, out.get("ename") or out.text)
        for n, out in outputs
        if out.output_type == "error" or out.get("name") == "stderr"
    ]
