"""The static shell reader gives the words that a shell would, and holes where it cannot know."""

import subprocess

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


AS_BASH = {
    "a condition that holds": 'M=async; R=no\nif [ "$M" = async ]; then R=yes; fi\nrun r=$R',
    "one that does not": 'if [[ a == b* && 1 -lt 2 ]]; then run n; elif [ -z "${Q:-}" ]; then run q; else run e; fi',
    "numbers": "N=3\nif [ $N -ge 2 ] && [ $N -ne 4 ]; then X=1; else X=2; fi\nrun $X",
    "negated": "if ! [ a = b ]; then run x; fi",
    "or": "[ a = b ] || X=1\n[ a = a ] || X=2\nrun $X",
    "and": "X=0; [ a = b ] && X=1; [[ -n y ]] &&\n  Y=2\nrun $X $Y",
    "case": "L=${L:-tv}\ncase $L in\n  kl) C=1 ;;\n  t*|x) C=2 ;;\n  *) exit 1 ;;\nesac\nrun $C",
    "arguments of the script": "if [ $# -lt 2 ]; then X=few; fi\nwhile [[ $# -gt 0 ]]; do X=$1; shift; done\nrun ${X}",
    "a document read": "read -r -d '' A <<EOF\nx.y \\\\\n  --a 1 \\\\\n  --b ${Q:-2}\nEOF\nrun $A",
    "a literal document": "A=$(cat <<'EOF'\n--a $Q --b\nEOF\n)\nrun $A",
    "a document of a shell": "export X=4\nexport -f run\nbash <<EOF\nrun a $X \\\n  b\nEOF\nrun c",
    "within bash -c": "export -f run\nX=3; bash -c \"run a=$X \\\n && run 'b c' -j '{\\\"k\\\": 1}'\" &>> x\nrun d",
    "within eval": 'C=\'run a "b c"\'\neval "$C d"',
    "an array's entry": "A=(a b c)\nrun ${A[1]} ${A[0]} ${A[7]}",
    "without ends": "P=org/Qwen3-8B.git\nrun ${P##*/} ${P%/*} ${P%.git} ${P#org/}",
    "base and folder": 'P=/a/b/c.sh\nrun $(basename $P) $(dirname "$P")',
    "arguments in text": 'D=" a=1 \\\n  b=\'x y\' \\\n"\nD="$D c=2"\nrun $D',
    "comments in an array": "A=(\n  a=1 # first\n  # b=2\n\n  c=3\n)\nrun ${A[@]}",
    "Windows line ends": "X=1\r\nrun a=$X \\\r\n  b\r\n",
}


@pytest.mark.parametrize("name", AS_BASH)
def test_the_same_words_as_bash(name, tmp_path):
    """Of scripts that name nothing from outside; their `run` prints its words."""
    script = AS_BASH[name]
    start = "run() { printf '%s\\0' \"$@\" >&3; printf '\\1\\0' >&3; }\nexec 3>&1\n"
    printed = subprocess.run(
        ["bash", "-c", start + script.replace("\r\n", "\n")],
        capture_output=True,
        text=True,
        timeout=60,
        env={},
        cwd=tmp_path,
    ).stdout
    expected = [line.split("\0")[:-1] for line in printed.split("\1\0")[:-1]]
    assert [line[1:] for line in words(script) if line[0] == "run"] == expected


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (
            "A=(a=1 b=2)\ncase $Q in x) ;; y) A+=(b=3 c=4 --flag) ;; *) exit 1 ;; esac\nrun ${A[@]} z",
            [["run", "a=1", "b=2", *(f"{k}<A, which depends on a condition>" for k in ("b=", "c=", "")), "z"]],
        ),
        (
            'A="a=1 b=2"\nif $Q; then A="$A b=3"; fi\nrun $A z',
            [["<$Q>"], ["run", "a=1", "b=2", "b=<A, which depends on a condition>", "z"]],
        ),
        (
            "if nvidia-smi; then X=1; else X=2; fi\nrun $X",
            [["nvidia-smi"], ["run", "<X, which depends on a condition>"]],
        ),
        ("cd x && make || exit 1\nrun a", [["make"], ["run", "a"]]),
        ("git describe || V=1\nrun $V", [["git", "describe"], ["run", "<V, which depends on a condition>"]]),
        ("if [ $# -eq 0 ]; then echo usage; exit 1; fi\nrun a", [["run", "a"]]),
        ("if [ a = b ]; then run no; f() { run no; }; fi\nrun a", [["run", "a"]]),
        ("cat > j.sh <<EOF\nrun $X a\nEOF\nsbatch j.sh", [["run", "<$X>", "a"], ["sbatch", "j.sh"]]),
        ("ssh h 'cd d && run a'", [["run", "a"]]),
        ("srun -N 1 bash -c \"run 'a' $Q/b\"", [["run", "a", "<$Q>/b"]]),
    ],
)
def test_commands_of_a_script(script, expected):
    assert words(script) == expected


def test_nothing_is_executed(tmp_path):
    witness = tmp_path / "witness"
    script = f"x=$(touch {witness})\n`touch {witness}`\ntouch {witness}\neval 'touch {witness}'\nrun $(touch {witness})"
    assert read_script(script)
    assert not witness.exists()


def test_a_doubling_variable_and_a_recursive_function_end():
    read_script("X=aaaaaaaaaaaaaaaa\n" + 'X="$X$X"\n' * 60 + "run $X")
    read_script("f() { f; f; run a; }\nf")
    read_script("((" * 3000)


PLACED = """\
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" >/dev/null 2>&1 && pwd)"
ROOT=$(cd "$HERE/../.." && pwd)
run $HERE $ROOT/data $(basename "$0" .sh) $(dirname $(readlink -f "$0")) $(realpath "$0")
"""


def test_a_script_finds_its_own_folder_where_its_place_is_known():
    found = read_script(PLACED, "examples/scripts/train.sh")[-1].words
    assert found == ("run", "examples/scripts", "./data", "train", "examples/scripts", "examples/scripts/train.sh")
    assert words(PLACED.replace("run ", "run x ", 1))[-1][2].startswith("<"), "from standard input it has no place"


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("${M//\\//_}", "Qwen_Qwen3_8B"),
        ("${M/Qwen/x}", "x/Qwen3/8B"),
        ("${M//Qwen/$N}", "ab/ab3/8B"),
        ("${M,,}", "qwen/qwen3/8b"),
        ("${N^^}", "AB"),
        ("${N^}", "Ab"),
        ("${M:0:4}", "Qwen"),
        ("${M:5}", "Qwen3/8B"),
        ("${#M}", "13"),
        ("${#L[@]}", "3"),
        ("${#L[*]}", "3"),
        ("$((2**10))", "1024"),
        ("${M//[0-9]/x}", "<${M//[0-9]/x}>"),
        ("$((2**99))", "<$((2**99))>"),
    ],
)
def test_values_are_cut_and_replaced(written, expected):
    assert words(f"M=Qwen/Qwen3/8B\nN=ab\nL=(a b c)\nrun {written}")[-1] == ["run", expected]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ('"x ${L[*]} y"', ["x a b c y"]),
        ('"x ${L[@]} y"', ["x a", "b", "c y"]),
        ('bash -c "run ${L[*]} d"', ["a", "b", "c", "d"]),
    ],
)
def test_a_quoted_list_is_one_word_with_a_star(written, expected):
    script = f"L=(a b c)\n{written if written.startswith('bash') else 'run ' + written}"
    assert words(script)[-1] == ["run", *expected]
