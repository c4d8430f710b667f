"""A service's log: last lines, new lines, and what of them is shown."""

from hone.services.log import EXCERPT_LINES, EXCERPT_REFILL_S, Excerpt, Follower, last_lines


def append(path, text):
    with path.open("a") as log:
        log.write(text)


def test_the_last_lines_of_one_life(tmp_path):
    log = tmp_path / "a.log"
    append(log, "an earlier life\n")
    began = log.stat().st_size
    assert last_lines(log, since=began) == []
    append(log, "1\n2\n3\nno end")
    assert last_lines(log, since=began) == ["1", "2", "3", "no end"]
    assert last_lines(log, count=2) == ["3", "no end"]
    assert last_lines(tmp_path / "none.log") == []


def test_new_lines_come_whole_and_once(tmp_path):
    log = tmp_path / "a.log"
    append(log, "before\n")
    follower, whole = Follower(log), Follower(log, from_start=True)
    append(log, "one\ntw")
    assert follower.new_lines() == ["one"] and whole.new_lines() == ["before", "one"]
    append(log, "o\n")
    assert follower.new_lines() == ["two"] and follower.new_lines() == []
    append(log, "x" * 100_000)
    assert [len(line) for line in follower.new_lines()] == [65536], (
        "a line without an end is no reason to wait for ever"
    )


def test_a_chatty_log_is_thinned(tmp_path):
    log = tmp_path / "a.log"
    excerpt = Excerpt(log)
    append(log, "".join(f"{n}\n" for n in range(20)))
    assert excerpt.new_lines(0.0) == [str(n) for n in range(EXCERPT_LINES)]
    append(log, "later\n")
    shown = excerpt.new_lines(EXCERPT_REFILL_S)
    assert shown == [f"... {20 - EXCERPT_LINES} more lines in its log", "later"]
    append(log, "and more\n")
    assert excerpt.new_lines(EXCERPT_REFILL_S) == []
    assert excerpt.left_out() == ["... 1 more line in its log"] and excerpt.left_out() == []
