"""The page of ``hfgen inspect`` in a headless Chromium: what is there, and what pointer and keys do."""

from __future__ import annotations

import importlib.util
import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hfgen
from hfgen.tools.inspect import Trace
from tests import tiny

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")
HAS_ALL = CHROMIUM and DRIVER and importlib.util.find_spec("selenium")

pytestmark = [
    pytest.mark.skipif(not HAS_ALL, reason="needs chromium, chromedriver and selenium"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

PROMPT = "</script><i>if x:"


def traces() -> dict[str, Trace]:
    model, tokenizer = hfgen.mix_into(tiny.llama()), tiny.ascii_tokenizer()
    assistant, length = tiny.llama(), {"max_new_tokens": 12, "eos_token_id": None}
    steer = hfgen.Steer("model.layers.0", torch.linspace(-9, 9, 32), rows=[0])
    sampled = {"do_sample": True, "temperature": 0.7, "top_k": 30, "top_p": 0.9, "seed": 1}
    return {
        "sampled": hfgen.trace(model, [PROMPT, "b"], tokenizer, **sampled, **length),
        "beams": hfgen.trace(model, PROMPT, tokenizer, num_beams=3, **length),
        "drafted": hfgen.trace(model, PROMPT, tokenizer, assistant_model=assistant, **length),
        "ids": hfgen.trace(model, tiny.prompt(1), **length),
        "edited": hfgen.trace(model, [PROMPT, "b"], tokenizer, interventions=[steer], **length),
        "nothing": hfgen.trace(model, "a", tokenizer, max_new_tokens=0),
    }


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Trace, Path]]:
    folder, found = tmp_path_factory.mktemp("pages"), {}
    for name, trace in traces().items():
        trace.save(folder / f"{name}.html")
        found[name] = trace, folder / f"{name}.html"
    return found


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    from selenium import webdriver
    from selenium.common import WebDriverException
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.add_argument("--window-size=1200,900")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    try:
        driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    except WebDriverException as error:
        pytest.skip(reason=f"Chromium does not start here: {error.msg}")
    yield driver
    driver.quit()


class Window:
    """A page that is open."""

    def __init__(self, driver: Any, path: Path) -> None:
        self.driver = driver
        driver.get(path.as_uri())

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements("css selector", selector)

    def text(self, selector: str) -> str:
        return self.all(selector)[0].text

    def run(self, script: str) -> Any:
        return self.driver.execute_script(script)

    def press(self, *keys: str) -> None:
        from selenium.webdriver import ActionChains, Keys

        for key in keys:
            ActionChains(self.driver).send_keys(getattr(Keys, key)).perform()

    def point_at(self, selector: str) -> None:
        from selenium.webdriver import ActionChains

        ActionChains(self.driver).move_to_element(self.all(selector)[0]).perform()

    @property
    def selected(self) -> list[str]:
        return [node.get_attribute("id") for node in self.all(".token[aria-selected=true]")]

    @property
    def errors(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]


def test_what_has_no_picture_is_written_by_its_code(
    chromium: Any, pages: Any, tmp_path: Path
) -> None:
    """Such as what turns round the direction of all text behind it."""
    trace, path = pages["sampled"][0], tmp_path / "page.html"
    first = trace.sequences[0].tokens[0].token_id
    replace(trace, spelling={**trace.spelling, first: "\u202eé\x1b "}).save(path)
    window = Window(chromium, path)
    assert window.text("#t0").strip() == "U+202EéU+001B"
    assert window.all("#t0")[0].get_attribute("aria-label").startswith("U+202EéU+001B␣, ")


@pytest.mark.parametrize("name", ["sampled", "beams", "drafted", "ids", "nothing"])
def test_every_token_is_there(name: str, chromium: Any, pages: Any) -> None:
    trace, path = pages[name]
    window = Window(chromium, path)
    tokens = trace.sequences[0].tokens
    found = window.run(
        "return [...document.querySelectorAll('.token')].map(t => [t.ariaLabel, t.style.getPropertyValue('--t')])"
    )
    assert len(found) == len(tokens)
    for (label, heat), token in zip(found, tokens, strict=True):
        spelled = trace.spelling.get(token.token_id, f"#{token.token_id}").replace(" ", "␣")
        assert label.startswith(f"{spelled}, ")
        assert (float(heat) < 0.13) == (token.probability > 0.5)
    if trace.prompts[0].text is not None:
        assert window.text("#prompt") == trace.prompts[0].text
    assert window.all("#prompt i") == []  # text, not HTML
    assert window.errors == []


def test_pointing_shows_a_token_and_clicking_keeps_it(chromium: Any, pages: Any) -> None:
    trace, path = pages["sampled"]
    window = Window(chromium, path)
    first, fifth = (trace.sequences[0].tokens[n] for n in (0, 4))
    assert f"id {first.token_id}" in window.text("#details")
    window.point_at("#t4")
    assert "5 of 12" in window.text("#details")
    assert f"id {fifth.token_id}" in window.text("#details")
    assert window.selected == ["t0"]
    window.point_at("#title")
    assert "1 of 12" in window.text("#details")
    window.all("#t4")[0].click()
    window.point_at("#title")
    assert window.selected == ["t4"]
    assert "5 of 12" in window.text("#details")
    rows = window.all(".candidates tbody tr")
    ids = {candidate.token_id for candidate in fifth.candidates} | {fifth.token_id}
    assert len(rows) == len(ids)
    assert len(window.all(".candidates tr.chosen")) == 1
    assert "logarithmic" in window.text("#details")
    heads = [cell.text for cell in window.all(".scores th")]
    assert heads == ["token", "logits", "temperature 0.7", "top k 30", "top p 0.9"]


def test_keys_move_from_token_to_token(chromium: Any, pages: Any) -> None:
    window = Window(chromium, pages["sampled"][1])
    window.run("document.getElementById('text').focus()")
    window.press("ARROW_RIGHT", "ARROW_RIGHT")
    assert window.selected == ["t2"]
    window.press("ARROW_LEFT")
    assert window.selected == ["t1"]
    window.press("END", "ARROW_RIGHT")
    assert window.selected == ["t11"]
    window.press("HOME", "ARROW_LEFT")
    assert window.selected == ["t0"]
    assert (
        window.run("return document.getElementById('text').getAttribute('aria-activedescendant')")
        == "t0"
    )


def test_tabs_and_colours(chromium: Any, pages: Any) -> None:
    trace, path = pages["sampled"]
    window = Window(chromium, path)
    tabs = window.all("[role=tab]")
    assert len(tabs) == 2
    tabs[1].click()
    assert window.text("#prompt") == "b"
    label = window.all("#t0")[0].get_attribute("aria-label")
    assert label.startswith(trace.spelling[trace.sequences[1].tokens[0].token_id].replace(" ", "␣"))
    heat = "return document.getElementById('t3').style.getPropertyValue('--t')"
    before = window.run(heat)
    window.all("#colours button")[2].click()
    entropy = trace.sequences[1].tokens[3].entropy
    assert float(window.run(heat)) == pytest.approx(min(1, entropy / 8), abs=0.01)
    assert window.run(heat) != before


def test_interventions_are_a_colour(chromium: Any, pages: Any) -> None:
    assert "interventions" not in Window(chromium, pages["sampled"][1]).text("#colours")
    trace, path = pages["edited"]
    window = Window(chromium, path)
    button = window.all("#colours button")[-1]
    assert button.text == "interventions"
    button.click()
    assert "4\N{MULTIPLICATION SIGN}" in window.text("#legend")
    for place, token in enumerate(trace.sequences[0].tokens):
        bits = math.log2(token.probability / token.unedited_probability)
        heat = window.run(
            f"return document.getElementById('t{place}').style.getPropertyValue('--t')"
        )
        assert float(heat) == pytest.approx(min(max(bits / 8, 0), 1), abs=0.01)
    assert "without interventions" in window.text("#details")
    assert window.errors == []


def test_beams_and_drafts(chromium: Any, pages: Any) -> None:
    trace, path = pages["beams"]
    window = Window(chromium, path)
    nodes = sum(len(nodes) for nodes in trace.beams[0])
    assert len(window.all("#tree g[role=img]")) == nodes
    returned = [beam for nodes in trace.beams[0] for beam in nodes if beam.fate == "returned"]
    assert len(window.all("#tree g.returned")) == len(returned) == 12
    assert not window.all("#rounds")[0].is_displayed()
    window.run("document.getElementById('tree').focus()")
    window.press("ARROW_RIGHT")
    assert "Step 2" in window.text("#beam")

    trace, path = pages["drafted"]
    window = Window(chromium, path)
    drafts = [draft for step in trace.steps for draft in step.drafts]
    assert len(window.all("#drafts li")) == len(drafts) > 0
    n_accepted = sum(draft.n_accepted for draft in drafts)
    assert len(window.all("#drafts .accepted")) == n_accepted
    assert len(window.all(".token.drafted")) == n_accepted
    assert not window.all("#beams")[0].is_displayed()


def test_a_notebook_shows_it_in_a_frame(chromium: Any, pages: Any, tmp_path: Path) -> None:
    trace, _ = pages["sampled"]
    notebook = tmp_path / "notebook.html"
    notebook.write_text(f"<!doctype html><meta charset=utf-8>{trace._repr_html_()}", "utf-8")
    window = Window(chromium, notebook)
    chromium.switch_to.frame(0)
    assert len(window.all(".token")) == 12
    window.all("#t4")[0].click()
    assert "5 of 12" in window.text("#details")
    assert window.errors == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["sampled", "beams", "drafted", "edited"])
def test_text_can_be_read_on_a_phone_in_light_and_dark(
    name: str, scheme: str, chromium: Any, pages: Any
) -> None:
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    phone = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    try:
        window = Window(chromium, pages[name][1])
        widths = window.run("return [document.documentElement.scrollWidth, innerWidth]")
        assert widths[0] <= widths[1] == 390
        assert window.run(CONTRAST) >= 4.5  # WCAG 2.2, level AA
        assert window.run(SCROLLING) == []
    finally:
        chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


#: Parts that scroll within the page, or that go beyond its edge; wide tables of scores may.
SCROLLING = """
const parts = [...document.querySelectorAll('.details, .paper, .tree')];
const boxes = [...document.querySelectorAll('#tree rect')].map((box) => box.getBoundingClientRect());
return parts.filter((part) => part.scrollHeight > part.clientHeight + 1).map((part) => part.id || part.className)
  .concat(boxes.filter((box) => box.left < 0 || box.right > innerWidth).map((box) => box.right));
"""

#: The least contrast of the text of tokens, prompts and hints with what is behind it.
CONTRAST = """
const context = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
function rgb(colours) {
  context.clearRect(0, 0, 1, 1);
  for (const colour of colours) { context.fillStyle = colour; context.fillRect(0, 0, 1, 1); }
  return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3);
}
function luminance(colour) {
  const [r, g, b] = colour.map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
function contrast(node) {
  const behind = [];
  for (let at = node; at; at = at.parentElement) behind.unshift(getComputedStyle(at).backgroundColor);
  const [a, b] = [luminance(rgb([...behind, getComputedStyle(node).color])), luminance(rgb(behind))].sort((x, y) => y - x);
  return (a + 0.05) / (b + 0.05);
}
document.querySelectorAll('.token').forEach((node) => node.style.setProperty('transition', 'none'));
document.querySelector('.token').style.setProperty('--t', '1');
const nodes = document.querySelectorAll('.token, #prompt, .hint, #summary, dt, dd, td, th, .chip, .legend span, button');
return Math.min(...[...nodes].map(contrast));
"""
