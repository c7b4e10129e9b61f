"""The Samples view in a real Chromium: conditions, conversations, groups, and texts that attack the reader."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from PIL import Image

from plaudit_wire.records import ScorerRecord
from stage_records import build_sample
from stored_conversations import HOSTILE, LONG

Tab = Any
Site = Any

ROWS = "document.querySelectorAll('.stored tbody tr').length"
CONVERSATION = "document.querySelectorAll('.message').length"
IMAGES = Path(__file__).parents[3] / "docs" / "images"


@pytest.fixture
def listing(kept_tab: Tab, site: Site) -> Iterator[Tab]:
    """The list of all stored samples; afterwards nothing has complained and nobody else was asked."""
    kept_tab.go(f"{site.url}#/samples")
    kept_tab.until(f"{ROWS} === 50")
    yield kept_tab
    assert kept_tab.complaints == []
    assert kept_tab.hosts() == {site.url.split("/")[2]}


@pytest.fixture
def conversation(kept_tab: Tab, site: Site) -> Iterator[Tab]:
    """One sample that called a tool."""
    kept_tab.go(f"{site.url}#/sample/6/t-25-1.0/2")
    kept_tab.until(f"{CONVERSATION} === 5")
    yield kept_tab
    assert kept_tab.complaints == []


def choose(tab: Tab, name: str, value: str) -> None:
    tab.ask(
        f"(() => {{ const field = document.querySelector('.filters [name={name}]'); field.value = {value!r};"
        " field.dispatchEvent(new Event('change', {bubbles: true})); })()"
    )


def shown_steps(tab: Tab) -> set[int]:
    links = tab.ask("[...document.querySelectorAll('.stored th a')].map((link) => link.innerText)")
    return {int(text.split()[1]) for text in links}


def test_the_list_grows_page_by_page_from_the_newest_step(listing: Tab) -> None:
    assert shown_steps(listing) == {4, 5, 6}
    assert listing.text("#views a[aria-current]") == "Samples"
    listing.point(".more button", click=True)
    listing.until(f"{ROWS} === 98")
    assert listing.text("[role=status].note").startswith("98 samples. Steps 1 to 6 are stored.")


def test_conditions_narrow_the_list_and_stay_in_the_address(listing: Tab) -> None:
    choose(listing, "outcome", "timeout")
    choose(listing, "last_step", "3")
    listing.until(f"0 < {ROWS} && {ROWS} < 15")
    assert shown_steps(listing) <= {1, 2, 3}
    rows = listing.ask(
        "[...document.querySelectorAll('.stored tbody tr')].every((row) => /timeout/.test(row.innerText))"
    )
    assert rows
    assert listing.ask("location.hash") == "#/samples?last_step=3&outcome=timeout"
    listing.send("Page.reload")
    listing.until(f"0 < {ROWS} && {ROWS} < 15")
    choose(listing, "outcome", "poison")
    listing.until("/No sample fulfils these conditions/.test(document.querySelector('.note').innerText)")


def test_a_score_range_and_an_order_are_kept_within_each_step(listing: Tab) -> None:
    choose(listing, "lowest", "0.5")
    choose(listing, "order", "highest")
    listing.until(f"{ROWS} > 0 && {ROWS} < 50")
    scores = listing.ask(
        "[...document.querySelectorAll('.stored tbody tr')].map((row) => Number(row.children[3].innerText))"
    )
    assert all(score >= 0.5 for score in scores)


def test_a_sample_opens_as_its_conversation_with_times_scorers_and_group(conversation: Tab) -> None:
    roles = conversation.ask("[...document.querySelectorAll('.message h4 b')].map((each) => each.innerText)")
    assert roles == ["system", "user", "assistant, turn 1", "tool", "assistant, turn 2"]
    shown = conversation.text(".message.assistant")
    assert "calls\ncalculator\nok · 0.30 s" in shown
    assert '{"expression":"48 * 19"}' in shown
    assert "24 tokens · reward 0" in shown
    assert conversation.text(".message.tool pre") == "912"
    results = conversation.text(".results")
    assert "completion_tokens 87" in results
    assert "verdict A" in results
    assert conversation.ask(ROWS) == 4
    assert conversation.text(".stored a[aria-current]").endswith("#2")
    assert "scorers" not in conversation.text(".partition")
    assert "generation" in conversation.text(".partition")
    sections = conversation.ask("[...document.querySelectorAll('section')].map((each) => each.innerText)")
    (machine,) = [each for each in sections if each.startswith("Machine\n")]
    assert "1 command of its agent." in machine
    assert all(stage in machine for stage in ("wait for a place", "start", "commands"))


def test_one_prompt_is_compared_across_steps(conversation: Tab) -> None:
    conversation.ask(
        "[...document.querySelectorAll('nav.steps a')].find((a) => /This prompt/.test(a.innerText)).click()"
    )
    conversation.until(f"{ROWS} === 24")
    table = '[aria-label="Scores of this prompt by step"]'
    steps = conversation.ask(f"[...document.querySelectorAll('{table} tbody th')].map((each) => each.innerText)")
    assert steps == ["6", "5", "4", "3", "2", "1"]
    prompts = conversation.ask(
        "new Set([...document.querySelectorAll('.preview p:first-child')].map((p) => p.innerText)).size"
    )
    assert prompts == 1


def test_the_other_samples_of_the_group_are_one_click_away(conversation: Tab) -> None:
    conversation.point("nav.steps a[rel=next]", click=True)
    conversation.until(
        "location.hash === '#/sample/6/t-25-1.0/3' && "
        "document.querySelector('.stored a[aria-current]')?.innerText.endsWith('#3')"
    )
    assert conversation.ask("document.activeElement.id") == "content"


def test_hostile_texts_are_shown_and_not_obeyed(kept_tab: Tab, site: Site) -> None:
    for address in ("#/samples?data_source=hostile+%3Cb%3E", "#/sample/6/hostile/0"):
        kept_tab.go(site.url + address)
        kept_tab.until("document.querySelector('main')?.innerText.includes('<img src=x onerror=')")
        kept_tab.until("document.title === 'Samples · digits-page · Plaudit'")
        assert kept_tab.ask("document.querySelectorAll('main img, main script, main b b').length") == 0
        assert (
            kept_tab.ask(
                "/[\\u0007\\u001b\\u202a-\\u202e\\u2066-\\u2069]/.test(document.querySelector('main').innerText)"
            )
            is False
        )
    kept_tab.until("document.querySelector('.message.assistant .control')")
    marks = kept_tab.ask("[...document.querySelectorAll('.message.assistant .control')].map((each) => each.innerText)")
    assert marks == [f"U+{ord(each):04X}" for each in HOSTILE if ord(each) in {0x1B, 7, 0x202E, 0x202C, 0x2067, 0x2069}]
    assert kept_tab.complaints == []


def test_a_text_of_a_megabyte_is_shown_whole_only_on_request(kept_tab: Tab, site: Site) -> None:
    kept_tab.go(f"{site.url}#/sample/6/hostile/1")
    kept_tab.until("document.querySelector('.message.assistant button.all')")
    shown = "document.querySelector('.message.assistant pre').innerText.length"
    assert kept_tab.ask(shown) == 20_000
    assert kept_tab.text(".message.assistant button.all") == f"Show all {len(LONG):,} characters"
    kept_tab.point(".message.assistant button.all", click=True)
    kept_tab.until(f"{shown} >= {len(LONG) - 1}")
    assert kept_tab.ask("document.querySelector('.message.assistant button.all')") is None
    assert kept_tab.complaints == []


def test_a_sample_that_is_not_stored_is_reported(kept_tab: Tab, site: Site) -> None:
    kept_tab.go(f"{site.url}#/sample/6/none/0")
    kept_tab.until("/Sample none #0 of step 6 is not stored/.test(document.querySelector('.empty')?.innerText)")


def test_without_a_folder_the_page_names_the_remedy(make_site: Callable[[Sequence[str]], Site], tab: Tab) -> None:
    tab.open(f"{make_site(['reward']).url}#/samples")
    tab.until("/spec.storage.claimName/.test(document.querySelector('.note')?.innerText)")
    assert tab.complaints == []


def test_samples_of_the_open_step_are_listed_without_texts(
    make_site: Callable[[Sequence[str]], Site], tab: Tab
) -> None:
    site = make_site(["reward"])
    raised = ScorerRecord("data_error", reason=HOSTILE)
    records = [build_sample("t-9-1.0", index, outcome="data_error", scorers={"mine": raised}) for index in range(3)]
    site.publish([msgspec.structs.replace(record, step=2) for record in records])
    for _ in range(20):  # until the service has read the events
        tab.open(f"{site.url}#/samples")
        tab.until("/sample/i.test(document.querySelector('.note')?.innerText)")
        if tab.ask(ROWS) == 3:
            break
        time.sleep(0.2)
    assert tab.text(".stored tbody th").splitlines()[0] == "step 2, open · t-9-1.0 #0"
    assert tab.ask("document.querySelectorAll('.stored tbody a').length") == 0
    assert "3 are of the open step" in tab.text("[role=status].note")
    assert tab.ask("document.querySelectorAll('main img, main script, main b b').length") == 0
    assert tab.complaints == []


@pytest.mark.long
@pytest.mark.parametrize("address", ["#/samples", "#/sample/6/t-25-1.0/2"])
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, False)])
def test_the_view_is_accessible_and_fits_its_screen(tab: Tab, site: Site, address: str, width: int, dark: bool) -> None:
    tab.look_like(width, 1180, dark=dark)
    tab.open(site.url + address)
    tab.until(f"{ROWS} > 3")
    assert tab.axe() == []
    assert tab.ask("document.documentElement.scrollWidth <= innerWidth")
    assert tab.complaints == []
    if os.environ.get("PLAUDIT_SCREENSHOTS"):
        kind = "samples" if address == "#/samples" else "sample"
        form = "phone" if width < 600 else "dark" if dark else "light"
        image = Image.open(io.BytesIO(tab.picture(1100))).convert("RGB")
        image.quantize(128, dither=Image.Dither.NONE).save(IMAGES / f"{kind}-{form}.png", optimize=True)
