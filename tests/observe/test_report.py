import base64
import gzip
import html
import io
import json
import math
import re
import shutil
import subprocess
from dataclasses import replace

from needs import needs
from observed import Settings, decode, make_group
from PIL import Image

from hone.data.picture_processors import PictureProcessor
from hone.observe.curves import MAX_POINTS, thin
from hone.observe.observer import Observer
from hone.observe.page import script_json
from hone.observe.recorder import samples_file
from hone.observe.report import MAX_PICTURES, MAX_SAMPLES, write_report
from hone.observe.thumbnails import MAX_NEW, SIDE

HOSTILE = (
    "</script><script>document.title='pwned'</script><img src=x onerror=\"document.title='pwned'\"><!--&amp;\u2028"
)


def make_run(folder, steps=30, title="my run", groups=2):
    observer = Observer(folder, Settings(trace=True), title=title, total_steps=steps, decode=decode)
    (folder / "run.yaml").write_text("seed: 7\nstages: [sft, rl]  # <b>& </script>\n")
    observer.begin("sft", 5)
    for step in range(1, 6):
        observer.log("sft", step, {"sft/loss": 2 / step, "sft/lr": 1e-3, "time/step_s": 0.1})
    observer.begin("rl", steps)
    observer.log("rl", 0, {"eval/accuracy": 0.25, "eval/accuracy[seen=true]": 0.5})
    for step in range(1, steps + 1):
        with observer.span("generate"):
            pass
        made = [make_group(i, texts=("4", HOSTILE), rewards=(1.0, None if i else 0.0)) for i in range(groups)]
        observer.record("rl", step, made, [[0.5, -0.5]] * groups)
        observer.log("rl", step, {"rollout/reward_mean": step / steps, "train/loss": float("nan"), "time/step_s": 0.1})
    observer.log("rl", steps, {"eval/accuracy": 0.75})
    observer.close("completed 30 updates")
    return folder / "report.html"


def page_data(page):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])


def test_the_page_holds_the_run_and_nothing_of_it_as_markup(tmp_path):
    page = make_run(tmp_path, title="a <b> {{data}} title").read_text()
    assert "a &lt;b&gt; {{data}} title" in page
    assert "pwned'</script>" not in page and page.count("</script>") == 2
    data = page_data(page)
    assert data["summary"]["outcome"] == "completed 30 updates"
    assert [(s["name"], s["steps"]["count"], s["evals"]["count"]) for s in data["stages"]] == [
        ("sft", 5, 0),
        ("rl", 30, 2),
    ]
    rl = data["stages"][1]
    assert rl["steps"]["step"] == list(range(1, 31))
    assert rl["steps"]["values"]["rollout/reward_mean"][-1] == 1.0
    assert rl["steps"]["values"]["train/loss"] == [None] * 30
    assert rl["evals"]["values"]["eval/accuracy"] == [0.25, 0.75]
    assert data["metrics"]["rollout/reward_mean"]["unit"] == "reward"
    assert data["pieces"][str(ord("4"))] == "4"
    row = data["samples"][1]
    assert (row["response"], row["reward"], row["advantage"]) == (HOSTILE, 0.0, -0.5)
    assert sorted({s["step"] for s in data["samples"]}) == [1, 8, 15, 23, 30]  # first, last, evenly between


def test_the_page_asks_nothing_of_the_network(tmp_path):
    page = make_run(tmp_path, steps=2).read_text()
    without_data = re.sub(r'(id="data">).*?(</script>)', r"\1\2", page, flags=re.S)
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\(|\bsrc=|<link|fetch\(|XMLHttpRequest|import\(", without_data)


def test_a_report_can_be_made_again_from_the_folder_alone(tmp_path):
    page = make_run(tmp_path)
    first = page.read_text()
    page.unlink()
    assert write_report(tmp_path) == page
    assert page.read_text() == first


def test_a_run_that_was_killed_has_a_report_too(tmp_path):
    make_run(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"stage": "rl", "st')
    (tmp_path / "run.yaml").unlink()
    (tmp_path / "logs" / "summary.json").unlink()
    shutil.rmtree(tmp_path / "samples")
    data = page_data(write_report(tmp_path).read_text())
    assert data["summary"]["outcome"] == "not finished" and data["samples"] == []
    assert data["summary"]["title"] == tmp_path.name
    (tmp_path / "metrics.jsonl").unlink()
    assert page_data(write_report(tmp_path).read_text())["stages"] == []


def test_a_damaged_file_of_samples_is_left_out_and_every_file_is_read_once(tmp_path, monkeypatch):
    make_run(tmp_path)
    torn = samples_file(tmp_path / "samples", "rl", 1)
    torn.write_bytes(torn.read_bytes()[:-9])
    opened, gzip_open = [], gzip.open
    monkeypatch.setattr(gzip, "open", lambda path, *how, **named: opened.append(path) or gzip_open(path, *how, **named))
    data = page_data(write_report(tmp_path).read_text())
    assert {sample["step"] for sample in data["samples"]} == {8, 15, 23, 30}
    assert len(opened) == len(set(opened)) == 5 and torn in opened


def test_it_says_where_the_run_comes_from_and_shows_groups_with_signal_first(tmp_path):
    origin = {"command": "hone train run.yaml", "git_commit": "abc", "inputs": {"data.train": "sha256:12"}}
    observer = Observer(
        tmp_path, Settings(), title="t", total_steps=1, metadata={**origin, "config": {"seed": 1}}, decode=decode
    )
    rewards = [(1.0, 1.0), (0.0, 1.0), (None, 0.5), (0.5, 0.0)]
    made = [make_group(i, rewards=found) for i, found in enumerate(rewards)]
    observer.record("rl", 1, made, None)
    observer.log("rl", 1, {"rollout/reward_mean": 0.5})
    observer.close("finished")
    data = page_data((tmp_path / "report.html").read_text())
    assert data["summary"]["origin"] == origin
    shown = [(row["group"], row["reward"]) for row in data["samples"]]
    first = [made[i].prompt.id for i in (1, 3, 0, 2)]
    assert [group for group, _ in shown] == [group for group in first for _ in range(2)]


def test_it_is_written_during_the_run(tmp_path):
    observer = Observer(tmp_path, Settings(), title="t", total_steps=3, report_after_s=0.0)
    observer.log("rl", 1, {"rollout/reward_mean": 0.5})
    observer._reporting.join(60)
    data = page_data((tmp_path / "report.html").read_text())
    assert data["summary"]["outcome"] == "not finished" and data["stages"][0]["steps"]["step"] == [1]
    observer.log("rl", 2, {"rollout/reward_mean": 0.5})
    assert not observer._reporting.is_alive(), "the next one is due in minutes"
    observer.close("stopped")
    assert page_data((tmp_path / "report.html").read_text())["summary"]["outcome"] == "stopped"


def test_a_report_that_failed_is_written_the_next_time_and_the_failure_is_said_once(tmp_path, monkeypatch):
    """A folder in the way of the file, twice."""
    monkeypatch.setattr("hone.observe.observer.REPORT_EVERY_S", 0.0)
    monkeypatch.setattr("hone.observe.observer.REPORT_SHARE", math.inf)
    observer = Observer(tmp_path, Settings(), title="t", total_steps=3, report_after_s=0.0)
    (tmp_path / "report.html").mkdir()
    for step in (1, 2, 3):
        if step == 3:
            (tmp_path / "report.html").rmdir()
        observer.log("rl", step, {"rollout/reward_mean": 0.5})
        observer._reporting.join(60)
    assert page_data((tmp_path / "report.html").read_text())["stages"][0]["steps"]["step"] == [1, 2, 3]
    observer.close("stopped")
    assert (tmp_path / "logs" / "training.log").read_text().count("report.html cannot be written") == 1


def test_curves_and_samples_are_bounded(tmp_path):
    data = page_data(make_run(tmp_path, steps=MAX_POINTS + 500, groups=3).read_text())
    rl = data["stages"][1]
    assert rl["steps"]["count"] == MAX_POINTS + 500
    assert all(len(values) == MAX_POINTS for values in rl["steps"]["values"].values())
    assert 0 < len(data["samples"]) <= MAX_SAMPLES


def test_thin_takes_means_of_equal_bins():
    assert thin([1.0, 2.0, None, 4.0], 4) == [1.0, 2.0, None, 4.0]
    assert thin([1.0, 3.0, None, 4.0, None, None], 3) == [2.0, 4.0, None]


def test_curves_come_with_healthy_ranges_and_events(tmp_path):
    observer = Observer(tmp_path, Settings(), title="t", total_steps=30)
    observer.begin("rl", 30)
    for step in range(1, 31):
        observer.event("training", step=step)
        if step == 7:
            observer.event("replica_down", replica="engine-1", why="out of memory")
        entropy = 2.0 if 5 <= step <= 20 else 9.0  # the baseline is of steps 5 to 20
        observer.log("rl", step, {"train/entropy": entropy, "train/mismatch_gap": 0.0, "reward/a_fault_frac": 0.0})
    observer.event("started", step=20)
    observer.close("finished")
    page = (tmp_path / "report.html").read_text()
    data = page_data(page)
    assert data["healthy"]["rl"] == {
        "train/entropy": [0.4, 3.0],
        "train/mismatch_gap": [None, 0.03],
        "reward/a_fault_frac": [None, 0.05],
    }
    assert [(mark["step"], mark["what"]) for mark in data["marks"]] == [
        (7, "engine engine-1 failed: out of memory"),
        (20, "continued from a checkpoint"),
    ]
    assert "Copyright (c) 2022 Leon Sorokin" in page, "the licence of the plot library goes with it"


def test_script_json_cannot_leave_its_element():
    text = script_json({"text": HOSTILE})
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {"text": HOSTILE}


WITNESS = """<script>
const rows = document.querySelectorAll("tr.sample");
rows[1].click();
byId("search").value = "tokens>1 reward<0.5 fault"; fillRows();
const faulty = byId("found").textContent;
byId("search").value = "pwned"; fillRows();
document.querySelector("tr.sample").click();
document.querySelectorAll("details").forEach(d => { d.open = true; });
const plot = document.querySelector(".plot");
for (const key of ["Home", "ArrowRight", "ArrowRight"]) plot.dispatchEvent(new KeyboardEvent("keydown", { key }));
const count = what => document.querySelectorAll(what).length;
const facts = { rows: rows.length, faulty, charts: count(".uplot canvas"), open: count(".detail"), images: count("img"),
  title: document.title, readout: document.querySelector(".legend").textContent, errors: window.failures };
document.body.innerHTML = "<pre id=facts></pre>";
byId("facts").textContent = JSON.stringify(facts);
</script></body>"""


def facts_in_a_browser(page, tmp_path):
    """What WITNESS finds in a page after clicking about in it."""
    trap = "<script>window.failures = []; window.onerror = message => { failures.push(message); };</script>"
    probe = tmp_path / "probe.html"
    probe.write_text(page.replace("<head>", "<head>" + trap, 1).replace("</body>", WITNESS))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
    flags += ["--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path}/profile", "--dump-dom"]
    out = subprocess.run(["chromium", *flags, probe.as_uri()], capture_output=True, text=True, timeout=60).stdout
    return json.loads(html.unescape(re.search(r'<pre id="facts">(.*?)</pre>', out, re.S)[1]))


@needs("chromium", shutil.which("chromium"))
def test_a_browser_shows_the_pictures(tmp_path):
    file = io.BytesIO()
    Image.new("RGB", (8, 6), "red").save(file, "PNG")
    observer = Observer(
        tmp_path / "run", Settings(), title="p", total_steps=3, picture=lambda text, answer: file.getvalue()
    )
    for step in range(1, 4):
        observer.record("rl", step, [make_group(texts=("4", "pwned", "5"), rewards=(1.0, 0.0, 0.5))], None)
        observer.log("rl", step, {"rollout/reward_mean": step / 4})
    observer.close("finished")
    found = facts_in_a_browser((tmp_path / "run" / "report.html").read_text(), tmp_path)
    assert found["errors"] == [] and found["images"] == 2  # the one row found, in the list and opened


@needs("chromium", shutil.which("chromium"))
def test_a_browser_draws_it_without_errors_and_runs_nothing_that_the_model_wrote(tmp_path):
    page = make_run(tmp_path / "run").read_text()
    found = facts_in_a_browser(page, tmp_path)
    assert found["errors"] == [] and found["title"] == "my run · Hone" and found["images"] == 0
    assert found["rows"] == 4 and found["charts"] >= 4 and found["faulty"] == "0 samples" and found["open"] == 1
    assert found["readout"].startswith("step 3")


def png_of(text, answer):
    return None if text == answer else b"\x89PNG" + text.encode()


def test_pictures_are_of_the_best_and_the_worst_of_each_group_and_are_kept(tmp_path):
    observer = Observer(tmp_path, Settings(), title="posters", total_steps=1, picture=png_of)
    made = [make_group(i, texts=("4", "22", HOSTILE), rewards=(0.5, 1.0, 0.0)) for i in range(2)]
    made.append(make_group(2, rewards=(None, None)))
    observer.record("rl", 1, made, None)
    observer.log("rl", 1, {"rollout/reward_mean": 0.5})
    observer.close("finished")
    page = (tmp_path / "report.html").read_text()
    drawn = {
        (s["prompt"], s["index"]): base64.b64decode(s["picture"]) for s in page_data(page)["samples"] if "picture" in s
    }
    assert sorted(index for _, index in drawn) == [1, 2]  # one prompt text for all rows here
    assert drawn[("2+2=", 2)] == b"\x89PNG" + HOSTILE.encode()
    places = [(s["reward"], "picture" in s) for s in page_data(page)["samples"]]
    assert places == [(0.5, False), (1.0, True), (0.0, True)] * 2 + [(None, False)] * 2
    assert write_report(tmp_path).read_text() == page


def shown_to(group, folder, *, sizes):
    """The group, its prompt with pictures of these (width, height)."""
    tiles = PictureProcessor.of(TILES, most_pixels=10**6)
    pictures = []
    for number, size in enumerate(sizes):
        file = folder / f"{group.prompt.id}-{number}.png"
        Image.effect_noise(size, 90 + number).save(file)
        pictures.append(tiles.picture(file))
    return replace(group, prompt=replace(group.prompt, pictures=tuple(pictures)))


TILES = {
    "preprocessor_config.json": '{"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 8, "width": 8}}',
    "processor_config.json": '{"image_seq_length": 4}',
}


def test_the_page_shows_the_pictures_of_prompts_as_thumbnails(tmp_path):
    """In their own shape, once in the page, and groups whose rewards differ first."""
    dull = [make_group(i, rewards=(0.5, 0.5)) for i in range(MAX_NEW)]
    groups = [*dull, make_group(40)]
    shown = [shown_to(group, tmp_path, sizes=[(60, 30)]) for group in groups[:-1]]
    shown.append(shown_to(groups[-1], tmp_path, sizes=[(64, 96), (1000, 500)]))
    observer = Observer(tmp_path / "run", Settings(samples_max_mib=8), title="pictures", total_steps=1)
    observer.record("rl", 1, shown, None)
    observer.log("rl", 1, {"rollout/reward_mean": 0.5})
    observer.close("finished")
    assert len(list((tmp_path / "run" / "samples" / "thumbnails").glob("*"))) == MAX_NEW
    samples = page_data((tmp_path / "run" / "report.html").read_text())["samples"]
    told = {digest: data for sample in samples for digest, data in sample.get("thumbnails", {}).items()}
    telling = [sample for sample in samples if sample["group"] == "row-40"]
    assert [sample["shows"] for sample in telling] == [[p.digest for p in shown[-1].prompt.pictures]] * 2
    assert sum("thumbnails" in sample for sample in telling) == 1
    sizes = [Image.open(io.BytesIO(base64.b64decode(told[digest]))).size for digest in telling[0]["shows"]]
    assert sizes == [(64, 96), (SIDE, SIDE // 2)]
    assert 1 < len(told) <= MAX_PICTURES and sum(map(len, told.values())) < MAX_PICTURES * 4 * SIDE**2


@needs("chromium", shutil.which("chromium"))
def test_a_browser_shows_the_pictures_of_a_prompt(tmp_path):
    observer = Observer(tmp_path / "run", Settings(), title="p", total_steps=3)
    for step in range(1, 4):
        group = make_group(texts=("4", "pwned", "5"), rewards=(1.0, 0.0, 0.5))
        observer.record("rl", step, [shown_to(group, tmp_path, sizes=[(40, 30), (30, 40)])], None)
        observer.log("rl", step, {"rollout/reward_mean": step / 4})
    observer.close("finished")
    found = facts_in_a_browser((tmp_path / "run" / "report.html").read_text(), tmp_path)
    assert found["errors"] == [] and found["images"] == 2  # the one row found, opened


def test_pictures_are_bounded(tmp_path):
    observer = Observer(tmp_path, Settings(samples_max_mib=8), title="posters", total_steps=1, picture=png_of)
    for step in range(1, 6):
        observer.record("rl", step, [make_group(i) for i in range(30)], None)
        observer.log("rl", step, {"rollout/reward_mean": 0.5})
    observer.close("finished")
    samples = page_data((tmp_path / "report.html").read_text())["samples"]
    drawn = [sample for sample in samples if "picture" in sample]
    assert 0 < len(drawn) <= MAX_PICTURES
    assert {sample["step"] for sample in drawn} == {1, 2, 3, 4, 5}
