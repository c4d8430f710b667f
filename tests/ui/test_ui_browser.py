"""`hone ui` as its reader meets it: the real command, a real browser, a run that makes steps meanwhile."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from browser import Browser
from needs import needs
from written_runs import add_steps, write_run

pytestmark = [
    pytest.mark.slow("starts a browser and the server, again and again"),
    needs("chromium", shutil.which("chromium")),
]


@pytest.fixture
def server(tmp_path):
    """`hone ui` of a folder with two runs, one of which has not ended: (address with token, its observer)."""
    folder = tmp_path / "runs"
    write_run(folder / "a").close("finished")
    observer = write_run(folder / "b", lr=1e-2)
    log = tmp_path / "ui.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "hone", "ui", str(folder), "--port", "0"], stdout=out, stderr=out
        )
    try:
        deadline = time.monotonic() + 60
        while "ui: ready" not in log.read_text():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        text = log.read_text()
        (url,), (token,) = re.findall(r"listening on (\S+)", text), re.findall(r"token=(\S+)", text)
        yield f"{url}/", token, observer
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(30) in (0, 130)
        assert token not in log.read_text().replace(f"token={token}", "", 1), "it is shown once, and never logged"
    finally:
        process.kill()
        process.wait()
        observer.close("finished")


def test_a_reader_opens_a_run_searches_and_sees_new_steps(server, tmp_path):
    url, token, observer = server
    with Browser(tmp_path / "profile") as browser:
        browser.open(f"{url}?token={token}")
        assert browser.run("location.href") == url
        assert browser.run("document.querySelectorAll('#runs tr').length") == 2
        browser.run("document.querySelector('#runs a[href$=\"name=b\"]').click()")
        browser.until("document.title.startsWith('b ·') && document.querySelector('tr.sample')")
        assert "hone train run.yaml" in browser.run("byId('origin').textContent")

        browser.press("/")
        assert browser.run("document.activeElement.id") == "search"
        browser.run("byId('search').value = 'reward<0.5'; byId('search').dispatchEvent(new Event('input'))")
        assert browser.run("[...document.querySelectorAll('tr.sample')].length") == 1
        browser.run("byId('search').value = '<b> reward>0'; byId('search').dispatchEvent(new Event('input'))")
        assert browser.run("[...document.querySelectorAll('tr.sample')].length") == 1, "of the step that is chosen"
        browser.run("byId('search-more').click()")
        browser.until("byId('found').textContent === '12 samples · 12 of 12 steps searched'")
        assert browser.run("[...document.querySelectorAll('tr.sample td:first-child')].map(td => +td.textContent)") == [
            *range(12, 0, -1)
        ]
        assert browser.run("byId('search-more').hidden")
        browser.run("byId('place').value = 'rl step 12'; byId('place').dispatchEvent(new Event('input'))")
        browser.run(
            "byId('search').value = ''; byId('search').dispatchEvent(new Event('input')); byId('search').blur()"
        )
        browser.press("j")
        browser.press("Enter")
        assert browser.run("document.querySelectorAll('.detail').length") == 1
        assert browser.run("document.querySelectorAll('.detail b').length") == 0, "text of the model is no markup"

        def tokens_by(shade):
            browser.run(f"byId('shade').value = '{shade}'; byId('shade').dispatchEvent(new Event('input'))")
            return browser.run("document.querySelector('.response').textContent")

        assert "Mean 0." in tokens_by("surprisal")
        assert tokens_by("advantage").endswith("<b>22</b>◦0.5 at every token.")
        assert "are not known" in tokens_by("entropy") and "are not known" in tokens_by("mismatch")
        browser.run("[...document.querySelectorAll('tr.sample')].at(-2).click()")
        assert "0.25 at every token" in browser.run("document.querySelector('#rows').textContent")
        tokens_by("entropy")
        assert "0.75 at every token" in browser.run("document.querySelector('#rows').textContent")

        browser.run("document.querySelector('.plot').focus()")
        for key in ("Home", "ArrowRight"):
            browser.press(key)
        read = "document.querySelector('.plot + .legend').textContent"
        assert browser.run(read).startswith("step 2")
        browser.run("plots.get('rl/Reward').plot.setScale('x', {min: 3, max: 9})")
        add_steps(observer, 13, 15)
        browser.until("data.now.step === 15")
        assert browser.run("document.querySelectorAll('.detail').length") == 2, "what was opened stays open"
        assert browser.run("plots.get('rl/Reward').plot.scales.x.max") == 9, "and what was zoomed into"
        browser.run("byId('place').value = 'rl step 14'; byId('place').dispatchEvent(new Event('input'))")
        browser.until("document.querySelectorAll('tr.sample').length === 4")
        for step in range(16, 30):
            observer.log("rl", step, {"rollout/all_wrong_group_frac": 1.0, "rollout/pass_rate": 0.0})
        observer.position()
        curve = "[...document.querySelectorAll('.card')].find(card => card.querySelector('h3')?.textContent === NAME)"
        curve = curve.replace("NAME", "'rollout/all_wrong_group_frac'")
        browser.until(f"{curve} && {curve}.textContent.includes('all_wrong, since step')")
        assert browser.errors == [] and browser.hosts == {url.split("/")[2]}


def test_runs_are_compared_and_pages_fit_a_phone_and_the_dark(server, tmp_path):
    url, token, _ = server
    with Browser(tmp_path / "profile") as browser:
        browser.size(390, 844)
        browser.open(f"{url}?token={token}")
        assert browser.run("byId('compare').disabled")
        assert browser.run(
            "[...document.querySelectorAll('#runs td')].every(td => td.getBoundingClientRect().right <= innerWidth)"
        )
        browser.run("document.querySelectorAll('#runs input').forEach(box => box.click())")
        browser.run("byId('compare').click()")
        browser.until("document.querySelectorAll('#curves .uplot').length > 1")
        assert "train.optimizer.lr" in browser.run("byId('differing').textContent")
        drawn = "plots.get('rl step/train/update_kl').plot.series.slice(1).map(s => s.spanGaps)"
        assert browser.run(drawn) == [True, True], "what few steps measure is drawn over the gaps"
        browser.run("byId('axis').value = 'samples'; byId('axis').dispatchEvent(new Event('input'))")
        assert browser.run("document.querySelectorAll('#curves .uplot').length") > 1
        for page in ("", "run?name=a", "compare?name=a&name=b"):
            browser.open(url + page)
            assert browser.run("document.documentElement.scrollWidth <= innerWidth"), page
        before = browser.run("getComputedStyle(document.body).backgroundColor")
        browser.run("byId('theme').click()")
        assert browser.run("getComputedStyle(document.body).backgroundColor") != before
        assert browser.errors == [] and browser.hosts == {url.split("/")[2]}


def test_a_run_that_cannot_be_read_and_the_alarms_of_a_long_one(server, tmp_path):
    """Run `b` has 9,000 steps, of which a page reads some; it reported an alarm and advice."""
    url, token, observer = server
    (tmp_path / "runs" / "a" / "logs" / "summary.json").write_text('{"title": "a", "beg')
    with (tmp_path / "runs" / "b" / "metrics.jsonl").open("a") as lines:
        for step in range(13, 9013):
            values = f'"rollout/reward_mean": {step % 7}, "train/entropy": {step % 5}'
            lines.write(f'{{"stage": "rl", "step": {step}, "time_s": {step}.0, {values}}}\n')
    words = {"pattern": "p", "cause": "c", "what": "It is so.", "evidence": ("e",), "change": "x", "confirm": "y"}
    words |= {"stage": "rl", "source": "z"}
    observer.event("alarm", name="slow", level="tuning", metric="rollout/reward_mean", since=5, step=9, **words)
    observer.event("alarm", name="odd", level="data", metric="train/entropy", since=100, step=103, **words)
    observer.position()
    card = "[...document.querySelectorAll('.card')].find(card => card.querySelector('h3')?.textContent === 'NAME')"
    with Browser(tmp_path / "profile") as browser:
        browser.size(390, 844)
        browser.open(f"{url}?token={token}")
        assert "unreadable" in browser.run("byId('runs').textContent")
        assert "summary.json: is torn" in browser.run("byId('runs').textContent")
        assert browser.run("document.documentElement.scrollWidth <= innerWidth")
        assert browser.run("document.querySelector('#runs .neg:not(:empty) + .soft').textContent") == "advice: slow"
        browser.run(AXE)
        assert browser.run("axe.run().then(all => all.violations.map(v => v.id))") == []
        browser.open(f"{url}run?name=b")
        assert browser.run("byId('alarms').querySelector('h2').textContent").startswith("First abnormal: train/entropy")
        assert "odd, since step 100" in browser.run(card.replace("NAME", "Entropy") + ".textContent")
        assert "advice: slow, since step 5" in browser.run(card.replace("NAME", "Reward") + ".textContent")
        assert browser.errors == [] and browser.hosts == {url.split("/")[2]}


AXE = (Path(__file__).parent / "axe" / "axe.min.js").read_text(encoding="utf-8")
"""axe-core 4.14.1 (Mozilla Public Licence 2.0, beside it): finds what keeps people from using a page."""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_pages_are_accessible(server, tmp_path, theme):
    url, token, _ = server
    with Browser(tmp_path / "profile") as browser:
        browser.open(f"{url}?token={token}")
        for page in ("", "run?name=a", "compare?name=a&name=b"):
            browser.open(url + page)
            browser.run(f"document.documentElement.dataset.theme = '{theme}'")
            browser.run("document.querySelectorAll('details').forEach(node => { node.open = true; })")
            browser.run("document.querySelector('tr.sample') && document.querySelector('tr.sample').click()")
            browser.run(AXE)
            for shade in ("surprisal", "entropy", "advantage", "mismatch") if "run" in page else ("",):
                if shade:
                    browser.run(f"byId('shade').value = '{shade}'; byId('shade').dispatchEvent(new Event('input'))")
                found = browser.run(
                    "axe.run().then(all => all.violations.map(v => [v.id, v.nodes.map(n => n.html.slice(0, 200))]))"
                )
                assert found == [], (page, shade)
