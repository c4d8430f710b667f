"""The static shell reader gives the words that a shell would, and holes where it cannot know."""

import pytest

from hone.dialects.foreign import holes_in, shown
from hone.dialects.shell import read_script


def words(script: str) -> list[list[str]]:
    return [[str(shown(word)) for word in command.words] for command in read_script(script)]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("run a=1 b='x y'", ["run", "a=1", "b=x y"]),
        ("X=8\nrun n=$X m=${X}", ["run", "n=8", "m=8"]),
        ("run m=${MODEL:-Qwen/Qwen3-8B}", ["run", "m=Qwen/Qwen3-8B"]),
        ("MODEL=${MODEL:-a}\nrun m=${MODEL:-b}", ["run", "m=a"]),
        ("p=$((1024 * 2)); run l=$((p + 8)) k=$(( (p) / 3 * -2 ))", ["run", "l=2056", "k=-1364"]),
        ("run a \\\n  b \\\n  # a comment\n", ["run", "a", "b"]),
        ("A=(x=1 'y=2 3')\nA+=(z=$HOME/d)\nrun \"${A[@]}\"", ["run", "x=1", "y=2 3", "z=~/d"]),
        ('f() { local n=$1; shift; run n=$n "$@"; }\nf 4 a b', ["run", "n=4", "a", "b"]),
        ("if [ $Q = 1 ]; then X=1; else X=1; fi\nrun x=$X", ["run", "x=1"]),
        ("cat <<EOF > f\nbad words\nEOF\nrun a", ["run", "a"]),
        ("run \"['$HOME/a', '$HOME/b']\"", ["run", "['~/a', '~/b']"]),
        ("run a > log.txt 2>&1 | tee x", ["run", "a"]),
        ("for s in 7; do run seed=$s; done", ["run", "seed=7"]),
        ("export X=1\nX+=2; run $X", ["run", "12"]),
        ("F='a  b'; run $F \"$F\"", ["run", "a", "b", "a b"]),
        ("run ${EMPTY:+gone} x", ["run", "x"]),
    ],
)
def test_words_of_a_static_script(script, expected):
    assert expected in words(script)


@pytest.mark.parametrize(
    ("script", "name"),
    [
        ("run x=$UNSET", "$UNSET"),
        ("run x=$(hostname -I)", "$(hostname -I)"),
        ("run x=`date`", "date"),
        ("run x=$1", "$1"),
        ("if [ $Q = 1 ]; then X=1; else X=2; fi\nrun x=$X", "X, which depends on a condition"),
        ("for s in 1 2; do run seed=$s; done", "s of a loop"),
        ("run x=$((N * 2))", "$((N * 2))"),
        ("run x=$((1 / 0))", "$((1 / 0))"),
        ("case $Q in a) X=1;; b) X=2;; esac\nrun x=$X", "X, which depends on a condition"),
    ],
)
def test_what_is_not_static_is_a_hole_with_a_name(script, name):
    command = next(command for command in read_script(script) if command.words[0] == "run")
    assert [found for word in command.words for found in holes_in(word)] == [name]


def test_nothing_is_executed(tmp_path):
    witness = tmp_path / "witness"
    script = f"x=$(touch {witness})\n`touch {witness}`\ntouch {witness}\neval 'touch {witness}'\nrun $(touch {witness})"
    assert read_script(script)
    assert not witness.exists()


def test_a_doubling_variable_and_a_recursive_function_end():
    read_script("X=aaaaaaaaaaaaaaaa\n" + 'X="$X$X"\n' * 60 + "run $X")
    read_script("f() { f; f; run a; }\nf")
    read_script("((" * 3000)
