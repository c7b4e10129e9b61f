"""The live page in a real Chromium: it shows what the service knows, by itself, to everyone, and asks nobody else."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from PIL import Image

from plaudit_metrics.service.page import FILES, FOLDER, library
from plaudit_wire.records import ScorerRecord, ScorerWork, StepRecord, WorkerRecord
from stage_records import build_sample

Tab = Any
Site = Any

READY = "document.querySelector('.verdict') && document.querySelectorAll('.uplot canvas').length >= 6"
STEP_READY = "document.querySelector('.timeline canvas') && document.querySelector('nav.steps')"
FORMS = {
    "light": (1280, 1180, False),
    "dark": (1280, 1180, True),
    "phone-light": (390, 1180, False),
    "phone-dark": (390, 1180, True),
}
COLOURS = {
    False: {"generation": (0x3A, 0x63, 0xB7), "score": (0xE0, 0x56, 0x6F)},
    True: {"generation": (0x5F, 0x8F, 0xF0), "score": (0xF0, 0x8A, 0x7C)},
}
IMAGES = Path(__file__).parents[3] / "docs" / "images"


@pytest.fixture
def overview(kept_tab: Tab, site: Site) -> Iterator[Tab]:
    """The overview, with its charts drawn; afterwards nothing has complained and nobody else was asked."""
    kept_tab.go(f"{site.url}#/")
    kept_tab.until(READY)
    yield kept_tab
    assert kept_tab.complaints == []
    assert kept_tab.hosts() == {site.url.split("/")[2]}


@pytest.fixture
def step_view(kept_tab: Tab, site: Site) -> Iterator[Tab]:
    """The view of a step that waited for scorers."""
    kept_tab.go(f"{site.url}#/step/12")
    kept_tab.until(STEP_READY)
    yield kept_tab
    assert kept_tab.complaints == []
    assert kept_tab.hosts() == {site.url.split("/")[2]}


def seconds_in(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"([\d.]+) s\b", text)]


def test_the_verdict_is_explained_and_its_seconds_add_up(overview: Tab, site: Site) -> None:
    assert overview.text("#verdict") == "Step 16 waited for scorers"
    assert overview.text(".advice").startswith("The trainer waited for scorers at work: make them faster")
    newest = site.builder.steps[-1][0]
    assert sum(seconds_in(overview.text(".partition ul"))) == pytest.approx(newest.closed - newest.opened, abs=0.1)
    assert overview.text("#run") == "digits-page"
    assert "reward 3" in overview.text(".recent")


def test_the_rules_of_the_verdict_are_shown_on_request(overview: Tab) -> None:
    overview.point(".verdict summary", click=True)
    overview.until("document.querySelector('.reasons')")
    rows = overview.ask("[...document.querySelectorAll('.reasons tbody tr')].map((row) => row.innerText)")
    assert ["yes" in row for row in rows] == [False, False, False, False, True]


def test_pointing_at_a_bar_tells_its_seconds(overview: Tab, site: Site) -> None:
    overview.point(".chart .u-over", 4.5 / 16, 0.6)
    overview.until("!document.querySelector('.chart .tip').hidden")
    told = overview.text(".chart .tip")
    assert told.startswith("Step 5")
    assert "group scorers" in told
    fifth = site.builder.steps[4][0]
    assert sum(seconds_in(told)) == pytest.approx(fifth.closed - fifth.opened, abs=0.1)


def test_a_click_on_a_bar_opens_its_step_and_focus_follows(overview: Tab) -> None:
    overview.point(".chart .u-over", 2.5 / 16, 0.9, click=True)
    overview.until(STEP_READY)
    assert overview.text("#verdict") == "Step 3 waited for a free reward worker"
    assert overview.ask("document.activeElement.id") == "content"


def test_every_verdict_and_outcome_has_an_explanation(overview: Tab, site: Site) -> None:
    for number in range(1, 9):
        overview.open(f"{site.url}#/step/{number}")
        overview.until(f"document.querySelector('#verdict')?.innerText.startsWith('Step {number} ')")
        assert "unknown" not in overview.text("#verdict")
        assert "(no scorer)" not in overview.text("[aria-label=Scorers]")
    overview.open(f"{site.url}#/")
    overview.until(READY)
    legend = overview.ask("[...document.querySelectorAll('.legend li')].map((each) => each.innerText)")
    assert {"data error", "infra error", "timeout", "skipped", "poison", "given up"} <= set(legend)


def test_workers_are_shown_busy_and_idle(overview: Tab) -> None:
    overview.until("document.querySelectorAll('.state').length === 6")
    rows = overview.ask("[...document.querySelectorAll('tr:has(.state)')].map((row) => row.innerText.split('\\t'))")
    shown = {row[0]: (row[1].strip(), row[2].strip()) for row in rows}
    assert shown["rollout-0"] == ("busy", "6 of 8")
    assert shown["rollout-1"] == ("idle", "0 of 8")
    assert shown["reward-2"][0] == "starting"


def described(text: str) -> str:
    """Return the condition that a chart's description matches a regular expression."""
    return f"[...document.querySelectorAll('.plot')].some((plot) => /{text}/.test(plot.ariaLabel))"


def test_the_queues_are_shown_with_depth_and_age(overview: Tab) -> None:
    overview.until(described("samples . reward workers 8,"))
    overview.until(described("samples . reward workers [0-9.]+ s"))


def test_what_rounding_leaves_of_0_reads_0(overview: Tab) -> None:
    shown = overview.ask("import('/page/format.js').then((format) => [-1e-17, 2.5e-7].map(format.figure))")
    assert shown == ["0", "2.5e-7"]


def test_the_slowest_samples_open_into_stages_and_scorers(overview: Tab, site: Site) -> None:
    overview.point(".samples td summary", click=True)
    overview.until("document.querySelector('.breakdown')")
    told = overview.text(".breakdown")
    assert "generation" in told
    assert "judge: scored" in told
    slowest = max(site.builder.steps[-1][1], key=lambda each: (each.stamps.committed or 0) - each.stamps.admitted)
    assert overview.text(".samples .id") == f"{slowest.group} #{slowest.index}"


def test_text_of_samples_and_scorers_is_never_markup(step_view: Tab) -> None:
    step_view.ask("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    step_view.until("document.body?.innerText.includes('<img src=x onerror=')")
    assert step_view.ask("document.querySelectorAll('img, main script').length") == 0
    step_view.until("document.title === 'Step 12 · digits-page · Plaudit'")


def test_the_timeline_shows_stages_and_points_out_a_group(step_view: Tab) -> None:
    before = timeline_colours(step_view)
    assert set(COLOURS[False].values()) <= before.keys()
    step_view.point(".timeline .u-over", 0.1, 0.3)
    step_view.until("!document.querySelector('.timeline .tip').hidden")
    told = step_view.text(".timeline .tip")
    assert "generation" in told
    assert "t-" in told
    after = timeline_colours(step_view)  # all but the four samples of the group that was pointed at have faded
    assert 0 < after[COLOURS[False]["score"]] < before[COLOURS[False]["score"]] / 3


def timeline_colours(tab: Tab) -> dict[tuple[int, int, int], int]:
    """Colours of the timeline that nothing shines through, and their pixels."""
    drawn = tab.ask("document.querySelector('.timeline canvas').toDataURL()").partition(",")[2]
    image = Image.open(io.BytesIO(base64.b64decode(drawn))).convert("RGBA")
    pixels: Any = image.getcolors(1 << 24)
    return {colour[:3]: count for count, colour in pixels if colour[3] == 255}


def test_the_timeline_zooms_and_shows_all_again(step_view: Tab) -> None:
    label = "document.querySelector('.timeline canvas').toDataURL()"
    whole = step_view.ask(label)
    step_view.point("button[aria-label='Zoom in']", click=True)
    step_view.until(f"{label} !== {whole!r}")
    step_view.point("button[aria-label='Show all']", click=True)
    step_view.until(f"{label} === {whole!r}")


def test_the_theme_follows_the_system_or_the_switch_and_is_kept(overview: Tab, site: Site) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    chart = "document.querySelector('.uplot canvas').toDataURL()"
    light, drawn = overview.ask(background), overview.ask(chart)
    overview.look_like(1280, 900, dark=True)
    overview.until(f"{background} !== {light!r} && {chart} !== {drawn!r}")
    overview.point("#theme label:nth-of-type(2)", click=True)
    overview.until(f"{background} === {light!r}")
    overview.open(f"{site.url}?again")
    overview.until(READY)
    assert overview.ask(background) == light
    overview.ask("localStorage.clear()")


@pytest.mark.parametrize("address", ["#/", "#/step/12"])
def test_a_narrow_phone_never_scrolls_sideways(tab: Tab, site: Site, address: str) -> None:
    tab.look_like(320, 640)
    tab.open(site.url + address)
    tab.until(READY if address == "#/" else STEP_READY)
    assert tab.ask("document.documentElement.scrollWidth") == 320
    assert tab.complaints == []


@pytest.mark.long
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_axe_finds_nothing_wrong(overview: Tab, site: Site, width: int, dark: bool) -> None:
    overview.look_like(width, 900, dark=dark)
    overview.ask("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    assert overview.axe() == []
    overview.open(f"{site.url}#/step/12")
    overview.until(STEP_READY)
    assert overview.axe() == []


def test_the_keyboard_reaches_everything_in_the_order_of_the_page(tab: Tab, site: Site) -> None:
    tab.open(site.url)
    tab.until(READY)
    tab.ask(
        "window.walk = []; document.addEventListener('focusin', ({target}) => walk.push("
        "target.closest('figure, table') ? 'in ' + target.closest('figure, section')?.querySelector('h3')?.innerText :"
        " target.className || target.id || target.name || target.tagName))"
    )
    for _ in range(16):
        tab.press("Tab")
    walked = tab.ask("walk")
    assert walked[0] == "skip"
    assert walked.index("theme") < walked.index("SUMMARY") < walked.index("count")
    charts = [each for each in walked if each.startswith("in ")]
    assert list(dict.fromkeys(charts))[:3] == ["in Where the time went", "in Reward", "in Staleness"]


def test_the_arrow_keys_read_a_chart_aloud_and_enter_opens_the_step(overview: Tab) -> None:
    overview.ask("document.querySelector('.plot').focus()")
    overview.press("Home")
    assert overview.text("#announcer").startswith("Step 1 ")
    overview.press("ArrowRight")
    overview.press("ArrowRight")
    assert overview.text("#announcer").startswith("Step 3 ")
    overview.press("Enter")
    overview.until(STEP_READY)
    assert overview.ask("location.hash") == "#/step/3"


def test_behind_each_chart_is_a_table_of_the_same_numbers(overview: Tab, site: Site) -> None:
    overview.ask("document.querySelector('figure details').open = true")
    overview.until("document.querySelector('figure tbody tr')")
    rows = overview.ask("[...document.querySelectorAll('figure tbody')][0].innerText.split('\\n').length")
    assert rows >= 16
    first = overview.ask("[...document.querySelector('figure tbody tr').cells].map((cell) => cell.innerText)")
    assert first[0] == "16"
    assert seconds_in(" ".join(first))[-2] == pytest.approx(site.builder.steps[-1][0].statistics["wait/group_scorer_s"])


def test_nothing_moves_under_reduced_motion(overview: Tab) -> None:
    overview.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-reduced-motion", "value": "reduce"}])
    moving = "[...document.querySelectorAll('*')].filter((e) => getComputedStyle(e).transitionDuration !== '0s').length"
    assert overview.ask(moving) == 0


def test_a_closed_step_appears_without_a_reload_and_a_lost_service_is_reported(
    tab: Tab, make_site: Callable[[Sequence[str]], Site]
) -> None:
    site = make_site([])
    tab.open(site.url)
    tab.until("document.body?.innerText.includes('No step has closed yet')")
    site.publish(site.builder.add("limiter"))
    tab.until("document.querySelector('#verdict')?.innerText === 'Step 1 waited for a limit of the job'")
    assert tab.ask("document.querySelector('#verdict').closest('[aria-live]').ariaLive") == "polite"
    assert tab.text("#status") == "Live"
    assert tab.complaints == []
    site.stop()
    tab.until("document.querySelector('#status').innerText.startsWith('The service does not respond')")
    assert "Next try in" in tab.text("#status")
    assert tab.text("#verdict") == "Step 1 waited for a limit of the job"


def test_an_outlier_is_named_and_does_not_flatten_the_chart_and_negative_rewards_are_drawn(
    make_site: Callable[[Sequence[str]], Site], tab: Tab
) -> None:
    site = make_site(["generation"] * 12)
    record: StepRecord = site.builder.steps[-1][0]
    opened = record.closed
    for number, (seconds, reward) in enumerate([(900.0, -4.0), (record.closed - record.opened, -6.0)], record.step + 1):
        figures = record.statistics | {"step_s": seconds, "reward/mean": reward, "reward/std": 1.0}
        figures["reward_pipeline/scorer/shape/extra/value/mean"] = 1.0  # no scorer, though its key ends like one
        later = msgspec.structs.replace(
            record, step=number, opened=opened, closed=opened + seconds, statistics=figures, waits=[]
        )
        site.publish([later])
        opened += seconds
    tab.open(site.url)
    tab.until("document.querySelector('#verdict')?.innerText.startsWith('Step 14')")
    notes = "[...document.querySelectorAll('figure .note')]"
    tab.until(f"{notes}.some((note) => note.innerText.startsWith('Beyond the axis: step 13'))")
    tab.until("document.querySelector('#values figure')")
    assert "shape/extra" not in tab.text("#values")
    if os.environ.get("PLAUDIT_SCREENSHOTS"):
        image = Image.open(io.BytesIO(tab.picture(1245))).convert("RGB")
        image.quantize(255, dither=Image.Dither.NONE).save(IMAGES / "page-outlier.png", optimize=True)
    assert tab.complaints == []


_INK = """(() => {
  const canvas = document.querySelector('figure.chart canvas');
  const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  let drawn = 0;
  for (let at = 3; at < data.length; at += 4) drawn += data[at] > 200;
  return drawn / (canvas.width * canvas.height);
})()"""
"""Share of the first chart that is painted."""


@pytest.mark.long
def test_500_steps_and_20_scorers_can_be_read_on_a_screen_and_on_a_phone(
    make_site: Callable[[Sequence[str]], Site], tab: Tab
) -> None:
    site = make_site(["generation"])
    record: StepRecord = site.builder.steps[-1][0]
    values = {f"reward_pipeline/scorer/s{number}/value/mean": 10.0**-number for number in range(20)}
    length_s = record.closed - record.opened
    steps = [
        msgspec.structs.replace(
            record,
            step=number,
            opened=record.closed + number * length_s,
            closed=record.closed + (number + (9 if number % 25 == 0 else 1)) * length_s,
            statistics=record.statistics | values | {"step_s": (9 if number % 25 == 0 else 1) * length_s},
            waits=[],
        )
        for number in range(2, 501)
    ]
    site.publish(steps)
    for width in (1280, 390):
        tab.look_like(width, 900)
        tab.open(site.url)
        tab.until("document.querySelector('#verdict')?.innerText.startsWith('Step 500')")
        assert tab.ask(_INK) > 0.2
        tab.ask("document.querySelector('#count').value = 500")
        tab.ask("document.querySelector('#count').dispatchEvent(new Event('change'))")
        tab.until("document.querySelector('figure.chart .note:not([hidden]) + .note')?.innerText.endsWith('more.')")
        assert tab.ask(_INK) > 0.2
        assert tab.ask("document.querySelectorAll('#values figure').length") == 22  # with those of the run
        assert tab.ask("document.documentElement.scrollWidth") <= width
        if folder := os.environ.get("PLAUDIT_PICTURES"):
            (Path(folder) / f"steps-{width}.png").write_bytes(tab.picture(3000))
    assert [text for text in tab.complaints if "getImageData" not in text] == []  # this test reads the canvas


def test_the_open_step_says_what_it_waits_for_before_everything_else(
    make_site: Callable[[Sequence[str]], Site], tab: Tab
) -> None:
    site = make_site(["generation"])
    hanging = WorkerRecord("reward-0", "reward", 64, 64, scorers={"slow": ScorerWork(64, 47.0)})
    site.redis.hset(site.keys.worker_records, hanging.worker, msgspec.msgpack.encode(hanging))
    for width in (1280, 390):
        tab.look_like(width, 900)
        tab.open(site.url)
        tab.until(
            "document.querySelector('#content .now')?.innerText.includes('64 calls of slow in flight, the oldest 47 s')"
        )
        assert "open for" in tab.text(".now")
        tab.until("document.querySelector('.chart .legend')?.innerText.includes('generation')")
        assert "limiter" not in tab.text(".chart .legend")  # no step waited for one
        waits = (
            "[...document.querySelectorAll('.stacked td:last-child')].find((cell) => /scorers/.test(cell.innerText))"
        )
        tab.until(f"{waits}?.getBoundingClientRect().right <= innerWidth")
        above = "document.querySelector('.now').getBoundingClientRect().top < document.querySelector('#verdict')"
        tab.until(f"{above}?.getBoundingClientRect().top")
        if folder := os.environ.get("PLAUDIT_PICTURES"):
            (Path(folder) / f"open-{width}.png").write_bytes(tab.picture(1200))
    assert tab.complaints == []


def test_work_in_flight_is_shown_by_stage_with_its_age(make_site: Callable[[Sequence[str]], Site], tab: Tab) -> None:
    site = make_site(["generation"])
    site.queue("samples", 3)
    hanging = WorkerRecord("reward-0", "reward", 16, 1, scorers={"judge": ScorerWork(5, 90.0)})
    site.redis.hset(site.keys.worker_records, hanging.worker, msgspec.msgpack.encode(hanging))
    tab.open(site.url)
    rows = "[...document.querySelectorAll('[aria-label=\"In flight now\"] tbody tr')].map((row) => row.innerText)"
    tab.until(f"{rows}.some((row) => /scorer judge 0 5 oldest 90/.test(row.replace(/\\s+/g, ' ')))")
    tab.until(f"{rows}.some((row) => /^samples . reward workers 2 oldest .* 1 oldest/.test(row.replace(/\\s+/g, ' ')))")
    assert tab.complaints == []


def test_validation_rewards_are_shown_once_a_step_has_them(
    tab: Tab, make_site: Callable[[Sequence[str]], Site]
) -> None:
    site = make_site(["reward"])
    tab.open(site.url)
    tab.until("document.querySelector('#verdict')")
    assert tab.ask("document.querySelector('#validation').hidden")
    *others, step = site.builder.add("reward")
    assert isinstance(step, StepRecord)
    rewards = {"val/openai/gsm8k/reward": 0.25, "val/math/reward": 0.5, "val/math/form": 1.0}
    site.publish([*others, msgspec.structs.replace(step, statistics=step.statistics | rewards)])
    tab.until("!document.querySelector('#validation').hidden")
    tab.ask("document.querySelector('#validation details').open = true")
    tab.until("document.querySelector('#validation tbody tr')")
    cells = tab.ask("[...document.querySelectorAll('#validation tr')].map((row) => row.innerText.split('\\t'))")
    assert cells == [["Step", "math", "openai/gsm8k"], ["2", "0.500", "0.250"]]
    assert tab.complaints == []


def test_why_samples_have_no_score_is_shown_before_their_step_closes(
    tab: Tab, make_site: Callable[[Sequence[str]], Site]
) -> None:
    site = make_site([])
    raised = ScorerRecord("data_error", reason="KeyError: <b>answer</b> (/srv/reward.py:2 in compute_score)")
    tab.open(site.url)
    site.publish([build_sample("t-9-1.0", index, outcome="data_error", scorers={"mine": raised}) for index in range(3)])
    tab.until("document.querySelector('.failures')")
    assert tab.text(".failures") == "mine: 3 × KeyError: <b>answer</b> (reward.py:2 in compute_score)"
    assert "3 of 3 samples" in tab.text("main")
    site.publish(site.builder.add("generation"))
    tab.until("document.querySelector('#verdict')?.innerText === 'Step 1 waited for generation'")
    tab.until("!document.body.innerText.includes('Samples without a score since the newest step')")


def test_without_the_chart_library_the_tables_remain(tab: Tab, site: Site) -> None:
    tab.send("Network.setBlockedURLs", urls=["*uplot.js"])
    tab.open(site.url)
    tab.until("document.body?.innerText.includes('The chart library did not load')")
    tab.ask("document.querySelector('figure details').open = true")
    tab.until("document.querySelectorAll('figure tbody tr').length >= 16")


def test_an_unknown_step_is_reported(kept_tab: Tab, site: Site) -> None:
    kept_tab.go(f"{site.url}#/step/999")
    kept_tab.until("document.body?.innerText.includes('Step 999 is not available')")


@pytest.mark.parametrize("form", FORMS)
def test_each_form_shows_the_verdict_and_the_stages_in_their_colours(tab: Tab, site: Site, form: str) -> None:
    width, height, dark = FORMS[form]
    tab.look_like(width, height, dark=dark)
    tab.open(site.url)
    tab.until(READY)
    tab.until("document.querySelector('#status').innerText === 'Live'")
    shot = tab.picture(height)
    image = Image.open(io.BytesIO(shot)).convert("RGB")
    counted = image.getcolors(1 << 24) or []
    coloured = {colour for count, colour in counted if count > 800}
    assert set(COLOURS[dark].values()) <= coloured
    background = max(counted)[1]
    assert (sum(background) < 150) == dark
    assert image.size == (width, height)
    if os.environ.get("PLAUDIT_SCREENSHOTS"):
        IMAGES.mkdir(exist_ok=True)
        image.quantize(255, dither=Image.Dither.NONE).save(IMAGES / f"page-{form}.png", optimize=True)


def test_browsers_are_forbidden_everything_but_this_service(site: Site) -> None:
    with httpx.Client(base_url=site.url) as client:
        for name in ("", *(f"page/{file}" for file in (*FILES, "uplot.js", "uplot.css"))):
            policy = client.get(name).headers["content-security-policy"]
            assert "default-src 'self'" in policy
            assert "unsafe" not in policy
            assert "frame-ancestors 'none'" in policy
        assert [client.get(f"page/{name}").status_code for name in ("..%2Fapi.py", "__init__.py")] == [404, 404]


def test_the_page_names_the_hash_of_the_chart_library() -> None:
    digest = base64.b64encode(hashlib.sha256(library("uplot.js").read_bytes()).digest()).decode()
    assert f'integrity="sha256-{digest}"' in (FOLDER / "index.html").read_text()
