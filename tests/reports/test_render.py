"""The page: self-contained, deterministic, accessible where a test can tell, honest about what is missing."""

from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from synthetic import Truth, build

import reports
from reports.judge import judge, write_verdicts
from reports.records import read_json, write_json
from reports.render import numbers, render, summary, tight
from reports.run import load_run
from reports.svg import PALETTE, inline
from reports.verdicts import Judgement

FIGURES = {"loss", "drop", "fidelity", "law", "movement", "speed", "memory"}
VOID = {"meta", "link", "br", "img", "path", "use", "rect", "stop", "circle", "line"}


class Page(HTMLParser):
    """Tags with their attributes in order, text, and whether tags close properly."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = build(tmp_path_factory.mktemp("run"))
    environment = read_json(folder.environment)
    environment["cpu_model"] = "<script>alert(1)</script> & Söhne"
    write_json(folder.environment, environment)
    write_verdicts(folder, judge(folder))
    render(folder)
    return folder


@pytest.fixture(scope="module")
def text(run):
    return run.report.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(text):
    return Page(text)


def test_nothing_is_fetched_and_nothing_runs(page, text):
    for tag, attributes in page.tags:
        assert tag not in ("script", "iframe", "object", "embed", "base")
        assert not any(name.startswith("on") for name in attributes)
        for name in ("src", "href", "xlink:href", "data", "srcset", "poster", "action"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:")), (tag, name, value)
    assert not re.search(r"@import|url\((?!#)", text)


def test_every_tag_closes(page):
    assert page.open == []


def test_ids_are_unique_and_every_reference_resolves(page, text):
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    targets = re.findall(r'href="#([^"]+)"', text) + re.findall(r"url\(#([^)]+)\)", text)
    targets += [
        attributes["aria-labelledby"] for _, attributes in page.tags if "aria-labelledby" in attributes
    ]
    assert len(targets) > 50 and set(targets) <= set(ids)


def test_headings_do_not_skip_a_level(page):
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


def test_every_figure_has_two_drawings_with_text_alternative_and_page_colours(page, text):
    drawings = re.findall(
        r'<svg viewBox="[^"]+" role="img" aria-label="([^"]+)">(.*?)</svg>', text, flags=re.S
    )
    assert len(drawings) == 2 * len(FIGURES)
    for label, body in drawings:
        assert len(label) > 20
        colours = set(re.findall(r"#[0-9a-f]{6}\b", body)) - {"#000000", "#ffffff"}
        assert not colours, f"colours that do not follow the scheme: {colours}"
        assert "var(--ink)" in body and "<style" not in body
    assert set(re.findall(r'<figure id="figure-(\w+)"', text)) == FIGURES


def test_figure_data_is_beside_and_inside_the_page(run, page):
    links = {
        attributes["download"]: attributes["href"]
        for tag, attributes in page.tags
        if "download" in attributes
    }
    assert set(links) == {f"{name}.json" for name in FIGURES}
    for name, link in links.items():
        packed = link.removeprefix("data:application/json;base64,")
        beside = read_json(run.figures / name)
        assert json.loads(base64.b64decode(packed)) == beside
        assert beside["predictions_sha256"] == load_run(run).predictions_sha256
        drawing = (run.figures / name).with_suffix(".svg").read_text(encoding="utf-8")
        assert drawing.startswith("<?xml") and "var(--" not in drawing


def test_figures_show_the_records(run, page):
    timing = read_json(run.evidence("timing"))
    shown = read_json(run.figures / "speed.json")["data"]["rows"]
    expected = [(r["mode"], r["cycle_length"], r["speedup"]) for r in timing["rows"] if r["mode"] != "full"]
    assert [(row["mode"], row["cycle_length"], row["measured"]) for row in shown] == expected
    curves = read_json(run.figures / "loss.json")["data"]["curves"]
    assert len(curves) == 21 and all(len(curve["training_loss"]) == 60 for curve in curves)
    assert all([t for t, _ in curve["held_out"]] == [0, 30, 60] for curve in curves)
    words = " ".join(page.texts)
    for _, _, speedup in expected:
        assert f"{speedup:.3f}" in words


def test_verdicts_are_words_beside_symbols(run, text):
    verdicts = judge(run)
    found = re.findall(
        r'<span class="badge is-([\w-]+)"><svg[^>]*aria-hidden="true">.*?</svg>([\w ]+)</span>', text
    )
    assert len(found) >= 2 * len(verdicts.verdicts)
    assert all(name == word.replace(" ", "-") for name, word in found)
    table = text[text.index('<table class="verdicts">') : text.index("</table>")]
    words = re.findall(r"</svg>([\w ]+)</span>", table)
    assert words == [j.verdict for entry in verdicts.verdicts for j in (entry.paper, entry.ours)]


def test_text_is_escaped(text):
    assert "<script>alert" not in text and "&lt;script&gt;alert(1)&lt;/script&gt; &amp; Söhne" in text


def test_settings_versions_and_commands_are_on_the_page(page, run):
    words = " ".join(" ".join(page.texts).split())
    for expected in (
        "smollm2-135m",
        "0.0001",
        "2.13.0",
        "c" * 64,
        "lcsb validate",
        "lcsb judge runs/validate",
    ):
        assert expected in words
    for arm in load_run(run).config.arms:
        assert arm.name in words


def test_the_same_folder_gives_the_same_bytes(run, text):
    paths = sorted(run.figures.iterdir())
    before = {path: path.read_bytes() for path in paths}
    render(run)
    assert run.report.read_text(encoding="utf-8") == text
    assert {path: path.read_bytes() for path in sorted(run.figures.iterdir())} == before
    assert not re.search(r"\b20\d\d-\d\d-\d\d", text)  # no dates


def test_partial_run_says_what_is_missing(tmp_path):
    truth = Truth(
        evidence=("timing",), without=(("mlp-momentum", 2), ("full-eta-over-p", 0)),
        diverged=(("identity-momentum", 0),), unfinished=(("exact-frozen", 2),), overrides=("steps=24",),
    )  # fmt: skip
    folder = build(tmp_path, truth)
    write_verdicts(folder, judge(folder))
    text = render(folder).read_text(encoding="utf-8")
    words = " ".join(" ".join(Page(text).texts).split())
    for expected in (
        "This run is not complete", "evidence/fidelity.json is not there", "arm mlp-momentum, seed 2: missing",
        "arm exact-frozen, seed 2: unfinished", "identity-momentum seed 0 (diverged)", "1 diverged (from step",
    ):  # fmt: skip
        assert expected in words, expected
    assert set(re.findall(r'<figure id="figure-(\w+)"', text)) == FIGURES - {"fidelity", "memory"}


def test_a_run_with_nothing_but_predictions_still_renders(tmp_path):
    arms = [(name, seed) for name in ("full", "exact-momentum") for seed in (0, 1, 2)]
    folder = build(
        tmp_path, Truth(evidence=(), without=tuple(arms), overrides=("arms=[full, exact-momentum]",))
    )
    write_verdicts(folder, judge(folder))
    text = render(folder).read_text(encoding="utf-8")
    assert "<figure" not in text and text.count("seeds 0, 1, 2: missing") == 2


def test_render_refuses_what_was_not_judged(tmp_path):
    folder = build(tmp_path, Truth(overrides=("steps=8",)))
    with pytest.raises(ValueError, match=r"verdicts\.json: not there"):
        render(folder)
    write_json(folder.verdicts, {**judge(folder).model_dump(mode="json"), "predictions_sha256": "e" * 64})
    with pytest.raises(ValueError, match=r"verdicts\.json: found predictions_sha256 e+, expected"):
        render(folder)


def test_summary_counts(run):
    assert summary(judge(run)) == (
        "5 of 8 claims of the paper tested in this run: 2 supported, 2 refuted. Our own predictions for them, written "
        "down beforehand: 4 supported, 1 inconclusive."
    )
    assert summary(judge(run, ["C3", "C7"])) == "None of the claims was tested in this run."


def test_numbers_in_their_unit():
    judgement = Judgement(
        verdict="supported", rule="r", reason="r.", effect=0.051, unit="share of full's drop", margin=0.05,
        interval=(-0.01, 0.0004), n=3,
    )  # fmt: skip
    assert numbers(judgement) == [
        ("share of full's drop", "5.1 %"), ("95 % interval", "−1.0 % to 0.0 %"), ("margin", "5.0 %"), ("n", "3 seeds"),
    ]  # fmt: skip
    assert numbers(Judgement(verdict="inconclusive", rule="r", reason="r.")) == []


def test_spaces_before_units_do_not_break():
    assert tight("27.0 % at p = 4, 95 % interval") == "27.0\u00a0% at p\u00a0=\u00a04, 95\u00a0% interval"


def test_ids_of_two_figures_do_not_collide():
    raw = '<svg viewBox="0 0 1 1"><defs><path id="a"/></defs><use xlink:href="#a"/><g id="b"/></svg>'
    first, second = inline(raw, "x", "l"), inline(raw, "y", "l")
    assert 'id="x-a"' in first and 'href="#x-a"' in first and 'id="y-a"' in second and "xlink" not in first
    assert 'id="b"' not in first  # ids that nothing refers to are dropped


# --- contrast -----------------------------------------------------------------------------------------------


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a, b):
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_function():
    assert contrast("#000000", "#ffffff") == pytest.approx(21.0)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("scheme", [0, 1])
def test_contrast_of_text_marks_and_badges(scheme):
    css = (Path(reports.__file__).parent / "templates" / "report.css").read_text(encoding="utf-8")
    css = re.sub(r"\{\{.*?\}\}", "", css)
    blocks = re.findall(r":root \{(.*?)\}", css, re.S)
    variables = [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block)) for block in blocks]
    assert len(variables) >= 2
    found = variables[scheme] | {name: pair[scheme] for name, pair in PALETTE.items()}
    for ground in ("ground", "card"):
        for name in ("ink", "muted", "link"):
            assert contrast(found[name], found[ground]) >= 4.5, (name, ground)
        for name in PALETTE.keys() - {"grid", "ink", "muted"}:
            assert contrast(found[name], found[ground]) >= 3, (name, ground)
    assert contrast(found["muted"], found["soft"]) >= 4.5
    for tone in ("ok", "bad", "same", "open", "none"):
        assert contrast(found[tone], found[f"{tone}-soft"]) >= 4.5, tone


def test_every_verdict_links_to_its_theorems(text):
    linked = set(re.findall(r'href="#theorem-(T\d+b?)"', text))
    stated = set(re.findall(r'<dt id="theorem-(T\d+b?)"', text))
    assert linked == stated and {"T6", "T7", "T9", "T12"} <= linked


def test_claims_name_theorems_that_exist():
    from bcd_theory.theorems import THEOREMS
    from reports.claims import CLAIMS

    assert {name for claim in CLAIMS for name in claim.theorems} <= THEOREMS.keys()


def test_jumps_of_the_updates_are_in_the_table_of_arms(run):
    """U05: also on a real record, a step whose every layer moved five times as far."""
    from reports.render import _arms

    loaded = load_run(run)
    assert not any("updates jump" in cell for row in _arms(loaded).rows for cell in row)
    steps = loaded.arms["exact-momentum", 0].steps
    assert len(steps) > 12
    far = steps[12].model_copy(update={"displacement": [5 * (x or 0.0) for x in steps[12].displacement]})
    steps[12] = far
    (row,) = [row for row in _arms(loaded).rows if row[0] == "exact-momentum"]
    assert row[-1].endswith("1 whose updates jump (from step 12)")
