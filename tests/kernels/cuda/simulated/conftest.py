"""Tests that need numba-cuda's simulator, which a process has from its first import of Numba or not at all.

A process without it, as plain ``pytest`` is, hands the selected tests to processes that have it, one for each core,
and reports what they report. ``NUMBA_ENABLE_CUDASIM=1 python -m pytest tests/kernels/cuda/simulated`` runs them itself.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import pytest

HERE = Path(__file__).parent
REPORTS = "LOWBIT_SIMULATED_REPORTS"
SIMULATING = os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0")


def _simulated(item):
    return HERE in item.path.parents


def pytest_collection_modifyitems(items):
    if importlib.util.find_spec("numba_cuda") is None:
        missing = pytest.mark.skip(reason="needs numba-cuda: pip install 'lowbit[cuda]'")
        for item in filter(_simulated, items):
            item.add_marker(missing)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Keep each report for the process that asked for it, if one did."""
    report = yield
    if REPORTS in os.environ:
        data = item.config.hook.pytest_report_to_serializable(config=item.config, report=report)
        with open(os.environ[REPORTS], "a") as file:
            file.write(json.dumps(data, default=str) + "\n")
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    if SIMULATING or not _simulated(item) or item.get_closest_marker("skip") is not None:
        return None
    if _Children.shared is None:
        _Children.shared = _Children(item.config, [other.nodeid for other in item.session.items if _simulated(other)])
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _Children.shared.reports(item):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_sessionfinish():
    if _Children.shared is not None:
        _Children.shared.stop()


class _Children:
    """Processes that share the simulated tests of a session."""

    shared: _Children | None = None

    def __init__(self, config, nodeids):
        self._config = config
        self._folder = tempfile.TemporaryDirectory(prefix="lowbit-simulated-")
        self._reports = defaultdict(list)
        self._children = []
        count = min(os.cpu_count() or 1, len(nodeids))
        for index in range(count):
            self._children.append(self._start(index, nodeids[index::count]))

    def _start(self, index, nodeids):
        tests, reports, output = (Path(self._folder.name, f"{name}{index}") for name in ("tests", "reports", "output"))
        tests.write_text("\n".join(nodeids))
        reports.touch()
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"@{tests}"]
        environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1", REPORTS: str(reports)}
        with output.open("w") as file:
            process = subprocess.Popen(
                command, cwd=self._config.rootpath, env=environment, stdout=file, stderr=subprocess.STDOUT
            )
        return process, reports.open(), output

    def reports(self, item):
        """Reports of a test's set-up, call and tear-down, once they are in."""
        while not self._complete(item.nodeid):
            alive = any(process.poll() is None for process, _, _ in self._children)
            self._read()
            if not alive and not self._complete(item.nodeid):
                return [*self._reports[item.nodeid], self._lost(item)]
            time.sleep(0.02)
        return self._reports[item.nodeid]

    def _complete(self, nodeid):
        return any(report.when == "teardown" for report in self._reports[nodeid])

    def _read(self):
        for _, file, _ in self._children:
            while (line := file.readline()).endswith("\n"):
                report = self._config.hook.pytest_report_from_serializable(config=self._config, data=json.loads(line))
                if isinstance(report.longrepr, list):  # place and reason of a skipped test, a tuple before it was JSON
                    report.longrepr = tuple(report.longrepr)
                self._reports[report.nodeid].append(report)

    def _lost(self, item):
        """The report of a test whose process ended before it."""
        texts = "\n".join(output.read_text()[-4000:] for _, _, output in self._children)
        return pytest.TestReport(item.nodeid, item.location, {}, "failed", f"no result came back:\n{texts}", "call")

    def stop(self):
        for process, file, _ in self._children:
            process.terminate()
            process.wait()
            file.close()
        self._folder.cleanup()
