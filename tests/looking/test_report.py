"""The page of a run: what it holds, that it asks for nothing, and that no text of a policy's becomes markup."""

import json
import re
import shutil
import subprocess
import sys
import time
from html.parser import HTMLParser

import pytest
from looked_at import HOSTILE, told_run
from running import GUARD_SECONDS, skyrl_here

from nanoskyrl.stages.core.safe_text import printable
from nanoskyrl.stages.looking.report.charts import MOST, Series

pytest.importorskip("vl_convert", reason="charts are drawn by vl-convert: pip install 'nanoskyrl[looking]'")


class Page(HTMLParser):
    """The elements of a page, the charts by their title, and its data."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.links, self.points, self._in, self._data = [], [], {}, None, ""
        self.feed(text)
        self.data = json.loads(self._data)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.tags.append(tag)
        self.links += [found[name] for name in ("src", "href", "action", "data", "xlink:href") if found.get(name)]
        self.links += [value for name, value in attrs if name.startswith("on")]
        self._in = "data" if found.get("id") == "data" else tag
        if found.get("data-curve"):
            self._curve = found["data-curve"]
        if found.get("aria-roledescription") == "point":
            self.points.setdefault(self._curve, []).append(found["aria-label"])

    def handle_data(self, data):
        if self._in == "data":
            self._data += data

    def handle_endtag(self, tag):
        self._in = None


def made(*arguments):
    done = skyrl_here("report", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    with open(told["output"], encoding="utf-8") as file:
        text = file.read()
    assert told["bytes"] == len(text.encode()) < 5_000_000
    return Page(text), text


@pytest.fixture(scope="module")
def page(small, tmp_path_factory):
    return made(small.root, "--out", tmp_path_factory.mktemp("page") / "report.html")


def test_a_curve_has_a_point_a_step_and_says_its_value(page, small):
    found, _ = page
    lines = [json.loads(line) for line in small.metrics.read_text().splitlines()]
    success = [line["reward/success"] for line in lines if line["stage"] == "score"]
    assert len(found.points["success"]) == 2
    for step, (label, value) in enumerate(zip(found.points["success"], success, strict=True)):
        assert label == f"small | step {step} | {value:.4g}"
    assert {"reward", "signal", "tokens", "entropy", "kl", "gap", "part.answer"} <= set(found.points)


def test_the_page_is_complete_and_forbids_to_load_anything(page):
    found, text = page
    assert all(link.startswith(("#", "data:,")) for link in found.links)
    assert "default-src 'none'" in text
    assert not re.search(r"url\(|@import|https?://", text)
    assert found.tags.count("script") == 2


def test_the_sample_holds_whole_trajectories_with_tokens(page, small):
    found, _ = page
    trajectories = found.data["trajectories"]
    assert {t["step"] for t in trajectories} == {0, 1}
    assert len(trajectories) == 32
    for t in trajectories:
        assert len(t["tokens"]["text"]) == len(t["tokens"]["mask"])
        assert t["messages"][0][0] == "user"


def test_hostile_text_is_in_the_page_and_nothing_of_it_is_markup(hostile):
    found, text = made(hostile.root)
    assert {"script", "img", "style"} & set(found.tags) == {"script", "style"}
    assert (found.tags.count("script"), found.tags.count("style"), found.tags.count("a")) == (2, 1, 6)
    assert "window.pwned" not in text.split('<script id="data"')[0]
    assert "<script>window.pwned" not in text
    said = [message for t in found.data["trajectories"] for _, message in t["messages"]]
    assert any(printable(HOSTILE) in message for message in said)
    assert "\x1b" not in text


def test_runs_are_a_mean_with_their_range_and_others_stand_beside(tmp_path):
    a = told_run(tmp_path / "a", success=[0.2, 0.4])
    b = told_run(tmp_path / "b", success=[0.4, 0.8])
    c = told_run(tmp_path / "c<script>", success=[0.1, 0.1])
    found, text = made(a.root, b.root, "--compare", c.root, "--out", tmp_path / "x.html")
    both = "a and 1 more (mean and range) | step 1 | 0.6, 0.4 to 0.8"
    assert found.points["success"][1] == both
    assert found.points["success"][3] == "c<script> | step 1 | 0.1"
    assert found.tags.count("script") == 2
    assert "c&lt;script&gt;" in text


def test_a_curve_of_more_steps_than_can_be_drawn_keeps_its_range():
    values = [0.0] * (2 * MOST)
    values[4001] = 7.0
    points = Series("a", 0, range(2 * MOST), values).points()
    assert len(points) == MOST
    assert max(point["high"] for point in points) == 7.0


@pytest.mark.parametrize(("place", "says"), [("nothing", "there is nothing at"), ("", "is no run, or has no step")])
def test_what_is_no_run_is_one_error(tmp_path, place, says):
    done = skyrl_here("report", tmp_path / place)
    assert (done.returncode, says in done.stderr) == (2, True)


def test_a_run_whose_stages_are_unfinished_or_broken_is_reported_as_far_as_it_is(small, tmp_path):
    shutil.copytree(small.root, tmp_path / "run")
    (tmp_path / "run" / "step-000001" / "train" / "_manifest.json").write_text("{")
    shutil.rmtree(tmp_path / "run" / "step-000001" / "advantage")
    shutil.rmtree(tmp_path / "run" / "policies")
    found, _ = made(tmp_path / "run")
    assert {t["step"] for t in found.data["trajectories"]} == {0, 1}


@pytest.mark.slow
def test_watch_writes_the_page_again_when_the_run_has_news(small, tmp_path):
    shutil.copytree(small.root, tmp_path / "run")
    output = tmp_path / "run" / "report.html"
    command = [
        sys.executable,
        "-c",
        "from nanoskyrl_cli.main import main; main()",
        "report",
        tmp_path / "run",
        "--watch",
    ]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            _until(output.is_file)
            told_run(tmp_path / "run", success=[0.1, 0.2, 0.3])
            _until(lambda: len(Page(output.read_text()).points["success"]) == 3)
        finally:
            process.terminate()


def _until(holds):
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < GUARD_SECONDS
        time.sleep(0.2)
