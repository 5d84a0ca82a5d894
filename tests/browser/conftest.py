"""One JupyterLab for all tests of a process, one Chromium for a file's; without them the tests are skipped.

While playwright is open, this thread has a running event loop, beside which no other test could run one.
"""

import pytest
from real_lab import Page, Server, chromium, what_is_missing


def pytest_collection_modifyitems(items):
    """Marked, and not skipped by a fixture, so that pytest says it once a file."""
    if missing := what_is_missing():
        for item in items:
            if "server" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.skip(reason=missing))


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    made = Server(tmp_path_factory.mktemp("lab"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def browser(server):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        options = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        made = playwright.chromium.launch(executable_path=chromium(), args=options)
        yield made
        made.close()


@pytest.fixture
def lab(server, browser):
    """Opens a notebook of the server's: lab("05_train_full.ipynb"). Its kernel ends with the test."""
    opened = []

    def open_notebook(name, **options):
        opened.append(Page(server, browser, name, **options))
        return opened[-1]

    yield open_notebook
    for page in opened:
        page.picture(f"{page.name}-at-the-end")
        page.close()
