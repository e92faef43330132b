"""The page in headless Chromium, made of a real run of 30 steps: charts, filters, keys, and what never happens."""

import shutil

import pytest
from looked_at import small_run
from running import skyrl_here

pytest.importorskip("vl_convert", reason="charts are drawn by vl-convert: pip install 'nanoskyrl[looking]'")
api = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
pytestmark = pytest.mark.slow
STEPS = 30


@pytest.fixture(scope="module")
def chromium():
    names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
    program = next(filter(None, map(shutil.which, names)), None)
    with api.sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        except api.Error as error:
            pytest.skip(f"no browser here: {str(error).splitlines()[0]}")
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    root = tmp_path_factory.mktemp("report")
    small_run(root / "run", STEPS)
    assert skyrl_here("report", root / "run").returncode == 0
    return root / "run" / "report.html"


@pytest.fixture
def opened(chromium, tmp_path):
    """Return an opener of pages; whatever a page tells or asks for is an error."""
    wrong, contexts = [], []

    def opens(file, **context):
        contexts.append(chromium.new_context(**{"viewport": {"width": 1280, "height": 900}, **context}))
        page = contexts[-1].new_page()
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: request.url != file.as_uri() and wrong.append(request.url))
        page.on("dialog", lambda dialog: wrong.append(dialog.message))
        page.goto(file.as_uri())
        page.wait_for_selector("#list")
        return page

    yield opens
    for context in contexts:
        context.close()
    assert wrong == []


def test_every_curve_has_a_point_a_step(opened, report):
    page = opened(report)
    for curve in ("success", "reward", "signal", "tokens", "entropy", "kl", "grad", "part.answer"):
        assert page.locator(f"figure[data-curve='{curve}'] path[aria-roledescription=point]").count() == STEPS
    assert page.locator("figure.wide path[aria-roledescription=bar]").count() >= 4 * STEPS


def test_points_tell_their_value_by_the_pointer_and_by_keys_and_lead_to_their_step(opened, report):
    page = opened(report)
    figure = page.locator("figure[data-curve=success]")
    figure.focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert "step 2" in page.locator("#tip").inner_text()
    figure.locator("path[aria-roledescription=point]").nth(7).hover()
    assert "step 7" in page.locator("#tip").inner_text()
    figure.locator("path[aria-roledescription=point]").nth(STEPS - 1).click()
    assert page.locator("#step").input_value() == str(STEPS - 1)


def test_trajectories_are_filtered_and_browsed_by_click_and_by_keyboard(opened, report):
    page = opened(report)
    items = page.locator("#list li")
    everything = items.count()
    page.select_option("#outcome", "no")
    failures = items.count()
    assert 0 < failures < everything
    assert page.locator("#list li.no").count() == failures
    page.locator("#list li").nth(1).click()
    second = page.locator("#one").inner_text()
    page.keyboard.press("k")
    assert page.locator("#one").inner_text() != second
    page.keyboard.press("j")
    assert page.locator("#one").inner_text() == second
    page.locator("#list").focus()
    page.keyboard.press("End")
    assert page.locator("#list li").last.get_attribute("aria-selected") == "true"
    page.select_option("#outcome", "")
    page.keyboard.press("Escape")
    page.locator("h1").click()
    page.keyboard.press("/")
    page.keyboard.type("no such text anywhere")
    assert items.count() == 0
    assert "No trajectory" in page.locator("#one").inner_text()
    page.locator("#search").fill("answer")
    assert items.count() > 0


def test_tokens_are_coloured_by_what_is_chosen(opened, report):
    page = opened(report)
    page.select_option("#order", "worst")
    sampled = page.locator(".tokens span:not(.off)")
    assert sampled.count() > 0
    assert page.locator(".tokens span[style*='--down']").count() == sampled.count()
    page.locator("button", has_text="mask").click()
    assert page.locator(".tokens span[style*='--up']").count() == sampled.count()
    page.locator("h1").click()
    page.keyboard.press("c")
    assert page.locator(".pills button[aria-pressed=true]", has_text="advantage").count() == 1
    assert "logprob" in sampled.first.get_attribute("title")


def test_one_trajectory_is_held_beside_the_next(opened, report):
    page = opened(report)
    page.keyboard.press("x")
    held = page.locator("#one h3").first.inner_text()
    page.locator("#list li").last.click()
    assert page.locator("#one.two > div").count() == 2
    assert page.locator("#one h3").first.inner_text() == held
    page.locator("#one button", has_text="let go").click()
    page.keyboard.press("k")
    assert page.locator("#one > div").count() == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_follow_the_system_and_the_button(opened, report, scheme):
    page = opened(report, color_scheme=scheme)
    colors = [page.evaluate("getComputedStyle(document.body).backgroundColor")]
    page.locator("#theme").click()
    colors.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert set(colors) == {"rgb(251, 250, 248)", "rgb(21, 23, 26)"}
    assert (colors[0] == "rgb(251, 250, 248)") == (scheme == "light")


def test_a_phone_sees_it_without_scrolling_sideways(opened, report):
    page = opened(report, viewport={"width": 375, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") == 375


def test_hostile_text_is_inert(opened, hostile):
    assert skyrl_here("report", hostile.root).returncode == 0
    page = opened(hostile.root / "report.html")
    assert "<script>window.pwned = 1</script>" in page.locator("#one").inner_text()
    for _ in range(4):
        page.keyboard.press("j")
    page.locator("#search").fill("<script>")
    assert page.locator("#list li").count() > 0
    assert page.evaluate("window.pwned") is None
    assert page.locator("#one script, #one img, #one a, #one style").count() == 0
    assert page.evaluate("document.title") == "hostile"
